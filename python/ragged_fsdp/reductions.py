"""Reductions of whole ragged tensors: sum, mean, norms, extremes, truth, equality, and the gradient scaler's check.

Each computes on the local piece and adds one all-reduce of scalars over the mesh dims that share the tensor out
(ragged and Shard, not Replicate). Results are 0-dim DTensors, replicated, so that they mix with those of other
DTensors. A rank without elements contributes the neutral element. Reductions over single dims aren't defined on
pieces and are refused; norms alone gather, because initialisers and weight norm ask for them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, invalid, unsupported
from ragged_fsdp.redistribute import make_spec, transfer

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_scalar_specs: weakref.WeakKeyDictionary[DeviceMesh, dict[torch.dtype, DTensorSpec]] = weakref.WeakKeyDictionary()


def _replicated_scalar(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    by_dtype = _scalar_specs.setdefault(mesh, {})
    spec = by_dtype.get(local.dtype)
    if spec is None or spec.mesh is not mesh:
        spec = by_dtype[local.dtype] = make_spec(mesh, [Replicate()] * mesh.ndim, (), local.dtype)
    # Not through DTensor(..): its __init__ does nothing and costs more than all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def _sharing_dims(operation: str, spec: DTensorSpec) -> tuple[int, ...]:
    dims = []
    for dim, placement in enumerate(spec.placements):
        if isinstance(placement, (RaggedShard, Shard)):
            dims.append(dim)
        elif isinstance(placement, Partial):
            raise invalid(
                operation,
                "a tensor without pending reductions",
                placement,
                "Redistribute it first: Partial to Replicate.",
                spec.mesh,
            )
    return tuple(dims)


def _all_reduce(scalars: torch.Tensor, mesh: DeviceMesh, dims: Sequence[int], reduce_op: str) -> torch.Tensor:
    # Functional, as DTensor's own are: the same ops appear in traces, and counters of collectives see one kind.
    is_bool = scalars.dtype == torch.bool
    for dim in dims:
        if mesh.size(dim) > 1 and not scalars.is_meta:
            sent = scalars.to(torch.uint8) if is_bool else scalars  # not every backend reduces truth values
            scalars = funcol.wait_tensor(funcol.all_reduce(sent, reduce_op, mesh.get_group(dim)))
    return scalars.to(torch.bool) if is_bool else scalars


def _whole(func: Any, tensor: Any, dim: Any, keepdim: bool) -> None:
    """Refuses anything but a reduction over all dims."""
    dims = (
        None if dim is None else {d % max(tensor.ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
    )
    if keepdim or (dims and len(dims) != tensor.ndim):
        raise unsupported(
            str(func),
            "a reduction of the whole tensor",
            f"dim={dim}, keepdim={keepdim} on a RaggedTensor of shape {tuple(tensor.shape)}",
            "Rows may be cut between ranks. Gather first: x.full_tensor().",
            tensor._spec.mesh,
        )


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, default)
    return default


def _reduced(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute: Callable[[torch.Tensor], torch.Tensor],
    reduce_op: str,
) -> DTensor:
    tensor = args[0]
    _whole(func, tensor, _argument(func, args, kwargs, "dim"), _argument(func, args, kwargs, "keepdim", False))
    dims = _sharing_dims(str(func), tensor._spec)
    value = compute(tensor._local_tensor)
    return _replicated_scalar(_all_reduce(value, tensor._spec.mesh, dims, reduce_op), tensor._spec.mesh)


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    dtype = kwargs.get("dtype")
    return _reduced(func, args, kwargs, lambda local: local.sum(dtype=dtype), "sum")


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    # The global sum over the global count: averaging the ranks' means would weigh short pieces too much.
    tensor, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise invalid(str(func), "a floating point or complex dtype", dtype, "Pass dtype=torch.float32.")
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = _reduced(func, args, kwargs, lambda local: local.sum(dtype=wide), "sum")
    count = tensor.numel()
    mean = total._local_tensor / count if count else total._local_tensor * math.nan
    return _replicated_scalar(mean.to(dtype), tensor._spec.mesh)


def _prod(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    dtype = kwargs.get("dtype")
    return _reduced(func, args, kwargs, lambda local: local.prod(dtype=dtype), "product")


def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _reduced(func, args, kwargs, lambda local: local.count_nonzero(), "sum")


def _extreme(largest: bool) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        if args[0].numel() == 0:
            raise invalid(str(func), "a tensor with elements", tuple(args[0].shape), "There is no extreme of nothing.")

        def compute(local: torch.Tensor) -> torch.Tensor:
            # NaN is the extreme of everything in torch but not in every backend's all-reduce: handled as two values
            # below.
            if local.numel():
                return local.amax() if largest else local.amin()
            return torch.full((), _lowest(local.dtype, largest), dtype=local.dtype, device=local.device)

        result = _reduced(func, args, kwargs, compute, "max" if largest else "min")
        if not args[0].dtype.is_floating_point:
            return result
        has_nan = _reduced(func, args, kwargs, lambda local: local.isnan().any().to(torch.int32), "max")
        value = torch.where(
            has_nan._local_tensor > 0, torch.full_like(result._local_tensor, math.nan), result._local_tensor
        )
        return _replicated_scalar(value, args[0]._spec.mesh)

    return handler


def _lowest(dtype: torch.dtype, largest: bool) -> Any:
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    if dtype == torch.bool:
        return not largest
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def _any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _reduced(func, args, kwargs, lambda local: local.any(), "max")


def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _reduced(func, args, kwargs, lambda local: local.all(), "min")


# ---- norms ------------------------------------------------------------------


def _norms(operation: str, tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[DTensor]:
    """The vector norm of each tensor: one all-reduce for all that share a mesh and its sharing dims, in fp64 between
    ranks."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, tensor in enumerate(tensors):
        key = (id(tensor._spec.mesh), _sharing_dims(operation, tensor._spec))
        groups.setdefault(key, []).append(i)
    results: list[Any] = [None] * len(tensors)
    for (_, dims), members in groups.items():
        mesh = tensors[members[0]]._spec.mesh
        locals_ = [tensors[i]._local_tensor for i in members]
        values = _all_reduce(_partial_norms(locals_, order), mesh, dims, _norm_reduce_op(order))
        if order not in (0.0, math.inf, -math.inf):
            values = values.pow(1.0 / order)
        by_dtype: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        for position, i in enumerate(members):
            wanted = dtype or _real(tensors[i].dtype)
            if wanted not in by_dtype:
                by_dtype[wanted] = values.to(wanted).unbind()
            results[i] = _replicated_scalar(by_dtype[wanted][position], mesh)
    return results


