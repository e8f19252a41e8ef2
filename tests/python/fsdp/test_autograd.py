"""Graphs of odd shape: outputs that no loss uses, modules that no output uses, tensors inside containers, hooks."""

import collections
import dataclasses

import pytest
import torch
from models import MLP, TinyLM, TwoHeads, next_token_loss, stack
from test_training import train
from torch import nn

from harness import full, randn, seeded, shard, threads, tokens


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_an_output_that_the_loss_does_not_use(reshard):
    def body():
        model = seeded(TwoHeads)
        shard(model, [model.first], reshard_after_forward=reshard)

        def loss(m, step, r):
            a, b = m(randn(2, 8, step=step, of_rank=r))
            return (a * b).sum() if step < 3 else a.sum()

        train(model, seeded(TwoHeads), loss)

    threads(4, body)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_module_that_the_output_does_not_use(reshard):
    def body():
        build = lambda: TwoHeads(second=False)
        model = seeded(build)
        shard(model, (model.first, model.second), reshard_after_forward=reshard)
        train(model, seeded(build), lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).sum())
        assert all(p.grad is None for p in model.second.parameters())

    threads(2, body)


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("kind", [list, tuple, dict, Pair, Record])
def test_activations_inside_containers(kind):
    """Between two units travel structures, not tensors: hooks find the tensors in them."""

    class Splits(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            if kind is dict:
                return {"a": a, "b": b}
            return kind([a, b]) if kind in (list, tuple) else kind(a, b)

    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 6)

        def forward(self, value):
            a, b = (value["a"], value["b"]) if kind is dict else (value.a, value.b) if kind in (Pair, Record) else value
            return self.out(a.relu() + b)

    def body():
        build = lambda: nn.Sequential(Splits(), Joins())
        model = seeded(build)
        shard(model, model)
        train(model, seeded(build), lambda m, s, r: m(randn(2, 6, step=s, of_rank=r)).square().mean(), steps=4)

    threads(2, body)


def test_post_accumulate_hooks_run_once_a_backward():
    def body():
        calls = collections.Counter()
        model = MLP()
        shard(model, (model.up, model.down))
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.update({name: int(p.grad is not None)}))
        for steps in (1, 2):
            model(randn(2, 8)).sum().backward()
            assert calls == {n: steps for n, _ in model.named_parameters()}

    threads(2, body)


def test_optimizer_inside_post_accumulate_hooks():
    """Stepping each parameter from its hook equals one step at the end, bit for bit."""

    def body():
        models = [seeded(TinyLM) for _ in range(2)]
        for model in models:
            shard(model, model.blocks)
        plain, hooked = models
        whole = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
        each = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in hooked.parameters()}

        def step(p):
            each[p].step()
            each[p].zero_grad()

        for p in hooked.parameters():
            p.register_post_accumulate_grad_hook(step)
        for k in range(4):
            ids = tokens(29, 2, 7, step=k)
            losses = [next_token_loss(m, ids) for m in models]
            for loss in losses:
                loss.backward()
            whole.step()
            whole.zero_grad()
            assert torch.equal(*losses)
            for p, q in zip(plain.parameters(), hooked.parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local()) and q.grad is None

    threads(2, body)


def test_input_that_needs_no_gradient_and_one_that_does():
    def body():
        model = seeded(stack)
        shard(model, model)
        x = randn(2, 8).requires_grad_()
        model(x).sum().backward()
        reference = seeded(stack)
        y = randn(2, 8).requires_grad_()
        reference(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)

    threads(2, body)


def test_backward_twice_over_a_retained_graph():
    def body():
        model = seeded(stack)
        shard(model, model)
        loss = model(randn(2, 8)).square().mean()
        loss.backward(retain_graph=True)
        once = [full(p.grad).clone() for p in model.parameters()]
        loss.backward()
        for p, g in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(full(p.grad), 2 * g)

    threads(2, body)
