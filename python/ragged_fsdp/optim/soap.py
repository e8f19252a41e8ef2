"""SOAP over pieces of matrices: gradients visit one rank each, which holds all states of a matrix whole, and updates
come back, packed into one all-to-all each way for each unit. The step is C++ (ragged/optim/soap_plan.h); here are
torch's interface, the options, and the states.

[Note: states on their root]
Factors and bases have nothing to do with the parameter's shape, so a state is a tensor of its own, on the parameter's
mesh, all of which one rank of the shard group owns: RaggedShard(0, (0, 1, 0), shape). A parameter that is one matrix
has "L", "R", "Q_L", "Q_R", "exp_avg" and "exp_avg_sq"; of a stack or of splits they are numbered, "L_0", "L_1", since
a rank may own the first and the last of them. Which rank is a function of shapes, placements and options. A state
that lies elsewhere, since an option has changed, moves when the plan is made.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ragged_fsdp import _C
from ragged_fsdp.optim import adam
from ragged_fsdp.optim.base import ParamsT
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.matrices import MatrixOptimizer, Together
from ragged_fsdp.optim.pieces import local_of, on_rank
from ragged_fsdp.tensor import RaggedTensor

_ORDER = ("L", "R", "Q_L", "Q_R", "exp_avg", "exp_avg_sq")  # as the plan takes them


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A matrix of a parameter. number: None where it is the only one."""

    param: torch.Tensor
    number: int | None
    rows: int
    columns: int
    mesh_dim: int | None  # of the shard group; none: this process has all of it
    root: int  # rank of the shard group that holds the states
    is_here: bool  # this one

    def key(self, state: str) -> str:
        return state if self.number is None else f"{state}_{self.number}"

    def shapes(self, max_precondition_dim: int) -> dict[str, tuple[int, int]]:
        """Of the states that there are: a longer side has no factor and no basis."""
        found = {}
        for side, size in (("L", self.rows), ("R", self.columns)):
            if size <= max_precondition_dim:
                found |= {side: (size, size), f"Q_{side}": (size, size)}
        return found | {moment: (self.rows, self.columns) for moment in ("exp_avg", "exp_avg_sq")}


