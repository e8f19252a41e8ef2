"""Reads the JSON lines of run.py and dry_run.py and reduces them to one row a system and cell. Imports no torch."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import statistics
from typing import Any

from bench.peers.catalogue import CELLS, LOSS_TOLERANCE, SYSTEMS, UNITS, Cell

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds of all repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Row:
    """One system in one cell. Bytes and calls are a step's, the largest of the ranks; `copied` without what the
    unsharded model itself copies and without what a backend writes when it puts out a reduction. Times are in ms of the
    clock (the slowest rank) and of CPU (mean over ranks), medians over rounds.
    """

    system: str
    error: str = ""
    loss_difference: float | None = None
    wall: Spread | None = None
    cpu: Spread | None = None
    update: Spread | None = None  # of the CPU time, the optimizer's
    above: float | None = None  # CPU of a step beyond the unsharded run's, optimizers left out
    above_with_update: float | None = None
    copied: float = 0.0
    collectives: int = 0
    payload: float = 0.0
    peak: float = 0.0  # median over repeats of the largest over ranks
    at_rest: float = 0.0
    padding: float | None = None

    def counts(self, cell: Cell) -> bool:
        """Whether it trains what one process would."""
        if self.error:
            return False
        is_exact = cell.bf16 or cell.model == "mixed" or self.loss_difference is None
        return is_exact or self.loss_difference <= LOSS_TOLERANCE

    def us_a_unit(self, cell: Cell) -> float | None:
        return None if self.above is None else 1e3 * self.above / UNITS[cell.model]


class Results:
    """`rows(cell)` by system, those that failed included; `parameter_bytes(cell)` of the whole model."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.conditions = next((line["conditions"] for line in lines if "conditions" in line), {})
        self._runs: dict[str, dict[str, list[dict[str, Any]]]] = collections.defaultdict(
            lambda: collections.defaultdict(list))  # fmt: skip
        for line in lines:
            if "cell" in line:
                self._runs[line["cell"]][line["system"]].append(line)
        self.other_cores = [line["other_cores"] for line in lines if "other_cores" in line]
        self.started = sorted(line["started"] for line in lines if "started" in line)

    def cells(self) -> list[Cell]:
        return [cell for name, cell in CELLS.items() if name in self._runs]

    def parameter_bytes(self, cell: Cell) -> int:
        """Of all parameters as they are stored."""
        return next(rank["parameter_bytes"] for run in self._good(cell) for rank in run["ranks"])

    def rows(self, cell: Cell) -> dict[str, Row]:
        bases = {name: reduced(name, runs) for name, runs in self._runs[cell.name].items()}
        return {name: against(bases[name], bases.get(SYSTEMS[name].base)) for name in SYSTEMS if name in bases}

    def rounds(self) -> tuple[int, int, int]:
        """(repeats, rounds in each, steps in each round), the largest there are."""
        runs = [run for cell in self.cells() for run in self._good(cell)]
        return (max((run.get("repeat", 0) for run in runs), default=0) + 1,
                max((len(run["rounds"]) for run in runs), default=0),
                max((run["steps_a_round"] for run in runs), default=0))  # fmt: skip

    def _good(self, cell: Cell) -> list[dict[str, Any]]:
        return [run for runs in self._runs[cell.name].values() for run in runs if "error" not in run]


def reduced(system: str, runs: list[dict[str, Any]]) -> Row:
    good = [run for run in runs if "error" not in run]
    if not good:
        return Row(system, error=runs[0]["error"])
    rounds = [of_ranks for run in good for of_ranks in run["rounds"]]

    def largest(name: str) -> float:
        return statistics.median(max(rank[name] for rank in run["ranks"]) for run in good)

    def mean_of_ranks(name: str) -> Spread | None:
        return Spread.of([statistics.mean(rank[name] for rank in of_ranks) for of_ranks in rounds]) if rounds else None

    first = good[0]["ranks"]
    calls = max(first, key=lambda rank: sum(entry[0] for entry in rank["collectives"].values()))["collectives"]
    reduces = any(rank["reduced_elements"] for rank in first)
    differences = [run["loss_difference"] for run in good if "loss_difference" in run]
    return Row(
        system,
        loss_difference=max(differences, default=None),
        wall=Spread.of([max(rank["wall_ms"] for rank in of_ranks) for of_ranks in rounds]) if rounds else None,
        cpu=mean_of_ranks("cpu_ms"),
        update=mean_of_ranks("update_cpu_ms"),
        copied=largest("copied"),
        collectives=sum(entry[0] for entry in calls.values()),
        payload=sum(entry[1] for entry in calls.values()),
        peak=largest("peak_bytes"),
        at_rest=largest("bytes_at_rest"),
        # Used-flags are reduced too, a few elements a step that are no padding and that no table shows.
        padding=largest("reduced_elements") / first[0]["trainable_elements"] - 1 if reduces else None,
    )


def against(row: Row, base: Row | None) -> Row:
    """With what the unsharded run does itself taken off."""
    if row.error or base is None or base.error:
        return row
    row = dataclasses.replace(row, copied=row.copied - base.copied)
    if row.cpu is None or base.cpu is None:
        return row
    whole = row.cpu.median - base.cpu.median
    return dataclasses.replace(row, above=whole - row.update.median + base.update.median, above_with_update=whole)


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
