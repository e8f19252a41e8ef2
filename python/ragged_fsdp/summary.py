"""What a sharded model looks like and what it has moved: numbers for people and programs. Reads, changes nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from ragged_fsdp import _C
from ragged_fsdp.state import RaggedState, state_of


def _root(model: nn.Module, operation: str) -> RaggedState:
    state = state_of(model)
    if state is None:
        raise _C.InvalidArgument(f"[{operation}] Expected a module that fully_shard was applied to, but got {type(model).__name__}.")
    return state


def _running(model: nn.Module, operation: str) -> Any:
    state = _root(model, operation)
    state.lazy_init()
    return state.runtime


def stats(model: nn.Module) -> dict[str, Any]:
    """What the tree of units has moved and held so far on this rank, in bytes and calls.

    cast_in, cast_grad, added, zeroed, copied: bytes that RaggedFSDP wrote itself; in_place: gradients computed in the reduce buffer, without a
    copy (the forecast counts them with cast_grad). gathered_bytes, reduced_bytes, all_gathers, reduce_scatters,
    all_reduces: whole images and logical collectives (those of a group are counted for all models on it). peak_image_bytes,
    peak_reduce_bytes: since reset_peaks(). On a CPU buffers go back to the allocator when nobody needs them;
    elsewhere pool_allocations must not grow after the second step.
    """
    return _running(model, "stats").stats()


def reset_peaks(model: nn.Module) -> None:
    """Peaks count from now on."""
    _running(model, "reset_peaks").reset_peaks()


def forecast(model: nn.Module, micro_batches: int = 1, sync_each: bool = False) -> dict[str, int]:
    """What one step will move and hold, computed from the plans alone; the names are those of stats()."""
    return _running(model, "forecast").forecast(micro_batches, sync_each)


def summary(model: nn.Module) -> str:
    """A table of the units below `model`: parameters, image, padding, this rank's part. Text, for print()."""
    root = _root(model, "summary")
    names = {module: name for name, module in model.named_modules()}
    states: dict[RaggedState, str] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None and state not in states:
            states[state] = ", ".join(names.get(each, type(each).__name__) or "(root)" for each in state.modules)
    rows = [("unit", "parameters", "image", "dtype", "image bytes", "padding", "this rank", "reduce")]
    total = padding = local = 0
    for state, name in states.items():
        for group in state.groups:
            core = group.core
            dtype = str(group.param_dtype or group.dtype).removeprefix("torch.")
            reduce = str(group.reduce_dtype or group.dtype).removeprefix("torch.")
            rows.append((
                name, f"{len(group.params)}", f"{core.image_numel:,}", dtype, f"{core.image_bytes:,}", f"{core.padding:,}",
                f"{core.local_numel:,}", reduce,
            ))  # fmt: skip
            total, padding, local = total + core.image_numel, padding + core.padding, local + core.local_numel
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows]
    mesh = root.mesh
    shape = f"{mesh.replicate.size} x {mesh.shard_size}" if mesh.is_hybrid else f"{mesh.shard_size}"
    share = 100.0 * padding / total if total else 0.0
    lines.append(f"{total:,} elements over {shape} ranks, {local:,} on this one; padding {padding:,} ({share:.3f} %)")
    return "\n".join(lines)
