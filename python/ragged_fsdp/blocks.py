"""What a shard policy answers: the block of a parameter that must stay on one rank. Values and their resolution, no sharding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch.distributed.tensor import Shard

from ragged_fsdp import _C


@dataclasses.dataclass(frozen=True)
class Block:
    """The smallest piece of a parameter that stays whole. Made by rows(), elements(), tile() and whole()."""

    kind: Literal["elements", "rows", "tile", "whole"]
    count: int = 1
    columns: int = 0

    def __post_init__(self) -> None:
        for value in (self.count, self.columns if self.kind == "tile" else 1):
            if not isinstance(value, int) or value < 1:
                raise _C.InvalidArgument(
                    f"[shard_policy] Expected {self.kind} of at least 1, but got {value!r}. Count whole {self.kind}."
                )


ShardPolicy = Callable[[str, torch.nn.Parameter], Block | None]


def rows(count: int) -> Block:
    """`count` rows of the last two dims; in a stack of matrices (3-D and more) blocks restart at each matrix. veScale-FSDP section 4."""
    return Block("rows", count)


def elements(count: int) -> Block:
    """`count` consecutive elements of the row-major storage."""
    return Block("elements", count)


def tile(rows: int, columns: int) -> Block:
    """Tiles of `rows` x `columns`; what stays whole is a strip of `rows` rows, the smallest contiguous block that cuts none."""
    return Block("tile", rows, columns)


def whole() -> Block:
    """The whole tensor on one rank."""
    return Block("whole")


def as_policy(policy: ShardPolicy | Block | None) -> ShardPolicy:
    """A function of (name, parameter). A Block alone stands for that block wherever a parameter is as large; smaller parameters stay
    whole, and rows and tiles leave parameters below 2-D to the default."""
    if policy is None:
        return lambda name, param: None
    if not isinstance(policy, Block):
        return policy
    block = policy

    def of(name: str, param: torch.nn.Parameter) -> Block | None:
        shape = tuple(param.shape)
        if block.kind in ("rows", "tile") and len(shape) < 2:
            return None
        available = shape[-2] if block.kind in ("rows", "tile") else math.prod(shape)
        return block if available >= block.count else whole()

    return of


def of_placement(placement: Shard, shape: tuple[int, ...], name: str) -> Block:
    """FSDP2's `Shard(d)` as a block choice: no cut goes through a slice of dims 0..d, so the tensor is cut between index tuples of those."""
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise _C.InvalidArgument(
            f"[shard_placement_fn] Expected a dim below {len(shape)}, but got {placement} (param '{name}'). "
            "Return a dim that the parameter has."
        )
    return elements(max(1, math.prod(shape[dim + 1 :])))


def to_args(block: Block | None) -> tuple[str, int, int] | None:
    """As the extension takes it."""
    return None if block is None else (block.kind, block.count, block.columns)


def in_elements(block: Block | None, shape: tuple[int, ...], default: int) -> int:
    """The block's size in elements of a tensor of this shape, for arithmetic with foreign shards."""
    numel = math.prod(shape)
    if block is None:
        return max(1, min(default, numel))
    if block.kind == "whole":
        return max(1, numel)
    row = shape[-1] if len(shape) > 1 else 1
    return max(1, min(numel, block.count * (1 if block.kind == "elements" else row)))
