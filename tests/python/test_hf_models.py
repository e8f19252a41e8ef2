"""Models that go between `ragged` and transformers, in both directions: the same logits, the same bytes.

The command runs in processes of its own, as a user runs it; what a checkpoint of ours computes is asked of a small
program (tests/train/logits_main.cpp) that knows nothing of the exporter. Skipped where transformers isn't installed.
"""

import importlib.util
import json
import os
import socket
import subprocess

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

BINARY = os.environ.get("RAGGED_BINARY", "")
LOGITS = os.environ.get("RAGGED_LOGITS", "")
MISSING = [p for p in ("transformers", "safetensors") if importlib.util.find_spec(p) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING} (pip install -r tools/requirements-hf.lock)"),
    pytest.mark.skipif(not (BINARY and LOGITS), reason="RAGGED_BINARY and RAGGED_LOGITS don't name the programs"),
]

TRAINING = """
[data]
path = "text.txt"
[train]
batch = 2
sequence = 24
param_dtype = "fp32"
[eval]
sequences = 2
sample_bytes = 0
[run]
device = "cpu"
"""

MODELS = {
    "llama": ["--model.head_dim=10"],
    "stretched": ["--model.rope_factor=8.0", "--model.rope_original_sequence=40"],
    "tied": ["--model.tied_embeddings=true", "--model.rope_theta=500000.0"],
    "gpt_oss": ["--model.kind=moe"],
    "mixtral": ["--model.kind=moe", "--model.expert_biases=false", "--model.kv_heads=4"],
}

TEXT = "Grüße,\tWelt\u3000!\n\n  def  f(x):\r\n    return x\x00\x7f \U0001f600"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"while n > {i * i % 89}:\n    n -= {i}\n" for i in range(300)))
    (tmp_path / "tiny.toml").write_text(
        "[model]\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nfeed_forward = 20\nexperts = 5\n" + TRAINING
    )
    return tmp_path


def ragged(folder, *args, ranks=1):
    """What rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env.update({} if ranks == 1 else {name: str(value) for name, value in variables.items()})
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        processes.append(subprocess.Popen([BINARY, *map(str, args)], cwd=folder, env=env, **pipes))
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, err) in zip(processes, outputs):
        assert process.returncode == 0, err
    return outputs[0][0]


def our_logits(folder, checkpoint, ids):
    done = subprocess.run(
        [LOGITS, str(folder / checkpoint), *map(str, ids)], text=True, capture_output=True, timeout=120, check=True
    )
    return torch.tensor([[float(x) for x in line.split()] for line in done.stdout.splitlines()])


def load(path, **options):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(report.values()), report  # missing, unexpected, mismatched
    return model.eval()


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def assert_same_logits(ours, theirs):
    """Sums run in other orders; what differs is rounding of fp32."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 2e-6 * max(1.0, float(theirs.abs().max())), (ours - theirs).abs().max()


