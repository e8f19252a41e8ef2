"""Ranks of a benchmark as processes of this machine, spawned so that each has a torch of its own."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable
from typing import Any


def run_ranks(work: Callable[..., None], ranks: int, *args: Any) -> Any:
    """What one of the ranks put into its queue. Each runs work(rank, port, queue, *args), where `port` is free on
    127.0.0.1 for all to meet at. Ends the program where one fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, queue, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed")
    return queue.get()
