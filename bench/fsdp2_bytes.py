"""Bytes of one training step under FSDP2 and under RaggedFSDP, side by side: copied, moved, held. Counts, so any
machine gives the same.

    python bench/fsdp2_bytes.py [--ranks 2] [--dim 256] [--layers 6] [--fp32] [--in-place same_bits|always] [--json]

A small transformer with a unit a block, forward and backward, bf16 compute and fp32 reduction unless --fp32. P is
the model in fp32. "copied" are the bytes written by torch's copying ops beyond those of the plain model, less the
copy that Gloo makes of a reduction's result; "unsharded" is the peak of gathered parameters and gather buffers;
"allocated" the peak of torch's CPU allocator over the later steps, with parameters, gradients, buffers and
activations of this rank, and "at rest" what is left of it between steps: RaggedFSDP keeps its pool of buffers
there, FSDP2 returns its own to the allocator. --in-place lets RaggedFSDP compute gradients of matrices in its reduce
buffers. It says nothing about time.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import pathlib
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"
sys.path[:0] = [str(TESTS / "fsdp"), str(TESTS)]

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from copies import Copies, UnshardedBytes, backend_copies_results
from models import TinyLM, next_token_loss
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh

WARM, STEPS = 2, 3


class Allocated:
    """Peak and last value of what torch's CPU allocator has handed out, all threads counted; on from before the
    model is built.

    The allocator reports to the profiler only while a flag of c10 is set.
    """

    def __enter__(self):
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exc):
        self._profile.__exit__(*exc)
        events, totals, steps = list(self._profile.profiler.kineto_results.experimental_event_tree()), [], []
        while events:
            event = events.pop()
            events.extend(event.children)
            if event.tag == torch._C._profiler._EventType.Allocation:
                totals.append((event.start_time_ns, event.extra_fields.total_allocated))
            elif event.name == "measured step":
                steps.append(event.start_time_ns)
        self.peak = max(total for time, total in totals if time >= min(steps))
        self.at_rest = max(totals)[1]


def build(o):
    torch.manual_seed(0)
    return TinyLM(vocab=o.vocab, dim=o.dim, heads=4, layers=o.layers)


def sharded(package, o):
    model = build(o)
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if not o.fp32:
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if o.in_place and package is not stock:
        options["gradients_in_place"] = True if o.in_place == "always" else o.in_place
    for block in model.blocks:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def step(model, o, k):
    ids = torch.randint(o.vocab, (1, 33), generator=torch.Generator().manual_seed(100 * k + dist.get_rank()))
    next_token_loss(model, ids).backward()


def held(package, o):
    with Allocated() as allocated:
        model = sharded(package, o)
        for k in range(WARM + STEPS):
            with torch.profiler.record_function("measured step" if k >= WARM else "first steps"):
                step(model, o, k)
            model.zero_grad()
    return allocated.peak, allocated.at_rest


def measure(o):
    import ragged_fsdp

    torch.set_num_threads(1)
    plain = build(o) if o.fp32 else build(o).bfloat16()
    total = sum(p.numel() for p in plain.parameters()) * 4
    step(plain, o, 0)
    with Copies() as compute:
        step(plain, o, 0)
    del plain
    result_copies = backend_copies_results()
    rows = {}
    for name, package in (("FSDP2", stock), ("ragged", ragged_fsdp)):
        model = sharded(package, o)
        for k in range(WARM):
            step(model, o, k)
            model.zero_grad()
        before = ragged_fsdp.stats(model) if name == "ragged" else None
        with Copies() as seen:
            step(model, o, WARM)
        model.zero_grad()
        row = {"copied": (seen.total - compute.total - (seen.results if result_copies else 0)) / total}
        if name == "ragged":
            after = ragged_fsdp.stats(model)
            delta = {k: after[k] - before[k] for k in after}
            row["unsharded"] = after["peak_image_bytes"] / total
            row["gathers"], row["reductions"] = delta["all_gathers"], delta["reduce_scatters"]
        else:
            with UnshardedBytes(model) as unsharded:
                step(model, o, WARM)
            row["unsharded"] = unsharded.peak / total
            row["gathers"], row["reductions"] = (
                seen.collectives[n] for n in ("_allgather_base_", "_reduce_scatter_base_")
            )
        del model
        gc.collect()  # modules and hooks are cycles
        peak, rest = held(package, o)
        row["allocated"], row["at rest"] = peak / total, rest / total
        rows[name] = row
    return {"P": total, "ranks": dist.get_world_size(), "dtype": "fp32" if o.fp32 else "bf16", **rows}


def work(rank, port, out, o):
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=o.ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    found = measure(o)
    if rank == 0:
        out.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--in-place", choices=("same_bits", "always"))
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    found = run_ranks(work, o.ranks, o)
    if o.json:
        print(json.dumps(found))
        return
    print(f"{found['dtype']}, {o.ranks} ranks, P = {found['P'] / 2**20:.1f} MiB of fp32 parameters; the rest in P")
    print(f"{'':>16}  {'FSDP2':>7}  {'ragged':>7}  {'ratio':>6}")
    labels = {
        "copied": "copied",
        "unsharded": "unsharded peak",
        "allocated": "allocated peak",
        "at rest": "at rest",
        "gathers": "gathers",
        "reductions": "reductions",
    }
    for key, label in labels.items():
        theirs, ours = found["FSDP2"][key], found["ragged"][key]
        digits = 0 if key in ("gathers", "reductions") else 2
        print(f"{label:>16}  {theirs:>7.{digits}f}  {ours:>7.{digits}f}  {ours / theirs:>6.2f}")


if __name__ == "__main__":
    main()
