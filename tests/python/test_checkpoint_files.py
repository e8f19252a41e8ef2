"""Checkpoints that `ragged train` wrote, read by others: stock torch.distributed.checkpoint with its Hugging Face
reader, and the safetensors library. None of our code takes part in the reading."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ragged_fsdp import _C

pytest.importorskip("safetensors")

# ctest says where the command is; else: the extension lies in python/ragged_fsdp of a build folder, the command in bin.
COMMAND = pathlib.Path(os.environ.get("RAGGED_BINARY") or pathlib.Path(_C.__file__).parents[2] / "bin" / "ragged")

# 40 x 72 with three ranks: intervals that need several boxes, hence several files a rank.
CONFIG = """
[model]
dim = 40
layers = 2
heads = 4
kv_heads = 2
feed_forward = 72
[data]
path = "text.txt"
[train]
steps = 3
batch = 1
sequence = 16
param_dtype = "fp32"
[eval]
sequences = 3
sample_bytes = 0
[checkpoint]
every = 3
[run]
dir = "run"
device = "cpu"
"""


def train(folder, ranks, *arguments):
    """Runs the command on so many ranks; returns the folder of its last checkpoint."""
    (folder / "text.txt").write_text("".join(f"x{i} = {i * i % 101}\n" for i in range(500)))
    (folder / "tiny.toml").write_text(CONFIG)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "--no-python", str(COMMAND), "train", "tiny.toml", *arguments], cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run" / "checkpoints" / "step-3"


def index(checkpoint):
    return json.loads((checkpoint / "checkpoint.json").read_text())["content"]


def pieces(checkpoint):
    """(name, offset, tensor) of every box, by the safetensors library."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            assert sorted(places) == sorted(opened.keys())
            for name in opened.keys():
                yield name, places[name]["saved_offsets"], opened.get_tensor(name)


@pytest.mark.parametrize("ranks, options", [(3, []), (4, ["--parallel.replicate=2", "--optimizer.moment_dtype=bf16"]),
                                            (2, ["--optimizer.kind=adamw8bit"])])
def test_stock_dcp_loads_model_and_optimizer(tmp_path, ranks, options):
    checkpoint = train(tmp_path, ranks, *options)
    tensors = {t["name"]: t for t in index(checkpoint)["tensors"]}
    from safetensors.torch import _getdtype

    # Put together by hand, each element once.
    whole = {n: torch.zeros(t["shape"], dtype=_getdtype(t["dtype"])) for n, t in tensors.items()}
    times = {n: torch.zeros(t["shape"], dtype=torch.int32) for n, t in tensors.items()}
    for name, offset, box in pieces(checkpoint):
        at = tuple(slice(o, o + n) for o, n in zip(offset, box.shape))
        whole[name][at] = box
        times[name][at] += 1
    assert all((count == 1).all() for count in times.values())
    assert any(w.float().abs().max() > 0 for n, w in whole.items() if n.startswith("state."))

    loaded = {n: torch.full_like(w, 7) for n, w in whole.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, whole[name]), name


def test_several_files_a_rank_are_needed_here(tmp_path):
    checkpoint = train(tmp_path, 3)
    names = sorted(p.name for p in checkpoint.glob("*.safetensors"))
    assert any("-model-00002-of-" in name for name in names), names


def test_names_are_those_that_torch_gives_optimizer_states(tmp_path):
    checkpoint = train(tmp_path, 1)
    names = [t["name"] for t in index(checkpoint)["tensors"]]
    assert "layers.0.mlp.up_proj.weight" in names
    assert "state.layers.0.mlp.up_proj.weight.exp_avg" in names
