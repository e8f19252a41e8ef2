"""Rewrites what the pages of this folder quote from the command: tables, figures and what it prints.

    python3 docs/refresh.py [--check] [build/bin/ragged]

A page has blocks between `<!-- refresh: WORDS -->` and `<!-- end -->`. WORDS starting with `ragged` are run as they
stand; others name a function below. --check writes nothing and fails where something would change.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import loss_curves as kept_curves

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.peers import page as peers_page  # noqa: E402

BLOCK = re.compile(r"(<!-- refresh: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
COLOURS = ("#4c78a8", "#f2a541", "#54a24b", "#e45756", "#9d7bb0", "#72b7b2")


class Command:
    def __init__(self, binary):
        self.binary = binary

    def text(self, *args):
        return subprocess.run(
            [self.binary, *map(str, args)], check=True, capture_output=True, text=True, cwd=HERE).stdout

    def json(self, *args):
        return json.loads(self.text(*args, "--json"))

    def plan(self, model, ranks, rows=1, *args):
        return self.json("plan", model, "--ranks", ranks, "--rows", rows, *args)


def percent(fraction):
    value = 100 * fraction
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def table(header, rows):
    lines = ["| " + " | ".join(map(str, header)) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def chart(name, title, xs, lines, y_top, y_label):
    """Line charts of values in per cent over group sizes; what is above y_top leaves the picture and says how high."""
    width, height, left, top = 800, 300, 50, 40
    plot_w, plot_h = width - left - 230, height - top - 40

    def x_of(x):
        return left + plot_w * (x - xs[0]) / (xs[-1] - xs[0])

    def y_of(y):
        return top + plot_h * (1 - min(y, y_top) / y_top)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<style>text{font:12px sans-serif;fill:#222}.t{font-size:14px;font-weight:bold}</style>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{left}" y="20" class="t">{title}</text>', f'<text x="4" y="{top - 6}">{y_label}</text>']
    for i in range(5):
        y = y_top * i / 4
        out.append(f'<path d="M{left} {y_of(y):.0f}h{plot_w}" stroke="#0002"/>'
                   f'<text x="4" y="{y_of(y) + 4:.0f}">{y:g}</text>')
    for x in range(0, xs[-1] + 1, xs[-1] // 4):
        if x >= xs[0]:
            out.append(f'<text x="{x_of(x) - 12:.0f}" y="{height - 20}">{x}</text>')
    for i, (label, ys, dashed) in enumerate(lines):
        path = "".join(f"{'M' if k == 0 else 'L'}{x_of(x):.1f} {y_of(y):.1f}" for k, (x, y) in enumerate(zip(xs, ys)))
        colour = COLOURS[i // 2 % len(COLOURS)]
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        peak = f", up to {max(ys):.0f}" if max(ys) > y_top else ""
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        y = top + 14 + 18 * i
        out.append(f'<path d="M{width - 222} {y - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>'
                   f'<text x="{width - 194}" y="{y}">{label}{peak}</text>')
    write(HERE / "figures" / name, "\n".join(out) + "\n</svg>\n")
    return f"![{title}](figures/{name})\n"


# --- what the blocks name ---


def figure11(ragged, model, flat):
    """Padding over group sizes for blocks of 1, 16 and 128 rows: this planner, and the paper's search."""
    sizes = list(range(32, 1025, 32))
    lines, rows = [], []
    for block in (1, 16, 128):
        flags = ["--flat-rows"] if flat == "flat" and block == 128 else []
        for strategy in ("auto", "paper"):
            values = [100 * ragged.plan(model, n, block, "--strategy", strategy, *flags)["padding"] for n in sizes]
            label = f"{block} row{'s' if block > 1 else ''}, {'this planner' if strategy == 'auto' else 'paper'}"
            lines.append((label, values, strategy == "paper"))
            picked = [f"{values[sizes.index(n)]:.2g}" for n in (64, 128, 256, 512, 768, 1024)]
            below = sum(v < 3 for v in values)
            rows.append([label, *picked, f"{max(values):.3g}", f"{below} of {len(sizes)}"])
    picture = chart(f"figure11-{model}.svg", f"{model}: padding by group size", sizes, lines, 20, "%")
    return picture + "\n" + table(
        ["rows a block", 64, 128, 256, 512, 768, 1024, "worst", "sizes below 3 %"], rows)


