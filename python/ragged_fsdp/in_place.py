"""Gradients computed where they are reduced: what `fully_shard(..., gradients_in_place=...)` does to nn.Linear and nn.Embedding.

A module's forward is replaced, on the instance, by one over the same operation as a single autograd node (ragged/fsdp/gradients_in_place.h),
whose backward writes the weight's gradient into the unit's reduce buffer. Everything that could tell the difference stays with torch's own
forward: modules of other types or with a forward of their own, torch.compile, autocast, tensor subclasses (DTensor under tensor parallelism),
weights that aren't gathered or that nobody trains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from ragged_fsdp import _C

CHOICES = ("no", "same_bits", "always")


def parse(value: bool | str) -> str:
    """False, True or "same_bits", as fully_shard takes it, by the runtime's names. Raises InvalidArgument."""
    if isinstance(value, bool):
        return "always" if value else "no"
    if value != "same_bits":
        raise _C.InvalidArgument(f"[fully_shard] Expected gradients_in_place to be True, False or 'same_bits', but got {value!r}.")
    return value


def convert(modules: Iterable[nn.Module]) -> None:
    """Replaces the forwards of those that can be; idempotent."""
    for module in modules:
        if "forward" in module.__dict__:
            continue
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]
        elif type(module) is nn.Embedding and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
            module.forward = functools.partial(_embedding, module)  # type: ignore[method-assign]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is nn.Parameter


def _linear(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight, module.bias
    if torch.compiler.is_compiling() or not (_is_plain(input) and _is_plain(weight) and (bias is None or _is_plain(bias))):
        return F.linear(input, weight, bias)
    return _C.linear(input, weight, bias)


def _embedding(module: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if torch.compiler.is_compiling() or not (_is_plain(input) and _is_plain(weight)):
        return F.embedding(input, weight, module.padding_idx)
    return _C.embedding(weight, input, -1 if module.padding_idx is None else module.padding_idx)
