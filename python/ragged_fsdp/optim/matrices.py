"""What optimizers that work on whole matrices share: two kinds of groups, how parameters lie as all ranks see it, plans
made from that and kept, and the frame of a step. What becomes of a matrix is C++ (ragged/optim/muon_plan.h,
soap_plan.h); what is the optimizer's own is in the subclasses.
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
from ragged_fsdp.optim.pieces import DTYPES, like, local_of
from ragged_fsdp.params import unit_number
from ragged_fsdp.placement import Interval, RaggedShard, shard_interval

NOT_MATRICES = r"(^|\.)(embed\w*|tok_embeddings|wte|wpe|lm_head|head|output|router|gate)\.|bias$"
_BUCKET_ELEMENTS = 1 << 25  # what travels together where parameters belong to no unit

MeshDim = tuple[Any, int]  # mesh and number of the dim


def matrix_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], adamw: str = NOT_MATRICES
) -> list[dict[str, Any]]:
    """Two groups for Muon and SOAP: matrices and stacks of them; and, for AdamW, parameters below 2-D and those whose
    name the regular expression `adamw` finds (embeddings, heads, routers, biases). Raises InvalidArgument where no
    matrix is left.
    """
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "algorithm": "adamw"}]
    for name, param in named_parameters:
        groups[param.ndim < 2 or bool(re.search(adamw, name))]["params"].append((name, param))
    if not groups[0]["params"]:
        refuse("matrix_groups", "a parameter of two dims whose name isn't excluded", "none", "Correct the expression.")
    return [group for group in groups if group["params"]]


@dataclasses.dataclass(frozen=True)
class Held:
    """How a parameter lies, as all ranks of its shard group see it."""

    shape: tuple[int, ...]  # what they cut
    intervals: tuple[Interval, ...]
    shard: MeshDim | None  # none: this process has all of it
    replicate: MeshDim | None


@dataclasses.dataclass(frozen=True)
class Together:
    """Parameters of a group that one plan steps, since the same ranks hold them."""

    shard: MeshDim | None
    replicate: MeshDim | None
    params: list[torch.Tensor]
    arguments: dict[str, Any]  # of the plan and of what says its roots: by parameter, and of all

    @property
    def ranks(self) -> int:
        return self.shard[0].size(self.shard[1]) if self.shard else 1

    def communicators(self) -> tuple[Any, Any]:
        """Of the shard group and of the replicas."""
        device = local_of(self.params[0]).device
        return tuple(
            communicator_of(*mesh_dim, device) if mesh_dim else _C.Communicator(None, device, "alone")
            for mesh_dim in (self.shard, self.replicate)
        )  # type: ignore[return-value]


@dataclasses.dataclass
class Operands:
    """Memory that a plan reads and writes, by parameter: 1-D values and gradients of this rank."""

    values: list[torch.Tensor] = dataclasses.field(default_factory=list)
    grads: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    late: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)  # (parameter, new values)

    def finish(self) -> None:
        """After the step: parameters whose memory isn't what the plan wrote."""
        for local, flat in self.late:
            local.copy_(flat.view(local.shape))


