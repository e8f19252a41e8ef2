"""One rank of one system, in a process of its own: it trains a few steps under the instruments, then times rounds of
steps when told to. Talks through a pipe; what it says is plain dicts.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import os
import re
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.peers import measuring, models, systems
from bench.peers.catalogue import SYSTEMS

LIVE_STEPS = 3  # under LiveBytes; the next one is counted


@dataclasses.dataclass(frozen=True)
class Task:
    """One system in one cell of the comparison."""

    system: str
    model: str
    world: int
    bf16: bool = False
    whole_batch: int = 0  # of the reference: the number of ranks whose parts of a batch it trains on in turn
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # overrides of the model's sizes

    def model_config(self) -> models.ModelConfig:
        return dataclasses.replace(models.MODELS[self.model], **self.config)


class Rank:
    def __init__(self, task: Task, rank: int, port: int) -> None:
        self.task, self.rank, self.config = task, rank, task.model_config()
        self.job = systems.Job(rank, task.world, task.bf16, port + 1)
        self.steps = 0
        self.losses: list[float] = []
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(task.world), LOCAL_SIZE=str(task.world), LOCAL_WORLD_SIZE=str(task.world))  # fmt: skip
        torch.set_num_threads(1)
        if module := SYSTEMS[task.system].module:
            importlib.import_module(module)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=task.world,
            timeout=datetime.timedelta(seconds=120))  # fmt: skip

    def step(self) -> None:
        self.losses.append(self.global_step() if self.task.whole_batch else self.own_step())
        self.steps += 1

    def own_step(self) -> float:
        loss = self.run.forward_backward(models.batch(self.config, self.steps, self.rank, self.task.world))
        self.run.update()
        return float(loss)

    def global_step(self) -> float:
        """What all ranks of a sharded run do together: each part's loss, and the step with the mean of gradients."""
        total = 0.0
        for part in range(self.task.whole_batch):
            loss = self.run.model(models.batch(self.config, self.steps, part, self.task.whole_batch))
            (loss / self.task.whole_batch).backward()
            total += loss.item()
        self.run.update()
        return total / self.task.whole_batch

    def count(self) -> dict[str, Any]:
        """The first steps, under the instruments. Bytes, calls and elements on this rank."""
        with measuring.LiveBytes() as live:
            model = models.build(self.config)
            params = list(model.parameters())
            sizes = {
                "parameter_bytes": measuring.nbytes(params),
                "trainable_elements": sum(p.numel() for p in params if p.requires_grad),
            }
            del params
            start = time.perf_counter()
            self.run = systems.MAKERS[self.task.system](model, self.job)
            wrapped = time.perf_counter() - start
            del model
            for _ in range(LIVE_STEPS):
                self.step()
        with measuring.Operations() as seen:
            self.step()
        measuring.release_free_memory()
        return sizes | {
            "peak_bytes": live.peak, "bytes_at_rest": live.at_rest, "copied": seen.copied,
            "copied_by": seen.by_operation, "backend_results": seen.results, "collectives": seen.collectives,
            "reduced_elements": seen.reduced_elements, "operations": seen.operations, "wrap_s": round(wrapped, 4),
        }  # fmt: skip

    def spent(self) -> float:
        return time.process_time()

    def time(self, steps: int) -> dict[str, float]:
        """Milliseconds a step: by the clock, CPU time of this process with all threads, and of it the optimizer's. A step
        goes before that isn't timed, and after the turn free memory goes back: all systems together need more than
        there is where each keeps what it once had.
        """
        self.step()
        cpu_update = wall = cpu = 0.0
        for _ in range(steps):
            data = models.batch(self.config, self.steps, self.rank, self.task.world)
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            loss = self.run.forward_backward(data)
            middle = time.process_time()
            self.run.update()
            end = time.process_time()
            wall += time.perf_counter() - wall_start
            cpu += end - cpu_start
            cpu_update += end - middle
            self.losses.append(float(loss))
            self.steps += 1
        measuring.release_free_memory()
        return {name: round(1e3 * value / steps, 4) for name, value in
                (("wall_ms", wall), ("cpu_ms", cpu), ("update_cpu_ms", cpu_update))}  # fmt: skip


def in_short(error: BaseException) -> str:
    """One line without paths: what it says, or the line of code that raised where it says nothing."""
    text = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    said = text[0] if text else f"at `{frames[-1].line}`" if frames else ""
    return re.sub(r"/(?:[\w.+-]+/)+", "", f"{type(error).__name__}: {said}")[:200]


def serve(task: Task, rank: int, port: int, pipe: Connection, log: str) -> None:
    """Answers ("count",), ("step",), ("time", steps), ("losses",) and ("spent",) until ("end",). An error is answered
    too, and is the end.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    warnings.filterwarnings("ignore")
    try:
        here = Rank(task, rank, port)
        while (request := pipe.recv())[0] != "end":
            name, *arguments = request
            pipe.send(here.losses if name == "losses" else getattr(here, name)(*arguments))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": in_short(error)})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # backends' threads may still hold tensors, and other ranks may be gone
