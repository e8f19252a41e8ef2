"""plan(): how a model would be laid out over so many ranks, before any of them exists. Shapes only: the module may be on the meta device, and no
process group is needed. `ragged plan` does the same from the command line for models that aren't at hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ragged_fsdp import _C, blocks
from ragged_fsdp.planning import Planning


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One bucket. Numbers count elements; `bound` is a lower bound of `image`, `uniform_only` the best without a ragged tail."""

    name: str
    parameters: int
    numel: int
    image: int
    bound: int
    uniform_only: int
    uniform_segments: int
    ragged_segments: int
    ragged_blocks: int
    largest_shard: int
    text: str = dataclasses.field(repr=False)
    layout: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def padding(self) -> int:
        return self.image - self.numel


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """All buckets of a model over `world_size` ranks; print() shows a table."""

    world_size: int
    units: tuple[UnitPlan, ...]

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def padding(self) -> float:
        """As a fraction of the parameters."""
        return sum(unit.padding for unit in self.units) / max(1, self.numel)

    @property
    def lower_bound(self) -> float:
        """The padding that no plan of these buckets can go below, likewise."""
        return sum(unit.bound - unit.numel for unit in self.units) / max(1, self.numel)

    @property
    def collectives(self) -> int:
        """For one gather of everything."""
        return sum(unit.uniform_segments + unit.ragged_segments for unit in self.units)

    def __str__(self) -> str:
        rows = [("unit", "parameters", "elements", "segments", "padding", "at least", "largest shard")]
        for unit in self.units:
            segments = f"{unit.uniform_segments}" + (f" + {unit.ragged_blocks} blocks" if unit.ragged_segments else "")
            rows.append((
                unit.name, f"{unit.parameters}", f"{unit.numel:,}", segments, f"{unit.padding:,}", f"{unit.bound - unit.numel:,}",
                f"{unit.largest_shard:,}",
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows]
        lines.append(f"{self.numel:,} elements over {self.world_size} ranks: padding {100 * self.padding:.4f} %, at least {100 * self.lower_bound:.4f} %")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    world_size: int,
    *,
    units: Iterable[nn.Module] | None = None,
    shard_policy: blocks.ShardPolicy | blocks.Block | None = None,
    dtype: torch.dtype = torch.bfloat16,
    planning: Planning = Planning(),
) -> ModelPlan:
    """Plans `model` as fully_shard would: each of `units` a bucket, the rest the root's (two on a CPU, see Planning.split_bytes). Pure; no
    communication.

    units: the modules that fully_shard is to be called on; default: the elements of all ModuleLists. dtype: the narrowest that travels. Raises
    InvalidArgument, naming the parameter, for blocks that don't fit, and for a world size below 1.
    """
    if units is None:
        units = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    policy = blocks.as_policy(shard_policy)
    names = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    plans = []
    for unit in [*units, model]:
        own = [(name, param) for name, param in unit.named_parameters() if param not in taken]
        taken.update(param for _, param in own)
        if own:
            plans.append(_plan_unit(names.get(unit) or "(root)", own, world_size, policy, dtype, planning))
    return ModelPlan(world_size, tuple(plans))


def _plan_unit(
    name: str,
    params: list[tuple[str, nn.Parameter]],
    world_size: int,
    policy: blocks.ShardPolicy,
    dtype: torch.dtype,
    planning: Planning,
) -> UnitPlan:
    layout, text, numbers = _C.plan_bucket(
        [param_name for param_name, _ in params],
        [list(param.shape) for _, param in params],
        [param.requires_grad for _, param in params],
        [blocks.to_args(policy(param_name, param)) for param_name, param in params],
        world_size,
        dtype.itemsize,
        planning.to_core(),
    )
    numbers.pop("padding")
    return UnitPlan(name=name, parameters=len(params), text=text, layout=json.loads(layout), **numbers)
