"""Muon over pieces of matrices: momentum stays on its shard, matrices visit one rank each to be orthogonalised, packed
into one all-to-all there and one back for each unit. The step is C++ (ragged/optim/muon_plan.h); here are torch's
interface, the groups, and the states.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ragged_fsdp import _C
from ragged_fsdp.mesh import communicator_of
from ragged_fsdp.optim import adam
from ragged_fsdp.optim.base import ParamsT, ShardedOptimizer
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.pieces import like, local_of
from ragged_fsdp.params import unit_number
from ragged_fsdp.placement import Interval, RaggedShard, shard_interval

KELLER = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
NOT_MATRICES = r"(^|\.)(embed\w*|tok_embeddings|wte|wpe|lm_head|head|output|router|gate)\.|bias$"
_BUCKET_ELEMENTS = 1 << 25  # what travels together where parameters belong to no unit
_ONLY_ADAMW, _ONLY_MUON = {"betas"}, {"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "splits",
                                      "flatten"}  # fmt: skip


def muon_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], adamw: str = NOT_MATRICES
) -> list[dict[str, Any]]:
    """Two groups for Muon: matrices and stacks of them; and, for AdamW, parameters below 2-D and those whose name the
    regular expression `adamw` finds (embeddings, heads, routers, biases). Raises InvalidArgument where no matrix is
    left.
    """
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "algorithm": "adamw"}]
    for name, param in named_parameters:
        groups[param.ndim < 2 or bool(re.search(adamw, name))]["params"].append((name, param))
    if not groups[0]["params"]:
        refuse("muon_groups", "a parameter of two dims whose name isn't excluded", "none", "Correct the expression.")
    return [group for group in groups if group["params"]]


@dataclasses.dataclass(frozen=True)
class _Held:
    """How a parameter lies, as all ranks of its shard group see it."""

    shape: tuple[int, ...]  # what they cut
    intervals: tuple[Interval, ...]
    shard: tuple[Any, int] | None  # (mesh, dim); none: this process has all of it
    replicate: tuple[Any, int] | None


class Muon(ShardedOptimizer):
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
    splits: of a group: rows of the matrices that each fused parameter in it is made of, as (q, k, v); each is
        orthogonalised by itself.
    flatten: of a group: [out, ...] is one matrix of `out` rows (convolutions).
    state_dtype: of the momentum and of AdamW's moments. wire_dtype, ns_dtype: what travels, and the operands of
        Newton-Schulz; float32 or bfloat16. With bfloat16 the update is off by some percent, as torch's is.
    master_weights, nonfinite: as in AdamW.
    replicas: on hybrid meshes "repeat" computes each matrix in every replica, "share" divides them and exchanges
        results.
    buckets_in_flight: units on the wire around the one that computes.

    step() is collective: ranks must agree on which parameters have gradients. States: momentum_buffer; and AdamW's.
    """

    operation = "Muon"

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
        for name, dtype in (("wire_dtype", wire_dtype), ("ns_dtype", ns_dtype), ("state_dtype", state_dtype)):
            if dtype not in (torch.float32, torch.bfloat16):
                refuse(self.operation, f"{name} float32 or bfloat16", dtype, "Correct the option.")
        self._movement = (wire_dtype, ns_dtype, replicas, buckets_in_flight)
        self._adamw = {"betas": adamw_betas, "eps": adamw_eps}
        self._plans: dict[Any, Any] = {}
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon", "splits": None, "flatten": False, "state_dtype": state_dtype,
            "master_weights": master_weights, "betas": adamw_betas,
        }  # fmt: skip
        super().__init__(params, defaults, nonfinite)
        self._all_plans()

    # ---- groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's. Collective once the optimizer is built, as construction is."""
        super().add_param_group(param_group)
        if self.__dict__.get("_is_built"):
            self._all_plans()

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        algorithm = group.get("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            refuse(self.operation, "algorithm 'muon' or 'adamw'", repr(algorithm), "Correct the group.")
        wrong = group.keys() & (_ONLY_MUON if algorithm == "adamw" else _ONLY_ADAMW)
        if wrong:
            refuse(self.operation, f"options of {algorithm} in a group with algorithm '{algorithm}'",
                   f"'{min(wrong)}'", "Move it to the other group.")  # fmt: skip
        return {**self._adamw, **group} if algorithm == "adamw" else group

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            adam.check_options(self.operation, group)
            return
        adam.check_rates(self.operation, group)
        if not 0.0 <= float(group["momentum"]) < 1.0:
            refuse(self.operation, "momentum in [0, 1)", group["momentum"], "Correct the option.")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            refuse(self.operation, "adjust_lr_fn None, 'original' or 'match_rms_adamw'", repr(group["adjust_lr_fn"]),
                   "Fold another factor into the lr of a group.")  # fmt: skip
        _check_coefficients(group["ns_coefficients"])
        if group["eps"] != EPS:
            refuse(self.operation, f"eps {EPS}", group["eps"], "It has nothing to do here: leave it out.")

    def _check_param(self, param: torch.Tensor, name: str) -> None:
        super()._check_param(param, name)
        group = self.param_groups[-1]
        if group["algorithm"] == "adamw":
            return
        if param.ndim < 2:
            refuse(self.operation, "matrices or stacks of matrices", f"shape {tuple(param.shape)}",
                   "Put it into a group with algorithm='adamw', as muon_groups(model.named_parameters()) does.",
                   name)  # fmt: skip
        if group["splits"] is not None:
            rows = param.shape[0] if group["flatten"] else param.shape[-2]
            if sum(group["splits"]) != rows or min(group["splits"]) < 1:
                refuse(self.operation, f"splits of at least 1 row that add up to {rows}", tuple(group["splits"]),
                       "Give parameters that are fused otherwise a group of their own.", name)  # fmt: skip
        _held(param, name, group["flatten"])

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        if group["algorithm"] == "adamw":
            return adam.new_state(param, name, group["state_dtype"], group["master_weights"])
        state = {"momentum_buffer": like(param, group["state_dtype"])}
        if group["master_weights"] and param.dtype != torch.float32:
            state["master"] = like(param, torch.float32)
            local_of(state["master"]).copy_(local_of(param))
        return state

    # ---- plans ----

    def _all_plans(self) -> None:
        self._is_built = True
        for position, group in enumerate(self.param_groups):
            if group["algorithm"] == "muon":
                self._plans_of(position)

    def _plans_of(self, position: int) -> list[tuple[Any, list[torch.Tensor]]]:
        """(plan, its parameters) of a group, one for each set of ranks that shard together. Made once, and again after
        an option that is part of it has changed; collective then."""
        group = self.param_groups[position]
        key = (group["nesterov"], group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"],
               tuple(group["params"]))  # fmt: skip
        known = self._plans.get(position)
        if known is None or not _same(known[0], key):
            known = self._plans[position] = (key, self._make_plans(position))
        return known[1]

    def _make_plans(self, position: int) -> list[tuple[Any, list[torch.Tensor]]]:
        group = self.param_groups[position]
        by_ranks: dict[Any, list[int]] = {}
        held = []
        for index, (param, name) in enumerate(zip(group["params"], self._names_of(position), strict=True)):
            held.append(_held(param, name, group["flatten"]))
            by_ranks.setdefault((held[-1].shard, held[-1].replicate), []).append(index)
        buckets = _buckets([unit_number(p) for p in group["params"]], [p.numel() for p in group["params"]])
        return [
            (self._plan(position, where, indices, held, buckets), [group["params"][i] for i in indices])
            for where, indices in by_ranks.items()
        ]

    def _plan(
        self, position: int, where: Any, indices: Sequence[int], held: Sequence[_Held], buckets: Sequence[int]
    ) -> Any:
        group, names = self.param_groups[position], self._names_of(position)
        wire, dtype, replicas, in_flight = self._movement
        device = local_of(group["params"][indices[0]]).device
        shard, replicate = (
            communicator_of(*mesh_dim, device) if mesh_dim else _C.Communicator(None, device, "alone")
            for mesh_dim in where
        )
        return _C.MuonPlan(
            names=[names[i] for i in indices],
            shapes=[list(held[i].shape) for i in indices],
            held=[list(held[i].intervals) for i in indices],
            splits=list(group["splits"] or ()),
            buckets=[buckets[i] for i in indices],
            flatten=group["flatten"],
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            scale=group["adjust_lr_fn"] or "original",
            coefficients=_as_text(group["ns_coefficients"]),
            num_steps=group["ns_steps"] or 0,
            ns_dtype=dtype,
            wire_dtype=wire,
            share_replicas=replicas == "share",
            buckets_in_flight=in_flight,
            shard=shard,
            replicate=replicate,
        )

    # ---- the step ----

    def _masters(self) -> adam.Masters:
        return self.__dict__.setdefault("_kept_masters", adam.Masters())

    def _work(self, algorithm: str, only_with_grad: bool = True) -> list[adam.Work]:
        return [
            (group, param, self.state[param])
            for group in self.param_groups
            if group["algorithm"] == algorithm
            for param in group["params"]
            if (param.grad is not None or not only_with_grad) and param in self.state
        ]

    def _update(self, scale: float) -> None:
        masters = self._masters()
        work = [*self._work("muon"), *self._work("adamw")]
        masters.follow(work)
        for position, group in enumerate(self.param_groups):
            if group["algorithm"] == "muon":
                for plan, params in self._plans_of(position):
                    self._step_plan(plan, group, params, scale)
        adam.step(self._work("adamw"), scale)
        masters.written(work)

    def _step_plan(self, plan: Any, group: dict[str, Any], params: Sequence[torch.Tensor], scale: float) -> None:
        if all(param.grad is None for param in params):
            return  # on all ranks alike
        values, grads, momenta = [], [], []
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param in params:
            local, state = local_of(param), self.state.get(param, {})
            target = local_of(state["master"]) if "master" in state else local
            flat = target.reshape(-1)
            if flat.data_ptr() != local.data_ptr():
                late.append((local, flat))
            values.append(flat)
            grads.append(None if param.grad is None else local_of(param.grad).reshape(-1))
            buffer = state.get("momentum_buffer")
            momenta.append(local_of(buffer).reshape(-1) if buffer is not None else torch.zeros_like(flat))
        plan.set_momentum(float(group["momentum"]))
        plan.step(values, grads, momenta, float(group["lr"]), float(group["weight_decay"]), scale)
        for local, flat in late:
            local.copy_(flat.view(local.shape))

    def _after_load(self) -> None:
        work = [*self._work("muon", False), *self._work("adamw", False)]
        for _, param, state in work:
            if "master" in state:
                local_of(param).copy_(local_of(state["master"]))
        self._masters().written(work)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_movement": self._movement, "_adamw": self._adamw, "_plans": {}, "_is_built": True}
        return {**super().__getstate__(), **own}


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:-1] == b[:-1] and len(a[-1]) == len(b[-1]) and all(p is q for p, q in zip(a[-1], b[-1]))


