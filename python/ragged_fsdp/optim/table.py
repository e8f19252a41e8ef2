"""What an optimizer keeps of each parameter, as a table for people. Reads, changes nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from ragged_fsdp.optim.pieces import TILE, dtype_name, local_of

if TYPE_CHECKING:
    from ragged_fsdp.optim.base import ShardedOptimizer


def table(optimizer: ShardedOptimizer) -> str:
    """A line for all layers that are alike. Bytes are those of this rank's states, counts of steps apart; "block" is
    what stays on one rank."""
    lines: dict[tuple[str, ...], list[int]] = {}  # -> parameters, bytes
    for position, group in enumerate(optimizer.param_groups):
        for param, name in zip(group["params"], optimizer._names_of(position), strict=True):
            state = {key: value for key, value in optimizer.state.get(param, {}).items() if key != "step"}
            shape = " x ".join(map(str, param.shape)) or "1"
            kind = _kind(optimizer, group, state)
            key = (re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), shape, kind, *_form(kind, group, param, state))
            line = lines.setdefault(key, [0, 0])
            line[0] += 1
            line[1] += sum(local_of(value).nbytes for value in state.values())
    rows = [("parameter", "", "shape", "optimizer", "states", "block", "bytes")]
    for (name, *rest), (count, size) in lines.items():
        rows.append((name, f"x {count}" if count > 1 else "", *rest, f"{size:,}"))
    rows.append(("states on this rank", "", "", "", "", "", f"{sum(size for _, size in lines.values()):,}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths)), row[-1].rjust(widths[-1])])
        for row in rows
    )


def _kind(optimizer: ShardedOptimizer, group: dict[str, Any], state: dict[str, torch.Tensor]) -> str:
    algorithm = group.get("algorithm", optimizer.operation.lower())
    return "normuon" if algorithm == "muon" and "row_exp_avg_sq" in state else algorithm


def _form(kind: str, group: dict[str, Any], param: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[str, str]:
    """(format of the states, block)."""
    if not state:
        return "none", "element"
    if any(key.endswith("_codes") for key in state):
        rows = param.shape[0] if group.get("flatten") else param.shape[-2]
        return f"{group.get('format') or group['momentum_format']} 32x32", f"{min(TILE, rows)} rows"
    return dtype_name(next(iter(state.values())).dtype), "matrix" if kind == "soap" else "element"
