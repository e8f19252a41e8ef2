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
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_STATE_DICT_NAMES = ("set_model_state_dict", "set_optimizer_state_dict")
_NAMES = ("fully_shard", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx")
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """From now on `from torch.distributed.fsdp import fully_shard` gives ours. Call it before the names are imported; calling it again does
    nothing. torch's FSDPModule stays: our modules are instances of it. The collectives stay as chosen."""
    import ragged_fsdp

    if _replaced:
        return
    for place, names in [*((place, _NAMES) for place in _PLACES), (_STATE_DICT, _STATE_DICT_NAMES)]:
        try:
            module: Any = importlib.import_module(place)
        except ImportError:  # a place that this torch doesn't have
            continue
        for name in names:
            if hasattr(module, name):
                _replaced.append((module, name, getattr(module, name)))
                setattr(module, name, getattr(ragged_fsdp, name))


def uninstall() -> None:
    """Puts torch's own names back."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)
