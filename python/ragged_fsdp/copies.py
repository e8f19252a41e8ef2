"""copy_ into ragged tensors, from anything of the global shape: the seam that load_state_dict and its like go through.

A plain tensor is the whole, held by every rank, and is cut locally; a DTensor is redistributed to the target's
placements, which is a collective unless it lies there already. Values are cast and moved between devices as copy_
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.placement import invalid
from ragged_fsdp.redistribute import cut_local, transfer

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy_(target, source): any source that has the global shape, wherever its elements are."""
    target, source, *rest = args
    if not getattr(target, "is_ragged_tensor", False):
        if not isinstance(target, DTensor):
            raise invalid(
                "copy_",
                "a RaggedTensor or DTensor as the target of a ragged source",
                f"a plain tensor of shape {tuple(target.shape)}",
                "Copy the gathered tensor: target.copy_(source.full_tensor()).",
                source._spec.mesh,
            )
        _check_shape("copy_", target, source)
        if target._spec.mesh != source._spec.mesh:
            raise invalid(
                "copy_", f"tensors on one mesh, {target._spec.mesh}", source._spec.mesh, "Copy source.full_tensor()."
            )
        target._local_tensor.copy_(
            transfer(source._local_tensor, source._spec, target._spec.placements), *rest, **kwargs
        )
        return target
    target._local_tensor.copy_(_piece_for(target, source), *rest, **kwargs)
    return target


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, source in zip(args[0], args[1]):
        target.copy_(source, *args[2:], **kwargs)


def _piece_for(target: Any, source: torch.Tensor) -> torch.Tensor:
    spec = target._spec
    if isinstance(source, DTensor):
        own = source._spec
        if own is spec:
            return source._local_tensor
        if source.numel() != 1 or target.numel() == 1:
            _check_shape("copy_", target, source)
            if own.mesh == spec.mesh:
                if own.placements == spec.placements:
                    return _own_piece(target, source._local_tensor)
                return transfer(source._local_tensor, own, spec.placements)
        source = source.full_tensor()
    if source.shape != target.shape:
        if source.ndim > target.ndim or any(
            a not in (1, b) for a, b in zip(reversed(source.shape), reversed(target.shape))
        ):
            raise invalid(
                "copy_",
                f"a source of the global shape {tuple(target.shape)}",
                tuple(source.shape),
                "Give the whole tensor, not this rank's piece (to write a piece: target.to_local().copy_(piece)).",
                spec.mesh,
            )
        source = source.expand(target.shape)
    return cut_local(source, spec.mesh, spec.placements)


def _own_piece(target: Any, local: torch.Tensor) -> torch.Tensor:
    # torch's loading from rank 0 into meta tensors knows no ragged slices: it puts all that is to be cut into such a
    # DTensor.
    mesh_dim, ragged = target.ragged
    begin, end = ragged.interval(target._spec.mesh.get_local_rank(mesh_dim))
    if local.ndim == 1 and local.numel() == end - begin:
        return local
    if tuple(local.shape) == ragged.shape:
        return local.reshape(-1)[begin:end]
    raise invalid(
        "copy_",
        f"a source whose local tensor has {end - begin} elements",
        tuple(local.shape),
        f"Its placements say {ragged}: use distribute_tensor to make it.",
        target._spec.mesh,
    )


def _check_shape(operation: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise invalid(
            operation, f"a source of shape {tuple(target.shape)}", tuple(source.shape), "Shapes here are global ones."
        )


HANDLERS: dict[str, Handler] = {"copy_": _copy, "_foreach_copy_": _foreach_copy}
