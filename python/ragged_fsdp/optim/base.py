"""What AdamW, AdamW8bit, Muon and SOAP share: options and their checks, states that exist from construction, loading
that casts nothing, and the frame of a step. The arithmetic is C++ (ragged/optim); who does what is in the subclasses.

[Note: states]
A parameter's state is `self.state[p]`: tensors of the parameter's own placement (of SOAP whole on one rank, see [Note:
states on their root] in soap.py) and a 0-dim fp32 `step`. It is made
when the optimizer is, on every rank and for empty pieces too, so that all ranks have the same keys and
torch.distributed.checkpoint, which loads in place, finds something to load into. A parameter that doesn't require a
gradient has none until it does. Loading copies into these tensors: dtypes stay what the options say, and codes of 8-bit
states are bytes that nobody decodes on the way.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from ragged_fsdp import _C
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.pieces import dtype_name, local_of
from ragged_fsdp.optim.table import table
from ragged_fsdp.params import replaced_by_unit
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.tensor import distribute_tensor

NONFINITE = ("ignore", "skip", "raise")
# Of schedulers and torch's own; whatever begins with an underscore is the user's.
_FOREIGN_OPTIONS = set("params param_names name initial_lr max_lr min_lr swa_lr max_momentum base_momentum".split())
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ParamsT = Iterable[Any]


def refuse_switches(operation: str, foreach: bool | None, fused: bool | None, capturable: bool, differentiable: bool,
                    amsgrad: bool = False) -> None:  # fmt: skip
    """torch's optimizers have these arguments. What they ask for is given or refused, never ignored."""
    if foreach:
        refuse(operation, "foreach None or False", True, "The step is one fused pass over all pieces: leave it out.")
    if fused is False:
        refuse(operation, "fused None or True", False, "The step is always fused: leave it out.")
    if capturable:
        refuse(operation, "capturable=False", True, "Step counts are read on the host: keep the step out of graphs.")
    if differentiable:
        refuse(operation, "differentiable=False", True, "Autograd doesn't record the step: use torch.optim for that.")
    if amsgrad:
        refuse(operation, "amsgrad=False", True, "The fused step has no running maximum: use torch.optim.AdamW for it.")


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over RaggedTensors, stock DTensors and plain tensors.

    nonfinite: what a step does about gradients with NaN or Inf on any rank. "ignore": nothing, no check. "skip": change
    nothing and count it in `nonfinite_steps`. "raise": RaggedError, alike on all ranks, nothing changed. The last two
    cost a pass over the gradients and one small all-reduce a step.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf
    operation = "optim"
    # Options that a checkpoint doesn't give back: states are made by then.
    decides_states = frozenset({"state_dtype", "master_weights", "format", "state_format"})

    def __init__(self, params: ParamsT, defaults: dict[str, Any], nonfinite: str) -> None:
        if nonfinite not in NONFINITE:
            refuse(self.operation, f"nonfinite to be one of {NONFINITE}", repr(nonfinite), "Correct the option.")
        self.nonfinite = nonfinite
        self.nonfinite_steps = 0  # skipped or raised for
        super().__init__(params, _with_names(defaults))

    # ---- for subclasses ----

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises InvalidArgument for values out of range."""

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """States of a parameter that was never stepped; raises for a parameter that can't be optimised so."""
        raise NotImplementedError

    def _update(self, scale: float) -> None:
        """One step; gradients count `scale` times."""
        raise NotImplementedError

    def _after_load(self) -> None:
        """States have new values."""

    # ---- groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's, with checks: unknown options, empty groups and parameters that can't be optimised raise."""
        position = len(self.param_groups)
        if isinstance(param_group, dict):
            self._check_keys(param_group)
            param_group = _with_names(self._complete(dict(param_group)))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if not group["params"]:
                refuse(self.operation, "parameters in each group", f"none in group {position}",
                       "Leave the group out, or correct the rule that fills it.")  # fmt: skip
            self._check_group(group)
            for param, name in zip(group["params"], self._names_of(position), strict=True):
                self._check_param(param, name)
            self._make_states(position)
        except BaseException:
            self.param_groups.pop()
            raise

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group before defaults are filled in."""
        return group

    def _check_keys(self, group: dict[str, Any]) -> None:
        for key in group:
            if key in self.defaults or key in _FOREIGN_OPTIONS or key.startswith("_"):
                continue
            near = difflib.get_close_matches(key, self.defaults, 1)
            hint = f"Did you mean '{near[0]}'?" if near else f"It takes {', '.join(sorted(self.defaults))}."
            refuse(self.operation, "options of this optimizer", f"'{key}' in a parameter group",
                   f"{hint} (Keys of your own may begin with an underscore.)")  # fmt: skip

    def _names_of(self, position: int) -> list[str]:
        group = self.param_groups[position]
        count = len(group["params"])
        return group.get("param_names") or [f"{index} of group {position}" for index in range(count)]

    def _check_param(self, param: torch.Tensor, name: str) -> None:
        _check_current(self.operation, param, name)
        if param.dtype not in _DTYPES:
            refuse(self.operation, "parameters of float32, bfloat16 or float16", param.dtype,
                   "Convert the model, or optimise this parameter with torch.optim.", name)  # fmt: skip
        if param.layout != torch.strided:
            refuse(self.operation, "dense parameters", param.layout, "Call to_dense() first.", name)
        if local_of(param).device.type == "meta":
            refuse(self.operation, "parameters with values", "one on the meta device",
                   "Call model.to_empty(device=..) and initialise before the optimizer is built.", name)  # fmt: skip
        for placement in getattr(param, "placements", ()):
            if isinstance(placement, Partial) and not isinstance(placement, RaggedShard):
                refuse(self.operation, "parameters without pending sums", placement, "Redistribute it first.", name)

    def _make_states(self, position: int) -> None:
        group = self.param_groups[position]
        for param, name in zip(group["params"], self._names_of(position), strict=True):
            if param not in self.state and (param.requires_grad or param.grad is not None):
                self.state[param] = self._new_state(group, param, name)

    def _make_all_states(self) -> None:
        for position in range(len(self.param_groups)):
            self._make_states(position)

    # ---- the step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step with the gradients that parameters hold. A parameter without gradient is untouched, its step count
        included. Returns what the closure does, if one is given; it runs under grad mode before the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_all_states()
        self._check_gradients()
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and float(found) != 0.0:
            return loss
        if self.nonfinite != "ignore" and not self._gradients_are_finite():
            return loss
        self._update(1.0 if scale is None else 1.0 / float(scale))
        return loss

    def _check_gradients(self) -> None:
        for position, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                grad = param.grad
                if grad is None:
                    # fully_shard made others out of parameters that were held before; these never see a gradient.
                    if replaced_by_unit(param) is not None:
                        _check_current(self.operation, param, self._names_of(position)[index])
                    continue
                if grad.layout != torch.strided or not _lie_alike(grad, param):
                    refuse(self.operation, "gradients that lie as their parameters do, dense",
                           f"{type(grad).__name__} {getattr(grad, 'placements', grad.layout)}",
                           "Redistribute the gradient to the parameter's placements.",
                           self._names_of(position)[index])  # fmt: skip

    def _gradients_are_finite(self) -> bool:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        bad = count_nonfinite([local_of(grad) for grad in grads])
        total = agree_on_sum(bad, [p for group in self.param_groups for p in group["params"]])
        if total == 0:
            return True
        self.nonfinite_steps += 1
        if self.nonfinite == "raise":
            here = f"{int(bad)} of this rank's" if int(bad) else "none of this rank's, but some of another's"
            raise _C.RaggedError(
                f"[{self.operation}] Expected finite gradients, but got NaN or Inf in {here} gradients. Nothing was "
                "changed; nonfinite='skip' leaves such steps out."
            )
        return False

    def table(self) -> str:
        """What is kept of each parameter: optimizer, format, bytes on this rank, a line for all layers that are alike.
        Text, for print(). Not collective."""
        self._make_all_states()
        return table(self)

    # ---- state dicts ----

    def state_dict(self) -> dict[str, Any]:
        """torch's; holds states for every parameter that requires a gradient, stepped or not."""
        self._make_all_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Copies the states into this optimizer's own tensors. Nothing is cast: a state of another dtype, shape or
        format raises InvalidArgument, before anything is changed. States may be plain tensors of the global shape, or
        lie in any way on the same mesh. A parameter that the state dict says nothing of begins anew, one that doesn't
        require a gradient keeps what it has."""
        self._make_all_states()
        # torch's own casts states to the parameter's dtype, so it sees none; hooks still run, ours last.
        hook = self.register_load_state_dict_pre_hook(lambda optimizer, given: self._take(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.__dict__.pop("_incoming", None)

    def _take(self, given: dict[str, Any]) -> dict[str, Any]:
        groups, saved = self.param_groups, given["param_groups"]
        lengths = [len(group["params"]) for group in groups]
        if lengths == [len(group["params"]) for group in saved]:  # else torch raises
            pairs = []
            for position, (group, other) in enumerate(zip(groups, saved, strict=True)):
                self._check_loaded_group(group, other, position)
                names = self._names_of(position)
                for param, key, name in zip(group["params"], other["params"], names, strict=True):
                    pairs.append((group, param, name, given["state"].get(key)))
            ids = {key for group in saved for key in group["params"]}
            others = {key: value for key, value in given["state"].items() if key not in ids}
            for group, param, name, incoming in pairs:
                if incoming:
                    self._check_loaded_state(group, param, name, incoming)
            self._incoming = (pairs, others)
        return {**given, "state": {}}

    def _check_loaded_group(self, group: dict[str, Any], saved: dict[str, Any], position: int) -> None:
        """Raises where a saved group can't be continued with this one's options."""

    def _check_loaded_state(
        self, group: dict[str, Any], param: torch.Tensor, name: str, incoming: dict[str, Any]
    ) -> None:
        own = self.state.get(param) or self._new_state(group, param, name)
        if set(own) != set(incoming):
            refuse("load_state_dict", f"the states {sorted(own)}", sorted(incoming),
                   "They were saved by another optimizer or in another format: build this one with the same options.",
                   name)  # fmt: skip
        for key, tensor in own.items():
            value = incoming[key]
            if key == "step" and not isinstance(value, torch.Tensor):
                continue
            if value.shape != tensor.shape or (value.dtype != tensor.dtype and key != "step"):
                refuse("load_state_dict", f"'{key}' of shape {tuple(tensor.shape)} in {tensor.dtype}",
                       f"shape {tuple(value.shape)} in {value.dtype}",
                       "Build the optimizer with the options and the tensor-parallel size of the one that was saved.",
                       name)  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        own = {"nonfinite": self.nonfinite, "nonfinite_steps": self.nonfinite_steps}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        incoming = self.__dict__.pop("_incoming", None)
        if incoming is not None:
            state = {**state, "state": self.state}
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group.update(_with_names(group))
        if incoming is not None:
            self._copy_in(*incoming)
            self._after_load()

    @torch.no_grad()
    def _copy_in(self, pairs: Sequence[Any], others: dict[Any, Any]) -> None:
        for group, param, name, incoming in pairs:
            if not incoming and (param not in self.state or not param.requires_grad):
                continue
            if param not in self.state:
                self.state[param] = self._new_state(group, param, name)
            fresh = incoming or self._new_state(group, param, name)
            for key, tensor in self.state[param].items():
                _copy(tensor, fresh[key])
        for key, value in others.items():
            self.state[key] = value


def _with_names(options: dict[str, Any]) -> dict[str, Any]:
    """state_dtype by name: torch's full state dicts take no torch.dtype in a group."""
    given = options.get("state_dtype")
    return {**options, "state_dtype": dtype_name(given)} if isinstance(given, torch.dtype) else options


