"""`set_model_state_dict` and `set_optimizer_state_dict` for ragged models: torch's, with the one case that torch
can't do.

torch.distributed.checkpoint.state_dict works on ragged models as it is, but for `broadcast_from_rank0`: it slices the
full tensor by a function that knows Shard only. These two take that case over, one tensor at a time, and hand
everything else to torch. The state dict may be full on rank 0 and empty elsewhere. Reading (`get_*_state_dict`) needs
nothing of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as _torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.placement import invalid
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor


@dataclasses.dataclass(frozen=True)
class _Missing:
    """Stands for a tensor that rank 0 has and the others are about to get."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: _torch.StateDictOptions | None = None
) -> Any:
    """torch.distributed.checkpoint.state_dict.set_model_state_dict, `broadcast_from_rank0` included."""
    targets = model.state_dict()
    if not _from_rank0(options) or not any(isinstance(value, RaggedTensor) for value in targets.values()):
        return _torch.set_model_state_dict(model, model_state_dict, options=options)
    assert options is not None
    names = {_canonical(model, name): value for name, value in targets.items()}
    state = _spread(model_state_dict, lambda path: names.get(path[0]))
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in targets.values()):
        return model.load_state_dict(state, strict=options.strict, assign=True)
    return _torch.set_model_state_dict(model, state, options=_sharded(options))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: _torch.StateDictOptions | None = None,
) -> None:
    """torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, `broadcast_from_rank0` included."""
    parameters = {_canonical(model, name): p for name, p in model.named_parameters()}
    if not _from_rank0(options) or not any(isinstance(p, RaggedTensor) for p in parameters.values()):
        _torch.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return
    assert options is not None
    if options.flatten_optimizer_state_dict:
        raise invalid(
            "set_optimizer_state_dict",
            "a nested state dict with broadcast_from_rank0",
            "flatten_optimizer_state_dict=True",
            "Pass the dict that get_optimizer_state_dict returns without flattening.",
        )
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)

    def target_of(path: tuple[Any, ...]) -> Any:
        # State of a parameter has the path ("state", name, key), and lies as the optimizer's does, or as the parameter.
        if len(path) != 3 or path[1] not in parameters:
            return None
        param = parameters[path[1]]
        own = (optimizer.state[param].get(path[2]) for optimizer in listed if param in optimizer.state)
        return next((each for each in own if isinstance(each, DTensor)), param)

    state = _spread(optim_state_dict, target_of)
    _torch.set_optimizer_state_dict(model, listed, state, options=_sharded(options))


def _from_rank0(options: _torch.StateDictOptions | None) -> bool:
    return options is not None and options.full_state_dict and options.broadcast_from_rank0


def _sharded(options: _torch.StateDictOptions) -> _torch.StateDictOptions:
    return dataclasses.replace(options, full_state_dict=False, broadcast_from_rank0=False)


def _canonical(model: nn.Module, name: str) -> str:
    # torch strips the names that torch.compile and checkpoint wrappers put in.
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _spread(tree: Any, target_of: Any) -> Any:
    """Rank 0's nested dict on every rank, its tensors laid out as `target_of(path)`, if any of the same shape, or
    whole."""
    rank = dist.get_rank()
    box = [_skeleton(tree) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return _filled(box[0], tree if rank == 0 else None, (), target_of)


def _skeleton(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            raise invalid(
                "set_state_dict", "plain full tensors on rank 0", type(value).__name__, "Gather the state dict first."
            )
        return _Missing(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _skeleton(part) for key, part in value.items()}
    return [_skeleton(part) for part in value] if isinstance(value, list) else value


def _filled(skeleton: Any, source: Any, path: tuple[Any, ...], target_of: Any) -> Any:
    if isinstance(skeleton, dict):
        parts = {}
        for key, part in skeleton.items():
            parts[key] = _filled(part, None if source is None else source[key], (*path, key), target_of)
        return parts
    if isinstance(skeleton, list):
        return [
            _filled(part, source[i] if source is not None else None, (*path, i), target_of)
            for i, part in enumerate(skeleton)
        ]
    if not isinstance(skeleton, _Missing):
        return skeleton
    target = target_of(path)
    device = target.device if target is not None and not target.is_meta else _default_device()
    full = torch.empty(skeleton.shape, dtype=skeleton.dtype, device=device)
    if source is not None:
        full.copy_(source)
    if isinstance(target, DTensor) and target.shape == full.shape:
        mesh = target.device_mesh
        if mesh.size() == dist.get_world_size() and int(mesh.mesh.reshape(-1)[0]) == 0:
            return distribute_tensor(
                full, mesh, target.placements
            )  # scatters from rank 0: each rank gets its piece alone
        dist.broadcast(full, src=0)
        return distribute_tensor(full, mesh, target.placements, src_data_rank=None)
    dist.broadcast(full, src=0)
    return full


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
