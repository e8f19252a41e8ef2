"""Parameters to optimise, cut at random but never through a tile, and gradients that are a function of the step
alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from support.layouts import layout, make_mesh, values
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as stock_distribute

from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.tensor import distribute_tensor

# Rows of 1, 31, 32, 33, 40 and many; a stack whose matrices end inside a tile; 1-D; small and empty.
SHAPES = [(1, 4200), (31, 140), (32, 130), (33, 129), (40, 105), (200, 33), (3, 40, 70), (5, 8), (37,), (4097,), (0, 3)]


def tile_cuts(shape: Sequence[int]) -> list[int]:
    """Elements before which a tensor may be cut: strips of 32 rows of each matrix; any element below 2-D."""
    if len(shape) < 2:
        return list(range(math.prod(shape) + 1))
    rows, columns = shape[-2], shape[-1]
    cuts = [
        (matrix * rows + row) * columns for matrix in range(math.prod(shape[:-2])) for row in range(0, rows, 32)
    ]
    return [*cuts, math.prod(shape)]


def tiled(shape: Sequence[int], world: int, seed: int) -> RaggedShard:
    """A random placement whose borders cut no tile; ranks may own nothing."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(tile_cuts(shape), k=world - 1))
    cuts = [0, *cuts, math.prod(shape)]
    return RaggedShard.from_intervals(shape, list(zip(cuts, cuts[1:])))


def plain_parameters(shapes: Sequence[Sequence[int]] = SHAPES, dtype=torch.float32) -> list[torch.nn.Parameter]:
    """Whole parameters, the same wherever they are asked for."""
    return [torch.nn.Parameter(values(shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]


def sharded_parameters(
    mesh: DeviceMesh, shapes: Sequence[Sequence[int]] = SHAPES, dtype=torch.float32, seed: int = 0, wrap=lambda p: [p]
) -> list[torch.nn.Parameter]:
    """The same parameters over the mesh's last dim; `wrap` turns the ragged placement into all placements."""
    found = []
    for i, param in enumerate(plain_parameters(shapes, dtype)):
        placement = tiled(param.shape, mesh.size(mesh.ndim - 1), 100 * seed + i)
        shard = distribute_tensor(param.detach(), mesh, wrap(placement), src_data_rank=None)
        found.append(torch.nn.Parameter(shard))
    return found


def randomly_sharded(
    world: int, shapes: Sequence[Sequence[int]], seed: int = 0, mesh=None, wrap=lambda p: [p], dtype=torch.float32
) -> list[torch.nn.Parameter]:
    """The same, cut anywhere."""
    mesh = mesh or make_mesh(world)
    size = mesh.size(mesh.ndim - 1)
    return [
        torch.nn.Parameter(
            distribute_tensor(p.detach(), mesh, wrap(layout(p.shape, size, 31 * seed + i)), src_data_rank=None)
        )
        for i, p in enumerate(plain_parameters(shapes, dtype))
    ]


def stepped(optimizer: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> torch.optim.Optimizer:
    """The optimizer after so many steps."""
    for step in range(first, first + steps):
        give_gradients([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()
    return optimizer


def give_gradients(params: Sequence[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients of a step: rows differ in size, some elements are zero."""
    for i, param in enumerate(params):
        whole = values(param.shape, seed=1000 * step + i) * scale
        if whole.ndim > 1 and whole.numel():
            whole = whole * torch.logspace(-3, 0, whole.shape[-2]).unsqueeze(-1)
        whole[values(param.shape, seed=7 + i + step) > 1.5] = 0.0
        if param.grad is None:
            param.grad = torch.empty_like(param)
        with torch.no_grad():
            whole = whole.to(param.dtype)
            if type(param.grad) is DTensor:
                whole = stock_distribute(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.grad.copy_(whole)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of all of it; a collective where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and states, whole, in order."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found.append(whole(param))
            found += [whole(optimizer.state[param][key]) for key in sorted(optimizer.state.get(param, {}))]
    return found


def assert_same_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Shapes, dtypes and every bit, NaN included."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert a.dtype == b.dtype and a.shape == b.shape, (i, a.dtype, b.dtype, a.shape, b.shape)
        a, b = (x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b), f"tensor {i} of {len(got)} differs in {int((a != b).sum())} bytes"
