"""Gradient clipping over sharded parameters. torch.nn.utils.clip_grad_norm_ also works on them; this one reads each gradient once, makes one
all-reduce for all of them instead of one tensor a parameter, and adds up in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ragged_fsdp import _C

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their total norm is at most `max_norm`; returns the norm before, a plain 0-dim float32 tensor, equal
    on all ranks. Collective over the meshes of the parameters: every rank must call it with the same ones. One all-reduce, whatever their
    number and meshes, where the meshes span the same ranks and these are one mesh dim or the whole world; else one for each mesh dim.

    norm_type: p > 0 or inf. Raises RuntimeError, on all ranks and with gradients as they were, for a norm that isn't finite, if
    `error_if_nonfinite`. foreach: False takes the gradients one by one; else those of a device and dtype go together, with the same result.
    """
    if not norm_type > 0:
        raise _C.InvalidArgument(f"[clip_grad_norm_] Expected norm_type above 0, but got {norm_type}.")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    joined = _total(params, grads, norm_type, foreach is not False, device)
    norm = (joined if math.isinf(norm_type) else joined.pow(1.0 / norm_type)).to(torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this error "
            "and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    locals_ = [_local(grad) for grad in grads]
    for indices in _alike(locals_, foreach is not False):
        first = locals_[indices[0]]
        torch._foreach_mul_([locals_[i] for i in indices], factor.to(device=first.device, dtype=first.dtype))
    return norm


def _total(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], norm_type: float, foreach: bool, device: torch.device
) -> torch.Tensor:
    """The sum of all elements' powers, or their largest magnitude; float64, equal on all ranks."""
    is_max = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    # Parts by the process groups that they must be summed over, from all parameters: every rank makes the same list of groups, whichever
    # gradients it has.
    totals: dict[Groups, torch.Tensor] = {_groups(param): torch.zeros((), dtype=torch.float64, device=device) for param in params}
    everyone = _everyone(params, [groups for groups in totals if groups])
    powers = _powers([_local(grad) for grad in grads], norm_type, foreach, device)
    for grad, power in zip(grads, powers, strict=True):
        key = _groups(grad)
        if everyone is not None and key and not _is_first_replica(grad):
            continue  # a tensor counts once however often it is replicated
        total = totals.setdefault(key, torch.zeros((), dtype=torch.float64, device=device))
        total.copy_(torch.maximum(total, power) if is_max else total + power)

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(list(parts)).max() if is_max else torch.stack(list(parts)).sum()

    shared = {groups: total for groups, total in totals.items() if groups}
    if everyone is not None:
        cut = join(list(shared.values()))
        dist.all_reduce(cut, op=op, group=everyone)
        shared = {(): cut}
    else:
        for groups, total in shared.items():
            for group in groups:
                dist.all_reduce(total, op=op, group=group)
    return join([*shared.values(), *([totals[()]] if () in totals else [])])


def _everyone(params: Sequence[torch.Tensor], keys: Sequence[Groups]) -> dist.ProcessGroup | None:
    """The default group, if there is more than one group to sum over and every mesh spans all of its ranks."""
    if sum(len(groups) for groups in keys) < 2:
        return None
    meshes: list[DeviceMesh] = [param.device_mesh for param in params if isinstance(param, DTensor)]
    world = dist.get_world_size()
    return dist.group.WORLD if all(mesh.size() == world for mesh in dict.fromkeys(meshes)) else None


def _is_first_replica(grad: torch.Tensor) -> bool:
    coordinate = grad.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return all(at == 0 for at, placement in zip(coordinate, grad.placements, strict=True) if isinstance(placement, Replicate))  # type: ignore[attr-defined]


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _groups(tensor: torch.Tensor) -> Groups:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))


def _alike(locals_: Sequence[torch.Tensor], together: bool) -> list[list[int]]:
    """Indices of the tensors that have elements, by device and dtype if they may go together."""
    lists: dict[object, list[int]] = {}
    for index, local in enumerate(locals_):
        if local.numel():
            lists.setdefault((local.device, local.dtype) if together else index, []).append(index)
    return list(lists.values())


def _powers(locals_: Sequence[torch.Tensor], norm_type: float, together: bool, device: torch.device) -> list[torch.Tensor]:
    """Of each piece: the sum of its elements' powers, or their largest magnitude. float64 on `device`."""
    powers = [torch.zeros((), dtype=torch.float64, device=device)] * len(locals_)
    for indices in _alike(locals_, together):
        norms = torch._foreach_norm([locals_[i] for i in indices], norm_type, dtype=torch.float64)
        for index, norm in zip(indices, norms, strict=True):
            norm = norm.to(device)
            # A maximum over ranks may lose a NaN; infinity it keeps.
            powers[index] = norm.nan_to_num(math.inf, math.inf) if math.isinf(norm_type) else norm.pow(norm_type)
    return powers