def _lie_alike(grad: torch.Tensor, param: torch.Tensor) -> bool:
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        return grad._spec.placements == param._spec.placements
    return not isinstance(grad, DTensor) and not isinstance(param, DTensor)


def _check_current(operation: str, param: torch.Tensor, name: str) -> None:
    unit = replaced_by_unit(param)
    if unit is not None:
        refuse(operation, "parameters of the sharded model", f"one that fully_shard has replaced since, as '{unit}'",
               "Build the optimizer after fully_shard, from model.parameters().", name)  # fmt: skip


def _copy(target: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
    elif value is target:
        pass
    elif isinstance(target, DTensor):
        if not isinstance(value, DTensor):
            mesh, placements = target.device_mesh, target.placements
            value = distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)
        target.copy_(value)
    else:
        target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def count_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many of the tensors hold NaN or Inf, 0-dim float32. One pass, nothing of their size allocated."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    device = filled[0].device if filled else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for tensor in filled:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in by_kind.values():
        largest = torch.stack(torch._foreach_norm(group, float("inf")))
        total += (~torch.isfinite(largest)).sum().to(device)
    return total


def agree_on_sum(value: torch.Tensor, params: Sequence[torch.Tensor]) -> float:
    """The sum over all ranks that hold other pieces of these parameters; one all-reduce for each of their groups, one
    in all on a 1-D mesh. Ranks give the same parameters."""
    groups: dict[dist.ProcessGroup, None] = {}
    for param in params:
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            for dim, placement in enumerate(param.placements):
                if not isinstance(placement, Replicate) and mesh.size(dim) > 1:
                    groups.setdefault(mesh.get_group(dim))
    value = value.clone()
    for group in groups:
        dist.all_reduce(value, group=group)
    return float(value)
