"""What torch ops do on RaggedTensors: a whitelist. An op that isn't on it is an error that names it.

Each op has a kind, and a kind one handler: elementwise ops run on the local pieces, list ops (foreach, fused
optimizers) on lists of them, reductions add one small all-reduce, fills and copies know the layout. A list of
forbidden ops would be the other way to write this, and a trap: an op that nobody thought of, such as a mean, would
then silently be computed of one rank's piece.

Operands that lie otherwise are brought to the first operand's placements (the written one's for in-place ops),
DTensors of one element are scalars, and plain tensors are accepted only as scalars, because whether one holds the
whole or a piece can't be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Replicate

from ragged_fsdp import copies, random_fill, reductions
from ragged_fsdp.placement import RaggedShard, invalid, ragged_mesh_dim, unsupported
from ragged_fsdp.redistribute import make_spec, transfer
from ragged_fsdp.tensor import RaggedTensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_ELEMENTWISE = """
    abs absolute neg negative positive sqrt rsqrt reciprocal square exp exp2 expm1 log log2 log10 log1p sin cos tan
    asin acos atan sinh cosh tanh asinh acosh atanh sinc sigmoid log_sigmoid silu mish gelu relu relu6 leaky_relu elu
    celu selu softplus hardtanh hardsigmoid hardswish threshold erf erfc erfinv lgamma digamma i0 ceil floor round
    trunc fix frac sign sgn signbit logit nan_to_num clamp clamp_min clamp_max clip logical_not bitwise_not isnan
    isinf isposinf isneginf isfinite isreal angle real imag conj_physical add sub rsub subtract mul multiply div
    divide true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin atan2 copysign hypot
    nextafter heaviside xlogy ldexp logaddexp logaddexp2 eq ne not_equal lt less le less_equal gt greater ge
    greater_equal isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    lerp addcmul addcdiv where masked_fill sigmoid_backward tanh_backward threshold_backward gelu_backward
    silu_backward elu_backward leaky_relu_backward hardtanh_backward softplus_backward logit_backward clone detach
    alias lift_fresh empty_like zeros_like ones_like full_like zero fill _to_copy contiguous _conj conj resolve_conj
    resolve_neg
""".split()

# Ops that commute with a sum that is still pending on another mesh dim (the partial gradient of HSDP).
_LINEAR = set(
    "add sub neg positive clone detach alias lift_fresh zero empty_like zeros_like _to_copy mul div copy".split()
)

_NEVER_LISTS = ("_foreach_max", "_foreach_norm", "_foreach_powsum")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on its arguments, at least one of which is or contains a RaggedTensor."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _find_handler(func)
    return handler(func, args, kwargs)


_handlers: dict[Any, Handler] = {}


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)  # higher-order ops have none
    return schema.name.split("::")[-1] if schema is not None else str(func)


def _is_inplace(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _find_handler(func: Any) -> Handler:
    name = _name(func)
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    if name in _SPECIAL:
        return _SPECIAL[name]
    if base in _ELEMENTWISE:
        return _inplace if _is_inplace(name) else _elementwise
    if base.startswith(("_foreach_", "_fused_")) and base not in _NEVER_LISTS:
        return _list_op
    return _refuse


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _first_ragged(args, kwargs)
    raise unsupported(
        str(func),
        "an op that is defined on ragged pieces (elementwise, whole-tensor reduction, copy, fill, optimizer step)",
        f"{_name(func)} on a RaggedTensor of shape {tuple(tensor.shape)}",
        "Gather first: x.full_tensor() for a plain tensor, or x.redistribute(placements=[Replicate(), ..]) for a "
        "DTensor. Where activation checkpointing runs a region again that takes a weight of the root without calling its "
        "module, set_keep_unsharded_storage(True, recurse=False) on the root keeps it.",
        tensor._spec.mesh,
    )


def _first_ragged(args: Any, kwargs: dict[str, Any]) -> RaggedTensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, RaggedTensor):
            return value
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, RaggedTensor):
                    return item
    raise AssertionError("dispatched without a RaggedTensor")


# ---- operands ---------------------------------------------------------------


def _local(value: Any, like: RaggedTensor, func: Any, written: bool = False) -> Any:
    """The local tensor of one operand under `like`'s placements; anything that isn't a tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    spec = like._spec
    if isinstance(value, DTensor):
        own = value._spec
        if own is spec or (own.placements == spec.placements and own.mesh == spec.mesh and value.shape == like.shape):
            return value._local_tensor
        if value.numel() == 1 and all(type(p) is Replicate or type(p) is Partial for p in own.placements):
            # Not redistribute on any type: a one-element ragged operand falls through.
            local = value._local_tensor if all(type(p) is Replicate for p in own.placements) else value.full_tensor()
            return _scalar(local, value, like, func)
        if written:
            raise invalid(
                str(func),
                f"everything that is written to lie as {spec.placements}",
                own.placements,
                "Redistribute it before the call: a moved copy would lose what is written.",
                spec.mesh,
            )
        if own.mesh == spec.mesh and value.shape == like.shape:
            return transfer(value._local_tensor, own, spec.placements)
        got = f"a DTensor of shape {tuple(value.shape)} on {own.mesh}"
    else:
        if value.numel() == 1 and value.ndim <= max(1, like.ndim):
            return _scalar(value, value, like, func)
        got = f"a plain tensor of shape {tuple(value.shape)}"
    raise invalid(
        str(func),
        f"scalars or DTensors of shape {tuple(like.shape)} on {spec.mesh} beside a RaggedTensor",
        got,
        "Lay it out first: ragged_fsdp.distribute_tensor(x, p.device_mesh, p.placements); broadcasting isn't defined "
        "on pieces.",
        spec.mesh,
    )


