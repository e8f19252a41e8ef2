"""examples/train_llama.py as a user runs it: under torchrun, against `ragged train` and against torch's FSDP2 on the
same configuration. Not a test of how well it trains."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from ragged_fsdp import _C

REPO = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "train_llama.py"
# ctest says where the command is; else: the extension lies in python/ragged_fsdp of a build folder, the command in bin.
COMMAND = pathlib.Path(os.environ.get("RAGGED_BINARY") or pathlib.Path(_C.__file__).parents[2] / "bin" / "ragged")

CONFIG = """
[model]
dim = 40
layers = 2
heads = 4
kv_heads = 2
feed_forward = 56

[train]
steps = 6
batch = 2
sequence = 24
warmup = 2
param_dtype = "fp32"

[eval]
every = 4
sequences = 5     # not a multiple of ranks times batch: some ranks run out
sample_bytes = 0
"""


def run(arguments, world, folder):
    """Runs the script or the command on `world` ranks; returns what it printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*torchrun, *map(str, arguments)], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(folder):
    lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same_losses(ours, others, tolerance):
    """Loss, norm, rate and validation loss of every step."""
    assert len(ours) == len(others)
    for mine, theirs in zip(ours, others):
        for key in ("step", "loss", "grad_norm", "lr", "val_loss"):
            assert (key in mine) == (key in theirs), (key, mine, theirs)
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=tolerance), (key, mine, theirs)


@pytest.fixture
def config(tmp_path):
    """A configuration over a folder of text whose order and hold-out matter."""
    rng = random.Random(7)
    for name in ("b.py", "a.py", "c/d.py", "c/B.py", "e.txt"):
        file = tmp_path / "text" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(rng.choice(["def", "return", "x", "(y)", ":\n"]) for _ in range(400)))
    path = tmp_path / "tiny.toml"
    path.write_text(f'{CONFIG}\n[data]\npath = "{tmp_path}/text"\nholdout = 3\n')
    return path


@pytest.mark.parametrize(
    "world, overrides",
    [
        pytest.param(2, [], id="two_ranks"),
        pytest.param(
            4,
            ["--parallel.replicate=2", "--train.accumulate=2", "--train.activation_checkpointing=true",
             "--parallel.rows=8", "--train.batch=1"],
            id="hybrid_mesh_and_accumulation",
        ),
    ],
)  # fmt: skip
def test_losses_equal_those_of_ragged_train(config, tmp_path, world, overrides):
    if not COMMAND.exists():
        pytest.skip(f"no {COMMAND}: built without RAGGED_BUILD_COMMAND")
    printed = run([SCRIPT, config, *overrides, f"--run.dir={tmp_path}/python"], world, tmp_path)
    run(["--no-python", COMMAND, "train", config, *overrides, f"--run.dir={tmp_path}/command"], world, tmp_path)
    assert_same_losses(metrics(tmp_path / "python"), metrics(tmp_path / "command"), tolerance=1e-5)
    assert "layers.0" in printed, "the summary lists the units"
    assert printed.count("  equal\n") == 6 and "DIFFERS" not in printed, printed


def test_losses_equal_those_of_stock_fsdp2(config, tmp_path):
    for name, flags in (("ours", []), ("stock", ["--stock"])):
        run([SCRIPT, config, "--train.steps=4", *flags, f"--run.dir={tmp_path}/{name}"], 3, tmp_path)
    assert_same_losses(metrics(tmp_path / "ours"), metrics(tmp_path / "stock"), tolerance=1e-5)


def test_optimizers_of_ours_train_like_the_stock_one(config, tmp_path):
    for name in ("stock", "adamw", "adamw8bit"):
        run([SCRIPT, config, "--optimizer", name, f"--run.dir={tmp_path}/{name}"], 2, tmp_path)
    stock = metrics(tmp_path / "stock")
    assert_same_losses(metrics(tmp_path / "adamw"), stock, tolerance=1e-5)
    coded = metrics(tmp_path / "adamw8bit")
    assert_same_losses(coded, stock, tolerance=2e-2)
    assert [step["loss"] for step in coded] != [step["loss"] for step in stock], "states are in 8 bits"


PROBE = """
import os, pathlib, runpy, sys
script = sys.argv.pop(1)
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as done:
    assert not done.code, done.code
sys.stdout.flush()
names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
left = sum(name.startswith("pt_gloo_run") for name in names)
os.write(1, f"threads of Gloo left: {left}\\n".encode())  # in one piece: ranks share the terminal
"""


def test_leaves_no_thread_of_gloo_that_could_outlive_python(config, tmp_path):
    """One that lets go of a tensor while Python is torn down aborts the process."""
    (tmp_path / "probe.py").write_text(PROBE)
    printed = run([tmp_path / "probe.py", SCRIPT, config, "--train.steps=1", f"--run.dir={tmp_path}/out"], 2, tmp_path)
    assert printed.count("threads of Gloo left: 0") == 2, printed


def test_runs_without_torchrun_and_refuses_unknown_keys(config, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(SCRIPT), str(config), "--train.steps=1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, "--train.stepps=2"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "'train.stepps'" in done.stderr
