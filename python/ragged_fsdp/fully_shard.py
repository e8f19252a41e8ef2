"""fully_shard: applies RaggedFSDP to a module, bottom-up, in the place of torch.distributed.fsdp.fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp import _C, in_place
from ragged_fsdp.blocks import Block, ShardPolicy
from ragged_fsdp.mesh import DataMesh, DataParallelMeshDims, resolve_mesh
from ragged_fsdp.module import FSDPModule
from ragged_fsdp.params import collect, make_groups, mark_behind
from ragged_fsdp.planning import Planning
from ragged_fsdp.state import RaggedState, state_of


@contract(state_cls=RaggedState)  # type: ignore[arg-type]
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_policy: ShardPolicy | Block | None = None,
    collectives: str | None = None,
    planning: Planning = Planning(),
    gradients_in_place: bool | str = False,
    gradients_over_weights: bool = False,
) -> Any:
    """Shards every parameter below `module` that no earlier call took, as one unit. Blocks first, the root last; returns what it was given.

    The arguments are those of FSDP2 (torch 2.15), and five more:

    shard_policy: a function of (name, parameter) that returns the block which must stay on one rank: rows(32), elements(n), tile(128, 128),
        whole(), or None for 16 bytes; or one such block for all (veScale-FSDP section 4). It must answer alike on all ranks.
    collectives: "auto" chooses what is fastest on the backend; "stock" issues the operations that FSDP2 does. Default: the environment
        variable RAGGED_COLLECTIVES, else "auto".
    planning: how the planner may lay the unit out; the default splits buckets and moves odd tensors to a ragged tail where that saves padding.

    gradients_in_place: the weight gradients of nn.Linear and nn.Embedding children of this unit are computed where they are reduced, without a
        gradient tensor and its copy (ragged_fsdp/in_place.py). "same_bits": where that gives the bits of a copy: weights reduced in the dtype they
        compute in, first addend of a step. True: later addends (micro-batches, several uses) are accumulated by the product itself, and
        products of bf16 aren't rounded before they are reduced in fp32, so that last bits differ. Other modules, torch.compile, autocast,
        DTensors and frozen weights take torch's own way, whatever this says. Hooks on *unsharded* weights see no gradient.

    gradients_over_weights: gradients are gathered up where the weights they belong to lay, once nobody holds these, so that a unit in backward
        takes one buffer instead of two. It needs gradients in the dtype of the gathered weights (fp32 throughout; on Gloo also bf16 reduced
        in fp32). Where a weight is still held, in nested backwards and in units that run several times in a step the unit takes a buffer of
        its own, by itself. Not for units in which activation checkpointing runs a region again that reads a weight of another region
        detached: it would read the gradient.

    mesh: 1-D shards, 2-D replicates over dim 0 and shards over dim 1; default: all ranks. With `dp_mesh_dims`, the full mesh of DTensor
        parameters and the names of its data-parallel dims.
    reshard_after_forward: True frees parameters after forward and gathers them again in backward; False keeps them; None is True except for
        the root; an int k frees them but for a k-th part, which groups of k neighbouring ranks gather among themselves in backward.
    shard_placement_fn: Shard(d) is taken as a block (no cut through a slice of dims 0..d); a ShardPlacementResult also chooses the mesh.
    mp_policy: dtypes of the unit; masters, gradients and optimizer states keep the parameters' own. Parameters of several dtypes are fine.
    offload_policy: CPUOffloadPolicy keeps masters, gradients and with them optimizer states in host memory; images and reductions stay on the
        mesh's device.
    ignored_params: left alone, neither sharded nor reduced.

    Raises ValueError (InvalidArgument is one) for a module that can't be sharded, a parameter tied across units, 0-dim parameters, meshes and
    policies that make no sense, before any communication; AssertionError for a module sharded twice.
    """
    in_place_choice = in_place.parse(gradients_in_place)
    modules = (module,) if isinstance(module, nn.Module) else tuple(_without_nested(module))
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
    data = resolve_mesh(mesh, dp_mesh_dims, collectives)
    state: RaggedState = fully_shard.state(modules[0])  # type: ignore[attr-defined]
    state.mesh = data
    state.mp_policy = mp_policy
    state.offload_policy = offload_policy
    state.reshard_after_forward, small = _checked_reshard(reshard_after_forward, data)
    ignored = set(ignored_params or ())
    managed, behind = _managed_modules(modules)
    params = collect(modules, managed, ignored, state)
    splits = data.device.type == "cpu" and not data.shard.is_stock
    mark_behind(params, behind, planning.split_bytes if splits else 0)
    _move_to_device(managed, ignored, data.device)
    if dp_mesh_dims is not None and (plain := [param.name for param in params if param.spec is None]):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via distribute_module). Got plain tensor "
            f"for parameter '{plain[0]}'."
        )
    state.groups = make_groups(params, data, mp_policy, shard_policy, shard_placement_fn, offload_policy, planning, state)
    for group in state.groups:
        group.core.gradients_in_place = in_place_choice
        group.core.gradients_over_weights = gradients_over_weights
    if in_place_choice != "no":
        in_place.convert(managed)
    if small:
        if any(group.holds_subclasses for group in state.groups):
            raise NotImplementedError(
                f"[fully_shard] Expected reshard_after_forward to be a bool for tensor subclasses, but got {reshard_after_forward}. They gather what "
                "only they understand, from all ranks: use True."
            )
        for group in state.groups:
            group.core.set_small_group(data.small_group(small))
    state.init(modules)
    for inner in managed:  # for Dynamo, as torch's own does
        inner._is_fsdp_managed_module = True  # type: ignore[assignment]
        inner._fsdp_use_orig_params = True  # type: ignore[assignment]
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def _without_nested(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of a list that don't lie in another of it, each once."""
    inside = {inner for outer in modules for inner in outer.modules() if inner is not outer}
    return [module for module in dict.fromkeys(modules) if module not in inside]


