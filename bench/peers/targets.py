"""What RaggedFSDP sets itself against FSDP2 and the others, and what was measured: met or not."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.peers.catalogue import CELLS, SHARDING_RIVALS, SYSTEMS
from bench.peers.results import Results, Row

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Target:
    what: str
    rival: str  # FSDP2's figure
    wanted: str
    system: str
    measured: str
    met: bool | None  # None: not measured


def targets(results: Results, dry: list[dict[str, Any]]) -> list[Target]:
    found: list[Target] = []
    for cell, limits in (
        # In fp32 a gather takes the master shard as its input, so that with gradients in place nothing is left.
        ("llama-fp32-2", (("ragged", 1.9), ("ragged_in_place", 0.05), ("ragged_cpp", 0.05))),
        ("llama-bf16-2", (("ragged", 1.5), ("ragged_in_place", 0.5), ("ragged_cpp", 0.5))),
    ):
        for system, limit in limits:
            what = "written by copies, P"
            found.append(absolute(results, cell, system, what, lambda row, size: row.copied / size, limit))
    for cell in ("llama-fp32-2", "llama-bf16-2", "moe-fp32-4"):
        for system in ("ragged", "ragged_in_place", "ragged_cpp", "ragged_cpp_over_weights"):
            what = "peak live bytes, MiB"
            found.append(ratio(results, cell, system, what, lambda row: row.peak / MIB, 0.80, all_peers=True))
    for system in ("ragged", "ragged_in_place", "ragged_cpp"):
        what = "CPU ms a step and rank above the unsharded run's, optimizers left out"
        found.append(ratio(results, "llama-fp32-2", system, what, lambda row: row.above, 0.5))
    for cell in ("llama-fp32-2", "llama-fp32-4"):
        for system in ("ragged", "ragged_in_place", "ragged_cpp"):
            found.append(ratio(results, cell, system, "wall ms a step", lambda row: row.wall and row.wall.median, 0.75,
                               all_peers=True, slack=1.0))  # fmt: skip
    for system, limit in (("ragged", 0.15), ("ragged_cpp", 0.05)):
        found.append(absolute(results, "tiny-fp32-1", system, "CPU ms a unit and step",
                              lambda row, size: row.above and row.above / 65, limit, digits=3))  # fmt: skip
    for system in ("ragged", "ragged_cpp"):
        found.append(absolute(results, "moe-fp32-4", system, "padding, %", lambda row, size: 100 * row.padding, 0.1))
    found.append(sharding(dry))
    return found


def pair(results: Results, cell: str, system: str) -> tuple[Row | None, Row | None, dict[str, Row], int]:
    rows = results.rows(CELLS[cell])
    good = {name: row for name, row in rows.items() if row.counts(CELLS[cell])}
    size = results.parameter_bytes(CELLS[cell]) if good else 1
    return good.get("fsdp2"), good.get(system), good, size


def absolute(results: Results, cell: str, system: str, what: str, value: Any, limit: float, digits: int = 2) -> Target:
    """A figure of its own, FSDP2's beside it."""
    rival, ours, _, size = pair(results, cell, system)
    theirs = value(rival, size) if rival else None
    mine = value(ours, size) if ours else None
    return Target(f"{what}: {cell}", "" if theirs is None else f"{theirs:.{digits}f}", f"{limit:g}", system,
                  "" if mine is None else f"{mine:.{digits}f}", None if mine is None else mine <= limit)  # fmt: skip


def ratio(
    results: Results, cell: str, system: str, what: str, value: Any, limit: float, all_peers: bool = False,
    slack: float = 1.0,
) -> Target:  # fmt: skip
    """A share of FSDP2's, and with `all_peers` no more than any other sharding system's."""
    rival, ours, good, _ = pair(results, cell, system)
    theirs, mine = value(rival) if rival else None, value(ours) if ours else None
    wanted = f"{limit:g} of it"
    if theirs is None or mine is None:
        return Target(f"{what}: {cell}", "", wanted, system, "", None)
    met = mine <= limit * theirs
    measured = f"{mine:.1f}, {mine / theirs:.2f} of it"
    if all_peers:
        wanted += ", and every other peer's"
        least = min((name for name in SHARDING_RIVALS if name in good), key=lambda name: value(good[name]))
        if mine > slack * value(good[least]):
            met = False
            measured += f"; {SYSTEMS[least].label} {value(good[least]):.1f}"
    return Target(f"{what}: {cell}", f"{theirs:.1f}", wanted, system, measured, met)


def sharding(dry: list[dict[str, Any]]) -> Target:
    what = "s to shard 64 units of one model at 1,024 ranks"
    for line in dry:
        if line.get("model") == "tiny" and line.get("world") == 1024 and "systems" in line:
            theirs, mine = (line["systems"][name]["shard_s"] for name in ("fsdp2", "ragged"))
            return Target(what, f"{theirs:.2f}", "0.2", "ragged", f"{mine:.3f}", mine <= 0.2)
    return Target(what, "", "0.2", "ragged", "", None)
