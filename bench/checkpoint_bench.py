"""Saving and loading a sharded model with AdamW's states: bytes a second of ragged_fsdp.checkpoint and of
torch.distributed.checkpoint (DCP) over FSDP2, against plain writes and reads of as many bytes on the same disk.

    python bench/checkpoint_bench.py                                # 2 ranks, 192 MiB a checkpoint, 7 rounds
    python bench/checkpoint_bench.py --ranks 4 --mib 768 --dir /mnt/disk --json

Each round runs every way once, in turns, so that what disturbs the disk disturbs all; a way's ratio is to the plain one
of its round, and medians are printed with the range. Files are synced before a save counts as done, by all ways. Before
a load the page cache is asked to forget the files; a cache below the operating system remembers them. One process a
rank over Gloo: no network, one disk.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import sys
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from rank_processes import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

BLOCK = 4 << 20  # bytes a plain write


def timed(action):
    """Seconds until all ranks are done, and what `action` returns."""
    dist.barrier()
    start = time.perf_counter()
    result = action()
    dist.barrier()
    return time.perf_counter() - start, result


def forget(folder):
    """The page cache drops what is in the folder."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)  # pages that aren't written yet stay
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
    dist.barrier()


def remove(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def sharded(package, mib):
    """Layers of equal size; a checkpoint with both moments has about so many MiB."""
    torch.manual_seed(0)
    dim, layers = 1024, max(1, round(mib / 12))
    model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(layers)])
    for layer in model:
        package.fully_shard(layer)
    package.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, optimizer)  # makes the states
    with torch.no_grad():
        for state in optimizer.state.values():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                (moment.to_local() if hasattr(moment, "to_local") else moment).normal_()
    return model, optimizer


class Plain:
    """What dd does: a rank's share of the bytes as one file, synced."""

    def __init__(self, o, total):
        self.bytes = total // o.ranks
        self.block = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8).numpy()
        self.into = bytearray(BLOCK)

    def _path(self, folder):
        return folder / f"plain-{dist.get_rank()}"

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with open(self._path(folder), "wb", buffering=0) as file:
            for begin in range(0, self.bytes, BLOCK):
                file.write(self.block[: self.bytes - begin])
            os.fsync(file.fileno())
        opened = os.open(folder, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)

    def load(self, folder):
        with open(self._path(folder), "rb", buffering=0) as file:
            while file.readinto(self.into):
                pass


class Ours:
    def __init__(self, checkpoint, model, optimizer):
        self.checkpoint, self.parts = checkpoint, (model, optimizer)

    def save(self, folder):
        self.checkpoint.save(folder, *self.parts, step=0)

    def async_save(self, folder):
        return self.checkpoint.async_save(folder, *self.parts, step=0)

    def load(self, folder, verify_first=True):
        self.checkpoint.load(folder, *self.parts, verify_first=verify_first)


class Dcp:
    def __init__(self, model, optimizer):
        self.parts = (model, optimizer)

    def _state(self):
        return {"model": get_model_state_dict(self.parts[0]), "optim": get_optimizer_state_dict(*self.parts)}

    def save(self, folder):
        dcp.save(self._state(), checkpoint_id=folder)

    def async_save(self, folder):
        return dcp.async_save(self._state(), checkpoint_id=folder)

    def load(self, folder):
        dcp.load(self._state(), checkpoint_id=folder)


def measure(o):
    import ragged_fsdp

    torch.set_num_threads(1)
    ours = Ours(ragged_fsdp.checkpoint, *sharded(ragged_fsdp, o.mib))
    theirs = Dcp(*sharded(stock, o.mib))
    total = sum(p.numel() for p in ours.parts[0].parameters()) * 3 * 4
    plain = Plain(o, total)
    root = pathlib.Path(o.dir)
    seconds = {}

    def note(name, value):
        seconds.setdefault(name, []).append(value)

    for number in range(o.rounds + 1):
        turn = [("plain", plain), ("ragged", ours), ("DCP, FSDP2", theirs)]
        for name, way in turn[number % 3 :] + turn[: number % 3]:
            folder = root / name.split(",")[0]
            remove(folder)
            times = {"save": timed(lambda way=way, folder=folder: way.save(folder))[0]}
            forget(folder)
            times["load"] = timed(lambda way=way, folder=folder: way.load(folder))[0]
            if way is ours:
                forget(folder)
                times["load, one pass"] = timed(lambda way=way, folder=folder: way.load(folder, False))[0]
            if way is not plain:
                remove(folder)
                dist.barrier()
                start = time.perf_counter()
                pending = way.async_save(folder)
                times["blocked by async"] = time.perf_counter() - start
                pending.result()
                dist.barrier()
                times["async until published"] = time.perf_counter() - start
            if number > 0:  # the first warms up
                for what, value in times.items():
                    note(f"{name}: {what}", value)
    remove(root)
    return {"bytes": total, "ranks": o.ranks, "rounds": o.rounds, "seconds": seconds}


def work(rank, port, out, o):
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=o.ranks,
        timeout=datetime.timedelta(seconds=300),
    )
    found = measure(o)
    if rank == 0:
        out.put(found)
    dist.barrier()
    dist.destroy_process_group()


def table(found):
    """Markdown: MB/s, and the time over that of the plain way, both medians over rounds (least to most)."""
    total, seconds = found["bytes"], found["seconds"]
    lines = ["| way | MB/s | time over plain |", "| --- | ---: | ---: |"]
    for name, values in seconds.items():
        against = seconds["plain: save" if "load" not in name else "plain: load"]
        ratios = sorted(a / b for a, b in zip(values, against, strict=True))
        rate = total / 1e6 / statistics.median(values)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {'' if 'blocked' in name else f'{rate:.0f}'} | {spread} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=192, help="of a checkpoint, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default="checkpoint_bench.tmp", help="on the disk to measure; made, and removed")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if pathlib.Path(o.dir).exists():
        sys.exit(f"Expected --dir to be a new folder, but '{o.dir}' exists: it is removed at the end.")
    found = run_ranks(work, o.ranks, o)
    if o.json:
        print(json.dumps(found))
        return
    print(f"{found['bytes'] / 2**20:.0f} MiB a checkpoint, {o.ranks} ranks, {o.rounds} rounds\n")
    print(table(found))


if __name__ == "__main__":
    main()
