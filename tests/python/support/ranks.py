"""Runs a function on several ranks: as threads over torch's threaded test group, or as processes over real Gloo.

`run_threads` is the default: a test costs milliseconds. Its group knows the usual collectives, uneven all-to-all
included, but not `reduce`, and all ranks share one process: one default random generator (pass `generator=`), one set
of globals. `run_ranks` is for what threads can't show. Both call `fn(rank, world, *args)` on every rank, return the
results in rank order, and raise the first rank's error with its rank and traceback, or `TimeoutError`. Arguments and
results of `run_ranks` travel by pickle, so `fn` is a module-level function and returns plain tensors or values, no
DTensors.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """What one rank raised; `rank` says which, `error` holds the exception where it could travel."""

    def __init__(self, rank: int, world: int, error: BaseException | None, text: str) -> None:
        super().__init__(f"rank {rank} of {world} failed:\n{text}")
        self.rank = rank
        self.error = error


# ---- threads ----------------------------------------------------------------


def run_threads(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls fn(rank, world, *args) on `world` threads of this process, each a rank of a threaded group on the CPU."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: list[Any] = [None] * world
    failures: list[tuple[int, BaseException, str]] = []
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(rank, world, *args)
            except BaseException as error:  # a rank must never be left waiting for one that has failed
                failures.append((rank, error, traceback.format_exc()))
                threaded.ProcessLocalGroup.exception_handle(error)
            finally:
                dist.destroy_process_group()
        finally:
            finished[rank].set()

    finished = [threading.Event() for _ in range(world)]
    try:
        for rank in range(world):
            _worker(rank).tasks.put(functools.partial(body, rank))
        deadline = time.monotonic() + timeout
        stuck = [rank for rank in range(world) if not finished[rank].wait(max(0.0, deadline - time.monotonic()))]
        stacks = "".join(_stack_of(_worker(rank).thread, rank) for rank in stuck)
        causes = list(failures)  # waking the stuck ones adds a SystemExit of each
        if stuck:
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            for rank in range(world):
                if not finished[rank].wait(2.0):
                    del _workers[rank]  # it may still run: the next test gets a new thread
        threaded.ProcessLocalGroup.reset()
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if causes:  # the peers of a failed rank are woken with SystemExit: the first entry is the cause
        rank, error, text = causes[0]
        raise RankError(rank, world, error, text) from error
    if stuck:
        raise TimeoutError(f"ranks {stuck} of {world} still ran after {timeout} s\n{stacks}")
    return results


class _Worker:
    """The thread of one rank, kept for all tests: torch caches layouts by mesh, and tells meshes of threads apart by
    thread id, so an id that came back as another rank would meet that rank's sizes."""

    def __init__(self, rank: int) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"rank{rank}")
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                self.tasks.get()()
            except BaseException:  # destroying the group of a failed test may fail too; the test has its error already
                pass


_workers: dict[int, _Worker] = {}


def _worker(rank: int) -> _Worker:
    if rank not in _workers:
        _workers[rank] = _Worker(rank)
    return _workers[rank]


def _stack_of(thread: threading.Thread, rank: int) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"-- rank {rank} --\n" + "".join(traceback.format_stack(frame)) if frame else ""


# ---- processes --------------------------------------------------------------


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls fn(rank, world, *args) in `world` processes with a Gloo default group; one thread a process."""
    context = _fork_server()
    folder = tempfile.mkdtemp(prefix="ragged_ranks_")
    pipes, processes = [], []
    try:
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_process_body, args=(there, f"{folder}/store", rank, world, timeout, fn, args), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _fork_server() -> Any:
    # The server imports torch once; each rank is then a fork of it that costs some 50 ms instead of seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    )
    return context


def _collect(pipes: list[Any], processes: list[Any], timeout: float) -> list[Any]:
    world = len(pipes)
    results: list[Any] = [None] * world
    waiting = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting)} of {world} still ran after {timeout} s")
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5.0)
                raise RankError(rank, world, None, f"it died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RankError(rank, world, *value)
            results[rank] = value
            del waiting[rank]
    return results


def _process_body(
    pipe: Any, store_path: str, rank: int, world: int, timeout: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_path, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        value = fn(rank, world, *args)
        dist.barrier()  # a rank that leaves early would fail the others' last collectives
        dist.destroy_process_group()
        # Plain pickle: multiprocessing's own would hand out shared memory that dies with this process.
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pipe.send_bytes(pickle.dumps((False, (error, text))))
        except Exception:  # an exception that can't be pickled still has its text
            pipe.send_bytes(pickle.dumps((False, (None, text))))
    pipe.close()
