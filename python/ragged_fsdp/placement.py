"""RaggedShard and StridedRaggedShard: how a tensor's row-major storage is cut into uneven contiguous pieces over one
mesh dim.

Values only; what moves between placements is in redistribute.py. The index mathematics is C++ (`ragged_fsdp._C`).

[Note: why a placement derives from Partial]
Stock torch knows four kinds of placement and none from outside. Of
these, `Partial` alone asks the placement itself what to do: `distribute_tensor` calls `_partition_value` and
`full_tensor` calls `_reduce_value`. Deriving from it lets torch's own functions, and with them the state-dict
helpers, cut and gather ragged tensors without patching torch. "Something is pending before this is the whole tensor"
is also an honest reading. `_reduce_value` sees only a 1-D local tensor, so the placement carries the shape that it
cuts.

[Note: foreign shards first, ragged last]
On an N-D mesh the other placements (tensor or expert parallel `Shard`s) cut
first, in mesh order, and ragged cuts what they leave on this rank, whatever the order of the list. `shape` is that
left-over shape, so the placement of one tensor may differ between tensor-parallel ranks, never within the group that
the ragged mesh dim spans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp import _C

InvalidArgument = _C.InvalidArgument

Interval = tuple[int, int]


def invalid(operation: str, expected: str, got: object, advice: str, mesh: DeviceMesh | None = None) -> Exception:
    """The error to raise for bad input: `[operation] Expected X, but got Y (rank r of n). What to do.`"""
    return InvalidArgument(_message(operation, expected, got, advice, mesh))


def unsupported(operation: str, expected: str, got: object, advice: str, mesh: DeviceMesh) -> Exception:
    """The same text for what isn't defined on ragged tensors, as the error by which torch says such things."""
    return NotImplementedError(_message(operation, expected, got, advice, mesh))


def _message(operation: str, expected: str, got: object, advice: str, mesh: DeviceMesh | None) -> str:
    known = mesh is not None and dist.is_initialized()
    where = f" (rank {dist.get_rank()} of {dist.get_world_size()})" if known else ""
    return f"[{operation}] Expected {expected}, but got {got}{where}. {advice}"


def is_ragged(placement: object) -> bool:
    """True for RaggedShard and StridedRaggedShard."""
    return isinstance(placement, RaggedShard)


