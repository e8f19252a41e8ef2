"""Loss curves of the optimizers: runs them, and keeps the numbers; refresh.py draws and tabulates what was kept.

    python3 docs/loss_curves.py [--ranks 4] [--binary build/bin/ragged] [NAME...]

trains the configs below (NAME: only those) on this machine, some two minutes each on two cores, and writes
figures/loss_curves.json. All compute in fp32, whatever the machine prefers, from equal initial values and over equal
batches, so that what differs is the optimizer.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
KEPT = HERE / "figures" / "loss_curves.json"
EVERY = 10

# Name, figure, config, and what its command says on top.
RUNS = (
    ("AdamW, fp32", "dense", "demo.toml", ()),
    ("AdamW, bf16 moments", "dense", "demo.toml", ("--optimizer.moment_dtype=bf16",)),
    ("AdamW8bit, power", "dense", "adamw8bit.toml", ()),
    ("AdamW8bit, dynamic", "dense", "adamw8bit.toml", ("--optimizer.tile_format=dynamic",)),
    ("Muon", "dense", "muon.toml", ()),
    ("SOAP", "dense", "soap.toml", ()),
    ("AdamW, four times the rate", "dense", "demo.toml", ("--train.lr=6e-3",)),
    ("AdamW, another seed", "dense", "demo.toml", ("--train.seed=2",)),
    ("MoE: AdamW, fp32", "moe", "moe.toml", ()),
    ("MoE: AdamW8bit", "moe", "moe.toml", ("--optimizer.kind=adamw8bit",)),
    ("MoE: Muon", "moe", "moe.toml", ("--optimizer.kind=muon", "--train.lr=4e-3")),
)
TITLES = {"dense": "2.5 million parameters, dense", "moe": "4.1 million parameters, 8 experts a layer"}
COLOURS = ("#222222", "#f2a541", "#4c78a8", "#72b7b2", "#e45756", "#9d7bb0", "#999999", "#54a24b")


def command(config: str, flags: tuple[str, ...]) -> str:
    return " ".join(["ragged train", f"configs/{config}", *flags])


def train(binary: pathlib.Path, launcher: pathlib.Path, ranks: int, config: str, flags: tuple[str, ...]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [launcher, "--standalone", "--nproc-per-node", str(ranks), "--no-python", binary, "train",
             HERE.parent / "configs" / config, *flags, "--train.param_dtype=fp32", f"--eval.every={EVERY}",
             "--eval.sample_bytes=0", f"--run.dir={folder}/run"],
            check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder)
        lines = (pathlib.Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    kept = [step for step in steps if "val_loss" in step]
    return {
        "command": command(config, flags), "ranks": ranks,
        "step": [step["step"] for step in kept], "val_loss": [round(step["val_loss"], 4) for step in kept],
        "last_20": round(sum(step["loss"] for step in steps[-20:]) / 20, 4)}


def machine() -> str:
    names = [line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


def draw(runs: dict[str, dict], title: str) -> str:
    """Validation losses over steps, from the first multiple of EVERY on; what is above the frame is cut off."""
    width, height, left, top = 800, 340, 50, 40
    plot_w, plot_h = width - left - 260, height - top - 45
    last = max(run["step"][-1] for run in runs.values())
    low = min(min(run["val_loss"]) for run in runs.values()) - 0.1
    high = 3.6

    def x_of(step: float) -> float:
        return left + plot_w * step / last

    def y_of(loss: float) -> float:
        return top + plot_h * (high - min(loss, high)) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>text{font:12px sans-serif;fill:#222}.t{font-size:14px;font-weight:bold}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>', f'<text x="{left}" y="20" class="t">{title}</text>',
        f'<text x="4" y="{top - 6}">validation loss, nats a byte</text>']
    for tenth in range(int(low * 5) + 1, int(high * 5) + 1):
        loss = tenth / 5
        out.append(f'<path d="M{left} {y_of(loss):.1f}h{plot_w}" stroke="#0002"/>'
                   f'<text x="14" y="{y_of(loss) + 4:.1f}">{loss:.1f}</text>')
    for step in range(0, last + 1, last // 4):
        out.append(f'<text x="{x_of(step) - 10:.0f}" y="{height - 22}">{step}</text>')
    out.append(f'<text x="{left + plot_w // 2 - 14}" y="{height - 6}">step</text>')
    for i, (name, run) in enumerate(runs.items()):
        points = [(x_of(s), y_of(v)) for s, v in zip(run["step"], run["val_loss"]) if s % EVERY == 0]
        path = "".join(f"{'M' if k == 0 else 'L'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if i % 2 else ""
        out.append(f'<path d="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.8"{dash}/>')
        y = top + 14 + 20 * i
        out.append(f'<path d="M{width - 250} {y - 4}h26" stroke="{COLOURS[i]}" stroke-width="2"{dash}/>'
                   f'<text x="{width - 216}" y="{y}">{name}: {run["val_loss"][-1]:.3f}</text>')
    return "\n".join(out) + "\n</svg>\n"


def kept_runs(figure: str) -> dict[str, dict]:
    """Of one figure, in the order of RUNS."""
    kept = json.loads(KEPT.read_text())["runs"]
    return {name: kept[name] for name, of, _, _ in RUNS if of == figure and name in kept}


def kept_machine() -> str:
    kept = json.loads(KEPT.read_text())
    ranks = sorted({run["ranks"] for run in kept["runs"].values()})
    return f"{', '.join(map(str, ranks))} ranks on {kept['machine']}"


def rows(figure: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table beside a figure. The first run is what the others are held against."""
    runs = kept_runs(figure)
    exact = next(iter(runs.values()))
    lines = []
    for name, run in runs.items():
        at = dict(zip(run["step"], run["val_loss"]))
        gap = max((at[step] - loss for step, loss in zip(exact["step"], exact["val_loss"]) if step >= EVERY), key=abs)
        lines.append([
            f"{name} (`{run['command']}`)", *(f"{at[step]:.4f}" for step in (50, 100, run["step"][-1])),
            f"{run['last_20']:.4f}", "-" if run is exact else f"{gap:+.4f}"])
    return ["validation loss", "step 50", "step 100", "at the end", "training, last 20", "largest gap"], lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--binary", type=pathlib.Path, default=HERE.parent / "build/bin/ragged")
    parser.add_argument("names", nargs="*", metavar="NAME", help="start of a run's name; default: all")
    args = parser.parse_args()
    venv = subprocess.run([HERE.parent / "tools/venv_path.sh"], check=True, capture_output=True, text=True).stdout
    launcher = pathlib.Path(venv.strip()) / "bin/torchrun"
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {"runs": {}}
    kept["machine"] = machine()
    for name, _, config, flags in RUNS:
        if args.names and not any(name.startswith(wanted) for wanted in args.names):
            continue
        kept["runs"][name] = train(args.binary.resolve(), launcher, args.ranks, config, flags)
        print(f"{name}: {kept['runs'][name]['val_loss'][-1]}", flush=True)
        KEPT.write_text(json.dumps(kept).replace('"runs": {', '"runs": {\n').replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