@dataclasses.dataclass(frozen=True)
class _Plan:
    core: Any  # _C.SoapPlan
    rooted: list[tuple[int, _Matrix]]  # (number in the plan, matrix) of those whose states are here


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al., arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner, for sharded matrices,
    stacks of matrices and, in groups of their own, fused ones. Gradients of matrices that several ranks hold go to one
    of them, their root, and updates come back: two all-to-alls a unit and step. All states lie whole on the root, 24
    bytes an element of a square matrix. Given equal gradients the bits don't depend on how many ranks there are, and
    are those of `ragged train`. The first gradient of a matrix makes its basis and updates nothing.

    params: groups with `algorithm="soap"` (the default) hold parameters of two dims and more, the last two being the
        matrix; those with `algorithm="adamw"` hold the rest and get AdamW in the same step, with this optimizer's lr
        and weight_decay unless they have their own. matrix_groups() makes both from a model's named parameters.
    betas: of the momentum; and of the second moment and both factors.
    precondition_frequency: steps from one basis to the next.
    max_precondition_dim: a longer side of a matrix has no factor and no basis, which saves what it costs: a side of n
        rows takes 8 n^2 bytes. Where neither side has one this is Adam.
    splits, flatten: of a group, as in Muon.
    wire_dtype: of gradients and updates between ranks; float32 or bfloat16.
    adamw_state_dtype: of AdamW's moments, float32 or bfloat16. SOAP's states are float32.
    master_weights, nonfinite, buckets_in_flight: as in Muon.

    lr, betas, eps, weight_decay, both precondition options and master_weights may differ by group; betas, eps and
    precondition_frequency may change as lr does. step() is collective: ranks must agree on which parameters have
    gradients. States: step, and those of the note above; and AdamW's. Replicas of a hybrid mesh hold them each. A
    parameter may be cut by one mesh dim alone: whole experts on tensor-parallel ranks raise.
    """

    operation = "SOAP"
    algorithm = "soap"
    numbers_matrices = True
    only_matrices = frozenset({"precondition_frequency", "max_precondition_dim", "splits", "flatten"})
    only_adamw = frozenset({"state_dtype"})
    decides_states = MatrixOptimizer.decides_states | {"max_precondition_dim", "splits", "flatten"}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        *,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_state_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        nonfinite: str = "ignore",
        buckets_in_flight: int = 2,
    ) -> None:
        self._wire_dtype = wire_dtype
        self._matrices: dict[torch.Tensor, list[_Matrix]] = {}
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency, "max_precondition_dim": max_precondition_dim,
            "state_dtype": adamw_state_dtype, "master_weights": master_weights,
        }  # fmt: skip
        adamw = {"betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, defaults, nonfinite, adamw, buckets_in_flight)

    # ---- groups and states ----

    def _check_matrices(self, group: dict[str, Any]) -> None:
        adam.check_options(self.operation, group)
        for key, smallest in (("precondition_frequency", 1), ("max_precondition_dim", 0)):
            if isinstance(group[key], bool) or not isinstance(group[key], int) or group[key] < smallest:
                refuse(self.operation, f"{key} of at least {smallest}, a whole number", repr(group[key]),
                       "Correct the option.")  # fmt: skip
        if self._wire_dtype not in (torch.float32, torch.bfloat16):
            refuse(self.operation, "wire_dtype float32 or bfloat16", self._wire_dtype, "Correct the option.")

    def _make_states(self, position: int) -> None:
        group = self.param_groups[position]
        if group["algorithm"] == self.algorithm and any(param not in self._matrices for param in group["params"]):
            rule = {key: group[key] for key in ("precondition_frequency", "max_precondition_dim")}
            for each in self._together(position):
                self._keep(each, _C.soap_roots(**each.arguments, **rule, ranks=each.ranks))
        super()._make_states(position)

    def _keep(self, together: Together, found: Sequence[Any]) -> list[_Matrix]:
        """The matrices of these parameters, in the plan's order."""
        counts = collections.Counter(each[0] for each in found)
        by_param: list[list[_Matrix]] = [[] for _ in together.params]
        matrices = []
        mesh_dim = together.shard[1] if together.shard else None
        rank = together.shard[0].get_local_rank(mesh_dim) if together.shard else 0
        for index, rows, columns, root, _ in found:
            number = len(by_param[index]) if counts[index] > 1 else None
            matrix = _Matrix(together.params[index], number, rows, columns, mesh_dim, root, root == rank)
            by_param[index].append(matrix)
            matrices.append(matrix)
        self._matrices.update(zip(together.params, by_param, strict=True))
        return matrices

    def _new_matrix_state(self, group: dict[str, Any], param: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for matrix in self._matrices[param]:
            for key, shape in matrix.shapes(group["max_precondition_dim"]).items():
                state[matrix.key(key)] = on_rank(param, shape, matrix.mesh_dim, matrix.root)
        return state

    # ---- plans ----

    def _plan_key(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return (group["max_precondition_dim"],)

    def _math(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": float(group["eps"]),
            "precondition_frequency": group["precondition_frequency"],
            "max_precondition_dim": group["max_precondition_dim"],
            "wire_dtype": self._wire_dtype,
        }

    def _make_plan(self, group: dict[str, Any], together: Together) -> _Plan:
        shard, replicate = together.communicators()
        plan = _C.SoapPlan(
            **together.arguments,
            **self._math(group),
            buckets_in_flight=self._buckets_in_flight,
            shard=shard,
            replicate=replicate,
        )
        matrices = self._keep(together, plan.matrices())
        self._to_roots(matrices)
        return _Plan(plan, [(i, matrix) for i, matrix in enumerate(matrices) if matrix.is_here])

    @torch.no_grad()
    def _to_roots(self, matrices: Sequence[_Matrix]) -> None:
        """Moves states that lie on another rank than the plan's root. Collective, alike on all ranks."""
        for matrix in matrices:
            state = self.state.get(matrix.param, {})
            for key in map(matrix.key, _ORDER):
                tensor = state.get(key)
                if isinstance(tensor, RaggedTensor) and not tensor.ragged[1].local_units[matrix.root]:
                    placements = on_rank(matrix.param, tensor.shape, matrix.mesh_dim, matrix.root).placements
                    state[key] = tensor.redistribute(placements=placements)

    # ---- the step ----

    def _step_plan(self, plan: _Plan, group: dict[str, Any], params: Sequence[torch.Tensor], scale: float) -> None:
        work = self._operands(params)
        counts = [self.state[param]["step"] for param in params if param.grad is not None]
        steps = [int(self.state[p]["step"]) + 1 if p.grad is not None else 1 for p in params]
        rooted = [(i, self._states_of(matrix)) for i, matrix in plan.rooted if matrix.param.grad is not None]
        plan.core.set_math(**self._math(group))
        rates = (float(group["lr"]), float(group["weight_decay"]))
        plan.core.step(work.values, work.grads, steps, rooted, *rates, scale)
        torch._foreach_add_(counts, 1.0)
        work.finish()

    def _states_of(self, matrix: _Matrix) -> list[torch.Tensor | None]:
        state = self.state[matrix.param]
        found = (state.get(matrix.key(key)) for key in _ORDER)
        return [None if each is None else local_of(each).view(each.shape) for each in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wire_dtype": self._wire_dtype, "_matrices": {}}
