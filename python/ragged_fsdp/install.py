"""install(): gives scripts that can't be edited (Accelerate, transformers, torchtitan) our fully_shard, by setting the names in the modules that
they import them from. Never done at import."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
)
_NAMES = ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx")
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """From now on `from torch.distributed.fsdp import fully_shard` gives ours. Call it before the names are imported; calling it again does
    nothing. FSDPModule stays a class that both ours and torch's modules are instances of. The collectives stay as chosen."""
    import ragged_fsdp

    if _replaced:
        return
    for place in _PLACES:
        try:
            module: Any = importlib.import_module(place)
        except ImportError:  # a place that this torch doesn't have
            continue
        for name in _NAMES:
            if hasattr(module, name) and name != "FSDPModule":
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, getattr(ragged_fsdp, name))


def uninstall() -> None:
    """Puts torch's own names back."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)
