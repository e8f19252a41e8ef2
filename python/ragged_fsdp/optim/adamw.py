"""AdamW with one fused pass over the pieces of all parameters."""

from __future__ import annotations

from typing import Any

import torch

from ragged_fsdp.optim import adam
from ragged_fsdp.optim.base import ParamsT, ShardedOptimizer, refuse_switches
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.pieces import DTYPES, local_of


class AdamW(ShardedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) as torch.optim.AdamW has it: decoupled decay before the update. One pass
    reads gradients and moments and writes parameters; given equal gradients the bits don't depend on how the parameter
    is cut. No communication.

    params: parameters, (name, parameter) pairs or groups of either; RaggedTensors, stock DTensors, plain tensors;
        float32, bfloat16 or float16. Gradients have their dtype.
    state_dtype: of both moments, float32 or bfloat16, whatever the parameters have. Arithmetic is fp32.
    master_weights: keep fp32 values of parameters in fewer bits, and write the parameter as their image in the same
        pass. Without it such a parameter is rounded at each step and small updates are lost.
    nonfinite: see ShardedOptimizer.

    States: step, exp_avg, exp_avg_sq as in torch.optim.AdamW, whose state dicts load too (float32 states), and master.
    amsgrad, foreach, capturable, differentiable and fused=False raise with the reason.
    """

    operation = "AdamW"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        nonfinite: str = "ignore",
    ) -> None:
        refuse_switches(self.operation, foreach, fused, capturable, differentiable, amsgrad)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
                    "state_dtype": state_dtype, "master_weights": master_weights}  # fmt: skip
        super().__init__(params, defaults, nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        adam.check_options(self.operation, group)
        if group["state_dtype"] not in DTYPES:
            refuse(self.operation, "state_dtype float32 or bfloat16", group["state_dtype"],
                   "AdamW8bit keeps moments in 8 bits.")  # fmt: skip

    def _moments(self, group: dict[str, Any], param: torch.Tensor, name: str) -> torch.dtype | str:
        return DTYPES[group["state_dtype"]]

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        return adam.new_state(param, name, self._moments(group, param, name), group["master_weights"])

    def _masters(self) -> adam.Masters:
        # Not part of a pickle: what isn't known is compared.
        return self.__dict__.setdefault("_kept_masters", adam.Masters())

    def _work(self, only_with_grad: bool) -> list[adam.Work]:
        return [
            (group, param, self.state[param])
            for group in self.param_groups
            for param in group["params"]
            if (param.grad is not None or not only_with_grad) and param in self.state
        ]

    def _update(self, scale: float) -> None:
        work = self._work(only_with_grad=True)
        masters = self._masters()
        masters.follow(work)
        adam.step(work, scale)
        masters.written(work)

    def _after_load(self) -> None:
        # A parameter is its master's image, never the other way round.
        work = self._work(only_with_grad=False)
        for _, param, state in work:
            if "master" in state:
                local_of(param).copy_(local_of(state["master"]))
        self._masters().written(work)
