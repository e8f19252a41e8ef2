"""Random layouts to test with, odd on purpose: uneven, empty and prime pieces are the normal sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, foreign_box

ROWS = RaggedShard(1, (2, 3), (5, 4))  # two ranks, whole rows
SHAPES = [(), (1,), (7,), (0, 3), (5, 4), (13, 1, 3), (2, 3, 5), (3, 2, 2, 2)]


def random_ragged(shape: Sequence[int], ranks: int, rng: random.Random, split_factor: int = 1) -> RaggedShard:
    """Any placement that fits: whole tensor on one rank, rows or finer, ranks without elements included."""
    dims = rng.randint(0, len(shape))
    if dims == 0:
        owner = rng.randrange(ranks)
        units = [int(rank == owner) for rank in range(ranks)]
    else:
        cells = math.prod(shape[:dims])
        cuts = sorted(rng.randint(0, cells) for _ in range(ranks - 1))
        units = [end - begin for begin, end in zip([0, *cuts], [*cuts, cells])]
    if split_factor > 1:
        return StridedRaggedShard(dims, units, shape, split_factor)
    return RaggedShard(dims, units, shape)


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose every element tells where it belongs."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(tuple(shape)).to(dtype)


def expected_piece(full: torch.Tensor, mesh, placements) -> torch.Tensor:
    """The slow twin: cut the full tensor by the foreign placements, flatten, slice."""
    sizes, offsets = foreign_box(full.shape, mesh, placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        full = full.narrow(dim, offset, size)
    mesh_dim = next(dim for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard))
    begin, end = placements[mesh_dim].interval(mesh.get_local_rank(mesh_dim))
    return full.contiguous().view(-1)[begin:end]


def make_mesh(world: int) -> DeviceMesh:
    """All ranks in one dim, on the CPU."""
    return init_device_mesh("cpu", (world,))


def layout(shape: Sequence[int], world: int, seed: int = 0) -> RaggedShard:
    """A random placement, the same for the same arguments."""
    return random_ragged(shape, world, random.Random(seed))


def values(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal values without the default generator, which ranks as threads share."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
