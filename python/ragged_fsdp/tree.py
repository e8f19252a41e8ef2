"""Finds and replaces the tensors in a module's arguments and results. torch's own pytree does the general case; flat tuples of tensors, which
nearly all modules take and return, and dataclasses, which pytree treats as leaves, are handled here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Tensor = torch.Tensor
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
Rebuild = Callable[[list[Tensor]], Any]


def split(value: Any) -> tuple[list[Tensor], Rebuild]:
    """(tensors in `value`, function that puts others in their places)."""
    if isinstance(value, Tensor):
        return [value], lambda tensors: tensors[0]
    if type(value) is tuple and all(isinstance(item, Tensor) or type(item) in _PLAIN for item in value):
        return [item for item in value if isinstance(item, Tensor)], lambda tensors: _refill(value, tensors)
    leaves, spec = tree_flatten(value)
    parts = [split_leaf(leaf) for leaf in leaves]
    tensors = [tensor for found, _ in parts for tensor in found]

    def rebuild(new: list[Tensor]) -> Any:
        position, rebuilt = 0, []
        for found, of in parts:
            rebuilt.append(of(new[position : position + len(found)]))
            position += len(found)
        return tree_unflatten(rebuilt, spec)

    return tensors, rebuild


def _refill(value: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, ...]:
    rest = iter(tensors)
    return tuple(next(rest) if isinstance(item, Tensor) else item for item in value)


def split_leaf(leaf: Any) -> tuple[list[Tensor], Rebuild]:
    """A leaf of pytree's: a tensor, a dataclass instance whose fields are values in turn, or something without tensors."""
    if isinstance(leaf, Tensor):
        return [leaf], lambda tensors: tensors[0]
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return [], lambda tensors: leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}
    tensors, rebuild = split(fields)

    def replaced(new: list[Tensor]) -> Any:
        # Not through the constructor: there may be fields that it doesn't take, and checks that it makes.
        result = copy.copy(leaf)
        for name, item in rebuild(new).items():
            object.__setattr__(result, name, item)
        return result

    return (tensors, replaced) if tensors else ([], lambda new: leaf)