def _scalar(local: torch.Tensor, value: torch.Tensor, like: RaggedTensor, func: Any) -> torch.Tensor:
    # A one-element tensor with dims takes part in type promotion, so its dims are kept, but no more of them than the
    # 1-D piece has.
    return local if local.ndim <= 1 else local.reshape(1)


def _check_linear(func: Any, tensor: RaggedTensor) -> None:
    for placement in tensor._spec.placements:
        if isinstance(placement, Partial) and not isinstance(placement, RaggedShard):
            base = _name(func).rstrip("_")
            if base not in _LINEAR:
                raise invalid(
                    str(func),
                    "a tensor without pending reductions",
                    placement,
                    "Redistribute it first: Partial to Replicate.",
                    tensor._spec.mesh,
                )


def _lies_ragged(value: Any) -> bool:
    # Stock DTensors with a ragged placement come from torch's own distribute_tensor; beside ours they are as good.
    if isinstance(value, RaggedTensor):
        return True
    return isinstance(value, DTensor) and ragged_mesh_dim(value._spec.placements) is not None


def _pending(spec: DTensorSpec) -> bool:
    return any(type(placement) is Partial for placement in spec.placements)


def _wrap(local: Any, like: RaggedTensor) -> Any:
    spec = like._spec
    if not isinstance(local, torch.Tensor):
        return local
    if local.dtype != spec.tensor_meta.dtype:  # type: ignore[union-attr]
        spec = make_spec(spec.mesh, spec.placements, like.shape, local.dtype)
    return RaggedTensor.wrap(local, spec)


# ---- elementwise ------------------------------------------------------------


