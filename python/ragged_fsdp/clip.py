"""Gradient clipping over sharded parameters. torch.nn.utils.clip_grad_norm_ also works on them; this one reads each gradient once, makes one
all-reduce a mesh instead of one tensor a parameter, and adds up in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ragged_fsdp import _C


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their total norm is at most `max_norm`; returns the norm before, a plain 0-dim float32 tensor, equal
    on all ranks. Collective over the meshes of the gradients: every rank must call it with the same parameters.

    norm_type: p >= 1 or inf. Raises RuntimeError for a norm that isn't finite, if `error_if_nonfinite`. `foreach` is accepted for
    compatibility.
    """
    if not norm_type > 0:
        raise _C.InvalidArgument(f"[clip_grad_norm_] Expected norm_type above 0, but got {norm_type}.")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    # Parts by the process groups that they must be summed over; a tensor is counted once however often it is replicated.
    totals: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    device = grads[0].device if grads else torch.device("cpu")
    for param in params:  # every rank makes the same list of groups, whichever gradients it has
        totals.setdefault(_groups(param), torch.zeros((), dtype=torch.float64, device=param.device))
    for grad in grads:
        local = _local(grad)
        part = _powers(local, norm_type)
        key = _groups(grad)
        total = totals.setdefault(key, torch.zeros((), dtype=torch.float64, device=part.device))
        total.copy_(torch.maximum(total, part) if math.isinf(norm_type) else total + part)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for groups, total in totals.items():
        for group in groups:
            dist.all_reduce(total, op=op, group=group)
    whole = [total.to(device) for total in totals.values()] or [torch.zeros((), dtype=torch.float64, device=device)]
    joined = torch.stack(whole)
    norm = joined.max() if math.isinf(norm_type) else joined.sum().pow(1.0 / norm_type)
    norm = norm.to(torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this error "
            "and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        _local(grad).mul_(factor.to(device=grad.device, dtype=grad.dtype))
    return norm


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))


def _powers(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    if local.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=local.device)
    if math.isinf(norm_type):
        return local.abs().max().to(torch.float64)
    return torch.linalg.vector_norm(local, norm_type, dtype=torch.float64).pow(norm_type)
