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
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.placement import Interval, RaggedShard, StridedRaggedShard, foreign_box, shard_interval
from ragged_fsdp.redistribute import make_spec
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.tensor import RaggedTensor

TILE = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of states, by the names that options have


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


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in DTYPES, or torch's."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


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


def matrix_shape(shape: Sequence[int], flatten: bool) -> tuple[int, ...]:
    """The shape of its matrices: [out, rest] where [out, ..] is one matrix of `out` rows."""
    return (shape[0], math.prod(shape[1:])) if flatten else tuple(shape)


def tile_scales_like(
    param: torch.Tensor, name: str, operation: str = "AdamW8bit", flatten: bool = False
) -> torch.Tensor:
    """Zeros, fp32, one a tile of 32 x 32, placed as the parameter's rows are. Raises InvalidArgument, on all ranks
    alike, where a rank's border cuts a tile."""
    place = place_of(param)
    here, shape = matrix_shape(place.shape, flatten), matrix_shape(param.shape, flatten)
    local_tiles = tiles(here)
    if not isinstance(param, DTensor):
        return torch.zeros(local_tiles, dtype=torch.float32, device=param.device)
    mesh, placements = param._spec.mesh, tuple(param._spec.placements)
    device = param._local_tensor.device
    errors = _Errors(operation, name, flatten)
    whole = _tiles_under(shape, mesh, placements, errors)
    if not isinstance(param, RaggedTensor):
        return _stock(torch.zeros(local_tiles, dtype=torch.float32, device=device), param, whole)
    if foreign_box(whole, mesh, placements)[0] != local_tiles:
        errors.refuse(
            "tensor-parallel cuts that leave each rank as many tiles as an even cut of all tiles",
            f"{placements} of shape {shape}",
        )
    return _beside(param, whole, local_tiles, [tuple(_tile_cut(here, at, errors) for at in i) for i in place.intervals])


