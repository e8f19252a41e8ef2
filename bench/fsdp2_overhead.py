"""Host time that FSDP2 and RaggedFSDP add to a step, per unit, in one run.

    python bench/fsdp2_overhead.py [--units 64] [--dim 64] [--steps 30] [--worlds 1 8 1024 2]

Many tiny units, forward and backward, no optimizer. What the plain model takes is subtracted. World 1 and the
worlds over a group that does nothing (bench/fake_group.py) run in one process; at world 2 the collectives are real
(Gloo, two processes) and the same raw calls, timed in the same run, are subtracted from both sides: there
RaggedFSDP is told to issue FSDP2's own two ops. Steps of the two alternate, and the fastest of each counts. The
time is CPU time of the driving thread, which a busy machine leaves alone; --wall takes the clock. It says nothing
about overlap or about steps whose computation outlasts the host.
"""

import argparse
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin = nn.Linear(dim, dim)
        nn.init.normal_(self.lin.weight, std=0.01)

    def forward(self, x):
        return x + self.lin(x)


def build(o):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(o.dim, o.dim), *[Residual(o.dim) for _ in range(o.units)])


def sharded(package, o, **options):
    model = build(o)
    grid = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model[1:]:
        package.fully_shard(unit, mesh=grid, **options)
    return package.fully_shard(model, mesh=grid, **options)


def raw_collectives(o):
    """A step that only communicates: what FSDP2 issues for the same units, into buffers that are there already."""
    world = dist.get_world_size()
    numel = o.dim * o.dim + o.dim
    part = -(-o.dim // world) * (o.dim + 1)
    whole, mine = torch.zeros(part * world), torch.zeros(part)
    assert whole.numel() >= numel

    def run():
        dist.all_gather_into_tensor(whole, mine)  # the root, once
        for _ in range(2 * o.units):
            dist.all_gather_into_tensor(whole, mine)
        for _ in range(o.units + 1):
            dist.reduce_scatter_tensor(mine, whole)

    return run


def fastest(runs, o):
    """Seconds of the fastest step of each run; steps alternate, so that all see the same machine."""
    clock = time.perf_counter if o.wall else time.thread_time
    best = dict.fromkeys(runs, float("inf"))
    for step in range(o.warm + o.steps):
        for name, run in runs.items():
            start = clock()
            run()
            spent = clock() - start
            if step >= o.warm:
                best[name] = min(best[name], spent)
    return best


def measure(o, world):
    import ragged_fsdp

    torch.set_num_threads(1)
    x = torch.randn(8, o.dim)
    options = {"collectives": "stock"} if world == 2 else {}
    models = {"plain": build(o), "fsdp2": sharded(stock, o), "ragged": sharded(ragged_fsdp, o, **options)}

    def step(model):
        def run():
            model(x).sum().backward()
            model.zero_grad()

        return run

    runs = {name: step(model) for name, model in models.items()}
    if world == 2:
        runs["raw"] = raw_collectives(o)
    best = fastest(runs, o)
    taken = best["plain"] + best.get("raw", 0.0)
    row = {
        "world": world,
        "units": o.units,
        "dim": o.dim,
        "clock": "wall" if o.wall else "cpu",
        "torch": torch.__version__,
    }
    for name in ("fsdp2", "ragged"):
        row[f"{name}_us"] = (best[name] - taken) * 1e6 / o.units
    row["ratio"] = row["ragged_us"] / row["fsdp2_us"]
    row["plain_us"], row["raw_us"] = best["plain"] * 1e6 / o.units, best.get("raw", 0.0) * 1e6 / o.units
    return row


def work(rank, port, out, world, o):
    if world > 2:
        import fake_group

        fake_group.init(world)
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    row = measure(o, world)
    if rank == 0:
        out.put(row)
    if world == 2:
        dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 1024, 2])
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="clock time instead of CPU time of the driving thread")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if not o.json:
        print(f"{'world':>6}  {'FSDP2':>8}  {'ragged':>8}  {'ratio':>6}   us a unit and step, beyond the plain model")
    for world in o.worlds:
        row = run_ranks(work, 2 if world == 2 else 1, world, o)
        if o.json:
            print(json.dumps(row), flush=True)
        else:
            print(f"{world:>6}  {row['fsdp2_us']:>8.1f}  {row['ragged_us']:>8.1f}  {row['ratio']:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
