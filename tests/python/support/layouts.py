"""Random layouts to test with, odd on purpose: uneven, empty and prime pieces are the normal sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, foreign_box

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
