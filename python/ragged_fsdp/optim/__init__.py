"""Optimizers that know how parameters are cut: AdamW, AdamW8bit, Muon and SOAP as torch.optim.Optimizers over
RaggedTensors, stock DTensors and plain tensors.

    from ragged_fsdp import fully_shard
    from ragged_fsdp.optim import AdamW8bit, tile_rows

    fully_shard(model, shard_policy=tile_rows)
    optimizer = AdamW8bit(model.named_parameters(), lr=3e-4)
"""

from __future__ import annotations

from ragged_fsdp.optim.adamw import AdamW
from ragged_fsdp.optim.adamw8bit import AdamW8bit, tile_rows
from ragged_fsdp.optim.matrices import matrix_groups
from ragged_fsdp.optim.muon import Muon, muon_groups
from ragged_fsdp.optim.soap import SOAP

__all__ = ["SOAP", "AdamW", "AdamW8bit", "Muon", "matrix_groups", "muon_groups", "tile_rows"]
