"""The parameters of one unit: collected from modules, planned in groups, and held in two forms each.

A parameter is *sharded* (an nn.Parameter over a RaggedTensor, this rank's piece of the flat masters) except between a unit's events, when
the module holds the *unsharded* one (an nn.Parameter over the image, or over a DTensor on it under tensor parallelism). Both objects live
as long as the unit; the extension swaps them in the modules' dicts. Decides nothing about when.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp import _C, blocks, extensions
from ragged_fsdp.mesh import DataMesh, names, resolve_mesh
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.planning import Planning
from ragged_fsdp.redistribute import make_spec
from ragged_fsdp.tensor import RaggedTensor

PlacementFn = Callable[[nn.Parameter], Any]
_UNIT = "_ragged_fsdp_unit"  # on an original parameter: (weak reference to its state, its name there)
_NUMBER = "_ragged_fsdp_unit_number"  # on a sharded parameter: equal for those that one unit gathers together
_numbers = itertools.count()  # numbers differ between ranks; which parameters share one doesn't


@dataclasses.dataclass(eq=False)
class ManagedParam:
    """One parameter and everywhere it is registered."""

    name: str  # relative to the module given to fully_shard; fully qualified once the root is known
    original: nn.Parameter  # let go once its values are cut
    places: list[tuple[nn.Module, str]]
    shape: tuple[int, ...]  # global
    local_shape: tuple[int, ...]  # what ragged cuts: the whole parameter, or what foreign placements left on this rank
    spec: DTensorSpec | None = None  # of the unsharded parameter, when that is a DTensor (tensor or expert parallelism)
    sharded: nn.Parameter = None  # type: ignore[assignment]
    unsharded: nn.Parameter = None  # type: ignore[assignment]
    group: ManagedGroup = None  # type: ignore[assignment]
    index: int = 0  # in the group
    is_behind: bool = False  # of the bucket of what lies behind the unit's inner units

    @property
    def ragged(self) -> RaggedShard:
        """The placement over the shard dim."""
        return self.sharded.ragged[1]  # type: ignore[attr-defined]

    @property
    def registered(self) -> nn.Parameter:
        """What the first of its modules holds now."""
        module, attribute = self.places[0]
        return module._parameters[attribute]  # type: ignore[return-value]


@dataclasses.dataclass(eq=False)
class ManagedGroup:
    """Parameters of one dtype on one mesh, and the C++ group that holds them."""

    params: list[ManagedParam]
    mesh: DataMesh
    dtype: torch.dtype  # of masters and gradients
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: OffloadPolicy
    holds_subclasses: bool = False  # values stay in tensor subclasses, which gather themselves (extensions.py)
    blocks: list[tuple[str, int, int] | None] = dataclasses.field(default_factory=list)
    core: Any = None  # _C.ParamGroup
    number: int = dataclasses.field(default_factory=lambda: next(_numbers))


def collect(modules: Sequence[nn.Module], managed: Iterable[nn.Module], ignored: set[nn.Parameter], state: Any) -> list[ManagedParam]:
    """The parameters of `managed` modules that nobody took yet, in module order; ties are one parameter with several places.

    Raises ValueError for scalars, NotImplementedError for strided ones, ValueError for one that another unit holds.
    """
    prefixes = {module: name for top in reversed(modules) for name, module in top.named_modules()}
    found: dict[nn.Parameter, ManagedParam] = {}
    for module in managed:
        for attribute, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            name = ".".join(part for part in (prefixes.get(module, ""), attribute) if part)
            if param in found:
                found[param].places.append((module, attribute))
                continue
            _check(param, name, state)
            spec, local = (param._spec, param._local_tensor) if isinstance(param, DTensor) else (None, param)
            found[param] = ManagedParam(name, param, [(module, attribute)], tuple(param.shape), tuple(local.shape), spec)
    return list(found.values())


def mark_behind(params: list[ManagedParam], behind: set[nn.Module], split_bytes: int) -> None:
    """Which parameters make a bucket of their own, since they lie in `behind` alone; none if it or the rest had less than `split_bytes`."""

    def size(those: list[ManagedParam]) -> int:
        return sum(param.original.numel() * param.original.element_size() for param in those)

    lie_behind = [param for param in params if all(module in behind for module, _ in param.places)]
    rest = [param for param in params if param not in lie_behind]
    if split_bytes and lie_behind and rest and min(size(lie_behind), size(rest)) >= split_bytes:
        for param in lie_behind:
            param.is_behind = True


def _check(param: nn.Parameter, name: str, state: Any) -> None:
    owner, other = getattr(param, _UNIT, (lambda: None, ""))
    if owner() is not None and owner() is not state:
        raise ValueError(
            f"[fully_shard] Expected each parameter in one unit, but '{name}' is shared with a parameter already managed by another FSDP group "
            f"(its '{other}'). Shard the modules that share it in one call: fully_shard([module_a, module_b])."
        )
    if isinstance(param, RaggedTensor):
        raise ValueError(
            f"[fully_shard] Expected parameters that aren't sharded yet, but got {param.placements} (param '{name}'). It belongs to a unit: "
            "shard the modules that share it in one call: fully_shard([module_a, module_b])."
        )
    if getattr(param, "_has_grad_dtype_override", False) and param.grad_dtype not in (None, param.dtype):
        raise NotImplementedError(
            f"[fully_shard] Expected parameters without a grad_dtype of their own, but got grad_dtype {param.grad_dtype} for {param.dtype} (param "
            f"'{name}'). Gradients have the parameters' dtype: keep parameters in {param.grad_dtype} and set MixedPrecisionPolicy.param_dtype."
        )
    if param.ndim == 0:
        raise ValueError(f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1.")
    if not param.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: param.shape={param.shape} param.stride()={param.stride()} (param '{name}'). "
            "Call contiguous() on it first."
        )


def replaced_by_unit(param: torch.Tensor) -> str | None:
    """For a parameter that a model no longer holds, because fully_shard (or a load with assign=True) put another in its place: that one's
    name in the unit. None for any other."""
    mark = getattr(param, _UNIT, None)
    return None if mark is None else mark[1]


def unit_number(param: torch.Tensor) -> int | None:
    """A number that parameters of one unit (and dtype) share, None for a parameter that isn't fully_shard's. Its value says nothing."""
    return getattr(param, _NUMBER, None)


def make_groups(
    params: list[ManagedParam],
    mesh: DataMesh,
    mp_policy: MixedPrecisionPolicy,
    shard_policy: blocks.ShardPolicy | blocks.Block | None,
    placement_fn: PlacementFn | None,
    offload: OffloadPolicy,
    planning: Planning,
    state: Any,
) -> list[ManagedGroup]:
    """Splits by dtype and mesh, plans each group, cuts the values, and puts the sharded parameters into the modules. No communication."""
    policy = blocks.as_policy(shard_policy)
    groups: dict[Any, ManagedGroup] = {}
    for param in params:
        block = policy(param.name, param.original)
        if block is not None and not isinstance(block, blocks.Block):
            raise _C.InvalidArgument(
                f"[shard_policy] Expected a block or None, but got {block!r} (param '{param.name}'). Return rows(n), elements(n), tile(r, c) or "
                "whole()."
            )
        placed = placement_fn(param.original) if placement_fn is not None else None
        own_mesh = mesh
        if placed is not None and not isinstance(placed, Shard):
            placed, own_mesh = _placement_result(placed, param, mesh)
        if block is None and placed is not None:
            block = blocks.of_placement(placed, param.local_shape, param.name)
        param_dtype, reduce_dtype = _dtypes(param.original, mp_policy)
        subclass = extensions.is_subclass(param.original)
        key = (param.original.dtype, param_dtype, reduce_dtype, id(own_mesh.groups), subclass, param.is_behind)
        group = groups.setdefault(key, ManagedGroup([], own_mesh, param.original.dtype, param_dtype, reduce_dtype, offload, subclass))
        param.index, param.group = len(group.params), group
        group.params.append(param)
        group.blocks.append(blocks.to_args(_raised(block, param)))
    for group in groups.values():
        build_core(group, [_local_value(param.original) for param in group.params], planning)
        group.core.is_behind = group.params[0].is_behind
        for param in group.params:
            _replace_original(param, state)
        connect(group)
    return list(groups.values())


def _local_value(original: nn.Parameter) -> torch.Tensor | None:
    if original.device.type == "meta" or extensions.is_subclass(original):
        return None
    return original._local_tensor if isinstance(original, DTensor) else original.detach()


def _replace_original(param: ManagedParam, state: Any) -> None:
    original = param.original
    param.sharded = _sharded_parameter(param, original)
    param.unsharded = _unsharded_parameter(param, original.requires_grad)
    for name, value in original.__dict__.items():  # what users hang on parameters goes along
        if name != _UNIT:
            setattr(param.sharded, name, value)
            setattr(param.unsharded, name, value)
    setattr(param.sharded, _NUMBER, param.group.number)
    for module, attribute in param.places:
        module._parameters[attribute] = param.sharded
    setattr(original, _UNIT, (weakref.ref(state), param.name))
    param.original = None  # type: ignore[assignment]


def _placement_result(result: Any, param: ManagedParam, mesh: DataMesh) -> tuple[Shard | None, DataMesh]:
    """FSDP2's ShardPlacementResult: a placement, and the mesh it is on."""
    info = getattr(result, "mesh_info", None)
    if info is None or not hasattr(result, "placement"):
        raise _C.InvalidArgument(
            f"[shard_placement_fn] Expected Shard, None or a ShardPlacementResult, but got {result!r} (param '{param.name}')."
        )
    if info.mesh == mesh.mesh:
        return result.placement, mesh
    return result.placement, resolve_mesh(info.mesh, None, None)


