"""The group whose ranks save and load together, and how they fail together. No files, no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ragged_fsdp import _C
from ragged_fsdp.mesh import communicator_of_group

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group as a checkpoint sees it."""

    all: Any  # _C.Communicator
    first: int  # global number of its rank 0, which publishes and writes what all ranks hold
    is_first: bool

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Ranks:
        """None: the default group; this process alone where torch.distributed isn't initialised."""
        if not dist.is_initialized():
            return Ranks(communicator_of_group(None), 0, True)
        group = group or dist.group.WORLD
        return Ranks(communicator_of_group(group), dist.get_global_rank(group, 0), dist.get_rank(group) == 0)

    def agreed(self, body: Callable[[], Result]) -> Result:
        """What `body`, which issues no collective, returns. Where it raises on some ranks, all raise the same:
        InvalidArgument for a ValueError, else CheckpointError. Collective."""
        cause: Exception | None = None
        try:
            result = body()
        except Exception as error:
            cause = error
        try:
            _C.agree(self.all, _text_of(cause), isinstance(cause, ValueError))
        except Exception as told:
            raise told from cause
        return result

    def text_of_first(self, text: str) -> str:
        """What the first rank has, on every rank. Collective."""
        return _C.broadcast_text(self.all, text, 0)


def _text_of(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, _C.RaggedError) else f"{type(error).__name__}: {error}"