class MatrixOptimizer(ShardedOptimizer):
    """Groups with `algorithm` of the subclass's name hold matrices and stacks of them; those with algorithm="adamw"
    hold the rest and get AdamW in the same step. Plans are collective: ranks make them at the same points, at
    construction, when a group is added, and in the step after an option that is part of one has changed."""

    algorithm = ""  # of groups of matrices
    numbers_matrices = False  # states are by matrix of the whole parameter, so nothing but the shard group may cut it
    only_matrices: frozenset[str] = frozenset()  # options that AdamW's groups don't have
    only_adamw: frozenset[str] = frozenset()

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], nonfinite: str, adamw: dict[str, Any], buckets_in_flight: int
    ) -> None:
        self._adamw = adamw  # options of AdamW's groups that differ from those of matrices
        self._buckets_in_flight = buckets_in_flight
        self._plans: dict[int, Any] = {}
        defaults = {**defaults, "algorithm": self.algorithm, "splits": None, "flatten": False}
        super().__init__(params, defaults, nonfinite)
        self._all_plans()

    # ---- for subclasses ----

    def _check_matrices(self, group: dict[str, Any]) -> None:
        """Raises InvalidArgument for options of a group of matrices."""

    def _new_matrix_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """States of a parameter that is matrices, its master apart."""
        raise NotImplementedError

    def _plan_key(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Options that a plan is made of."""
        raise NotImplementedError

    def _make_plan(self, group: dict[str, Any], together: Together) -> Any:
        """Collective over its ranks."""
        raise NotImplementedError

    def _step_plan(self, plan: Any, group: dict[str, Any], params: Sequence[torch.Tensor], scale: float) -> None:
        """One step of a plan's parameters; some have a gradient."""
        raise NotImplementedError

    # ---- groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's. Collective once the optimizer is built, as construction is."""
        super().add_param_group(param_group)
        if self.__dict__.get("_is_built"):
            self._all_plans()

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        algorithm = group.get("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            refuse(self.operation, f"algorithm '{self.algorithm}' or 'adamw'", repr(algorithm), "Correct the group.")
        wrong = group.keys() & (self.only_matrices if algorithm == "adamw" else self.only_adamw)
        if wrong:
            refuse(self.operation, f"options of {algorithm} in a group with algorithm '{algorithm}'",
                   f"'{min(wrong)}'", "Move it to the other group.")  # fmt: skip
        return {**self._adamw, **group} if algorithm == "adamw" else group

    def _check_group(self, group: dict[str, Any]) -> None:
        adam.check_rates(self.operation, group)
        if group["state_dtype"] not in DTYPES:
            refuse(self.operation, "state_dtype float32 or bfloat16", group["state_dtype"], "Correct the option.")
        if group["algorithm"] == "adamw":
            adam.check_options(self.operation, group)
        else:
            self._check_matrices(group)

    def _check_param(self, param: torch.Tensor, name: str) -> None:
        super()._check_param(param, name)
        group = self.param_groups[-1]
        if group["algorithm"] == "adamw":
            return
        if param.ndim < 2:
            refuse(self.operation, "matrices or stacks of matrices", f"shape {tuple(param.shape)}",
                   "Put it into a group with algorithm='adamw', as matrix_groups(model.named_parameters()) does.",
                   name)  # fmt: skip
        if group["splits"] is not None:
            rows = param.shape[0] if group["flatten"] else param.shape[-2]
            if sum(group["splits"]) != rows or min(group["splits"]) < 1:
                refuse(self.operation, f"splits of at least 1 row that add up to {rows}", tuple(group["splits"]),
                       "Give parameters that are fused otherwise a group of their own.", name)  # fmt: skip
        self._held(param, name, group["flatten"])

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        if group["algorithm"] == "adamw":
            return adam.new_state(param, name, DTYPES[group["state_dtype"]], group["master_weights"])
        state = self._new_matrix_state(group, param, name)
        if group["master_weights"] and param.dtype != torch.float32:
            state["master"] = like(param, torch.float32)
            local_of(state["master"]).copy_(local_of(param))
        return state

    # ---- plans ----

    def _all_plans(self) -> None:
        self._is_built = True
        for position, group in enumerate(self.param_groups):
            if group["algorithm"] == self.algorithm:
                self._plans_of(position)

    def _plans_of(self, position: int) -> list[tuple[Any, list[torch.Tensor]]]:
        """(plan, its parameters) of a group, one for each set of ranks that shard together. Made once, and again after
        an option that is part of it has changed; collective then."""
        group = self.param_groups[position]
        key = (*self._plan_key(group), tuple(group["params"]))
        known = self._plans.get(position)
        if known is None or not _same(known[0], key):
            plans = [(self._make_plan(group, each), each.params) for each in self._together(position)]
            known = self._plans[position] = (key, plans)
        return known[1]

    def _together(self, position: int) -> list[Together]:
        group, names = self.param_groups[position], self._names_of(position)
        params = group["params"]
        held = [self._held(param, name, group["flatten"]) for param, name in zip(params, names, strict=True)]
        buckets = _buckets([unit_number(p) for p in params], [p.numel() for p in params])
        by_ranks: dict[Any, list[int]] = {}
        for index, each in enumerate(held):
            by_ranks.setdefault((each.shard, each.replicate), []).append(index)
        return [
            Together(
                *where,
                params=[params[i] for i in indices],
                arguments={
                    "names": [names[i] for i in indices],
                    "shapes": [list(held[i].shape) for i in indices],
                    "held": [list(held[i].intervals) for i in indices],
                    "buckets": [buckets[i] for i in indices],
                    "splits": list(group["splits"] or ()),
                    "flatten": group["flatten"],
                },
            )
            for where, indices in by_ranks.items()
        ]

    def _held(self, param: torch.Tensor, name: str, flatten: bool) -> Held:
        """Raises InvalidArgument, alike on all ranks, where matrices aren't cut along rows by one mesh dim alone."""
        if not isinstance(param, DTensor):
            return Held(tuple(param.shape), ((0, param.numel()),), None, None)
        mesh, shape = param.device_mesh, list(param.shape)
        stack_dims = range(0 if flatten or self.numbers_matrices else len(shape) - 2)
        # Whole rows of a matrix, or of a flattened one; of a stack whole matrices, where these are numbered.
        cuts_rows = len(shape) == 2 or flatten or self.numbers_matrices
        shard, replicate, intervals = None, None, None
        is_ragged = any(isinstance(placement, RaggedShard) for placement in param.placements)
        for dim, placement in enumerate(param.placements):
            if isinstance(placement, RaggedShard):
                shard, intervals = (mesh, dim), placement.intervals()
            elif type(placement) is Shard and placement.dim in stack_dims:
                begin, end = shard_interval(shape[placement.dim], mesh.size(dim), mesh.get_local_rank(dim))
                shape[placement.dim] = end - begin  # whole matrices of a stack
            elif type(placement) is Shard and placement.dim == 0 and cuts_rows and not is_ragged and shard is None:
                rows = [shard_interval(shape[0], mesh.size(dim), rank) for rank in range(mesh.size(dim))]
                numel = math.prod(shape[1:])
                shard, intervals = (mesh, dim), tuple((a * numel, b * numel) for a, b in rows)
            elif isinstance(placement, Replicate):
                replicate = replicate or ((mesh, dim) if mesh.size(dim) > 1 else None)
            elif type(placement) is not Shard or mesh.size(dim) > 1:
                whole = "whole parameters" if self.numbers_matrices else "whole matrices"
                refuse(self.operation, f"{whole} across tensor-parallel ranks", f"{placement} of a parameter of shape "
                       f"{tuple(param.shape)}", "Put it into a group with algorithm='adamw'.", name)  # fmt: skip
        return Held(tuple(shape), intervals or ((0, math.prod(shape)),), shard, replicate)

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
        work = [*self._work(self.algorithm), *self._work("adamw")]
        masters.follow(work)
        for position, group in enumerate(self.param_groups):
            if group["algorithm"] != self.algorithm:
                continue
            for plan, params in self._plans_of(position):
                if any(param.grad is not None for param in params):  # on all ranks alike
                    self._step_plan(plan, group, params, scale)
        adam.step(self._work("adamw"), scale)
        masters.written(work)

    def _operands(self, params: Sequence[torch.Tensor]) -> Operands:
        found = Operands()
        for param in params:
            local, state = local_of(param), self.state.get(param, {})
            target = local_of(state["master"]) if "master" in state else local
            flat = target.reshape(-1)
            if flat.data_ptr() != local.data_ptr():
                found.late.append((local, flat))
            found.values.append(flat)
            found.grads.append(None if param.grad is None else local_of(param.grad).reshape(-1))
        return found

    def _after_load(self) -> None:
        work = [*self._work(self.algorithm, False), *self._work("adamw", False)]
        for _, param, state in work:
            if "master" in state:
                local_of(param).copy_(local_of(state["master"]))
        self._masters().written(work)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_adamw": self._adamw, "_buckets_in_flight": self._buckets_in_flight, "_plans": {}, "_is_built": True}
        return {**super().__getstate__(), **own}


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:-1] == b[:-1] and len(a[-1]) == len(b[-1]) and all(p is q for p, q in zip(a[-1], b[-1]))


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