@functools.lru_cache(maxsize=65536)
def _normalized(dims: int, units: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    found_dims, found_units = _C.normalize_ragged(dims, list(units))
    return found_dims, tuple(found_units)


@functools.lru_cache(maxsize=65536)
def _intervals(shape: tuple[int, ...], dims: int, units: tuple[int, ...]) -> tuple[Interval, ...]:
    return tuple(_C.ragged_intervals(list(shape), dims, list(units)))


_stock_cuts = 0


def stock_cuts() -> int:
    """How often torch's own functions made pieces in this process; adopt.py asks."""
    return _stock_cuts


class RaggedShard(Partial):
    """Rank r of the mesh dim owns one contiguous interval of the tensor's row-major storage; its local tensor is 1-D.

    dims:        the leading tensor dims that may be cut, as a tuple (0, .., k-1) or as the number k. With k = 1 the
                 atom is a row, with all dims an element, with none of them the whole tensor (one owner; units are
                 then one-hot).
    local_units: the ranks' relative shares, zeros allowed; divided by their gcd, so that equal layouts are equal
                 placements. Their sum divides the product of the first k sizes. All zero means an empty tensor.
    shape:       what is cut: the tensor as the foreign placements left it on this rank (see the note above).

    Example: shape (5, 4), dims 1, units (2, 3): rank 0 owns elements [0, 8), rank 1 owns [8, 20).
    Raises InvalidArgument (a ValueError) for anything else. Immutable, hashable; equality is strict by type.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    shape: tuple[int, ...]

    def __init__(self, dims: int | Sequence[int], local_units: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__("sum")
        if not isinstance(dims, int):
            if tuple(dims) != tuple(range(len(dims))):
                raise invalid(
                    type(self).__name__,
                    "dims to be a prefix (0, 1, .., k-1)",
                    tuple(dims),
                    "Storage is cut in row-major order, so only leading dims can be cut: pass the number of them.",
                )
            dims = len(dims)
        sizes = tuple(int(size) for size in shape)
        count, units = _normalized(dims, tuple(int(unit) for unit in local_units))
        self._freeze(dims=tuple(range(count)), local_units=units, shape=sizes, _owned=_intervals(sizes, count, units))

    def _freeze(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: build a new one instead of setting {name}")

    @staticmethod
    def from_intervals(shape: Sequence[int], by_rank: Sequence[Interval]) -> RaggedShard:
        """The placement that gives rank r the r-th of these adjacent, ascending intervals of a tensor of this shape."""
        dims, units = _C.ragged_from_intervals(list(shape), [tuple(interval) for interval in by_rank])
        return RaggedShard(dims, units, shape)

    @property
    def world_size(self) -> int:
        """Size of the mesh dim that this placement is made for."""
        return len(self.local_units)

    def interval(self, rank: int) -> Interval:
        """(begin, end) of the rank with this coordinate on the mesh dim, in elements of the row-major tensor of
        `shape`."""
        return self._owned[rank]  # type: ignore[attr-defined]

    def intervals(self) -> tuple[Interval, ...]:
        """(begin, end) of every rank."""
        return self._owned  # type: ignore[attr-defined]

    # ---- value semantics ----

    def _key(self) -> tuple[Any, ...]:
        return (len(self.dims), self.local_units, self.shape)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._key() == other._key()  # type: ignore[attr-defined]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._key()))

    def __reduce__(self) -> tuple[Callable[..., RaggedShard], tuple[Any, ...]]:
        return type(self), self._key()

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dims={self.dims}, local_units={self.local_units}, shape={self.shape})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        arguments = ", ".join(repr(part) for part in self._key())
        return f"{type(self).__name__}({arguments})", {type(self).__name__: type(self)}

    # ---- what stock torch calls, see the note above ----

    def _partition_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        """This rank's 1-D piece, as a copy, of a tensor that is the same on all ranks of the mesh dim."""
        global _stock_cuts
        _stock_cuts += 1
        if mesh_dim < mesh.ndim - 1:
            # Foreign placements to the right have yet to cut, and must cut first.
            return _CutLast.of(tensor, self, mesh, mesh_dim)
        return self._cut(tensor, mesh, mesh_dim)

    def _cut(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        if tuple(tensor.shape) != self.shape:
            raise invalid(
                "distribute_tensor",
                f"a tensor of shape {self.shape} where {self} cuts",
                tuple(tensor.shape),
                "The placement is made for the shape that Shard placements leave on this rank: build it for that.",
                mesh,
            )
        begin, end = self.interval(mesh.get_local_rank(mesh_dim))
        return tensor.reshape(-1)[begin:end].clone()

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        """The pre-ragged tensor, gathered from the 1-D pieces."""
        from ragged_fsdp import flat

        begin, end = self.interval(mesh.get_local_rank(mesh_dim))
        if tuple(tensor.shape) == self.shape:
            # torch's loading from rank 0 into meta tensors, which knows no ragged slices, leaves all that is to be cut
            # here. An owner of everything can't tell that from its piece, so the others take part in its gather.
            tensor = tensor.reshape(-1)[begin:end]
        if tensor.ndim != 1 or tensor.numel() != end - begin:
            raise invalid(
                "full_tensor",
                f"a 1-D piece of {end - begin} elements on mesh dim {mesh_dim}",
                tuple(tensor.shape),
                "torch gathers mesh dims from right to left, which is wrong beside a Shard: use "
                "ragged_fsdp.distribute_tensor, whose tensors gather in the right order.",
                mesh,
            )
        return flat.gather(tensor, self.intervals(), mesh.get_group(mesh_dim)).view(self.shape)

    def _reduce_shard_value(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement
    ) -> torch.Tensor:
        """The Shard(d) piece of the pre-ragged tensor."""
        dim = shard_spec.dim  # type: ignore[attr-defined]
        begin, end = shard_interval(self.shape[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
        return self._reduce_value(tensor, mesh, mesh_dim).narrow(dim, begin, end - begin).contiguous()


class StridedRaggedShard(RaggedShard):
    """RaggedShard of what a foreign Shard(0) to its right on the mesh left on this rank; `split_factor` is that mesh
    dim's size.

    Same interval arithmetic; the type records that rebuilding the full tensor interleaves the pieces of
    `split_factor` ranks.
    """

    split_factor: int

    def __init__(
        self, dims: int | Sequence[int], local_units: Sequence[int], shape: Sequence[int], split_factor: int
    ) -> None:
        super().__init__(dims, local_units, shape)
        if split_factor < 1:
            raise invalid(
                "StridedRaggedShard",
                "split_factor >= 1",
                split_factor,
                "It is the size of the mesh dim that has Shard(0).",
            )
        self._freeze(split_factor=int(split_factor))

    def _key(self) -> tuple[Any, ...]:
        return (*super()._key(), self.split_factor)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, split_factor={self.split_factor})"

    __str__ = __repr__


class _CutLast(torch.Tensor):
    """A full tensor on its way through stock `distribute_tensor` that cuts itself ragged at the end.

    Stock code walks the mesh dims from left to right, so a ragged placement is asked to cut before the Shards to its
    right have. This keeps the n-D tensor and the wish to cut through their chunking and scattering, and cuts at the
    call that ends the walk, `requires_grad_`.
    """

    _wish: tuple[RaggedShard, DeviceMesh, int]

    @staticmethod
    def of(tensor: torch.Tensor, placement: RaggedShard, mesh: DeviceMesh, mesh_dim: int) -> _CutLast:
        pending = tensor.detach().as_subclass(_CutLast)
        pending._wish = (placement, mesh, mesh_dim)
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.requires_grad_:
            pending = args[0]
            placement, mesh, mesh_dim = pending._wish
            piece = placement._cut(pending.as_subclass(torch.Tensor), mesh, mesh_dim)
            return piece.requires_grad_(*args[1:], **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        wish = next((arg._wish for arg in args if isinstance(arg, _CutLast) and hasattr(arg, "_wish")), None)
        if wish is not None:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, _CutLast):
                    part._wish = wish
        return result


# ---- foreign shards ---------------------------------------------------------


def shard_interval(size: int, ranks: int, rank: int) -> Interval:
    """[begin, end) of `rank` when `size` items are split as torch.chunk does: ceil-sized pieces, trailing ranks short
    or empty."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def ragged_mesh_dim(placements: Sequence[Placement], operation: str = "RaggedTensor") -> int | None:
    """The mesh dim with the ragged placement, None without one; more than one is an error."""
    found = [dim for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if len(found) > 1:
        raise invalid(
            operation, "at most one ragged placement", tuple(placements), "Flatten the mesh dims that shard together."
        )
    return found[0] if found else None


def foreign_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], operation: str = "RaggedTensor"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, offsets) in the full tensor of what the placements other than ragged leave on this rank."""
    sizes, offsets = list(shape), [0] * len(shape)
    coordinate = mesh.get_coordinate()
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Shard:
            dim = placement.dim
            if not 0 <= dim < len(sizes):
                raise invalid(
                    operation, f"Shard(d) with 0 <= d < {len(sizes)}", placement, "Count dims from the front.", mesh
                )
            rank = coordinate[mesh_dim] if coordinate is not None else 0
            begin, end = shard_interval(sizes[dim], mesh.size(mesh_dim), rank)
            sizes[dim], offsets[dim] = end - begin, offsets[dim] + begin
        elif not isinstance(placement, (Replicate, Partial)):
            raise invalid(
                operation,
                "Replicate, Shard, Partial or RaggedShard placements",
                placement,
                "Other kinds, strided shards included, can't lie under a ragged one: redistribute to a Shard first.",
                mesh,
            )
    return tuple(sizes), tuple(offsets)


torch.serialization.add_safe_globals([RaggedShard, StridedRaggedShard])