def _without_memory_format(kwargs: dict[str, Any]) -> dict[str, Any]:
    # Pieces are 1-D: channels-last and the like mean nothing there.
    return (
        {key: value for key, value in kwargs.items() if key != "memory_format"} if "memory_format" in kwargs else kwargs
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    if out is not None:
        if not isinstance(out, RaggedTensor):
            raise invalid(
                str(func), "out to be a RaggedTensor as well", type(out).__name__, "Use zeros_like of an operand."
            )
        like = out
    else:
        like = _first_ragged(args, kwargs)
    if _pending(like._spec):
        _check_linear(func, like)
    if "memory_format" in kwargs:
        kwargs = _without_memory_format(kwargs)
    local_args = [_local(arg, like, func) for arg in args]
    local_kwargs = {key: _local(value, like, func, written=key == "out") for key, value in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if out is not None:
        return out
    return _wrap(result, like)


def _inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if isinstance(target, DTensor) and not _lies_ragged(target):
        return func(target, *[_as_stock(arg, target) for arg in args[1:]], **kwargs)
    if not isinstance(target, DTensor):
        raise invalid(
            str(func),
            "the tensor that is written to be a RaggedTensor",
            f"a {type(target).__name__}",
            "Write into a RaggedTensor, or use full_tensor() of the other operand.",
        )
    if _pending(target._spec):
        _check_linear(func, target)
    func(
        target._local_tensor,
        *[_local(arg, target, func) for arg in args[1:]],
        **{key: _local(value, target, func) for key, value in kwargs.items()},
    )
    return target


def _as_stock(value: Any, target: DTensor) -> Any:
    # A ragged operand of an op that writes a stock DTensor comes to lie as that does; a first gradient may be one,
    # see test_backward_twice.
    if not isinstance(value, RaggedTensor):
        return value
    if value._spec.mesh != target._spec.mesh or _pending(target._spec):
        raise invalid(
            "in-place op",
            "a target on the same mesh without pending reductions",
            f"{target._spec.placements} on {target._spec.mesh}",
            "Redistribute the operands to common placements first.",
            value._spec.mesh,
        )
    return value.redistribute(placements=target._spec.placements)


def _same_shape_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, size = args[0], list(args[1])
    if tuple(size) == tuple(tensor.shape) or (-1 in size and _infer(size, tensor.numel()) == tuple(tensor.shape)):
        return _wrap(tensor._local_tensor.detach(), tensor)
    return _refuse(func, args, kwargs)


def _infer(size: list[int], numel: int) -> tuple[int, ...]:
    known = 1
    for extent in size:
        known *= extent if extent != -1 else 1
    return tuple(numel // max(known, 1) if extent == -1 else extent for extent in size)


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # new_zeros and friends: a ragged tensor where the size is the global one, else an ordinary replicated one.
    tensor, size = args[0], tuple(args[1])
    kwargs = _without_memory_format(kwargs)
    rest = args[2:]
    if size == tuple(tensor.shape):
        if _name(func) == "new_empty_strided":
            rest = ([1], *rest[1:])
        return _wrap(func(tensor._local_tensor, list(tensor._local_tensor.shape), *rest, **kwargs), tensor)
    local = func(tensor._local_tensor, list(size), *rest, **kwargs)
    mesh = tensor._spec.mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, size, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


# ---- lists: foreach and fused optimizers ------------------------------------


def _written_positions(func: Any) -> set[int]:
    arguments = func._schema.arguments
    return {i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write}


def _list_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Item i of every list goes with item i of the first; items of the first that aren't ragged are left to torch in
    a second call."""
    first = args[0]
    ragged = [i for i, item in enumerate(first) if _lies_ragged(item)]
    if len(ragged) != len(first):
        return _split_list_op(func, args, kwargs, ragged)
    written = _written_positions(func)
    name = _name(func)
    for item in first:
        if _pending(item._spec) and name.removeprefix("_foreach_").rstrip("_") not in _LINEAR:
            _check_linear(func, item)
    locals_ = [item._local_tensor for item in first]
    local_args: list[Any] = [locals_]
    for position, arg in enumerate(args[1:], 1):
        local_args.append(_local_list(arg, first, func, position in written))
    local_kwargs = {key: _local_list(value, first, func, False) for key, value in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if isinstance(result, (list, tuple)) and result:
        return [_wrap(local, item) for local, item in zip(result, first)]
    return result


def _local_list(value: Any, first: Sequence[RaggedTensor], func: Any, written: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return _local(value, first[0], func, written)
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], torch.Tensor):
        return value
    return [
        item._local_tensor
        if type(item) is RaggedTensor and item._spec is like._spec
        else _local(item, like, func, written)
        for item, like in zip(value, first)
    ]


def _split_list_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ragged: list[int]) -> Any:
    first = args[0]
    if not ragged:
        raise invalid(
            str(func),
            "RaggedTensors in the first list",
            type(first[0]).__name__ if first else "an empty list",
            "The list that is written or read first decides where the op runs: lay its tensors out like the others.",
        )
    others = sorted(set(range(len(first))) - set(ragged))
    results: list[Any] = [None] * len(first)
    for chosen in (ragged, others):

        def pick(value: Any, chosen: Sequence[int] = chosen) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == len(first)
            return [value[i] for i in chosen] if is_list else value

        part = func(*[pick(arg) for arg in args], **{key: pick(value) for key, value in kwargs.items()})
        for i, value in zip(chosen, part or ()):
            results[i] = value
    return results if any(value is not None for value in results) else None


# ---- random fills -----------------------------------------------------------


def _random(make: Callable[..., random_fill.Sampler], *defaults: float) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, *given = args
        names = [argument.name for argument in func._schema.arguments[1:]]
        values = [given[i] if i < len(given) else kwargs.get(names[i], default) for i, default in enumerate(defaults)]
        random_fill.fill_(target._local_tensor, target._spec, make(*values), kwargs.get("generator"))
        return target

    return handler


def _random_like(make: Callable[..., random_fill.Sampler], *values: float) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "layout", "device", "pin_memory")}
        result = _wrap(torch.empty_like(args[0]._local_tensor, **options), args[0])
        random_fill.fill_(result._local_tensor, result._spec, make(*values), kwargs.get("generator"))
        return result

    return handler


# ---- small things -----------------------------------------------------------


def _on_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _wrap(func(args[0]._local_tensor, *args[1:], **kwargs), args[0])


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].numel() != 1:
        return _refuse(func, args, kwargs)
    return args[0].detach().full_tensor().item()


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


_SPECIAL: dict[str, Handler] = {
    "view": _same_shape_view,
    "_unsafe_view": _same_shape_view,
    "reshape": _same_shape_view,
    "expand": _same_shape_view,
    "new_empty": _new_like,
    "new_zeros": _new_like,
    "new_ones": _new_like,
    "new_full": _new_like,
    "new_empty_strided": _new_like,
    "uniform_": _random(random_fill.uniform, 0.0, 1.0),
    "normal_": _random(random_fill.normal, 0.0, 1.0),
    "exponential_": _random(random_fill.exponential, 1.0),
    "bernoulli_": _random(random_fill.bernoulli, 0.5),
    "rand_like": _random_like(random_fill.uniform, 0.0, 1.0),
    "randn_like": _random_like(random_fill.normal, 0.0, 1.0),
    "is_pinned": _on_local,
    "record_stream": _on_local,
    "_pin_memory": _pin,
    "pin_memory": _pin,
    "_local_scalar_dense": _item,
    "is_same_size": _same_size,
    **copies.HANDLERS,
    **reductions.HANDLERS,
}