def _managed_modules(modules: tuple[nn.Module, ...]) -> tuple[list[nn.Module], set[nn.Module]]:
    """All modules below that belong to this unit: not those that an earlier call took, with what is below them. And which of them lie behind the
    last that an earlier call took, in the order of registration; none where there is no such call."""
    found: dict[nn.Module, None] = {}
    behind = 0

    def visit(module: nn.Module) -> None:
        nonlocal behind
        if module in found:
            return
        if module not in modules and state_of(module) is not None:
            behind = len(found)
            return
        found[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(found), set(list(found)[behind:] if behind else ())


def _checked_reshard(value: bool | int | None, data: DataMesh) -> tuple[bool | None, int]:
    """(reshard after forward, size of the groups that keep the image in between; 0: none does)."""
    if value is None or isinstance(value, bool):
        return value, 0
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}")
    if value < 1 or value > data.shard_size or data.shard_size % value != 0:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {data.shard_size}, not {value}")
    if value in (1, data.shard_size):
        return value != 1, 0
    return True, value


def _move_to_device(managed: list[nn.Module], ignored: set[nn.Parameter], device: torch.device) -> None:
    for module in managed:
        tensors: list[torch.Tensor] = [param for param in module._parameters.values() if param is not None and param not in ignored]
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        for tensor in tensors:
            if tensor.device.type not in ("meta", device.type):
                tensor.data = tensor.data.to(device)


_sharded_classes: dict[type, type] = {}


def _sharded_class(original: type) -> type:
    if original not in _sharded_classes:
        body = {"__deepcopy__": _no_deepcopy, "__module__": original.__module__}
        _sharded_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), body)
    return _sharded_classes[original]


def _no_deepcopy(self: nn.Module, memo: Any) -> NoReturn:
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization. (For an averaged copy, keep deep copies of the parameters: "
        "copy.deepcopy(list(model.parameters())) stays sharded.)"
    )
