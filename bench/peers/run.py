"""Trains small models under every sharding system on this machine and writes what each cost, a JSON line a run.

    python -m bench.peers.run [--out FILE] [--cells llama-fp32-2 ...] [--systems fsdp2 ragged ...]
                              [--rounds 7] [--steps 5] [--repeats 3]

in the root of the repository, with the interpreter in `tools/venv_path.sh --peers` and a built package on PYTHONPATH;
`make bench-peers` does all of it. All systems of a cell (a model, a dtype and a number of ranks) are up at once and
take turns: in each round each trains a few steps while the others wait, so that what disturbs the machine disturbs all.
A repeat starts them anew. What can't run is a line with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.peers import rank as ranks
from bench.peers import systems
from bench.peers.catalogue import CELLS, COMPARED_STEPS, SYSTEMS, UNSHARDED, Cell

REPO = pathlib.Path(__file__).resolve().parents[2]
START_S = 240.0  # DeepSpeed compiles an operator the first time
ROUND_S = 120.0
RANK_BYTES = 340 << 20  # what a rank of these models takes at most, with its interpreter
COUNTED_STEPS = ranks.LIVE_STEPS + 1


class Failed(Exception):
    """What a rank said, or how it ended."""


class Group:
    """The processes of one system."""

    def __init__(self, task: ranks.Task, context: Any, folder: str) -> None:
        self.task, self.log = task, pathlib.Path(folder, f"{task.system}.log")
        self.error: str | None = None
        port = free_ports()
        self.pipes, self.processes = [], []
        for rank in range(task.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=ranks.serve, args=(task, rank, port, theirs, str(self.log)), daemon=True)  # fmt: skip
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *request: Any, timeout: float = ROUND_S) -> list[Any]:
        """The answers of all ranks. Raises Failed, and the group is over, when one has none."""
        if self.error:
            raise Failed(self.error)
        try:
            for pipe in self.pipes:
                pipe.send(request)
            return self._answers(timeout)
        except (Failed, OSError, EOFError) as error:
            self.error = str(error) if isinstance(error, Failed) else self._ending()
            self.end()
            raise Failed(self.error) from None

    def _answers(self, timeout: float) -> list[Any]:
        """The first error counts: the other ranks may wait for the one that failed forever."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"no answer within {timeout:.0f} s")
            for pipe in ready:
                said = pipe.recv()
                if isinstance(said, dict) and "error" in said:
                    raise Failed(said["error"])
                answers[silent[pipe]] = said
        return [answers[rank] for rank in range(len(self.pipes))]

    def spent(self) -> float:
        """CPU seconds of all ranks so far; 0 where they are gone."""
        try:
            return sum(self.ask("spent"))
        except Failed:
            return 0.0

    def _ending(self) -> str:
        for process in self.processes:
            process.join(2)
        codes = [process.exitcode for process in self.processes]
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        said = re.sub(r"/(?:[\w.+-]+/)+", "", lines[-1])[:200] if lines else "no output"
        return f"ended with exit codes {codes}: {said}"

    def end(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self.processes:
            process.join(0 if self.error else 10)
            if process.is_alive():
                process.kill()
                process.join()


def free_ports() -> int:
    """A port with a free one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def make_context() -> Any:
    """Processes come from one that has torch loaded: seconds of start-up each are saved, and nobody's memory is
    another's.
    """
    systems.prepare_environment()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "bench.peers.rank"])
    return context


def run_cell(
    cell: Cell, names: Sequence[str], context: Any, rounds: int, steps: int, sizes: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """One repeat: the lines of all systems."""
    sizes = sizes or {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        begun, busy = time.monotonic(), busy_seconds()
        expected = reference_losses(ranks.Task("single", cell.model, 1, False, cell.world, sizes), context, folder)

        groups, counted = {}, {}
        for name in names:
            world = 1 if name in UNSHARDED else cell.world
            groups[name] = Group(ranks.Task(name, cell.model, world, cell.bf16, 0, sizes), context, folder)
            stack.callback(groups[name].end)
            with contextlib.suppress(Failed):
                counted[name] = groups[name].ask("count", timeout=START_S)
        timed = take_turns(groups, rounds, steps)

        ours = sum(group.spent() for group in groups.values())
        others = max(0.0, busy_seconds() - busy - ours) / (time.monotonic() - begun)
        for name, group in groups.items():
            line = {
                "cell": cell.name, "model": cell.model, "dtype": cell.dtype, "world": cell.world, "system": name,
                "started": started, "other_cores": round(others, 2),
            }  # fmt: skip
            try:
                losses = group.ask("losses")
                line |= {"steps_a_round": steps, "rounds": timed[name], "ranks": counted[name]}
                if name not in UNSHARDED or cell.world == 1:
                    line["loss_difference"] = largest_difference(losses, expected)
            except Failed as error:
                line["error"] = str(error)
            yield line


def take_turns(groups: dict[str, Group], rounds: int, steps: int) -> dict[str, list[Any]]:
    """What each said in each round. A first one warms up, and brings losses to the steps that are compared."""
    timed: dict[str, list[Any]] = {name: [] for name in groups}
    for number in range(-1, rounds):
        for name, group in groups.items():
            with contextlib.suppress(Failed):
                answers = group.ask("time", steps if number >= 0 else COMPARED_STEPS - COUNTED_STEPS)
                if number >= 0:
                    timed[name].append(answers)
    return timed


def check_memory(cell: Cell, names: Sequence[str]) -> None:
    """All systems of a cell are up at once; a machine that swaps measures nothing."""
    ranks_up = sum(1 if name in UNSHARDED else cell.world for name in names)
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if free < ranks_up * RANK_BYTES:
        raise SystemExit(
            f"[bench.peers] Expected {ranks_up * RANK_BYTES / 2**30:.1f} GiB of free memory for {ranks_up} processes "
            f"({cell.name}), but there are {free / 2**30:.1f}. Stop other programs, or take fewer with --systems."
        )


def busy_seconds() -> float:
    """CPU time of everything on this machine since it started."""
    fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, interrupts, soft = (int(field) for field in fields[:7])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def reference_losses(task: ranks.Task, context: Any, folder: str) -> list[float]:
    """Of one process that trains the unsharded fp32 model on the parts of all ranks."""
    group = Group(task, context, folder)
    try:
        group.ask("count", timeout=START_S)
        for _ in range(COMPARED_STEPS - COUNTED_STEPS):
            group.ask("step")
        return group.ask("losses")[0]
    finally:
        group.end()


def largest_difference(losses: list[list[float]], expected: list[float]) -> float:
    """Of the mean over ranks, over the first steps."""
    means = [sum(of_ranks) / len(losses) for of_ranks in zip(*losses, strict=True)]
    return max(abs(mean - value) for mean, value in zip(means, expected, strict=False))


def conditions() -> dict[str, Any]:
    """What a reader needs to judge the numbers, and nothing that names a machine."""
    import torch

    models = [line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]  # fmt: skip
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    versions = {"torch": torch.__version__}
    for package in ("deepspeed", "megatron-fsdp"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "python": platform.python_version(), "versions": versions, "cores": os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "features": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in flags],
        "build": os.environ.get("RAGGED_PEERS_BUILD", "unknown"), "omp_num_threads": os.environ["OMP_NUM_THREADS"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=REPO / "bench/peers/results.jsonl", help="written anew")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of a system in a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON, over the models' sizes: for quick tries")
    options = parser.parse_args()
    context = make_context()
    begun = time.monotonic()
    with open(options.out, "w", encoding="utf-8") as out:
        print(json.dumps({"conditions": conditions()}), file=out, flush=True)
        for repeat in range(options.repeats):
            for name in options.cells:
                chosen = [each for each in CELLS[name].systems if each in options.systems]
                check_memory(CELLS[name], chosen)
                for line in run_cell(CELLS[name], chosen, context, options.rounds, options.steps, options.sizes):
                    print(json.dumps({"repeat": repeat} | line), file=out, flush=True)
                    say(line)
                print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return 0


def say(line: dict[str, Any]) -> None:
    text = line.get("error")
    if not text:
        wall = [max(answer["wall_ms"] for answer in of_ranks) for of_ranks in line["rounds"]]
        text = f"{sorted(wall)[len(wall) // 2]:.1f} ms a step" if wall else "counted"
        text += f", loss off by {line['loss_difference']:.1e}" if "loss_difference" in line else ""
    print(f"{line['cell']:<14} {line['system']:<20} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
