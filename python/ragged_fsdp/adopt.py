"""Turns stock DTensors with a ragged placement into RaggedTensors in optimizer states, before they step.

torch's `set_optimizer_state_dict` and its like lay full tensors out by torch's own `distribute_tensor`, whose class is
fixed. Parameters take such tensors by `copy_`, but an optimizer keeps them as its state, and their ops would be
torch's, which gather. A hook of torch's public kind, run before each step of any optimizer, exchanges them; where none
was made since the last step it compares two numbers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ragged_fsdp import placement
from ragged_fsdp.tensor import RaggedTensor

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def adopt(value: Any) -> Any:
    """A RaggedTensor over the same piece where `value` is a stock DTensor with a ragged placement, else `value`."""
    if type(value) is DTensor and placement.ragged_mesh_dim(value._spec.placements) is not None:
        return RaggedTensor.wrap(value._local_tensor, value._spec, value.requires_grad)
    return value


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    made = placement.stock_cuts()
    if _seen.get(optimizer, 0) == made:
        return
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for key, value in state.items():
                state[key] = adopt(value)
    _seen[optimizer] = made


register_optimizer_step_pre_hook(_before_step)
