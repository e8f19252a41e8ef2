"""Worlds that no machine here has, in one process: time to shard and plan, host time a step and unit, bytes, of FSDP2
and RaggedFSDP beside each other. A JSON line a world and model.

    python -m bench.peers.dry_run [--out FILE] [--runs tiny:8 ... moe:256] [--steps 15]

The process is rank 0 of a group that moves nothing (bench/fake_group.py). Torch's own fake group isn't used: it copies
a part once a rank, which at 1,024 ranks is most of a step and no system's doing. Losses and gradients over either mean
nothing. Builds and steps of the two alternate. It says nothing of networks, and rank 0 stands for all ranks.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench.peers import measuring, models, systems
from bench.peers.run import REPO, conditions, make_context

BUILDS = 5
SYSTEMS = ("fsdp2", "ragged")
# FSDP2 pads 6 experts to one a rank, so that with many more ranks than these its images need more memory than there is.
RUNS = ["tiny:8", "tiny:64", "tiny:512", "tiny:1024", "tiny:4096", "moe:8", "moe:64", "moe:256"]


def shard(name: str, config: models.ModelConfig, job: systems.Job) -> tuple[systems.Running, float]:
    """Sharded, and the seconds that sharding and its planning took."""
    import ragged_fsdp
    import torch.distributed.fsdp as stock

    model = models.build(config)
    package = stock if name == "fsdp2" else ragged_fsdp
    mesh = systems.cpu_mesh(job.world)
    start = time.perf_counter()
    systems.shard_layers(model, functools.partial(package.fully_shard, mesh=mesh))
    seconds = time.perf_counter() - start
    return systems.plain_loop(model, systems.adamw(model.parameters())), seconds


def host_seconds(run: Callable[[], Any]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def communication(step: Callable[[], Any], elements: int) -> dict[str, Any]:
    """Collectives of a step, bytes of their whole buffers, padding in what is reduced, and bytes copied."""
    import torch.distributed as dist

    group = dist.group.WORLD
    group.calls = []
    with measuring.Operations() as seen:
        step()
    calls, group.calls = group.calls, None
    sizes = [(name, max(measuring.nbytes(each) for each in args[:2])) for name, args in calls]
    reductions = ("reduce_scatter", "all_to_all", "alltoall")
    reduced = sum(size for name, size in sizes if name.strip("_").startswith(reductions))
    return {"collectives": len(sizes), "payload": sum(size for _, size in sizes),
            "padding": reduced / 4 / elements - 1, "copied": seen.copied}  # fmt: skip


Found = dict[str, dict[str, Any]]  # by system


def build_in_turns(config: models.ModelConfig, job: systems.Job) -> tuple[dict[str, systems.Running], Found]:
    runs: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(BUILDS):
        for name in SYSTEMS:
            runs.pop(name, None)
            gc.collect()  # modules and hooks are cycles
            runs[name], took = shard(name, config, job)
            seconds[name].append(took)
    return runs, {name: {"shard_s": statistics.median(took), "shard_range_s": [min(took), max(took)]}
                  for name, took in seconds.items()}  # fmt: skip


def best_steps(runs: dict[str, systems.Running], data: Any, steps: int) -> dict[str, list[float]]:
    """Least host seconds of forward and backward, and of the optimizer; steps alternate."""
    best = {name: [float("inf"), float("inf")] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            best[name][0] = min(best[name][0], host_seconds(functools.partial(run.forward_backward, data)))
            best[name][1] = min(best[name][1], host_seconds(run.update))
    return best


def live_bytes(name: str, config: models.ModelConfig, job: systems.Job, data: Any) -> dict[str, int]:
    gc.collect()
    with measuring.LiveBytes() as live:
        run, _ = shard(name, config, job)
        for _ in range(2):
            run.forward_backward(data)
            run.update()
    return {"peak_bytes": live.peak, "bytes_at_rest": live.at_rest}


def measure(kind: str, world: int, steps: int) -> dict[str, Any]:
    import torch

    from bench import fake_group

    torch.set_num_threads(1)
    fake_group.init(world)
    config = models.MODELS[kind]
    job = systems.Job(rank=0, world=world, bf16=False, port=0)
    data = models.batch(config, 0, 0, 1)
    model = models.build(config)
    elements, units = sum(param.numel() for param in model.parameters()), len(model.layers) + 1
    plain = systems.plain_loop(model, systems.adamw(model.parameters()))
    own = communication(lambda: plain.forward_backward(data), elements)["copied"]

    runs, found = build_in_turns(config, job)
    for name, run in runs.items():
        step = functools.partial(run.forward_backward, data)
        found[name]["first_step_s"] = host_seconds(step)
        run.update()
        found[name] |= communication(step, elements)
        found[name]["copied"] -= own
        run.update()
    best = best_steps({"plain": plain, **runs}, data, steps)
    for name in SYSTEMS:
        above = best[name][0] - best["plain"][0]
        found[name] |= {"step_ms": 1e3 * best[name][0], "us_a_unit": 1e6 * above / units,
                        "update_ms": 1e3 * best[name][1]}  # fmt: skip
    del runs, run, step
    for name in SYSTEMS:
        found[name] |= live_bytes(name, config, job, data)
    return {"model": kind, "world": world, "units": units, "elements": elements,
            "plain_step_ms": 1e3 * best["plain"][0], "systems": found}  # fmt: skip


def work(kind: str, world: int, steps: int, pipe: Connection) -> None:
    try:
        pipe.send(measure(kind, world, steps))
    except Exception as error:
        pipe.send({"model": kind, "world": world, "error": f"{type(error).__name__}: {error}"[:300]})


def in_a_process(context: Any, kind: str, world: int, steps: int) -> dict[str, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(kind, world, steps, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return {"model": kind, "world": world, "error": "the process ended"}
    finally:
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=REPO / "bench/peers/dry_runs.jsonl", help="written anew")
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="MODEL:RANKS")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    context = make_context()
    with open(options.out, "w", encoding="utf-8") as out:
        print(json.dumps({"conditions": conditions()}), file=out)
        for run in options.runs:
            kind, world = run.split(":")
            line = in_a_process(context, kind, int(world), options.steps)
            print(json.dumps(line), file=out, flush=True)
            print(run, line.get("error") or {name: f"{found['shard_s']:.3f} s, {found['us_a_unit']:.0f} us a unit"
                                             for name, found in line["systems"].items()}, flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
