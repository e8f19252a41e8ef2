"""Bars of what systems cost in one cell, as SVG."""

from __future__ import annotations

from bench.peers.catalogue import SYSTEMS
from bench.peers.results import Row

MIB = 2**20
OURS, OTHERS, UNSHARDED = "#f2a541", "#4c78a8", "#bbbbbb"
LABELS, PANEL, GAP, LINE = 216, 150, 24, 20


def bars(title: str, rows: dict[str, Row], parameter_bytes: int) -> str:
    """A line a system, a panel a measure; each panel starts at 0 and has a scale of its own."""
    panels = [
        ("bytes copied / P", [row.copied / parameter_bytes for row in rows.values()], "{:.2f}"),
        ("peak live MiB", [row.peak / MIB for row in rows.values()], "{:.0f}"),
        ("CPU ms a step", [row.cpu.median if row.cpu else 0.0 for row in rows.values()], "{:.0f}"),
        ("wall ms a step", [row.wall.median if row.wall else 0.0 for row in rows.values()], "{:.0f}"),
    ]
    width, height = LABELS + len(panels) * (PANEL + GAP), 66 + LINE * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>text{font:12px sans-serif;fill:#222}.t{font-size:14px;font-weight:bold}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>', f'<text x="8" y="20" class="t">{title}</text>',
    ]  # fmt: skip
    for i, name in enumerate(rows):
        out.append(f'<text x="8" y="{66 + LINE * i}">{SYSTEMS[name].label}</text>')
    for k, (name, values, form) in enumerate(panels):
        left = LABELS + k * (PANEL + GAP)
        scale = (PANEL - 44) / (max(values) or 1.0)
        out.append(f'<text x="{left}" y="44">{name}</text>')
        for i, (system, value) in enumerate(zip(rows, values, strict=True)):
            known = SYSTEMS[system]
            colour = OURS if known.ours else OTHERS if known.sharded else UNSHARDED
            length = max(0.0, value) * scale
            out.append(f'<rect x="{left}" y="{55 + LINE * i}" width="{length:.1f}" height="13" fill="{colour}"/>'
                       f'<text x="{left + length + 4:.1f}" y="{66 + LINE * i}">{form.format(value)}</text>')
    return "\n".join(out) + "\n</svg>\n"
