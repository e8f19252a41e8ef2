"""Writes the tables and pictures of docs/peers.md from the JSON lines of run.py and dry_run.py. Runs nothing.

    python3 -m bench.peers.page [--check]

The page has blocks between `<!-- refresh: peers WORDS -->` and `<!-- end -->`; docs/refresh.py fills them too.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable

from bench.peers import figures
from bench.peers.catalogue import CELLS, MODELS, SHARDING_RIVALS, SYSTEMS, Cell
from bench.peers.targets import targets
from bench.peers.results import HERE, Results, Row, read

DOCS = HERE.parents[1] / "docs"
BLOCK = re.compile(r"(<!-- refresh: peers (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MIB = 2**20
# A time counts as shorter from here on: medians of a run scatter by about as much.
TIE = 0.03
QUIET_CORES = 0.2  # what other programs may use before the page says that the machine was busy


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    """`digits` behind the point, and no minus before a zero."""
    return "" if value is None else f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def time(value: float | None) -> str:
    return "" if value is None else number(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)


def label(row: Row, cell: Cell) -> str:
    name = SYSTEMS[row.system].label
    return name if row.error or row.counts(cell) else f"{name} (doesn't count: loss)"


def system_row(row: Row, cell: Cell, parameter_bytes: int) -> list[str]:
    if row.error:
        said = row.error.replace("|", "\\|").replace("<", "&lt;")
        return [label(row, cell), f"fails: {said}", *[""] * 10]
    spread = f"{time(row.wall.median)} ({time(row.wall.low)} to {time(row.wall.high)})" if row.wall else ""
    return [
        label(row, cell), "" if row.loss_difference is None else f"{row.loss_difference:.1e}",
        time(row.cpu.median if row.cpu else None), time(row.update.median if row.update else None),
        number(row.us_a_unit(cell), 0) if cell.model == "tiny" else time(row.above), spread,
        number(row.copied / parameter_bytes), str(row.collectives),
        number(row.payload / parameter_bytes), number(row.peak / MIB, 1), number(row.at_rest / MIB, 1),
        "" if row.padding is None else number(100 * row.padding, 2),
    ]  # fmt: skip


def header(cell: Cell) -> list[str]:
    own = "host us a unit" if cell.model == "tiny" else "CPU ms above unsharded"
    return ["system", "loss off by", "CPU ms", "of it optimizer", own, "wall ms (range)", "copied / P", "collectives",
            "their bytes / P", "peak MiB", "at rest MiB", "padding %"]  # fmt: skip


# What less is better of, with how much less counts, for the sentence below a table.
MEASURES: list[tuple[str, Callable[[Row, Cell], float | None], float]] = [
    ("CPU time", lambda row, cell: row.cpu and row.cpu.median, TIE),
    ("wall time", lambda row, cell: row.wall and row.wall.median, TIE),
    ("bytes copied", lambda row, cell: row.copied / MIB, 0.005),
    ("collectives", lambda row, cell: row.collectives, 0.0),
    ("their bytes", lambda row, cell: row.payload, 0.005),
    ("peak", lambda row, cell: row.peak, 0.005),
    ("bytes at rest", lambda row, cell: row.at_rest, 0.005),
    ("padding", lambda row, cell: row.padding and round(row.padding, 5), 0.0),
]


def behind(rows: dict[str, Row], cell: Cell, ours: str) -> str:
    """In what another sharding system is ahead of this row."""
    row = rows.get(ours)
    if row is None or row.error:
        return ""
    found = []
    for what, value, margin in MEASURES:
        mine = value(row, cell)
        others = {name: value(rows[name], cell) for name in SHARDING_RIVALS if name in rows and rows[name].counts(cell)}
        ahead = [SYSTEMS[name].label for name, other in others.items()
                 if other is not None and mine is not None and other < mine - margin * abs(mine)]  # fmt: skip
        if ahead:
            found.append(f"{what} ({', '.join(ahead)})")
    return f"{SYSTEMS[ours].label}: {'; '.join(found) if found else 'nothing'}."


def cell_block(results: Results, cell: Cell) -> str:
    rows = results.rows(cell)
    if not rows:
        return "Not measured.\n"
    size = results.parameter_bytes(cell)
    dtype = "dtypes as stored" if cell.model == "mixed" else cell.dtype
    lines = [f"{MODELS[cell.model]}; {dtype}, {cell.world} rank{'s' if cell.world > 1 else ''}. "
             f"P = {size / MIB:.1f} MiB.\n",
             table(header(cell), [system_row(row, cell, size) for row in rows.values()])]  # fmt: skip
    if missing := [SYSTEMS[name].label for name in cell.systems if name not in rows]:
        lines.append(f"Not run here: {', '.join(missing)}.\n")
    weak = [text for name in ("ragged", "ragged_cpp") if (text := behind(rows, cell, name))]
    lines.append("Another sharding system is ahead in: " + " ".join(weak) + "\n" if weak else "")
    return "\n".join(lines)


def conditions_block(results: Results) -> str:
    made = results.conditions
    if not made:
        return "Nothing has been measured yet.\n"
    repeats, rounds, steps = results.rounds()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    others = results.other_cores or [0.0]
    used = f"{min(others):.1f} to {max(others):.1f} of {made['cores']} cores"
    said = f"Other programs used {used} meanwhile."
    if max(others) > QUIET_CORES:
        said = f"**The machine was busy: other programs used {used}. Bytes and counts are exact, times are not.**"
    return (
        f"{made['cpu']}, {made['cores']} cores ({', '.join(made['features'])}); Python {made['python']}; {versions}; "
        f"RaggedFSDP built {made['build']}; `OMP_NUM_THREADS={made['omp_num_threads']}`; Gloo over loopback. "
        f"{results.started[0][:10] if results.started else ''}: {repeats} repeat{'s' if repeats > 1 else ''} of "
        f"{rounds} rounds of {steps} steps. {said}\n")  # fmt: skip


def targets_block(results: Results, dry: list[dict]) -> str:
    rows = [[each.what, each.rival, each.wanted, SYSTEMS[each.system].label if each.system in SYSTEMS else each.system,
             each.measured, "yes" if each.met else "**no**" if each.met is not None else "not measured"]
            for each in targets(results, dry)]  # fmt: skip
    met = sum(row[-1] == "yes" for row in rows)
    return table(["", "FSDP2", "at most", "row", "measured", "met"], rows, left=6) + f"\n{met} of {len(rows)} met.\n"


def dry_block(dry: list[dict]) -> str:
    runs = [line for line in dry if "world" in line]
    if not runs:
        return "Not measured.\n"
    header = ["model", "ranks", "system", "shard and plan, s", "first step, ms", "us a unit", "optimizer ms",
              "collectives", "their bytes, MiB", "copied MiB", "padding %", "peak MiB", "at rest MiB"]  # fmt: skip
    rows = []
    for line in runs:
        if "error" in line:
            rows.append([line["model"], f"{line['world']:,}", f"fails: {line['error']}", *[""] * 10])
            continue
        for name, found in line["systems"].items():
            rows.append([
                line["model"], f"{line['world']:,}", SYSTEMS[name].label, number(found["shard_s"], 3),
                time(1e3 * found["first_step_s"]), number(found["us_a_unit"], 0), number(found["update_ms"]),
                str(found["collectives"]), number(found["payload"] / MIB, 1), number(found["copied"] / MIB, 1),
                number(100 * found["padding"], 2), number(found["peak_bytes"] / MIB, 1),
                number(found["bytes_at_rest"] / MIB, 1)])  # fmt: skip
    return table(header, rows, left=3)


def block(words: str, results: Results, dry: list[dict], write: Callable[[pathlib.Path, str], None]) -> str:
    name, *rest = words.split()
    if name == "conditions":
        return conditions_block(results)
    if name == "targets":
        return targets_block(results, dry)
    if name == "dry":
        return dry_block(dry)
    if name == "figure":
        cell = CELLS[rest[0]]
        path = DOCS / "figures" / f"peers-{cell.name}.svg"
        rows = {name: row for name, row in results.rows(cell).items() if row.counts(cell)}
        if not rows:
            return "Not measured.\n"
        title = f"{cell.model}, {cell.dtype}, {cell.world} ranks"
        write(path, figures.bars(title, rows, results.parameter_bytes(cell)))
        return f"![{title}: what each system costs](figures/{path.name})\n"
    return cell_block(results, CELLS[name])


def load() -> tuple[Results, list[dict]]:
    return Results(read(HERE / "results.jsonl")), read(HERE / "dry_runs.jsonl")


def main() -> int:
    check = "--check" in sys.argv[1:]
    changed: list[pathlib.Path] = []

    def write(path: pathlib.Path, text: str) -> None:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(path)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")

    results, dry = load()
    page = DOCS / "peers.md"
    text = page.read_text(encoding="utf-8")
    write(page, BLOCK.sub(lambda match: match[1] + block(match[2], results, dry, write) + match[3], text))
    print("\n".join(f"changed: {path.relative_to(DOCS.parent)}" for path in changed) or "nothing changed")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
