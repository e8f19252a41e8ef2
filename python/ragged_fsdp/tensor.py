"""RaggedTensor: a DTensor whose local tensor is one contiguous, 1-D piece of the row-major global tensor.

A subclass with its own dispatch (ops.py): what is defined on shards runs on them, everything else is an error that
says so, and nothing gathers behind the user's back. Not a matrix: `mm`, views and indexing need `full_tensor()`
first.

[Note: wrappers are cheap and their locals change]
`RaggedTensor.wrap(local, spec)` makes one object and checks
nothing. The wrapper reads `_local_tensor` at every op, so an owner may keep a wrapper (a gradient's, say) and assign
another piece of the same size, dtype and device to `_local_tensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._api as _torch_api
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from ragged_fsdp import flat
from ragged_fsdp.dcp import RaggedCheckpointing
from ragged_fsdp.placement import RaggedShard, foreign_box, invalid, ragged_mesh_dim
from ragged_fsdp.redistribute import check_placements, cut_local, from_front, make_spec, transfer

_torch_data: Any = torch.Tensor.data
_new_dtensor: Callable[..., Any] = DTensor.__new__


class RaggedTensor(RaggedCheckpointing, DTensor):
    """A tensor of global `shape`, of which `local` (1-D, contiguous) is this rank's piece under `placements` on `mesh`.

    Exactly one of the placements is a RaggedShard; it sits on the mesh dim that data parallelism shards over. No
    communication here: every rank gives its own piece. `stride`, if given, must be the row-major one. Raises
    InvalidArgument for a local tensor that isn't the piece that the placements say, naming both.
    """

    is_ragged_tensor = True

    def __new__(
        cls,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        *,
        requires_grad: bool = False,
    ) -> RaggedTensor:
        mesh_dim = check_placements(shape, mesh, placements, "RaggedTensor")
        if mesh_dim is None:
            raise invalid(
                "RaggedTensor",
                "one RaggedShard among the placements",
                tuple(placements),
                "Use DTensor.from_local for the others.",
            )
        spec = make_spec(mesh, placements, shape, local.dtype)
        if stride is not None and tuple(stride) != spec.tensor_meta.stride:
            raise invalid(
                "RaggedTensor",
                f"the row-major stride {spec.tensor_meta.stride}",
                tuple(stride),
                "Call contiguous() first.",
            )
        begin, end = placements[mesh_dim].interval(mesh.get_local_rank(mesh_dim))  # type: ignore[attr-defined]
        if local.ndim != 1 or local.numel() != end - begin or not local.is_contiguous():
            raise invalid(
                "RaggedTensor",
                f"a contiguous 1-D local tensor of {end - begin} elements",
                f"shape {tuple(local.shape)} with stride {local.stride()}",
                f"This rank owns [{begin}, {end}) of {placements[mesh_dim]}.",
                mesh,
            )
        return cls.wrap(local.detach(), spec, requires_grad)

    @classmethod
    def wrap(cls, local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> RaggedTensor:
        """A RaggedTensor over `local` and a finished spec (`make_spec`), unchecked: for code that has checked once."""
        return _new_dtensor(cls, local, spec, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    # ---- placement ----

    @property
    def ragged(self) -> tuple[int, RaggedShard]:
        """(mesh dim, placement) of the ragged one."""
        mesh_dim = ragged_mesh_dim(self._spec.placements)
        assert mesh_dim is not None
        return mesh_dim, self._spec.placements[mesh_dim]  # type: ignore[return-value]

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The 1-D piece of this rank, sharing memory. Differentiable; `grad_placements` must be None or the tensor's
        own."""
        if grad_placements is not None and tuple(grad_placements) != self._spec.placements:
            raise invalid(
                "to_local", "grad_placements None", tuple(grad_placements), "A piece's gradient lies as the piece does."
            )
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        return _ToLocal.apply(self)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor as a plain one, on every rank; a collective over the mesh. Differentiable: each rank's
        gradient is taken to be the gradient of the whole, and this rank keeps its piece of it (pass
        `[Partial()]`-like grad_placements to have them summed)."""
        replicated = [Replicate()] * self._spec.mesh.ndim
        if torch.is_grad_enabled() and self.requires_grad:
            return _FullTensor.apply(self, tuple(grad_placements or replicated))
        return transfer(self._local_tensor, self._spec, replicated)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor under other placements: a RaggedTensor if one is ragged, else a DTensor. A collective over
        the mesh.

        Same mesh only. `async_op` is accepted and runs synchronously. The dtypes are those that the data and its
        gradient travel in.
        """
        if device_mesh is not None and device_mesh != self._spec.mesh:
            raise invalid(
                "redistribute", f"the tensor's own mesh {self._spec.mesh}", device_mesh, "Go through full_tensor()."
            )
        if placements is None:
            raise invalid("redistribute", "placements", None, "Say how the result shall lie.")
        source: Any = self if forward_dtype is None else self.to(forward_dtype)
        return _Redistribute.apply(source, tuple(placements), backward_dtype)

    # ---- what Python and torch ask of a tensor ----

    @property
    def data(self) -> RaggedTensor:  # type: ignore[override]
        """The tensor without its autograd history, sharing memory. Assigning another RaggedTensor of the shape makes
        this one share its memory and placements; torch's own setter would change the wrapper and leave the piece."""
        return _torch_data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RaggedTensor) or value.shape != self.shape:
            got = f"a {type(value).__name__} of shape {tuple(value.shape)}"
            raise invalid(
                "data",
                f"a RaggedTensor of shape {tuple(self.shape)}",
                got,
                "Copy values instead: p.copy_(x) under no_grad takes any source.",
            )
        _torch_data.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    def share_memory_(self) -> RaggedTensor:
        """Moves the piece to shared memory; the wrapper has no storage for torch to move."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the piece is in shared memory."""
        return self._local_tensor.is_shared()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = "Parameter RaggedTensor" if isinstance(self, torch.nn.Parameter) else "RaggedTensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, local={self._local_tensor}, "
            f"mesh={self._spec.mesh}, placements={self._spec.placements}{grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "[deepcopy] Expected a leaf of the autograd graph, but got a result of an op. Call detach() first."
            )
        result = self.wrap(self._local_tensor.clone(), self._spec, self.requires_grad)
        memo[id(self)] = result
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        # Attributes such as Parameter's flag and those that users hang on parameters; the two slots of DTensor aren't
        # among them.
        for name, value in self.__dict__.items():
            result.__dict__[name] = copy.deepcopy(value, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        attributes = {name: value for name, value in self.__dict__.items() if not name.startswith("__")}
        spec = self._spec
        arguments = (self._local_tensor, spec.mesh, spec.placements, tuple(self.shape), self.requires_grad, attributes)
        return rebuild_ragged_tensor, arguments

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, outer_size: Any, outer_stride: Any) -> RaggedTensor:
        spec, requires_grad = context
        local = inner["_local_tensor"]
        if local.dtype != spec.tensor_meta.dtype:
            spec = make_spec(spec.mesh, spec.placements, spec.tensor_meta.shape, local.dtype)
        return RaggedTensor.wrap(local, spec, requires_grad)


