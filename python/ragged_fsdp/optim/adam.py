"""Adam's states and its step over pieces, for whichever optimizer holds them: fp32 or bf16 moments, or 8-bit codes with
a scale a tile, and fp32 masters of bf16 parameters. The arithmetic is C++ (ragged/optim/adamw_step.h,
adamw8bit_step.h); this gathers its arguments. No communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ragged_fsdp import _C
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.pieces import like, local_of, place_of, tile_scales_like

FORMATS = ("power", "dynamic")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")

Work = tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]  # parameter group, parameter, its state


def check_options(operation: str, group: dict[str, Any]) -> None:
    """Raises InvalidArgument for numbers out of range."""
    check_rates(operation, group)
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        refuse(operation, "two betas in [0, 1)", betas, "Correct the option.")
    if not float(group["eps"]) >= 0.0:
        refuse(operation, "eps >= 0", group["eps"], "Correct the option.")


def check_rates(operation: str, group: dict[str, Any]) -> None:
    """The learning rate and the weight decay."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        refuse(operation, "a learning rate of one element", f"a tensor of {lr.numel()}", "Correct the option.")
    for key in ("lr", "weight_decay"):
        if not float(group[key]) >= 0.0:
            refuse(operation, f"{key} >= 0", group[key], "Correct the option.")


def new_state(
    param: torch.Tensor, name: str, moments: torch.dtype | str, master: bool
) -> dict[str, torch.Tensor]:
    """States of a parameter that was never stepped. moments: a dtype, or the name of an 8-bit format. master: keep fp32
    values of a parameter in fewer bits."""
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if isinstance(moments, str):
        for moment in _MOMENTS:
            state[f"{moment}_codes"] = like(param, torch.uint8)
            state[f"{moment}_scales"] = tile_scales_like(param, name)
        local_of(state["exp_avg_codes"]).fill_(_C.zero_code(moments, True))
        local_of(state["exp_avg_sq_codes"]).fill_(_C.zero_code(moments, False))
    else:
        state["exp_avg"], state["exp_avg_sq"] = like(param, moments), like(param, moments)
    if master and param.dtype != torch.float32:
        state["master"] = like(param, torch.float32)
        local_of(state["master"]).copy_(local_of(param))
    return state


class Masters:
    """Keeps fp32 masters in step with their parameters: a parameter that somebody else wrote since the last step (a
    load of model weights, an in-place change) gives its new values to its master, and keeps the master's bits where
    they round to the parameter's."""

    def __init__(self) -> None:
        self._versions: dict[torch.Tensor, int] = {}

    def follow(self, work: Sequence[Work]) -> None:
        """Before a step."""
        for _, param, state in work:
            if "master" not in state:
                continue
            values, master = local_of(param), local_of(state["master"])
            if self._versions.get(param) != values._version:
                changed = master.to(values.dtype) != values
                master.copy_(torch.where(changed, values.to(torch.float32), master))

    def written(self, work: Sequence[Work]) -> None:
        """After a step or a load, when parameters are what their masters say."""
        for _, param, state in work:
            if "master" in state:
                self._versions[param] = local_of(param)._version


def step(work: Sequence[Work], scale: float) -> None:
    """One step of each parameter with its gradient times `scale`; `maximize` of its group turns the sign."""
    if not work:
        return
    torch._foreach_add_([state["step"] for _, _, state in work], 1.0)
    batches: dict[tuple[float, str], _Batch] = {}
    late: list[tuple[torch.Tensor, torch.Tensor]] = []  # (parameter, new values) that no kernel writes
    for group, param, state in work:
        factor = -scale if group.get("maximize") else scale
        batch = batches.setdefault((factor, group["format"] if "exp_avg_codes" in state else ""), _Batch())
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rates = (float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
        batch.rates.append((*rates, int(state["step"].item())))
        values, image = _target(param, state, late)
        batch.params.append(values)
        batch.images.append(image)
        grad = _flat(local_of(param.grad))  # type: ignore[arg-type]
        batch.grads.append(grad if grad.dtype in (torch.float32, torch.bfloat16) else grad.float())
        keys = _MOMENTS if "exp_avg" in state else _CODES
        batch.states.append([_flat(local_of(state[key])) for key in keys])
        place = place_of(param)
        batch.places.append((place.shape, place.begin, place.end))
    for (factor, format), batch in batches.items():
        if format:
            _C.adamw8bit_step(
                batch.params, batch.grads, batch.states, batch.images, batch.rates, batch.places, format, factor
            )
        else:
            first, second = ([pair[i] for pair in batch.states] for i in range(2))
            _C.adamw_step(batch.params, batch.grads, first, second, batch.images, batch.rates, factor)
    for param, values in late:
        local = local_of(param)
        local.copy_(values.view(local.shape))


@dataclasses.dataclass
class _Batch:
    params: list[torch.Tensor] = dataclasses.field(default_factory=list)
    grads: list[torch.Tensor] = dataclasses.field(default_factory=list)
    images: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    states: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    rates: list[tuple[float, float, float, float, float, int]] = dataclasses.field(default_factory=list)
    places: list[tuple[tuple[int, ...], int, int]] = dataclasses.field(default_factory=list)


def _flat(local: torch.Tensor) -> torch.Tensor:
    """1-D in row-major order: a view where that is how it lies, as states always do."""
    return local.detach().reshape(-1)


def _target(
    param: torch.Tensor, state: dict[str, torch.Tensor], late: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(fp32 values that the step changes, bf16 parameter that it writes in the same pass)."""
    local = local_of(param)
    master = state.get("master")
    if master is None and local.dtype == torch.float32 and local.is_contiguous():
        return _flat(local), None
    values = _flat(local_of(master)) if master is not None else _flat(local).to(torch.float32, copy=True)
    if local.dtype == torch.bfloat16 and local.is_contiguous():
        return values, _flat(local)
    late.append((param, values))
    return values, None
