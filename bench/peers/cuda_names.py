"""Stand-ins for the names of torch.cuda that Megatron-FSDP calls whatever its device, so that it runs on a CPU.

Nothing in that package is changed. On a CPU each operation is done when it returns, so streams and events have nothing
to order.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class Stream:
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *args: Any) -> Event:
        return Event()


def install() -> None:
    cuda = torch.cuda
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = lambda *args: Stream()
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.current_device = lambda: 0
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    torch.Tensor.record_stream = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
