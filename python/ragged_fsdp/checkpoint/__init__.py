"""Checkpoints of sharded training, in the files that `ragged train` writes and reads.

    from ragged_fsdp import checkpoint

    checkpoint.save("run", model, optimizer, step=200, extra={"scheduler": scheduler.state_dict()})
    pending = checkpoint.async_save("run", model, optimizer, step=300)   # copies, then writes while training goes on
    pending.result()
    loaded = checkpoint.load("run", model, optimizer)                    # any number of ranks, mesh, block
    scheduler.load_state_dict(loaded.extra["scheduler"])

A checkpoint appears whole or not at all; `latest` names one that is whole. What goes wrong on one rank is the same
error on all, and earlier checkpoints stay as they are. The files are safetensors and JSON, never pickle, and are read
by torch.distributed.checkpoint with HuggingFaceStorageReader too. torch's own `dcp.save` and `load` work on ragged
tensors as they are (ragged_fsdp/dcp.py) and know nothing of these files.
"""

from __future__ import annotations

from ragged_fsdp._C import CheckpointError
from ragged_fsdp.checkpoint.loading import Loaded, latest, load
from ragged_fsdp.checkpoint.models import load_safetensors, save_safetensors
from ragged_fsdp.checkpoint.rng import rng_state, set_rng_state
from ragged_fsdp.checkpoint.saving import Checkpointer, PendingSave, Saved, async_save, save

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Loaded",
    "PendingSave",
    "Saved",
    "async_save",
    "latest",
    "load",
    "load_safetensors",
    "rng_state",
    "save",
    "save_safetensors",
    "set_rng_state",
]
