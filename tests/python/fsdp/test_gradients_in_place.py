"""Gradients computed in the reduce buffer: same bits where that is promised, near ones elsewhere, and torch's own way
where neither can be."""

import pytest
import torch
from copies import Copies
from models import TinyLM, next_token_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import assert_close, full, mesh, only_ours, processes, randn, seeded, shard, subject, tokens

pytestmark = only_ours("FSDP2 copies every gradient")


class Shared(nn.Module):
    """One linear used three times, one frozen, one whose input needs no gradient, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.shared, self.frozen, self.first, self.unused = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = self.first(x)
        for _ in range(3):
            y = torch.tanh(self.frozen(self.shared(y)))
        return y


def lm(tied=False):
    return TinyLM(vocab=29, dim=12, layers=2, tied=tied)


def padded():
    return nn.Sequential(nn.Embedding(7, 6, padding_idx=2), nn.Linear(6, 5))


def lm_loss(model, k):
    return next_token_loss(model, tokens(29, 2, 9, step=k))


def shared_loss(model, k):
    return model(randn(3, 2, 6, step=k)).square().mean()


def padded_loss(model, k):
    return model(tokens(7, 2, 9, step=k)).square().mean()


class Recomputed(TinyLM):
    """Torch's own checkpointing, of both kinds, around blocks."""

    reentrant = False

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def recomputed(reentrant):
    model = Recomputed(vocab=29, dim=12, layers=2)
    model.reentrant = reentrant
    return model


CASES = {
    "lm": (lm, lm_loss),
    "tied": (lambda: lm(tied=True), lm_loss),
    "shared": (Shared, shared_loss),
    "padded": (padded, padded_loss),
    "recomputed": (lambda: recomputed(False), lm_loss),
    "recomputed reentrant": (lambda: recomputed(True), lm_loss),
}


def gradients(name, in_place, bf16=False, micro=1, autocast=False, over=False):
    """(gradients after each of three steps, losses, what moved in the last)."""
    build, loss_of = CASES[name]
    options = {"mesh": mesh(), "gradients_in_place": in_place, "gradients_over_weights": over}
    if bf16:
        options["mp_policy"] = subject().MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = seeded(build)
    model = shard(model, getattr(model, "blocks", ()), **options)
    model.set_merge_bytes(0)  # what merges is copied
    found, losses = [], []
    for step in range(3):
        before = subject().stats(model)
        for k in range(micro):
            model.set_requires_gradient_sync(k == micro - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, micro * step + k)
            loss.backward()
            losses.append(loss.detach())
        found.append({n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()})
        after = subject().stats(model)
        model.zero_grad()
    return found, losses, {k: after[k] - before[k] for k in ("cast_grad", "in_place", "added", "copied")}


def compare(name, in_place, exact, **options):
    want, want_losses, copied = gradients(name, False, **options | {"over": False})
    got, losses, moved = gradients(name, in_place, **options)
    assert (moved["copied"] == 0 or options.get("over")) and copied["in_place"] == 0
    for loss, expected in zip(losses, want_losses, strict=True):
        assert torch.equal(loss, expected)
    for mine, theirs in zip(got, want, strict=True):
        for key, grad in theirs.items():
            assert (grad is None) == (mine[key] is None), key
            if grad is None:
                continue
            if exact:
                assert torch.equal(mine[key], grad), key
            else:
                assert_close(mine[key], grad, 0.02 if options.get("bf16") else 2e-6, key)
    return moved, copied


def _all_of(checks):
    return [compare(name, in_place, exact, **options) for name, in_place, exact, options in checks]


SAME_BITS = [
    (name, "same_bits", True, options)
    for name in CASES
    for options in ({}, {"micro": 3}, {"bf16": True}, {"over": True}, {"over": True, "bf16": True}, {"over": True, "micro": 2})
]
OVER_WEIGHTS = [(name, False, True, {"over": True} | options) for name in CASES for options in ({}, {"bf16": True}, {"micro": 2})]
ALWAYS = [(name, True, False, options) for name in CASES for options in ({}, {"micro": 2}, {"bf16": True})]