def stored_tensors(path):
    """Of a folder, by name: dtype, shape and bytes as they lie in the files."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:end]).items():
            if name == "__metadata__":
                continue
            begin, stop = entry["data_offsets"]
            assert name not in tensors
            tensors[name] = (entry["dtype"], entry["shape"], data[end + begin : end + stop])
    return tensors


# --- ours to theirs ---


@pytest.mark.parametrize("kind", MODELS)
def test_what_we_trained_computes_the_same_in_transformers(folder, kind):
    ranks = 2 if kind == "gpt_oss" else 1
    # Far enough from where it started for every bias to count.
    training = ("--train.steps=4", "--train.warmup=0", "--train.lr=0.05", "--model.init_std=0.2", "--run.dir=run")
    ragged(folder, "train", "tiny.toml", *MODELS[kind], *training, "--checkpoint.every=4", ranks=ranks)
    said = ragged(folder, "export", "run/checkpoints/step-4", "out", "--max-file-size=20000")
    model = load(folder / "out")
    assert type(model).__name__ in said
    assert model.dtype == torch.float32
    assert len(list((folder / "out").glob("model-*.safetensors"))) > 1
    ids = list(TEXT.encode())
    ours = our_logits(folder, "run/checkpoints/step-4", ids)
    assert ours.abs().max() > 1
    assert_same_logits(ours, their_logits(model, ids))
    if kind == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    if kind == "gpt_oss":  # parts that GPT-OSS has and we don't would show
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        assert len(biases) == 6 and all(bias.abs().max() > 1e-3 for bias in biases)

    # In the dtype that models are published in, both ways round the same numbers.
    ragged(folder, "export", "run/checkpoints", "half", "--dtype=bf16")
    half = load(folder / "half")
    assert half.dtype == torch.bfloat16
    for (name, found), (_, whole) in zip(half.state_dict().items(), model.state_dict().items()):
        assert torch.equal(found, whole.bfloat16()), name


def test_tokens_are_the_bytes_of_the_text(folder):
    from transformers import AutoTokenizer

    ragged(folder, "train", "tiny.toml", "--train.steps=1", "--run.dir=run", "--checkpoint.every=1")
    ragged(folder, "export", "run/checkpoints", "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    for text in (TEXT, "", " ", "<s>", "a" * 1000, "\n\n  \n", "".join(map(chr, range(1, 0x250)))):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode()), text
        assert tokenizer.decode(ids) == text
    model = load(folder / "out")
    ids = torch.tensor([list(b"while n > ")])
    written = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert written.shape == (1, 30), "a byte ended the text"


# --- theirs to ours ---


def make_theirs(kind, **options):
    import transformers

    sizes = dict(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=20, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.2,
    )
    torch.manual_seed(1)
    if kind == "stretched":
        rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
        options["rope_parameters"] = {**rope, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama", "tied", "stretched"):
        config = transformers.LlamaConfig(**sizes, head_dim=10, tie_word_embeddings=kind == "tied", **options)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        config = transformers.MistralConfig(**sizes, sliding_window=None, **options)
        model = transformers.MistralForCausalLM(config)
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=5, num_experts_per_tok=3, **options)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **sizes, head_dim=8, num_local_experts=5, num_experts_per_tok=3, attention_bias=False, swiglu_alpha=1.0,
            swiglu_limit=1e30, layer_types=["full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **options,
        )
        model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e30)
            elif name.endswith("gate_up_proj_bias"):
                parameter.normal_(0, 0.1)[..., 1::2] -= 1
            elif parameter.dim() < 2 or name.endswith("bias"):
                parameter.normal_(0.5, 0.2)
    return model.eval()


def start_from(folder, *args, ranks=1):
    """Imports `theirs`, and a run that changes nothing: below 1e-29 every sum rounds back."""
    ragged(folder, "import", "theirs", "start.toml")
    config = folder / "start.toml"
    config.write_text(config.read_text() + TRAINING)
    still = ("--train.steps=1", "--train.lr=1e-30", "--run.dir=run", "--checkpoint.every=1")
    return ragged(folder, "train", "start.toml", *still, *args, ranks=ranks)


@pytest.mark.parametrize("kind", ["llama", "tied", "stretched", "mistral", "mixtral", "gpt_oss"])
def test_what_they_made_computes_the_same_here_and_goes_back(folder, kind):
    model = make_theirs(kind)
    model.save_pretrained(folder / "theirs", max_shard_size="30KB")
    assert (folder / "theirs" / "model.safetensors.index.json").exists()
    said = start_from(folder, ranks=3 if kind in ("tied", "mixtral") else 1)
    assert f"({'LlamaForCausalLM' if kind == 'mistral' else type(model).__name__}, " in said
    ids = list(TEXT.encode())
    assert_same_logits(our_logits(folder, "run/checkpoints/step-1", ids), their_logits(model, ids))

    ragged(folder, "export", "run/checkpoints", "back")
    theirs, back = stored_tensors(folder / "theirs"), stored_tensors(folder / "back")
    assert theirs.keys() == back.keys()
    for name, (dtype, shape, data) in theirs.items():
        assert back[name][:2] == (dtype, shape), name
        if name.endswith("gate_up_proj_bias"):  # 1 was added and taken off again
            a, b = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (data, back[name][2]))
            assert (a - b).abs().max() <= 1.2e-7, name
        else:
            assert back[name][2] == data, name
    assert_same_logits(their_logits(load(folder / "back"), ids), their_logits(model, ids))


@pytest.mark.parametrize("dtype,name", [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_weights_of_two_bytes_come_in_exactly(folder, dtype, name):
    make_theirs("llama").to(dtype).save_pretrained(folder / "theirs")
    start_from(folder, ranks=2)
    ragged(folder, "export", "run/checkpoints", "back", "--dtype=fp32")
    theirs, back = stored_tensors(folder / "theirs"), stored_tensors(folder / "back")
    assert {entry[0] for entry in theirs.values()} == {name}
    for key, (_, _, data) in theirs.items():
        whole = torch.frombuffer(bytearray(data), dtype=dtype).float()
        assert torch.equal(torch.frombuffer(bytearray(back[key][2]), dtype=torch.float32), whole), key
    if dtype == torch.bfloat16:
        ragged(folder, "export", "run/checkpoints", "half", "--dtype=bf16")
        assert stored_tensors(folder / "half") == theirs


def test_models_with_parts_that_ours_lack_are_refused(folder):
    for kind, options in (
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("mixtral", {"sliding_window": 8}),
    ):
        path = folder / f"theirs-{len(list(folder.iterdir()))}"
        make_theirs(kind, **options).save_pretrained(path)
        done = subprocess.run([BINARY, "import", str(path)], text=True, capture_output=True, timeout=60)
        assert done.returncode == 2, done
        assert next(iter(options)).split("_")[0] in done.stderr and "config.json" in done.stderr, done.stderr