def rebuild_ragged_tensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> RaggedTensor:
    """What pickle calls."""
    tensor = RaggedTensor.wrap(local, make_spec(mesh, placements, shape, local.dtype), requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


def wrap_any(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A RaggedTensor where a placement is ragged, else a stock DTensor."""
    cls = DTensor if ragged_mesh_dim(spec.placements) is None else RaggedTensor
    return _new_dtensor(cls, local, spec, requires_grad=requires_grad)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lays a full tensor out on a mesh: a RaggedTensor if one of the placements is ragged, else what torch's function
    returns.

    tensor:        the full tensor, of the same shape and dtype on all ranks; its values count on the mesh dims' rank
                   `src_data_rank` only. With None every rank cuts its own copy and nothing travels. A DTensor is
                   redistributed.
    placements:    one a mesh dim; foreign shards cut first, ragged last, so RaggedShard's shape is what the others
    leave on this rank. Returns a leaf with `tensor.requires_grad`; its memory is never shared with `tensor`.
    """
    if isinstance(tensor, DTensor):
        return redistribute(tensor, placements)
    mesh_dim = check_placements(tensor.shape, device_mesh, placements, "distribute_tensor")
    if mesh_dim is None:
        return _torch_api.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    for placement in placements:
        if isinstance(placement, Partial) and not isinstance(placement, RaggedShard):
            raise invalid(
                "distribute_tensor",
                "no Partial beside a ragged placement",
                placement,
                "A full tensor has nothing pending.",
            )
    full = tensor.detach()
    if full.device.type != device_mesh.device_type and not full.is_meta:
        full = full.to(device_mesh.device_type)
    if src_data_rank is None or full.is_meta or device_mesh.size() == 1:
        local = cut_local(full, device_mesh, placements).clone()
    else:
        local = _scatter(full, device_mesh, placements, mesh_dim, src_data_rank)
    spec = make_spec(device_mesh, placements, tensor.shape, tensor.dtype)
    return RaggedTensor.wrap(local, spec, tensor.requires_grad)


def _scatter(
    full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], mesh_dim: int, source_rank: int
) -> torch.Tensor:
    # The other mesh dims get the whole tensor, the ragged dim, usually the largest, only the pieces.
    if mesh.ndim > 1:
        full = full.contiguous().clone()
        for dim in range(mesh.ndim):
            if dim != mesh_dim and mesh.size(dim) > 1:
                flat.broadcast_(full.view(-1), mesh.get_group(dim), source_rank)
    sizes, offsets = foreign_box(full.shape, mesh, placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        full = full.narrow(dim, offset, size)
    intervals = placements[mesh_dim].intervals()  # type: ignore[attr-defined]
    return flat.scatter(full.reshape(-1), intervals, mesh.get_group(mesh_dim), source_rank)


def redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """`tensor` under other placements on its mesh; unlike DTensor.redistribute it also makes stock DTensors ragged.
    Differentiable."""
    return _Redistribute.apply(tensor, tuple(placements), None)


# ---- autograd ---------------------------------------------------------------


def _settled(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    # A gradient of a pending sum is the same on all ranks.
    pending = (isinstance(p, Partial) and not isinstance(p, RaggedShard) for p in placements)
    return tuple(Replicate() if wait else p for wait, p in zip(pending, placements))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: tuple[Placement, ...], backward_dtype: torch.dtype | None) -> Any:
        spec = tensor._spec
        placements = from_front(placements, tensor.ndim)
        ctx.placements, ctx.dtypes = _settled(spec.placements), (backward_dtype, tensor.dtype)
        local = transfer(tensor._local_tensor, spec, placements)
        if local is tensor._local_tensor:
            local = local.view_as(local)
        return wrap_any(local, make_spec(spec.mesh, placements, tensor.shape, tensor.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        travel, dtype = ctx.dtypes
        moved = redistribute(grad if travel is None else grad.to(travel), ctx.placements)
        return moved.to(dtype) if moved.dtype != dtype else moved, None, None


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor, grad_placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.spec, ctx.grad_placements = tensor._spec, grad_placements
        return transfer(tensor._local_tensor, tensor._spec, [Replicate()] * tensor._spec.mesh.ndim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        mesh, shape = ctx.spec.mesh, ctx.spec.tensor_meta.shape
        whole = wrap_any(grad.contiguous(), make_spec(mesh, ctx.grad_placements, shape, grad.dtype))
        return redistribute(whole, _settled(ctx.spec.placements)), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        spec = ctx.spec
        return RaggedTensor.wrap(
            grad.contiguous(), make_spec(spec.mesh, spec.placements, spec.tensor_meta.shape, grad.dtype)
        )


def _register() -> None:
    """Tells torch about the class the way DTensor does: default foreach, and loading with weights_only."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if RaggedTensor not in supported:
            supported.append(RaggedTensor)
    torch.serialization.add_safe_globals([RaggedTensor, rebuild_ragged_tensor])


_register()

from ragged_fsdp import adopt as _adopt  # noqa: E402, F401  (both need the class; adopt registers itself)
from ragged_fsdp.ops import dispatch as _dispatch  # noqa: E402
