"""Optimizers that know how parameters are cut: AdamW, AdamW8bit and Muon as torch.optim.Optimizers over RaggedTensors,
stock DTensors and plain tensors.

    from ragged_fsdp import fully_shard
    from ragged_fsdp.optim import AdamW8bit, tile_rows

    fully_shard(model, shard_policy=tile_rows)
    optimizer = AdamW8bit(model.named_parameters(), lr=3e-4)
"""

from __future__ import annotations

from ragged_fsdp.optim.adamw import AdamW
from ragged_fsdp.optim.adamw8bit import AdamW8bit, tile_rows
from ragged_fsdp.optim.muon import Muon, muon_groups

__all__ = ["AdamW", "AdamW8bit", "Muon", "muon_groups", "tile_rows"]