def _norm_reduce_op(order: float) -> str:
    return {math.inf: "max", -math.inf: "min"}.get(order, "sum")


def _partial_norms(locals_: list[torch.Tensor], order: float) -> torch.Tensor:
    # 1-D fp64: sums of p-th powers, or extremes; empty pieces give the neutral element (a kernel would refuse them
    # for extremes).
    neutral = {math.inf: 0.0, -math.inf: math.inf}.get(order, 0.0)
    filled = [i for i, local in enumerate(locals_) if local.numel()]
    values = torch.full((len(locals_),), neutral, dtype=torch.float64, device=locals_[0].device)
    if not filled:
        return values
    pieces = [locals_[i] for i in filled]
    if order in (1.0, 2.0, math.inf) and all(piece.is_floating_point() for piece in pieces):
        # Low precision is summed in fp32 by the kernel, but rounded back: ask for fp32 there.
        wide = torch.float32 if any(piece.element_size() < 4 for piece in pieces) else None
        norms = torch._foreach_norm(pieces, order, dtype=wide)
        if len({norm.dtype for norm in norms}) > 1:
            norms = [norm.to(torch.float64) for norm in norms]
        norms = torch.stack(norms).to(torch.float64)
    else:
        norms = torch.stack(
            [torch.linalg.vector_norm(piece, order, dtype=_wide(piece.dtype)).to(torch.float64) for piece in pieces]
        )
    if order not in (0.0, math.inf, -math.inf):
        norms = norms.pow(order)
    values[torch.tensor(filled, device=values.device)] = norms
    return values


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor = args[0]
    dim, keepdim = _argument(func, args, kwargs, "dim"), _argument(func, args, kwargs, "keepdim", False)
    if dim is not None and (keepdim or len([dim] if isinstance(dim, int) else dim) != tensor.ndim):
        return _gathered(func, args, kwargs)
    order = _argument(func, args, kwargs, "ord", None)
    if order is None:
        order = _argument(func, args, kwargs, "p", 2)
    order = 2.0 if order is None else float(order)
    return _norms(str(func), [tensor], order, _argument(func, args, kwargs, "dtype"))[0]


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Norms of rows or columns, which initialisers ask for: rows may be cut between ranks, so the whole is gathered."""
    tensor = args[0]
    result = func(tensor.full_tensor(), *args[1:], **kwargs)
    mesh = tensor._spec.mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, tuple(result.shape), result.dtype)
    return DTensor.__new__(DTensor, result, spec, requires_grad=False)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    tensors = args[0]
    order = float(_argument(func, args, kwargs, "ord", 2))
    dtype = _argument(func, args, kwargs, "dtype")
    ragged = [i for i, tensor in enumerate(tensors) if is_ragged_tensor(tensor)]
    others = sorted(set(range(len(tensors))) - set(ragged))
    results: list[Any] = [None] * len(tensors)
    for i, value in zip(ragged, _norms(str(func), [tensors[i] for i in ragged], order, dtype)):
        results[i] = value
    if others:
        for i, value in zip(others, func([tensors[i] for i in others], *args[1:], **kwargs)):
            results[i] = value
    return results


def is_ragged_tensor(value: Any) -> bool:
    """True for a RaggedTensor (a stock DTensor may carry a ragged placement too; its ops are torch's)."""
    return getattr(value, "is_ragged_tensor", False)  # not isinstance: tensor.py imports this module


# ---- comparisons and the gradient scaler ------------------------------------


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    for x in (a, b):
        if not isinstance(x, DTensor) or x._spec.mesh != (a if isinstance(a, DTensor) else b)._spec.mesh:
            raise invalid(str(func), "two DTensors on one mesh", type(x).__name__, "Compare full_tensor() of both.")
    like, other = (a, b) if is_ragged_tensor(a) else (b, a)
    moved = transfer(other._local_tensor, other._spec, like._spec.placements)
    same = torch.tensor(
        int(torch.equal(like._local_tensor, moved)), device=like._local_tensor.device, dtype=torch.int32
    )
    dims = _sharing_dims(str(func), like._spec)
    return bool(_all_reduce(same, like._spec.mesh, dims, "min").item())


def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b, *rest = args
    return bool(torch.isclose(a, b, *rest, **kwargs).all().full_tensor().item())


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler: unscales the pieces and tells every rank whether any rank found an infinity."""
    tensors, found, inverse = args
    inverse = inverse.full_tensor() if isinstance(inverse, DTensor) else inverse
    flag = found._local_tensor if isinstance(found, DTensor) else found
    ragged = [tensor for tensor in tensors if is_ragged_tensor(tensor)]
    others = [tensor for tensor in tensors if not is_ragged_tensor(tensor)]
    if others:
        func(others, found, inverse)
    func([tensor._local_tensor for tensor in ragged], flag, inverse)
    seen = {}
    for tensor in ragged:
        seen.setdefault((id(tensor._spec.mesh), _sharing_dims(str(func), tensor._spec)), tensor._spec.mesh)
    for (_, dims), mesh in seen.items():
        flag.copy_(_all_reduce(flag, mesh, dims, "max"))
    return None


HANDLERS: dict[str, Handler] = {
    "sum": _sum,
    "mean": _mean,
    "prod": _prod,
    "count_nonzero": _count_nonzero,
    "max": _extreme(True),
    "amax": _extreme(True),
    "min": _extreme(False),
    "amin": _extreme(False),
    "any": _any,
    "all": _all,
    "norm": _vector_norm,
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "equal": _equal,
    "allclose": _allclose,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
