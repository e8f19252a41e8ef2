"""Loading into a model and its optimizers, in place, whatever the ranks, mesh and blocks that saved. Each rank reads
what it needs; reading and checking are C++ (ragged/checkpoint/load.h).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ragged_fsdp import _C
from ragged_fsdp.checkpoint import contents as names
from ragged_fsdp.checkpoint.contents import Model, Optimizers, Stepped
from ragged_fsdp.checkpoint.groups import Ranks
from ragged_fsdp.checkpoint.parts import Entry, Parts
from ragged_fsdp.checkpoint.saving import EXTRA, Folder, checkpointer_of
from ragged_fsdp.optim.base import ShardedOptimizer


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What was loaded beside the tensors. extra, rank_extra: as they were saved; rank_extra only where as many ranks
    saved. facts: everything else that is written beside the tensors, such as the trainer's. read_bytes: that this rank
    read in each of its passes."""

    step: int
    folder: pathlib.Path
    world_size: int
    extra: Any
    rank_extra: Any
    facts: Mapping[str, str | int | float]
    read_bytes: int
    seconds: float


def latest(root: Folder) -> pathlib.Path | None:
    """The folder of the newest complete checkpoint below `root`, if there is one: what `latest` names, or else the
    newest that opens without an error. Not collective: let one rank ask."""
    found, _ = _C.newest_checkpoint(os.fspath(root))
    return pathlib.Path(found) if found else None


def load(
    folder: Folder,
    model: Model,
    optimizer: Optimizers = None,
    *,
    restore_options: bool = True,
    allow_unused: bool = False,
    verify_first: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fills the model's parameters and buffers and the optimizers' states. Collective.

    folder: of a step, or a root, whose newest complete checkpoint is taken (see latest()).
    model, optimizer: as in save(). A model without an optimizer, or tensors by name, may take a part of what there is:
        pass allow_unused=True.
    restore_options: parameter groups get their learning rate and other options back.
    verify_first: every byte is read and checked on all ranks before the first tensor changes.

    Nothing is cast and codes aren't quantised anew: another dtype, shape or format raises. A parameter of which no
    state was saved begins anew. Raises CheckpointError, the same on all ranks and before anything is changed, for what
    is missing, damaged or doesn't fit.
    """
    ranks = Ranks.of(process_group)
    for root in (pathlib.Path(folder), pathlib.Path(folder).parent):
        unfinished = checkpointer_of(root, process_group)
        if unfinished is not None:
            unfinished.finish()
    path = ranks.text_of_first(ranks.agreed(lambda: _find(folder) if ranks.is_first else ""))
    index = ranks.agreed(lambda: _C.checkpoint_index(path))
    optimizers = names.as_list(optimizer)
    _make_states(model, optimizers, index, ranks)
    target = ranks.agreed(lambda: _Target(model, optimizers, index, ranks))
    report = _C.load_checkpoint(ranks.all, path, target.parts.parts, allow_unused, verify_first)
    target.finish(restore_options)

    facts = index["facts"]
    own = report["rank_texts"]
    return Loaded(
        step=index["step"],
        folder=pathlib.Path(path),
        world_size=index["world_size"],
        extra=json.loads(facts.pop(EXTRA)) if EXTRA in facts else None,
        rank_extra=json.loads(own[EXTRA]) if EXTRA in own else None,
        facts=facts,
        read_bytes=report["read_bytes"],
        seconds=report["seconds"],
    )


def _find(folder: Folder) -> str:
    path = pathlib.Path(folder)
    if (path / "checkpoint.json").exists():
        return str(path)
    found, skipped = _C.newest_checkpoint(str(path))
    if found is None:
        reasons = "".join(f" {line}" for line in skipped)
        raise _C.CheckpointError(
            f"[load] Expected a checkpoint folder, or a folder with some, but '{path}' is none.{reasons} Give the "
            "folder that was saved to."
        )
    return found


def _make_states(model: Model, optimizers: list[torch.optim.Optimizer], index: dict[str, Any], ranks: Ranks) -> None:
    """torch's optimizers have no states before their first step; torch's own loading takes one of zeros, and so do we.
    Ranks agree on whether."""
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedOptimizer) or optimizer.state or not isinstance(model, torch.nn.Module):
            continue
        if any(name.startswith("state.") for name in index["tensors"]):
            get_optimizer_state_dict(model, optimizer)


class _Target:
    """What is filled, and what is done once it is."""

    def __init__(
        self, model: Model, optimizers: list[torch.optim.Optimizer], index: dict[str, Any], ranks: Ranks
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._facts: dict[str, Any] = index["facts"]
        known = index["tensors"]
        self._groups = _json_fact(self._facts, names.GROUPS, [])
        self._values = _json_fact(self._facts, names.VALUES, {})
        self._anew: list[Stepped] = []
        self._stepped: list[Stepped] = []
        entries = _model_entries(model, known)
        for item in names.stepped(model, optimizers):
            own = item.entries()
            saved_steps = names.STEPS + item.name in self._facts
            if item.state and not saved_steps and not any(entry.name in known for entry in own):
                self._anew.append(item)
                continue
            self._stepped.append(item)
            entries += own
        self.parts = Parts(entries, ranks, "load")

    def finish(self, restore_options: bool) -> None:
        self.parts.copy_back()
        for item in self._stepped:
            _set_step(item.state, self._facts.get(names.STEPS + item.name))
            for key, value in self._values.get(item.name, {}).items():
                if key in item.state:
                    item.state[key] = value
        for item in self._anew:
            _begin_anew(item)
        if restore_options:
            names.restore_groups(self._model, self._optimizers, self._groups)
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer._after_load()


def _json_fact(facts: dict[str, Any], name: str, default: Any) -> Any:
    return json.loads(facts[name]) if name in facts else default


def _model_entries(model: Model, known: Mapping[str, Any]) -> list[Entry]:
    """Each tensor once: of the names of a tied one, that which the checkpoint has."""
    chosen: dict[int, Entry] = {}
    for name, tensor in names.named_tensors(model).items():
        entry = chosen.get(id(tensor))
        if entry is None or (entry.name not in known and name in known):
            chosen[id(tensor)] = Entry(name, tensor)
    return list(chosen.values())


@torch.no_grad()
def _set_step(state: dict[str, Any], steps: int | None) -> None:
    if "step" not in state or steps is None:
        return
    if isinstance(state["step"], torch.Tensor):
        state["step"].fill_(steps)
    else:
        state["step"] = steps


@torch.no_grad()
def _begin_anew(item: Stepped) -> None:
    if not isinstance(item.optimizer, ShardedOptimizer):
        del item.optimizer.state[item.param]
        return
    fresh = item.optimizer._new_state(item.group, item.param, item.name)
    for key, tensor in item.state.items():
        tensor.copy_(fresh[key])