def fused_or_apart(ragged, model, rows):
    """Stacked experts against a tensor an expert."""
    out = []
    for ranks in (64, 128, 256, 512, 1024):
        for layout in ("fused", "perexpert"):
            plan = ragged.plan(f"{model}-{layout}", ranks, rows)
            gathered = 2 * plan["parameters"] * (1 + plan["padding"]) / 2**30
            out.append([f"{ranks}, {layout}", percent(plan["padding"]), percent(plan["lower_bound"]),
                        f"{gathered:,.1f}", plan["collectives"], f"{plan['boxes']:,}"])
    return table(["ranks, layout", "padding %", "lower bound %", "gathered GiB", "collectives", "boxes"], out)


RANKS = (64, 256, 1024, 4096, 10240)
LIMIT = 8192  # tokens of a micro-batch


def best(ragged, model, ranks, tokens, *flags):
    return ragged.json("tune", model, "--ranks", ranks, "--rows", 16, "--tokens", tokens, "--optimizer", "adamw8bit",
                       "--fixed-optimizer", "--reduce-dtype", "bf16", *flags)


def way(tuned):
    point = tuned["recommended"]
    text = f"{point['replicas']} x {point['shard']}"
    return text if tuned["fits"] else f"({text}, {point['memory_bytes'] / 2**30:.0f} GiB)"


def weak_scaling(ragged):
    """8,192 tokens a rank, however many ranks."""
    rows = []
    for model in ("gpt-oss-120b-fused", "qwen3-235b-a22b-fused", "deepseek-v3-671b-fused"):
        first = None
        for ranks in RANKS:
            tuned = best(ragged, model, ranks, LIMIT)
            rate = LIMIT / tuned["recommended"]["seconds"] if tuned["fits"] else None
            first = first or rate
            rows.append([model, ranks, way(tuned), f"{tuned['recommended']['memory_bytes'] / 2**30:.0f}",
                         f"{rate:,.0f}" if rate else "-", f"{100 * rate / first:.0f}" if rate else "doesn't fit"])
    return table(["model", "ranks", "copies x shard", "GiB a rank", "tokens/s a rank", "% of the first"], rows)


