"""The part of a tensor that an optimizer works on here, and states that lie as their parameter does.

A step sees 1-D runs of memory and where they lie in a row-major matrix or stack of matrices. What a RaggedTensor, a
stock DTensor or a plain tensor makes of that is decided here, from placements that all ranks know, so that all ranks
decide alike. No arithmetic, no communication.

[Note: scales of tiles]
8-bit states keep one scale a tile of 32 x 32, counted from row 0 of each matrix that the tensor-parallel placements
left here. Scales are a tensor of one element a tile. Its ragged placement follows from the *rows* at which the
parameter is cut, never from the parameter's units: 40 rows cut 32 + 8 have units (4, 1), their scales (1, 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.placement import Interval, RaggedShard, StridedRaggedShard, foreign_box, shard_interval
from ragged_fsdp.redistribute import make_spec
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.tensor import RaggedTensor

TILE = 32


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank's piece lies: elements [begin, end) of the row-major `shape`, which is what the placements other
    than ragged left here; `intervals` are those of all ranks that cut it."""

    shape: tuple[int, ...]
    intervals: tuple[Interval, ...]
    rank: int  # of this process among `intervals`

    @property
    def begin(self) -> int:
        return self.intervals[self.rank][0]

    @property
    def end(self) -> int:
        return self.intervals[self.rank][1]


def place_of(tensor: torch.Tensor) -> Place:
    """The place of this rank's piece of a parameter."""
    if isinstance(tensor, RaggedTensor):
        mesh_dim, ragged = tensor.ragged
        return Place(ragged.shape, ragged.intervals(), tensor._spec.mesh.get_local_rank(mesh_dim))
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return Place(tuple(local.shape), ((0, local.numel()),), 0)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece as it lies in memory, sharing it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros with the parameter's shape and placements."""
    if isinstance(param, RaggedTensor):
        spec = param._spec
        local = torch.zeros_like(param._local_tensor, dtype=dtype)
        return RaggedTensor.wrap(local, make_spec(spec.mesh, spec.placements, param.shape, dtype))
    if isinstance(param, DTensor):
        local = torch.zeros(param._local_tensor.shape, dtype=dtype, device=param._local_tensor.device)
        return _stock(local, param, tuple(param.shape))
    return torch.zeros(param.shape, dtype=dtype, device=param.device)


def tile_scales_like(param: torch.Tensor, name: str) -> torch.Tensor:
    """Zeros, fp32, one a tile of 32 x 32, placed as the parameter's rows are. Raises InvalidArgument, on all ranks
    alike, where a rank's border cuts a tile."""
    place = place_of(param)
    local_tiles = tiles(place.shape)
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return torch.zeros(local_tiles, dtype=torch.float32, device=param.device)
    mesh, placements = param._spec.mesh, tuple(param._spec.placements)
    device = param._local_tensor.device
    whole = _tiles_under(shape, mesh, placements, name)
    if not isinstance(param, RaggedTensor):
        return _stock(torch.zeros(local_tiles, dtype=torch.float32, device=device), param, whole)
    mesh_dim, ragged = param.ragged
    cuts = [(_tile_cut(place.shape, a, name), _tile_cut(place.shape, b, name)) for a, b in place.intervals]
    if foreign_box(whole, mesh, placements)[0] != local_tiles:
        refuse(
            "AdamW8bit", "tensor-parallel cuts that leave each rank as many tiles as an even cut of all tiles",
            f"{placements} of shape {shape}", "Give this parameter state_format='fp32' in a group of its own.", name,
        )  # fmt: skip
    scales = RaggedShard.from_intervals(local_tiles, cuts)
    if isinstance(ragged, StridedRaggedShard):
        scales = StridedRaggedShard(len(scales.dims), scales.local_units, scales.shape, ragged.split_factor)
    begin, end = cuts[place.rank]
    own = (*placements[:mesh_dim], scales, *placements[mesh_dim + 1 :])
    local = torch.zeros(end - begin, dtype=torch.float32, device=device)
    return RaggedTensor.wrap(local, make_spec(mesh, own, whole, torch.float32))


def tiles(shape: Sequence[int]) -> tuple[int, ...]:
    """Tiles of each matrix of a stack: (leading dims, strips, tiles a strip)."""
    return (*shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE))


def _tile_cut(shape: tuple[int, ...], element: int, name: str) -> int:
    """Index among the tiles of a cut before `element` of the row-major `shape`; raises where it goes through a tile."""
    rows, columns = shape[-2], shape[-1]
    if math.prod(shape) == 0:
        return 0
    matrix, inside = divmod(element, rows * columns)
    row, rest = divmod(inside, columns)
    if rest or row % TILE:
        where = f"a cut before row {row}" if not rest else f"a cut inside row {row}"
        _cut_through_tiles(shape, where, name)
    _, strips, across = tiles((1, rows, columns))
    return (matrix * strips + row // TILE) * across


def _cut_through_tiles(shape: Sequence[int], where: str, name: str) -> None:
    refuse(
        "AdamW8bit", f"ranks to own whole strips of {TILE} rows of each matrix",
        f"{where} of a parameter of shape {tuple(shape)}",
        "Shard with fully_shard(.., shard_policy=ragged_fsdp.optim.tile_rows), or give this parameter "
        "state_format='fp32' in a group of its own.", name,
    )  # fmt: skip


def _tiles_under(
    shape: tuple[int, ...], mesh: Any, placements: Sequence[Placement], name: str
) -> tuple[int, ...]:
    """Tiles of the whole tensor when every shard of a stock `Shard(d)` has tiles of its own, counted from its start.
    Under a stock DTensor alone, where such a shard isn't tensor parallelism, its borders have to lie between tiles."""
    ragged = any(isinstance(placement, RaggedShard) for placement in placements)
    counts = [[size] for size in shape]  # of each dim: sizes of its parts
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, (RaggedShard, Replicate)):
            continue
        if type(placement) is not Shard or isinstance(placement, Partial):
            refuse(
                "AdamW8bit", "Shard, Replicate or RaggedShard placements", placement,
                "Give this parameter state_format='fp32' in a group of its own.", name,
            )  # fmt: skip
        parts = []
        for size in counts[placement.dim]:
            borders = [shard_interval(size, mesh.size(mesh_dim), rank) for rank in range(mesh.size(mesh_dim))]
            if not ragged and placement.dim >= len(shape) - 2 and any(b % TILE and b < size for _, b in borders):
                _cut_through_tiles(shape, f"{placement} over {mesh.size(mesh_dim)} ranks", name)
            parts += [end - begin for begin, end in borders]
        counts[placement.dim] = parts
    leading = [sum(parts) for parts in counts[:-2]]
    return (*leading, *(sum(-(-size // TILE) for size in parts) for parts in counts[-2:]))


def _stock(local: torch.Tensor, param: DTensor, shape: tuple[int, ...]) -> DTensor:
    spec = make_spec(param._spec.mesh, param._spec.placements, shape, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