def _dtypes(param: nn.Parameter, policy: MixedPrecisionPolicy) -> tuple[torch.dtype | None, torch.dtype | None]:
    """(image, reduction); None: the parameter's own. Integers travel as they are."""
    if not param.dtype.is_floating_point:
        return None, None
    override = getattr(policy, "param_dtype_override_fn", None)
    param_dtype = policy.param_dtype
    if override is not None:
        answer = override(param)
        if answer is not None and answer not in (policy.param_dtype, param.dtype):
            raise ValueError(
                f"param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got {answer} for a parameter with "
                f"dtype {param.dtype} and param_dtype {policy.param_dtype}"
            )
        param_dtype = answer or policy.param_dtype
    # Unset means the gradients' own dtype, that of the parameters (torch 2.15; before, it was param_dtype).
    return param_dtype, policy.reduce_dtype or param.dtype


def _raised(block: blocks.Block | None, param: ManagedParam) -> blocks.Block | None:
    """A block under foreign shards of dims beyond the first: no cut may go through such a dim."""
    if param.spec is None:
        return block
    shape, raised = param.local_shape, None
    for placement in param.spec.placements:
        if isinstance(placement, Shard) and placement.dim > 0:
            current = raised or blocks.in_elements(block, shape, 16 // max(1, min(4, param.original.element_size())))
            raised = _C.raise_block_for_shard(list(shape), current, placement.dim)
    return block if raised is None else blocks.elements(raised)


def build_core(group: ManagedGroup, values: list[torch.Tensor | None], planning: Planning) -> None:
    """Makes the C++ group. `values` are whole local tensors to be cut, None where there are none yet."""
    params = group.params
    floating = group.dtype.is_floating_point
    offloads = isinstance(group.offload, CPUOffloadPolicy)
    group.core = _C.ParamGroup(
        names=[param.name for param in params],
        shapes=[list(param.local_shape) for param in params],
        requires_grad=[(param.original if param.sharded is None else param.sharded).requires_grad for param in params],
        blocks=group.blocks,
        dtype=group.dtype,
        param_dtype=group.param_dtype if floating else None,
        reduce_dtype=group.reduce_dtype if floating else None,
        groups=group.mesh.groups,
        values=values,
        front_holds_values=group.holds_subclasses,
        planning=planning.to_core(),
        offload=offloads,
        # Pinning needs a driver, and is of use only where copies go to another device.
        pin_memory=offloads and group.offload.pin_memory and group.mesh.device.type != "cpu",  # type: ignore[attr-defined]
    )


def connect(group: ManagedGroup, gatherer: extensions.ExtensionGatherer | None = None) -> None:
    """Tells the C++ group which Python objects to swap, where gradients go, and who gathers if not the group."""
    group.core.set_front(
        [
            _C.PythonParam(param.sharded, param.unsharded, param.sharded._spec, [(m._parameters, attribute) for m, attribute in param.places])
            for param in group.params
        ],
        _calls(),
        gatherer,
    )


def _sharded_parameter(param: ManagedParam, original: nn.Parameter) -> nn.Parameter:
    mesh, placements = _mesh_and_placements(param)
    spec = make_spec(mesh, placements, param.shape, original.dtype)
    if param.group.holds_subclasses:
        begin, end = next(p for p in placements if isinstance(p, RaggedShard)).interval(param.group.mesh.shard.rank)
        local = original.detach().reshape(-1)[begin:end].clone()
    else:
        local = param.group.core.master(param.index)
        if original.device.type == "meta":
            local = local.to("meta")
    return nn.Parameter(RaggedTensor.wrap(local, spec), requires_grad=original.requires_grad)


def _unsharded_parameter(param: ManagedParam, requires_grad: bool) -> nn.Parameter:
    image: Any = param.group.core.image(param.index)
    if param.group.holds_subclasses:
        return nn.Parameter(torch.empty(0, dtype=image.dtype, device=image.device), requires_grad=requires_grad)  # until the first gather
    if param.spec is not None:
        meta = param.spec.tensor_meta._replace(dtype=image.dtype) if param.spec.tensor_meta is not None else None
        spec = DTensorSpec(param.spec.mesh, param.spec.placements, tensor_meta=meta)
        image = torch.Tensor._dtensor__new__(DTensor, image, spec, requires_grad=False)  # type: ignore[attr-defined]
    return nn.Parameter(image, requires_grad=requires_grad)


def reread(group: ManagedGroup, owned_elsewhere: Callable[[nn.Parameter], str | None]) -> None:
    """Follows what happened to the modules' parameters since: module.to(), to_empty(), load_state_dict(assign=True). New values are copied
    into the masters, and the parameters are views of those again. `owned_elsewhere` gives a parameter's name in another unit, None if it isn't in one.
    """
    if group.holds_subclasses:
        for param in group.params:
            if param.registered is not param.sharded:
                param.sharded = param.registered
                group.core.set_sharded(param.index, param.sharded)
        return
    dtypes = {param.registered.dtype for param in group.params}
    if len(dtypes) > 1:
        raise ValueError(
            f"[fully_shard] Expected the parameters of a group to keep one dtype, but got {sorted(map(str, dtypes))} (param "
            f"'{group.params[0].name}' and others). Convert the whole module, or shard its parts in units of their own."
        )
    locals_ = [_current_local(param, owned_elsewhere) for param in group.params]
    if (dtype := dtypes.pop()) != group.dtype:
        if group.reduce_dtype == group.dtype:
            group.reduce_dtype = dtype
        group.dtype = dtype
        group.core = group.core.converted(dtype, group.param_dtype, group.reduce_dtype)
        for param in group.params:
            param.unsharded = _unsharded_parameter(param, param.registered.requires_grad)
    elif all(_is_master(group, param, local) for param, local in zip(group.params, locals_, strict=True)):
        return
    missing = False
    for param, local in zip(group.params, locals_, strict=True):
        current = param.registered
        if not isinstance(current, RaggedTensor):
            spec = make_spec(*_mesh_and_placements(param), param.shape, group.dtype)
            current = nn.Parameter(RaggedTensor.wrap(group.core.master(param.index), spec), requires_grad=current.requires_grad)
        if local is not None and local.device.type != "meta":
            if not _is_master(group, param, local):
                group.core.set_master(param.index, local)
            current._local_tensor = group.core.master(param.index)  # type: ignore[attr-defined]
        else:
            missing = True
        if current is not param.sharded:
            setattr(param.sharded, _UNIT, (lambda: None, param.name))
            setattr(current, _NUMBER, group.number)
        param.sharded = current
        for module, attribute in param.places:
            module._parameters[attribute] = current
    if not missing:
        group.core.mark_initialised()
    connect(group)


def _is_master(group: ManagedGroup, param: ManagedParam, local: torch.Tensor | None) -> bool:
    if local is None or local.device.type == "meta" or param.registered is not param.sharded:
        return local is not None and local.device.type == "meta" and param.registered is param.sharded
    master = group.core.master(param.index)
    return local.data_ptr() == master.data_ptr() and local.device == master.device and local.dtype == master.dtype


def _current_local(param: ManagedParam, owned_elsewhere: Callable[[nn.Parameter], str | None]) -> torch.Tensor | None:
    """This rank's piece of whatever is registered; a collective only where a stock DTensor has to be gathered."""
    current: Any = param.registered
    if current is param.sharded:
        return current._local_tensor
    if (owner := owned_elsewhere(current)) is not None:
        raise ValueError(
            f"[fully_shard] Expected parameters to stay in their unit, but '{param.name}' is shared with a parameter already managed by another "
            f"FSDP group ('{owner}'). Tie them before sharding, and shard the modules that share it in one call: "
            "fully_shard([module_a, module_b])."
        )
    if isinstance(current, RaggedTensor) and current.placements == param.sharded.placements:  # type: ignore[attr-defined]
        return current._local_tensor
    if current.device.type == "meta":
        return None
    with torch.no_grad():
        spec = make_spec(*_mesh_and_placements(param), param.shape, current.dtype)
        begin, end = next(p for p in spec.placements if isinstance(p, RaggedShard)).interval(param.group.mesh.shard.rank)
        piece = RaggedTensor.wrap(torch.empty(end - begin, dtype=current.dtype, device=param.group.mesh.device), spec)
        piece.copy_(current.detach())
    return piece._local_tensor


def _mesh_and_placements(param: ManagedParam) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    data = param.group.mesh
    dims, units = param.group.core.placement(param.index)
    shape = param.local_shape
    foreign = [] if param.spec is None else list(zip(range(param.spec.mesh.ndim), param.spec.placements))
    if param.spec is not None and data.spmd_mesh is not None:
        ours = set(names(data.dims.shard) + names(data.dims.replicate))  # type: ignore[union-attr]
        foreign = [(dim, placement) for dim, placement in foreign if param.spec.mesh.mesh_dim_names[dim] not in ours]  # type: ignore[index]
    split = 1
    for dim, placement in foreign:
        if isinstance(placement, Shard) and placement.dim == 0:
            split *= param.spec.mesh.size(dim)  # type: ignore[union-attr]
    ragged = StridedRaggedShard(dims, units, shape, split) if split > 1 else RaggedShard(dims, units, shape)
    placements: list[Placement] = [Replicate(), ragged] if data.is_hybrid else [ragged]
    if param.spec is None or not foreign:
        return data.mesh, tuple(placements)
    placements += [placement for _, placement in foreign]
    if data.spmd_mesh is None:
        return DeviceMesh._concatenate([data.mesh, param.spec.mesh]), tuple(placements)
    others = tuple(param.spec.mesh.mesh_dim_names[dim] for dim, _ in foreign)  # type: ignore[index]
    return DeviceMesh._concatenate([data.mesh, param.spec.mesh[others]]), tuple(placements)


# ---- what the extension calls back; none of these holds a model ----


def _dense_gradient(unsharded: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    spec = unsharded._spec  # type: ignore[attr-defined]
    if grad.placements != spec.placements:
        grad = grad.redistribute(placements=spec.placements)
    return grad._local_tensor  # type: ignore[union-attr]


def _local_gradient(sharded: nn.Parameter) -> torch.Tensor:
    grad: Any = sharded.grad
    if isinstance(grad, RaggedTensor) and grad.placements == sharded.placements:  # type: ignore[attr-defined]
        return grad._local_tensor
    result = torch.zeros_like(sharded)
    result.copy_(grad)
    return result._local_tensor  # type: ignore[attr-defined]


def _run_hooks(sharded: nn.Parameter) -> None:
    """Autograd never accumulates into a sharded parameter, so its hooks are run by hand once the gradient is whole: register_hook first,
    whose result replaces the gradient, then post-accumulate hooks."""
    for hook in list((sharded._backward_hooks or {}).values()):
        new = hook(sharded.grad)
        if new is not None and new is not sharded.grad:
            with torch.no_grad():
                sharded.grad.copy_(new)  # type: ignore[union-attr]
    for hook in list((getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(sharded)


def _calls() -> Any:
    return _C.PythonCalls(RaggedTensor.wrap, _dense_gradient, _local_gradient, _run_hooks)
