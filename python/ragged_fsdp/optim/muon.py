"""Muon over pieces of matrices: momentum stays on its shard, matrices visit one rank each to be orthogonalised, packed
into one all-to-all there and one back for each unit. The step is C++ (ragged/optim/muon_plan.h); here are torch's
interface, the options, and the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ragged_fsdp import _C
from ragged_fsdp.optim import adam
from ragged_fsdp.optim.base import ParamsT
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.matrices import MatrixOptimizer, Together, matrix_groups
from ragged_fsdp.optim.pieces import DTYPES, like, local_of, rows_like, tile_scales_like

KELLER = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

muon_groups = matrix_groups


class Muon(MatrixOptimizer):
    """Muon (Jordan et al., 2024) as torch.optim.Muon has it, for sharded matrices, stacks of matrices and, in groups of
    their own, fused ones: the update is the orthogonalised Nesterov momentum. Each matrix is orthogonalised whole on
    one rank; what travels is packed into two all-to-alls a unit and step, made from a plan that construction works out.
    Given equal gradients the bits don't depend on how many ranks there are.

    params: groups with `algorithm="muon"` (the default) hold parameters of two dims and more, the last two being the
        matrix; those with `algorithm="adamw"` hold the rest and get AdamW in the same step, with this optimizer's lr
        and weight_decay unless they have their own. muon_groups() makes both from a model's named parameters.
    ns_coefficients: a name ("keller", "you", "polar_express", "cushioned", "deepseek_v4") or (a, b, c) for all steps.
    ns_steps: None is the set's own number.
    adjust_lr_fn: None and "original" scale updates by sqrt(max(1, rows / columns)), "match_rms_adamw" by
        0.2 sqrt(max(rows, columns)) (Moonlight), which shares lr and weight decay with AdamW.
    eps: is there for torch's signature and has one value. Matrices are scaled by a power of two and normalised in fp32,
        so that gradients of 1e-30 count as those of 1; zero gives zero.
    normuon: NorMuon (arXiv 2510.05491): rows of the orthogonalised matrix are divided by the root of a moving average
        of their mean squares, with row_beta2, and the whole is scaled back to its length. One more number a row.
    momentum_format: "fp32", "bf16", or a byte an element in tiles of 32 x 32 as "power" or "dynamic" (see AdamW8bit),
        for which ranks own whole tiles: shard with `shard_policy=ragged_fsdp.optim.tile_rows`. None: state_dtype.
    splits: of a group: rows of the matrices that each fused parameter in it is made of, as (q, k, v); each is
        orthogonalised by itself.
    flatten: of a group: [out, ...] is one matrix of `out` rows (convolutions).
    state_dtype: of the momentum and of AdamW's moments. wire_dtype, ns_dtype: what travels, and the operands of
        Newton-Schulz; float32 or bfloat16. With bfloat16 the update is off by some percent, as torch's is.
    master_weights, nonfinite: as in AdamW.
    replicas: on hybrid meshes "repeat" computes each matrix in every replica, "share" divides them and exchanges
        results.
    buckets_in_flight: units on the wire around the one that computes.

    Groups may have any option of their own but wire_dtype, ns_dtype, nonfinite, replicas and buckets_in_flight. step()
    is collective: ranks must agree on which parameters have gradients. States: momentum_buffer, or momentum_codes and
    momentum_scales; row_exp_avg_sq with normuon; and AdamW's.
    """

    operation = "Muon"
    algorithm = "muon"
    only_matrices = frozenset({"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "normuon",
                               "row_beta2", "momentum_format", "splits", "flatten"})  # fmt: skip
    only_adamw = frozenset({"betas"})
    decides_states = MatrixOptimizer.decides_states | {"normuon", "momentum_format", "splits", "flatten"}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | tuple[float, float, float] = KELLER,
        eps: float = EPS,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        normuon: bool = False,
        row_beta2: float = 0.95,
        momentum_format: str | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        state_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.bfloat16,
        ns_dtype: torch.dtype = torch.bfloat16,
        master_weights: bool = False,
        nonfinite: str = "ignore",
        replicas: str = "repeat",
        buckets_in_flight: int = 2,
    ) -> None:
        if eps != EPS:
            remedy = "Matrices are scaled by a power of two before they are normalised: there is nothing for it to do."
            refuse(self.operation, f"eps {EPS}", eps, remedy)
        if replicas not in ("repeat", "share"):
            refuse(self.operation, "replicas 'repeat' or 'share'", repr(replicas), "Correct the option.")
        for name, dtype in (("wire_dtype", wire_dtype), ("ns_dtype", ns_dtype)):
            if dtype not in (torch.float32, torch.bfloat16):
                refuse(self.operation, f"{name} float32 or bfloat16", dtype, "Correct the option.")
        self._movement = (wire_dtype, ns_dtype, replicas)
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "normuon": normuon, "row_beta2": row_beta2, "momentum_format": momentum_format,
            "state_dtype": state_dtype, "master_weights": master_weights, "betas": adamw_betas,
        }  # fmt: skip
        adamw = {"betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, defaults, nonfinite, adamw, buckets_in_flight)

    # ---- groups and states ----

    def _check_matrices(self, group: dict[str, Any]) -> None:
        for key in ("momentum", "row_beta2"):
            if not 0.0 <= float(group[key]) < 1.0:
                refuse(self.operation, f"{key} in [0, 1)", group[key], "Correct the option.")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            refuse(self.operation, "adjust_lr_fn None, 'original' or 'match_rms_adamw'", repr(group["adjust_lr_fn"]),
                   "Fold another factor into the lr of a group.")  # fmt: skip
        if group["momentum_format"] not in (None, *DTYPES, *adam.FORMATS):
            refuse(self.operation, f"momentum_format to be one of {(*DTYPES, *adam.FORMATS)}",
                   repr(group["momentum_format"]), "Leave it out for that of state_dtype.")  # fmt: skip
        _check_coefficients(group["ns_coefficients"])
        if group["eps"] != EPS:
            refuse(self.operation, f"eps {EPS}", group["eps"], "It has nothing to do here: leave it out.")

    def _new_matrix_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        format = group["momentum_format"]
        if format in adam.FORMATS:
            state = {
                "momentum_codes": like(param, torch.uint8),
                "momentum_scales": tile_scales_like(param, name, self.operation, group["flatten"]),
            }
            local_of(state["momentum_codes"]).fill_(_C.zero_code(format, True))
        else:
            state = {"momentum_buffer": like(param, DTYPES[format or group["state_dtype"]])}
        if group["normuon"]:
            state["row_exp_avg_sq"] = rows_like(param, group["flatten"])
        return state

    def _check_loaded_group(self, group: dict[str, Any], saved: dict[str, Any], position: int) -> None:
        if group["algorithm"] != self.algorithm:
            return
        own, other = group["momentum_format"], saved.get("momentum_format")
        if own != other and (own in adam.FORMATS or other in adam.FORMATS):
            refuse("load_state_dict", f"a momentum in the format {own!r}", f"{other!r} in group {position}",
                   f"Build the optimizer with momentum_format={other!r}.")  # fmt: skip

    # ---- plans ----

    def _plan_key(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return (group["nesterov"], group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"],
                group["normuon"], float(group["row_beta2"]))  # fmt: skip

    def _make_plan(self, group: dict[str, Any], together: Together) -> Any:
        wire, dtype, replicas = self._movement
        shard, replicate = together.communicators()
        return _C.MuonPlan(
            **together.arguments,
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            scale=group["adjust_lr_fn"] or "original",
            coefficients=_as_text(group["ns_coefficients"]),
            num_steps=group["ns_steps"] or 0,
            ns_dtype=dtype,
            wire_dtype=wire,
            normuon=bool(group["normuon"]),
            row_beta2=float(group["row_beta2"]),
            share_replicas=replicas == "share",
            buckets_in_flight=self._buckets_in_flight,
            shard=shard,
            replicate=replicate,
        )

    # ---- the step ----

    def _step_plan(self, plan: Any, group: dict[str, Any], params: Sequence[torch.Tensor], scale: float) -> None:
        work = self._operands(params)
        momenta, scales, rows = [], [], []
        for param in params:
            # One that was frozen when states were made, and is, takes part with zeros.
            state = self.state.get(param) or self._new_matrix_state(group, param, "")
            momenta.append(_flat(state.get("momentum_buffer", state.get("momentum_codes"))))
            scales.append(_flat(state.get("momentum_scales")))
            rows.append(_flat(state.get("row_exp_avg_sq")))
        plan.set_momentum(float(group["momentum"]))
        rates = (float(group["lr"]), float(group["weight_decay"]))
        plan.step(work.values, work.grads, momenta, scales, rows, *rates, group["momentum_format"] or "", scale)
        work.finish()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_movement": self._movement}


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else local_of(tensor).reshape(-1)


def _as_text(coefficients: Any) -> str:
    return coefficients if isinstance(coefficients, str) else ", ".join(repr(float(number)) for number in coefficients)


def _check_coefficients(coefficients: Any) -> None:
    if isinstance(coefficients, str):
        return  # C++ knows the names
    numbers = tuple(coefficients)
    if len(numbers) != 3 or not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
        refuse("Muon", "ns_coefficients to be the name of a set or three numbers", numbers, "Correct the option.")