@pytest.mark.parametrize("ranks", [2, 3])
def test_same_bits_means_same_bits(ranks):
    for found in processes(ranks, _all_of, SAME_BITS):
        for (name, *_, options), (moved, copied) in zip(SAME_BITS, found, strict=True):
            assert moved["in_place"] > 0, name
            assert moved["cast_grad"] + moved["in_place"] == copied["cast_grad"], (name, options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_copies_over_weights_have_the_same_bits(ranks):
    processes(ranks, _all_of, OVER_WEIGHTS)


def test_always_is_near_and_copies_no_matrix():
    for found in processes(2, _all_of, ALWAYS):
        for (name, *_, options), (moved, copied) in zip(ALWAYS, found, strict=True):
            if not options.get("bf16"):
                assert moved["cast_grad"] < 0.2 * copied["cast_grad"], (name, options)


def test_autocast_takes_torchs_way():
    for found in processes(2, _all_of, [("lm", True, True, {"autocast": True})]):
        assert found[0][0]["in_place"] == 0


def _bytes():
    model = seeded(lambda: TinyLM(vocab=64, dim=64, heads=4, layers=3))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    total = 4 * sum(p.numel() for p in model.parameters())
    plain = seeded(lambda: TinyLM(vocab=64, dim=64, heads=4, layers=3))
    model = shard(model, model.blocks, mesh=mesh(), gradients_in_place="same_bits")
    model.set_merge_bytes(0)

    def step(module):
        next_token_loss(module, tokens(64, 2, 9)).backward()

    for module in (model, plain):
        step(module)
        module.zero_grad()
    with Copies() as compute:
        step(plain)
    with Copies() as seen:
        step(model)
    moved = subject().stats(model)
    return (seen.total - compute.total) / total, moved["in_place"] == 2 * 4 * matrices, moved["cast_in"]


def test_in_fp32_only_gradients_of_vectors_are_copied():
    for copied, all_in_place, cast_in in processes(2, _bytes):
        assert all_in_place
        assert cast_in == 0
        assert copied < 0.05


def _compiled():
    torch._dynamo.reset()
    x = randn(3, 6)
    found = []
    for compiles in (False, True):
        inner = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
        model = nn.Sequential(seeded(lambda: nn.Linear(6, 5)), inner)
        if compiles:
            model[1].compile(backend="aot_eager", fullgraph=True)
        shard(model, mesh=mesh(), gradients_in_place=True)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        found.append(([full(p.grad) for p in model.parameters()], subject().stats(model)))
    (plain, moved), (compiled, moved_compiled) = found
    for p, q in zip(compiled, plain, strict=True):
        assert_close(p, q)
    return moved["in_place"], moved_compiled["in_place"]


def test_compiled_parts_take_torchs_way():
    assert processes(2, _compiled) == [(2 * 4 * (30 + 20 + 12), 2 * 4 * 30)] * 2


def _left_alone():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({
        "own": Own(4, 4),
        "sparse": nn.Embedding(4, 4, max_norm=1.0),
        "plain": nn.Linear(4, 4),
        "bilinear": nn.Bilinear(4, 4, 4),
    })
    wrapped = nn.Sequential(*model.values())
    wrapped.forward = lambda x: x
    shard(wrapped, mesh=mesh(), gradients_in_place=True)
    return [name for name, module in model.items() if "forward" in module.__dict__]


def test_only_plain_modules_are_converted():
    assert processes(1, _left_alone) == [["plain"]]


def _values(value):
    try:
        subject().fully_shard(nn.Linear(2, 2), mesh=mesh(), gradients_in_place=value)
    except ValueError as error:
        return str(error)
    return None


def test_other_values_are_refused():
    text = processes(1, _values, "no")[0]
    assert "Expected gradients_in_place to be True, False or 'same_bits', but got 'no'" in text


def _vmap():
    model = seeded(lambda: nn.Linear(4, 3))
    shard(model, mesh=mesh(), gradients_in_place=True)
    x = randn(5, 2, 4)
    got = model(x)
    inside = seeded(lambda: nn.Linear(4, 3))

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = inside

        def forward(self, x):
            return torch.vmap(self.lin)(x)

    mapped = shard(Mapped(), mesh=mesh(), gradients_in_place=True)
    out = mapped(x)
    assert torch.allclose(out, got)
    out.sum().backward()
    got.sum().backward()
    assert_close(full(inside.weight.grad), full(model.weight.grad))


def test_transforms_take_torchs_way():
    processes(1, _vmap)
