"""Runs that the tests of checkpoints save and load: a model with everything awkward in it, an optimizer of each kind, and
steps whose gradients are the same on any number of ranks. No test."""

import torch
from models import Mixer, next_token_loss
from support.optim import everything
from torch.distributed.tensor import DTensor

from harness import seeded, tokens
from ragged_fsdp import fully_shard
from ragged_fsdp.optim import SOAP, AdamW, AdamW8bit, Muon, muon_groups, tile_rows

MAKE = {
    "adamw": lambda model: AdamW(model.named_parameters(), lr=0.01, betas=(0.9, 0.95)),
    "bf16 states": lambda model: AdamW(model.named_parameters(), lr=0.01, state_dtype=torch.bfloat16),
    "power": lambda model: AdamW8bit(model.named_parameters(), lr=0.01),
    "dynamic": lambda model: AdamW8bit(model.named_parameters(), lr=0.01, format="dynamic"),
    "muon": lambda model: Muon(muon_groups(model.named_parameters()), lr=0.01),
    "normuon": lambda model: Muon(
        muon_groups(model.named_parameters()), lr=0.01, normuon=True, momentum_format="power"
    ),
    "soap": lambda model: SOAP(muon_groups(model.named_parameters()), lr=0.01, precondition_frequency=2),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def build(kind, seed=0, units=True, grid=None):
    """A model with a tie, a frozen parameter and one that no step reaches, and its optimizer."""
    model = seeded(Mixer, seed)
    for unit in (model.up, model.down) if units else ():
        fully_shard(unit, shard_policy=tile_rows, mesh=grid)
    fully_shard(model, shard_policy=tile_rows, mesh=grid)
    return model, MAKE[kind](model)


def train(model, optimizer, first, steps):
    """The same gradients on any number of ranks: all take the same batch."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        next_token_loss(model, tokens(64, 2, 9, step=step, of_rank=0)).backward()
        optimizer.step()
    return everything(optimizer)


def spoil(optimizer):
    """Values that no run has, in every state."""
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                (value._local_tensor if isinstance(value, DTensor) else value).fill_(3)
