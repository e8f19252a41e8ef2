"""Moves a tensor between placements when at least one side is ragged. Works on local tensors and specs; tensor.py
wraps the results.

`transfer` is the one entry. What it runs, on the ragged mesh dim (the others unchanged):

    ragged    -> ragged      one uneven all-to-all of the overlaps, no copy on either side
    ragged    -> Replicate   uneven all-gather
    ragged    -> Shard(d)    all-to-all of box intersections; for d = 0 without packing
    ragged    -> Partial     nothing travels: zeros around the own piece
    Replicate -> ragged      a local copy of the slice, never a view: resharding must free memory
    Shard(d)  -> ragged      all-to-all of box intersections
    Partial   -> ragged      reduce-scatter

A pending Partial on another mesh dim is all-reduced while the tensor is small. When other mesh dims change as well,
the ragged dim is gathered first and the rest left to torch. Everything is decided from specs, which all ranks of the
group share, before the first collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp import _C, flat
from ragged_fsdp.placement import (
    Interval,
    RaggedShard,
    StridedRaggedShard,
    foreign_box,
    invalid,
    ragged_mesh_dim,
    shard_interval,
)

Box = tuple[Sequence[int], Sequence[int]]  # offset, size


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a row-major tensor of this global shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(torch.Size(shape), tuple(reversed(stride)), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def check_placements(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], operation: str
) -> int | None:
    """The ragged mesh dim of `placements` (None without one), after checking that they fit the mesh and the shape."""
    if len(placements) != mesh.ndim:
        raise invalid(
            operation, f"one placement for each of the {mesh.ndim} mesh dims", tuple(placements), "Add Replicate()."
        )
    mesh_dim = ragged_mesh_dim(placements, operation)
    if mesh_dim is None:
        return None
    placement: Any = placements[mesh_dim]
    if placement.world_size != mesh.size(mesh_dim):
        raise invalid(
            operation,
            f"{mesh.size(mesh_dim)} local units, one for each rank of mesh dim {mesh_dim}",
            placement.local_units,
            "Build the placement for this mesh.",
            mesh,
        )
    box, _ = foreign_box(shape, mesh, placements, operation)
    if placement.shape != box:
        raise invalid(
            operation,
            f"a ragged placement for the shape {box} that the other placements leave on this rank",
            placement,
            f"The full shape is {tuple(shape)}: give RaggedShard the pre-ragged shape.",
            mesh,
        )
    if isinstance(placement, StridedRaggedShard):
        factor = 1
        for other in range(mesh_dim + 1, mesh.ndim):
            if placements[other] == Shard(0):
                factor *= mesh.size(other)
        if factor != placement.split_factor:
            raise invalid(
                operation,
                f"split_factor {factor}, the size of the mesh dims with Shard(0) to the right",
                placement.split_factor,
                "Use RaggedShard where there is none.",
                mesh,
            )
    return mesh_dim


def cut_local(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's flat piece of `full`, which every rank holds: a 1-D view where possible. No communication."""
    mesh_dim = ragged_mesh_dim(placements)
    sizes, offsets = foreign_box(full.shape, mesh, placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        if size != full.shape[dim]:
            full = full.narrow(dim, offset, size)
    begin, end = placements[mesh_dim].interval(mesh.get_local_rank(mesh_dim))  # type: ignore[index, union-attr]
    return full.reshape(-1)[begin:end]


def transfer(local: torch.Tensor, spec: DTensorSpec, target: Sequence[Placement]) -> torch.Tensor:
    """The local tensor under `target` of the tensor that `spec` and `local` describe; new memory or `local` itself
    where nothing changes.

    Ragged local tensors are 1-D. Every rank of the mesh calls it. Raises InvalidArgument, on all ranks alike, for a
    target that doesn't fit.
    """
    mesh, shape = spec.mesh, spec.tensor_meta.shape  # type: ignore[union-attr]
    target = from_front(target, len(shape))
    check_placements(shape, mesh, target, "redistribute")
    current = list(spec.placements)
    if tuple(current) == target:
        return local
    source_dim, target_dim = ragged_mesh_dim(current), ragged_mesh_dim(target)
    _refuse_new_partials(current, target, source_dim, mesh)

    if source_dim is not None:
        local = _finish_partials(local, mesh, current, target, source_dim)
        if tuple(current) == target:
            return local
        ragged: Any = current[source_dim]
        group = mesh.get_group(source_dim)
        if _same_elsewhere(current, target, source_dim):
            goal = target[source_dim]
            if isinstance(goal, RaggedShard):
                return flat.exchange(local, ragged.intervals(), goal.intervals(), group)
            if type(goal) is Shard and not _cuts_later(current, source_dim, goal.dim):
                return _ragged_to_shard(local, ragged, goal.dim, group)
            if isinstance(goal, Partial) and goal.reduce_op == "sum":
                begin, end = ragged.interval(group.rank())
                full = local.new_zeros(ragged.shape)
                full.view(-1)[begin:end] = local
                return full
        local = flat.gather(local, ragged.intervals(), group).view(ragged.shape)
        current[source_dim] = Replicate()
        if tuple(current) == target:
            return local

    if target_dim is None:
        return _by_torch(local, mesh, current, target, shape)

    goal = target[target_dim]
    assert isinstance(goal, RaggedShard)
    here = current[target_dim]
    if type(here) is Shard:
        direct = not _cuts_later(current, target_dim, here.dim)
    else:
        direct = isinstance(here, (Replicate, Partial))
    if not (direct and _same_elsewhere(current, target, target_dim)):
        middle = list(target)
        middle[target_dim] = here if isinstance(here, Partial) else Replicate()
        local = _by_torch(local, mesh, current, middle, shape)
        here = middle[target_dim]
    group = mesh.get_group(target_dim)
    if isinstance(here, Partial):
        return flat.reduce_scatter(local.reshape(-1), goal.intervals(), group, here.reduce_op)
    if isinstance(here, Shard):
        return _shard_to_ragged(local, goal, here.dim, group)
    begin, end = goal.interval(group.rank())
    return local.reshape(-1)[begin:end].clone()


def from_front(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """The placements with negative Shard dims counted from the front."""
    return tuple(Shard(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)


def _same_elsewhere(current: Sequence[Placement], target: Sequence[Placement], mesh_dim: int) -> bool:
    return all(a == b for dim, (a, b) in enumerate(zip(current, target)) if dim != mesh_dim)


def _cuts_later(placements: Sequence[Placement], mesh_dim: int, tensor_dim: int) -> bool:
    # torch cuts mesh dims from left to right: a Shard of the same tensor dim to the right cuts what Shard on mesh_dim
    # left, so what is on this rank isn't a chunk of the pre-ragged tensor.
    return any(other == Shard(tensor_dim) for other in placements[mesh_dim + 1 :])


def _is_pending(placement: Placement) -> bool:
    return isinstance(placement, Partial) and not isinstance(placement, RaggedShard)


def _refuse_new_partials(
    current: Sequence[Placement], target: Sequence[Placement], source_dim: int | None, mesh: DeviceMesh
) -> None:
    for dim, goal in enumerate(target):
        if _is_pending(goal) and current[dim] != goal and not (dim == source_dim and goal == Partial("sum")):
            raise invalid(
                "redistribute",
                "a target without a new Partial",
                goal,
                f"Mesh dim {dim} is {current[dim]}: only ragged to Partial('sum') is defined.",
                mesh,
            )


def _finish_partials(
    local: torch.Tensor, mesh: DeviceMesh, current: list[Placement], target: Sequence[Placement], ragged_dim: int
) -> torch.Tensor:
    for dim, placement in enumerate(current):
        if dim != ragged_dim and _is_pending(placement) and target[dim] != placement:
            local = flat.all_reduce_(local.clone(), mesh.get_group(dim), placement.reduce_op)  # type: ignore[attr-defined]
            current[dim] = Replicate()
    return local


def _by_torch(
    local: torch.Tensor,
    mesh: DeviceMesh,
    current: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[int],
) -> torch.Tensor:
    with torch.no_grad():
        stock = DTensor(local, make_spec(mesh, current, shape, local.dtype), requires_grad=False)
        moved = stock.redistribute(mesh, tuple(target))._local_tensor
    return moved.wait() if isinstance(moved, funcol.AsyncCollectiveTensor) else moved


# ---- ragged and Shard(d), by box intersection -------------------------------


def _row_intervals(shape: Sequence[int], ranks: int) -> list[Interval]:
    row = 1
    for size in shape[1:]:
        row *= size
    chunks = (shard_interval(shape[0], ranks, rank) for rank in range(ranks))
    return [(begin * row, end * row) for begin, end in chunks]


def _shard_box(shape: Sequence[int], dim: int, ranks: int, rank: int) -> Box:
    begin, end = shard_interval(shape[dim], ranks, rank)
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = begin, end - begin
    return offset, size


def _common(a: Box, b: Box) -> Box | None:
    offset = [max(x, y) for x, y in zip(a[0], b[0])]
    end = [min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1])]
    size = [last - first for first, last in zip(offset, end)]
    return (offset, size) if all(n > 0 for n in size) else None


def _inside(tensor: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
    for dim, (start, offset, size) in enumerate(zip(origin, *box)):
        tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def flat_boxes(local: torch.Tensor, shape: Sequence[int], interval: Interval) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a flat interval, each with its n-D view of `local`, the 1-D tensor that holds the interval."""
    views, position = [], 0
    for offset, size in _C.boxes(list(shape), *interval):
        numel = 1
        for extent in size:
            numel *= extent
        views.append(((offset, size), local[position : position + numel].view(size)))
        position += numel
    return views


def _ragged_to_shard(local: torch.Tensor, ragged: RaggedShard, dim: int, group: Any) -> torch.Tensor:
    shape, ranks, rank = ragged.shape, group.size(), group.rank()
    mine = _shard_box(shape, dim, ranks, rank)
    if dim == 0:
        return flat.exchange(local, ragged.intervals(), _row_intervals(shape, ranks), group).view(mine[1])
    held = flat_boxes(local, shape, ragged.interval(rank))
    pieces, sends = [], []
    for peer in range(ranks):
        wanted = _shard_box(shape, dim, ranks, peer)
        common = [(_common(box, wanted), box, view) for box, view in held]
        parts = [_inside(view, box[0], part).reshape(-1) for part, box, view in common if part is not None]
        pieces += parts
        sends.append(sum(part.numel() for part in parts))
    result = local.new_empty(mine[1])
    places, receives = [], []
    for peer in range(ranks):
        parts = [_common(box, mine) for box in _C.boxes(list(shape), *ragged.interval(peer))]
        views = [_inside(result, mine[0], part) for part in parts if part is not None]
        places += views
        receives.append(sum(view.numel() for view in views))
    _unpack(_packed(pieces, local, sends, receives, group), places)
    return result


def _shard_to_ragged(local: torch.Tensor, ragged: RaggedShard, dim: int, group: Any) -> torch.Tensor:
    shape, ranks, rank = ragged.shape, group.size(), group.rank()
    begin, end = ragged.interval(rank)
    if dim == 0:
        return flat.exchange(local.reshape(-1), _row_intervals(shape, ranks), ragged.intervals(), group)
    mine = _shard_box(shape, dim, ranks, rank)
    pieces, sends = [], []
    for peer in range(ranks):
        parts = [_common(box, mine) for box in _C.boxes(list(shape), *ragged.interval(peer))]
        views = [_inside(local, mine[0], part).reshape(-1) for part in parts if part is not None]
        pieces += views
        sends.append(sum(view.numel() for view in views))
    result = local.new_empty(end - begin)
    held = flat_boxes(result, shape, (begin, end))
    places, receives = [], []
    for peer in range(ranks):
        sent = _shard_box(shape, dim, ranks, peer)
        common = [(_common(box, sent), box, view) for box, view in held]
        views = [_inside(view, box[0], part) for part, box, view in common if part is not None]
        places += views
        receives.append(sum(view.numel() for view in views))
    _unpack(_packed(pieces, local, sends, receives, group), places)
    return result


def _packed(
    pieces: list[torch.Tensor], like: torch.Tensor, sends: list[int], receives: list[int], group: Any
) -> torch.Tensor:
    send = torch.cat(pieces) if pieces else like.new_empty(0)
    return flat.all_to_all(send, sends, receives, sum(receives), group)


def _unpack(received: torch.Tensor, places: list[torch.Tensor]) -> None:
    position = 0
    for place in places:
        place.copy_(received[position : position + place.numel()].view(place.shape))
        position += place.numel()