def rows_like(param: torch.Tensor, flatten: bool = False) -> torch.Tensor:
    """Zeros, fp32, one a row of each matrix, on the rank that holds the row's first element ([Note: rows] in
    ragged/optim/muon_plan.h)."""
    place = place_of(param)
    here, whole = matrix_shape(place.shape, flatten), matrix_shape(param.shape, flatten)[:-1]
    if not isinstance(param, DTensor):
        return torch.zeros(here[:-1], dtype=torch.float32, device=param.device)
    if not isinstance(param, RaggedTensor):
        local = torch.zeros(here[:-1], dtype=torch.float32, device=param._local_tensor.device)
        return _stock(local, param, whole)
    return _beside(param, whole, here[:-1], [tuple(-(-at // max(1, here[-1])) for at in i) for i in place.intervals])


def on_rank(param: torch.Tensor, shape: Sequence[int], mesh_dim: int | None, owner: int) -> torch.Tensor:
    """Zeros, fp32, of a shape of its own: all of it on rank `owner` of this dim of the parameter's mesh and nothing on
    the dim's others, or a copy on each rank where the dim is None."""
    if not isinstance(param, DTensor):
        return torch.zeros(tuple(shape), dtype=torch.float32, device=param.device)
    mesh, device = param._spec.mesh, param._local_tensor.device
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if mesh_dim is None:
        spec = make_spec(mesh, placements, tuple(shape), torch.float32)
        local = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)
    units = [int(rank == owner) for rank in range(mesh.size(mesh_dim))]
    placements[mesh_dim] = RaggedShard(0, units, shape)
    numel = math.prod(shape) if mesh.get_local_rank(mesh_dim) == owner else 0
    local = torch.zeros(numel, dtype=torch.float32, device=device)
    return RaggedTensor.wrap(local, make_spec(mesh, placements, tuple(shape), torch.float32))


def _beside(
    param: RaggedTensor, whole: tuple[int, ...], here: tuple[int, ...], cuts: Sequence[Sequence[int]]
) -> RaggedTensor:
    """Zeros, fp32, of shape `whole`, under the parameter's placements; of what these leave here, `here`, each rank
    that cuts the parameter has one of the intervals `cuts`."""
    mesh_dim, ragged = param.ragged
    own = RaggedShard.from_intervals(here, [(begin, end) for begin, end in cuts])
    if isinstance(ragged, StridedRaggedShard):
        own = StridedRaggedShard(len(own.dims), own.local_units, own.shape, ragged.split_factor)
    mesh, placements = param._spec.mesh, tuple(param._spec.placements)
    begin, end = cuts[mesh.get_local_rank(mesh_dim)]
    local = torch.zeros(end - begin, dtype=torch.float32, device=param._local_tensor.device)
    placements = (*placements[:mesh_dim], own, *placements[mesh_dim + 1 :])
    return RaggedTensor.wrap(local, make_spec(mesh, placements, whole, torch.float32))


@dataclasses.dataclass(frozen=True)
class _Errors:
    """Of a parameter whose states can't be in tiles."""

    operation: str
    name: str
    flatten: bool

    def refuse(self, expected: str, got: object) -> NoReturn:
        refuse(self.operation, expected, got, f"Give this parameter {self._instead}.", self.name)

    def cut_through_tiles(self, shape: Sequence[int], where: str) -> NoReturn:
        policy = "Shard with fully_shard(.., shard_policy=ragged_fsdp.optim.tile_rows)"
        if self.flatten:
            policy = f"Let shard_policy return ragged_fsdp.blocks.elements({TILE * shape[-1]}) for it"
        refuse(
            self.operation, f"ranks to own whole strips of {TILE} rows of each matrix",
            f"{where} of a parameter of shape {tuple(shape)}",
            f"{policy}, or give this parameter {self._instead}.", self.name,
        )  # fmt: skip

    @property
    def _instead(self) -> str:
        option = "state_format" if self.operation == "AdamW8bit" else "momentum_format"
        return f"{option}='fp32' in a group of its own"


def tiles(shape: Sequence[int]) -> tuple[int, ...]:
    """Tiles of each matrix of a stack: (leading dims, strips, tiles a strip)."""
    return (*shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE))


def _tile_cut(shape: tuple[int, ...], element: int, errors: _Errors) -> int:
    """Index among the tiles of a cut before `element` of the row-major `shape`; raises where it goes through a tile."""
    rows, columns = shape[-2], shape[-1]
    if math.prod(shape) == 0:
        return 0
    matrix, inside = divmod(element, rows * columns)
    row, rest = divmod(inside, columns)
    if rest or row % TILE:
        errors.cut_through_tiles(shape, f"a cut before row {row}" if not rest else f"a cut inside row {row}")
    _, strips, across = tiles((1, rows, columns))
    return (matrix * strips + row // TILE) * across


def _tiles_under(
    shape: tuple[int, ...], mesh: Any, placements: Sequence[Placement], errors: _Errors
) -> tuple[int, ...]:
    """Tiles of the whole tensor when every shard of a stock `Shard(d)` has tiles of its own, counted from its start.
    Under a stock DTensor alone, where such a shard isn't tensor parallelism, its borders have to lie between tiles."""
    ragged = any(isinstance(placement, RaggedShard) for placement in placements)
    counts = [[size] for size in shape]  # of each dim: sizes of its parts
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, (RaggedShard, Replicate)):
            continue
        if type(placement) is not Shard or isinstance(placement, Partial):
            errors.refuse("Shard, Replicate or RaggedShard placements", placement)
        parts = []
        for size in counts[placement.dim]:
            borders = [shard_interval(size, mesh.size(mesh_dim), rank) for rank in range(mesh.size(mesh_dim))]
            if not ragged and placement.dim >= len(shape) - 2 and any(b % TILE and b < size for _, b in borders):
                errors.cut_through_tiles(shape, f"{placement} over {mesh.size(mesh_dim)} ranks")
            parts += [end - begin for begin, end in borders]
        counts[placement.dim] = parts
    leading = [sum(parts) for parts in counts[:-2]]
    return (*leading, *(sum(-(-size // TILE) for size in parts) for parts in counts[-2:]))


def _stock(local: torch.Tensor, param: DTensor, shape: tuple[int, ...]) -> DTensor:
    spec = make_spec(param._spec.mesh, param._spec.placements, shape, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
