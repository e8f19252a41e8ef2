"""What is saved of a model and its optimizers, and how it is called: names, counts of steps and options. Values stay
where they are.

[Note: names in the files]
Parameters and buffers have the names that `state_dict()` gives them, without what wrappers put in. A tensor with
several names is saved once, under the first; the others are in the fact "tied.<name>". States are tensors
"state.<parameter>.<state>", and those of our optimizers are called as `ragged train` calls them. Counts of steps are
integers, "optimizer.steps.<parameter>", since the trainer's are.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ragged_fsdp import _C
from ragged_fsdp.checkpoint.parts import Entry
from ragged_fsdp.optim.adamw import AdamW
from ragged_fsdp.optim.adamw8bit import AdamW8bit
from ragged_fsdp.optim.base import ShardedOptimizer
from ragged_fsdp.optim.matrices import MatrixOptimizer
from ragged_fsdp.placement import invalid

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Model = nn.Module | Mapping[str, torch.Tensor]

GROUPS, VALUES = "optimizer.groups", "optimizer.values"
STEPS, KIND, TIED = "optimizer.steps.", "optimizer.kind.", "tied."


@dataclasses.dataclass
class Contents:
    """A model's and its optimizers' tensors, and the facts beside them."""

    entries: list[Entry] = dataclasses.field(default_factory=list)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    integers: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A parameter that an optimizer has, under its name."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    param: torch.Tensor
    name: str

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self.param, {})

    def entries(self) -> list[Entry]:
        """Its states that are tensors, the count of steps apart."""
        return [
            Entry(f"state.{self.name}.{self._file_key(key)}", value, self._format(key))
            for key, value in self.state.items()
            if key != "step" and isinstance(value, torch.Tensor)
        ]

    def values(self) -> dict[str, Any]:
        """Its states that are plain numbers."""
        return {
            key: value for key, value in self.state.items() if key != "step" and not isinstance(value, torch.Tensor)
        }

    def kind(self) -> str:
        """What `ragged train` calls the optimizer; empty for others."""
        if isinstance(self.optimizer, MatrixOptimizer):
            normuon = self.group["algorithm"] == "muon" and self.group["normuon"]
            return "normuon" if normuon else self.group["algorithm"]
        if isinstance(self.optimizer, AdamW8bit):
            return "adamw8bit"
        return "adamw" if isinstance(self.optimizer, (AdamW, torch.optim.AdamW)) else ""

    def _file_key(self, key: str) -> str:
        if not isinstance(self.optimizer, ShardedOptimizer):
            return key
        # ragged/optim has a dot there, and a matrix's number before its state.
        for part in ("codes", "scales"):
            key = f"{key.removesuffix('_' + part)}.{part}" if key.endswith("_" + part) else key
        if numbered := re.fullmatch(r"(\w+)_(\d+)", key):
            return f"{numbered[2]}.{numbered[1]}"
        return "momentum" if key == "momentum_buffer" else key

    def _format(self, key: str) -> str:
        # One for a parameter, as in ragged/optim: NorMuon's rows have that of the codes beside them.
        if not isinstance(self.optimizer, ShardedOptimizer) or key == "master":
            return ""
        if not any(each.endswith("_codes") for each in self.state):
            return ""
        return f"{self.group.get('format') or self.group['momentum_format']} 32x32"


def canonical(name: str) -> str:
    """A parameter's name without what torch.compile and checkpoint wrappers put in."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def named_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name; tied ones are one object under several names."""
    given = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise invalid("checkpoint", "tensors", f"a {type(value).__name__} named '{name}'",
                          "Put what isn't a tensor into `extra`.")  # fmt: skip
    return {canonical(name): value for name, value in given.items()}


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def stepped(model: Model, optimizers: Iterable[torch.optim.Optimizer]) -> list[Stepped]:
    """Every parameter of the optimizers. States of ours exist afterwards."""
    found: list[Stepped] = []
    names = {}
    if isinstance(model, nn.Module):
        names = {param: canonical(name) for name, param in model.named_parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer._make_all_states()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param not in names:
                    raise invalid("checkpoint", "optimizers over the model's parameters",
                                  f"a parameter of shape {tuple(param.shape)} that has no name in the model",
                                  "Build the optimizer after fully_shard, from model.parameters(), and pass the module "
                                  "itself.")  # fmt: skip
                found.append(Stepped(optimizer, group, param, names[param]))
    return found


def contents(model: Model, optimizers: Optimizers) -> Contents:
    """What a checkpoint of these holds."""
    saved = Contents()
    first_name: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        if (known := first_name.setdefault(id(tensor), name)) != name:
            saved.texts[TIED + name] = known
        else:
            saved.entries.append(Entry(name, tensor))
    values = {}
    listed = as_list(optimizers)
    for item in stepped(model, listed):
        saved.entries += item.entries()
        if "step" in item.state:
            saved.integers[STEPS + item.name] = int(item.state["step"])
        if item.kind():
            saved.texts[KIND + item.name] = item.kind()
        if item.values():
            values[item.name] = item.values()
    if listed:
        saved.texts[GROUPS] = to_json(groups_of(model, listed), "options of parameter groups")
    if values:
        saved.texts[VALUES] = to_json(values, "states of the optimizer")
    return saved


# ---- options ----------------------------------------------------------------


def groups_of(model: Model, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Options of each parameter group that are JSON, and the names of its parameters."""
    names = {(id(item.optimizer), item.param): item.name for item in stepped(model, optimizers)}
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            params = [names[id(optimizer), param] for param in group["params"]]
            found.append({"params": params, "options": {k: v for k, v in options.items() if v is not _SKIPPED}})
    return found


def restore_groups(model: Model, optimizers: Sequence[torch.optim.Optimizer], saved: list[dict[str, Any]]) -> None:
    """Gives each group whose parameters were in one group the options that it had then, where they are of the type that
    they have now; not those that say which states there are."""
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    names = {(id(item.optimizer), item.param): item.name for item in stepped(model, optimizers)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            numbers = {group_of.get(names[id(optimizer), param]) for param in group["params"]}
            number = numbers.pop() if len(numbers) == 1 else None
            if number is None:
                continue
            fixed = getattr(optimizer, "decides_states", frozenset())
            for key, value in saved[number]["options"].items():
                if key in group and key not in fixed:
                    group[key] = _restored(group[key], value)


_SKIPPED = object()


def _plain(value: Any) -> Any:
    """The value as JSON has it, or _SKIPPED."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _SKIPPED if any(part is _SKIPPED for part in parts) else parts
    return value if value is None or isinstance(value, (bool, int, float, str)) else _SKIPPED


def _restored(now: Any, saved: Any) -> Any:
    if isinstance(now, torch.Tensor):
        return now.fill_(saved) if isinstance(saved, (int, float)) else now
    if isinstance(now, (list, tuple)) and isinstance(saved, list):
        return type(now)(saved)
    if isinstance(now, float) and isinstance(saved, (int, float)) and not isinstance(saved, bool):
        return float(saved)
    return saved if type(now) is type(saved) else now


def to_json(value: Any, what: str) -> str:
    """Raises InvalidArgument for anything that isn't JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _C.InvalidArgument(
            f"[save] Expected {what} to be JSON (numbers, texts, lists, dicts), but got an error: {error}. Tensors "
            "belong into the model; numpy's numbers become Python's by item()."
        ) from error
