"""Checkpoints that `ragged train` wrote, read by others: stock torch.distributed.checkpoint with its Hugging Face
reader, the safetensors library, where none of our code takes part in the reading; and the Python package, whose own
checkpoints the command reads and resumes."""

import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.optim import whole as gathered
from support.ranks import run_threads

from ragged_fsdp import _C, checkpoint, distribute_tensor, fully_shard
from ragged_fsdp.optim import SOAP, AdamW, AdamW8bit, Muon, muon_groups, tile_rows

pytest.importorskip("safetensors")
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train_llama.py"

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


def index(folder):
    return json.loads((folder / "checkpoint.json").read_text())["content"]


def pieces(folder):
    """(name, offset, tensor) of every box, by the safetensors library."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            assert sorted(places) == sorted(opened.keys())
            for name in opened.keys():
                yield name, places[name]["saved_offsets"], opened.get_tensor(name)


def whole_tensors(folder):
    """The tensors, put together by hand, each element once."""
    from safetensors.torch import _getdtype

    tensors = {t["name"]: t for t in index(folder)["tensors"]}
    whole = {n: torch.zeros(t["shape"], dtype=_getdtype(t["dtype"])) for n, t in tensors.items()}
    times = {n: torch.zeros(t["shape"], dtype=torch.int32) for n, t in tensors.items()}
    for name, offset, box in pieces(folder):
        at = tuple(slice(o, o + n) for o, n in zip(offset, box.shape))
        whole[name][at] = box
        times[name][at] += 1
    assert all((count == 1).all() for count in times.values())
    return whole


@pytest.mark.parametrize("ranks, options", [(3, []), (4, ["--parallel.replicate=2", "--optimizer.moment_dtype=bf16"]),
                                            (2, ["--optimizer.kind=adamw8bit"])])
def test_stock_dcp_loads_model_and_optimizer(tmp_path, ranks, options):
    folder = train(tmp_path, ranks, *options)
    whole = whole_tensors(folder)
    assert any(w.float().abs().max() > 0 for n, w in whole.items() if n.startswith("state."))

    loaded = {n: torch.full_like(w, 7) for n, w in whole.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, whole[name]), name


def test_several_files_a_rank_are_needed_here(tmp_path):
    folder = train(tmp_path, 3)
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    assert any("-model-00002-of-" in name for name in names), names


def test_names_are_those_that_torch_gives_optimizer_states(tmp_path):
    folder = train(tmp_path, 1)
    names = [t["name"] for t in index(folder)["tensors"]]
    assert "layers.0.mlp.up_proj.weight" in names
    assert "state.layers.0.mlp.up_proj.weight.exp_avg" in names


# ---- the command and the package read each other's -------------------------------------------------------------------

MAKE = {
    "adamw": lambda model: AdamW(model.named_parameters()),
    "adamw8bit": lambda model: AdamW8bit(model.named_parameters(), embeddings="embed_tokens|lm_head"),
    "muon": lambda model: Muon(muon_groups(model.named_parameters())),
    "normuon": lambda model: Muon(muon_groups(model.named_parameters()), normuon=True, momentum_format="power"),
    "soap": lambda model: SOAP(muon_groups(model.named_parameters())),
}
ARGUMENTS = {
    "normuon": ["--optimizer.kind=muon", "--optimizer.normuon=true", "--optimizer.momentum_format=power"],
    "soap": ["--optimizer.kind=soap", "--optimizer.precondition_frequency=2"],
}


def llama():
    spec = importlib.util.spec_from_file_location("train_llama", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = {"vocabulary": 256, "dim": 40, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 112, "head_dim": 0}
    return example.Llama(types.SimpleNamespace(**config, rope_theta=1e4, norm_eps=1e-5))


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype and torch.equal(tensor, want[name]), name


def pass_through(rank, world, kind, source, target):
    """Loads with the package, saves with it again; compares values and counts in between."""
    model = llama()
    for layer in model.layers:
        fully_shard(layer, shard_policy=tile_rows)
    fully_shard(model, shard_policy=tile_rows)
    optimizer = MAKE[kind](model)
    loaded = checkpoint.load(source, model, optimizer)
    assert loaded.step == 3 and loaded.world_size == 2 and "[train]" in loaded.facts["config"]
    want = whole_tensors(source)
    for name, param in model.named_parameters():
        assert torch.equal(gathered(param), want[name]), name
        for key, value in optimizer.state[param].items():
            if key == "step":
                assert value.item() == 3
            else:
                key = key.replace("_codes", ".codes").replace("_scales", ".scales").replace("m_buffer", "m")
                assert torch.equal(gathered(value), want[f"state.{name}.{key}"]), (name, key)
    checkpoint.save(target, model, optimizer, step=3)


@pytest.mark.parametrize("kind", MAKE)
def test_the_package_loads_the_commands_checkpoint_and_the_command_resumes_the_packages(tmp_path, kind):
    # 112 x 40: as large as AdamW8bit asks for.
    options = [*ARGUMENTS.get(kind, [f"--optimizer.kind={kind}"]), "--train.steps=6", "--checkpoint.keep=0"]
    options.append("--model.feed_forward=112")
    source = train(tmp_path, 2, *options)
    unbroken = whole_tensors(source.with_name("step-6"))
    run_threads(3, pass_through, kind, source, tmp_path / "package")
    ours = tmp_path / "package" / "step-3"
    assert_same(whole_tensors(ours), whole_tensors(source))
    assert (kind in ("adamw8bit", "normuon")) == any(name.endswith(".codes") for name in whole_tensors(ours))

    verified = subprocess.run([str(COMMAND), "inspect", "--verify", str(ours)], capture_output=True, text=True)
    assert verified.returncode == 0 and "verified: all" in verified.stdout, verified.stdout + verified.stderr
    assert "step 3, saved by 3 ranks" in verified.stdout and "optimizer.steps.lm_head.weight = 3" in verified.stdout

    train(tmp_path, 2, *options, f"--checkpoint.resume={ours}", "--run.dir=resumed")
    assert_same(whole_tensors(tmp_path / "resumed" / "checkpoints" / "step-6"), unbroken)


# ---- the same bits, and as many bytes as planned ---------------------------------------------------------------------


def steps_of_the_package(rank, world, folders):
    """From the command's first checkpoint on, each step with the gradients that the command had. Its first moments are
    its gradients where beta1 is 0, clip factor and all."""
    model = llama()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SOAP(
        muon_groups(model.named_parameters()), lr=1e-2, betas=(0.0, 0.95), weight_decay=0.1, precondition_frequency=2,
        adamw_betas=(0.0, 0.95),
    )  # fmt: skip
    loaded = checkpoint.load(folders[0], model, optimizer, restore_options=False)
    assert loaded.step == 1
    vectors = {id(param) for param in model.parameters() if param.ndim < 2}  # what `ragged train` doesn't decay
    seen = []
    for folder in folders[1:]:
        after = whole_tensors(folder)
        for name, param in model.named_parameters():
            grad = after[f"state.{name}.exp_avg"]
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        optimizer.step()
        for name, param in model.named_parameters():
            if id(param) not in vectors:
                seen.append((name, gathered(param), after[name]))
            for key, value in optimizer.state[param].items():
                if key != "step":
                    seen.append((f"{name} {key}", gathered(value), after[f"state.{name}.{key}"]))
    return seen


@pytest.fixture(scope="module")
def soap_run(tmp_path_factory):
    """Checkpoints of six steps of the command on three ranks, whose first moments are gradients."""
    folder = train(
        tmp_path_factory.mktemp("soap"), 3, "--optimizer.kind=soap", "--optimizer.precondition_frequency=2",
        "--optimizer.betas=[0.0, 0.95]",
        "--train.steps=6", "--train.warmup=0", "--train.lr=1e-2", "--train.min_lr_ratio=1", "--checkpoint.every=1",
        "--checkpoint.keep=0", "--model.feed_forward=112",
    )  # fmt: skip
    return [folder.with_name(f"step-{step}") for step in range(1, 7)]


def test_soap_steps_have_the_bits_of_the_commands(soap_run):
    for world in (1, 2, 4):
        for seen in run_threads(world, steps_of_the_package, soap_run):
            for name, got, want in seen:
                assert torch.equal(got, want), name
            assert any(name.endswith("Q_L") for name, _, _ in seen)


def test_plan_forecasts_the_bytes_of_soaps_states_on_the_fullest_rank(soap_run, tmp_path):
    def params(names):
        return [{"name": n, "shape": shapes[n], "kind": "embedding" if "embed" in n else "matrix",
                 "role": "head" if "head" in n else "mlp"} for n in names]  # fmt: skip

    tensors = index(soap_run[0])["tensors"]
    shapes = {t["name"]: t["shape"] for t in tensors if not t["name"].startswith("state.")}
    units = [[n for n in shapes if not n.startswith("layers.")]]
    units += [[n for n in shapes if n.startswith(f"layers.{layer}.")] for layer in range(2)]
    listed = [{"name": f"{i}", "params": params(unit)} for i, unit in enumerate(units)]
    (tmp_path / "m.json").write_text(json.dumps({"format": 1, "name": "m", "units": listed}))
    held = [0.0] * 3
    for tensor in tensors:
        if tensor["name"].startswith("state."):
            shares = [int(unit) for unit in re.search(r"units=\[(.*)\]", tensor["placement"])[1].split(",")]
            for rank, share in enumerate(shares):
                held[rank] += 4 * math.prod(tensor["shape"]) * share / sum(shares)
    arguments = [str(COMMAND), "plan", str(tmp_path / "m.json"), "--ranks", "3", "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forecast = json.loads(done.stdout)["bytes_per_rank"]["optimizer"]["soap"]
    assert abs(forecast - max(held)) < 1e-3 * forecast, "the same roots; AdamW's part is aligned by other rules"