def strong_scaling(ragged):
    """16 million tokens a step, in micro-batches of at most 8,192 a rank that each gather and reduce."""
    rows = []
    for model in ("gpt-oss-120b-fused", "qwen3-235b-a22b-fused", "deepseek-v3-671b-fused"):
        first = None
        for ranks in RANKS:
            a_rank = 2**24 // ranks
            micro = -(-a_rank // LIMIT)
            tuned = best(ragged, model, ranks, a_rank // micro)
            rate = a_rank / (micro * tuned["recommended"]["seconds"]) * ranks / 1e6 if tuned["fits"] else None
            first = first or (rate, ranks) if rate else first
            rows.append([model, ranks, way(tuned), micro, f"{rate:.3g}" if rate else "-",
                         f"{rate / first[0]:.1f} of {ranks / first[1]:.1f}" if rate else "doesn't fit"])
    return table(["model", "ranks", "copies x shard", "micro-batches", "million tokens/s", "speed-up"], rows)


def sensitivity(ragged):
    """The weak-scaling figure at 1,024 ranks with one assumption changed at a time."""
    base = {"base": "h100"}
    changes = {
        "as assumed": {}, "half the network between nodes": {"network_bandwidth": 25e9},
        "half the links within a node": {"node_bandwidth": 225e9}, "90 % of every link": {"bandwidth_efficiency": 0.9},
        "50 % of every link": {"bandwidth_efficiency": 0.5}, "40 % of peak FLOP/s": {"flops_efficiency": 0.4},
        "60 % of peak FLOP/s": {"flops_efficiency": 0.6},
        "ten times the latencies": {"latency": 2e-4, "hop_latency": 3e-5}}
    rows = []
    for text, change in changes.items():
        file = HERE / "figures" / "device.tmp.json"
        file.write_text(json.dumps(base | change | {"name": "h100"}))
        cells = [text]
        for model in ("gpt-oss-120b-fused", "qwen3-235b-a22b-fused", "deepseek-v3-671b-fused"):
            tuned = best(ragged, model, 1024, LIMIT, "--device", file)
            point = tuned["recommended"]
            cells += [f"{LIMIT / point['seconds']:,.0f}", way(tuned)]
        file.unlink()
        rows.append(cells)
    return table(["assumption", "gpt-oss-120b", "", "qwen3-235b", "", "deepseek-v3", ""], rows)


def optimizer_table(ragged, config, *flags):
    """What `ragged train` says of optimizers before it trains; for one step on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        text = ragged.text(
            "train", HERE.parent / "configs" / config, *flags, "--train.steps=1", "--train.batch=1",
            "--train.sequence=32", "--eval.sequences=1", "--eval.sample_bytes=0", f"--run.dir={folder}")
    said = re.search(r"(?:default rules of|parameter  ).*states on this rank[^\n]*\n", text, re.DOTALL)[0]
    return f"```text\n$ ragged train {' '.join((f'configs/{config}', *flags))}\n...\n{said}...\n```\n"


def loss_curves(ragged, figure):
    """Runs that loss_curves.py kept; nothing is trained here."""
    name = f"loss-curves-{figure}.svg"
    write(HERE / "figures" / name, kept_curves.draw(kept_curves.kept_runs(figure), kept_curves.TITLES[figure]))
    header, rows = kept_curves.rows(figure)
    return (f"![loss curves](figures/{name})\n\n{table(header, rows)}\n"
            f"({kept_curves.kept_machine()}; `python3 docs/loss_curves.py`)\n")


def peers(ragged, *words):
    """Runs beside other systems that bench/peers kept; nothing is trained here."""
    return peers_page.block(" ".join(words), *peers_page.load(), write)


# --- pages ---

CHANGED = []
CHECK = False


def write(path, text):
    if path.is_file() and path.read_text() == text:
        return
    CHANGED.append(path)
    if not CHECK:
        path.write_text(text)


def block(ragged, words):
    name, *args = shlex.split(words)
    if name != "ragged":
        return globals()[name](ragged, *args)
    if "--svg" in args:
        at = args.index("--svg")
        before = (HERE / args[at + 1]).read_text() if (HERE / args[at + 1]).is_file() else ""
        ragged.text(*args)
        if (HERE / args[at + 1]).read_text() != before:
            CHANGED.append(HERE / args[at + 1])
        return f"![{' '.join(args[:2])}]({args[at + 1]})\n"
    text = re.sub(r"planned in .*\n", "", ragged.text(*args))
    return f"```text\n$ {words}\n{text}```\n"


def main():
    global CHECK
    args = sys.argv[1:]
    CHECK = "--check" in args
    paths = [a for a in args if a != "--check"]
    ragged = Command(str(pathlib.Path(paths[0] if paths else HERE.parent / "build/bin/ragged").resolve()))
    (HERE / "figures").mkdir(exist_ok=True)
    for page in sorted(HERE.glob("*.md")):
        text = page.read_text()
        if BLOCK.search(text):
            write(page, BLOCK.sub(lambda m: m[1] + block(ragged, m[2]) + m[3], text))
    print("\n".join(f"changed: {path.relative_to(HERE.parent)}" for path in CHANGED) or "nothing changed")
    return 1 if CHECK and CHANGED else 0


if __name__ == "__main__":
    sys.exit(main())