def _as_text(coefficients: Any) -> str:
    return coefficients if isinstance(coefficients, str) else ", ".join(repr(float(number)) for number in coefficients)


def _check_coefficients(coefficients: Any) -> None:
    if isinstance(coefficients, str):
        return  # C++ knows the names
    numbers = tuple(coefficients)
    if len(numbers) != 3 or not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
        refuse("Muon", "ns_coefficients to be the name of a set or three numbers", numbers, "Correct the option.")


def _held(param: torch.Tensor, name: str, flatten: bool) -> _Held:
    """Raises InvalidArgument, alike on all ranks, where matrices aren't cut along rows by one mesh dim alone."""
    if not isinstance(param, DTensor):
        return _Held(tuple(param.shape), ((0, param.numel()),), None, None)
    mesh, shape = param.device_mesh, list(param.shape)
    matrix_dims = range(len(shape)) if flatten else range(len(shape) - 2, len(shape))
    shard, replicate, intervals = None, None, None
    is_ragged = any(isinstance(placement, RaggedShard) for placement in param.placements)
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, RaggedShard):
            shard, intervals = (mesh, dim), placement.intervals()
        elif type(placement) is Shard and placement.dim not in matrix_dims:
            begin, end = shard_interval(shape[placement.dim], mesh.size(dim), mesh.get_local_rank(dim))
            shape[placement.dim] = end - begin  # whole matrices of a stack
        elif type(placement) is Shard and placement.dim == 0 and len(shape) == 2 and not is_ragged and shard is None:
            rows = [shard_interval(shape[0], mesh.size(dim), rank) for rank in range(mesh.size(dim))]
            shard, intervals = (mesh, dim), tuple((a * shape[1], b * shape[1]) for a, b in rows)
        elif isinstance(placement, Replicate):
            replicate = replicate or ((mesh, dim) if mesh.size(dim) > 1 else None)
        else:
            refuse("Muon", "whole matrices across tensor-parallel ranks", f"{placement} of a parameter of shape "
                   f"{tuple(param.shape)}", "Put it into a group with algorithm='adamw'.", name)  # fmt: skip
    if shard is None:
        numel = 1
        for size in shape:
            numel *= size
        intervals = ((0, numel),)
    assert intervals is not None
    return _Held(tuple(shape), intervals, shard, replicate)


def _buckets(units: Sequence[int | None], sizes: Sequence[int]) -> list[int]:
    """What travels together: the parameters of a unit, by order of first appearance; where some have none, runs of a
    bounded size. From what all ranks know alone."""
    if all(unit is not None for unit in units):
        order = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        return [order[unit] for unit in units]
    buckets, filled, bucket = [], 0, 0
    for size in sizes:
        if filled and filled + size > _BUCKET_ELEMENTS:
            bucket, filled = bucket + 1, 0
        buckets.append(bucket)
        filled += size
    return buckets
