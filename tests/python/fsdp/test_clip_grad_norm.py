"""Clipping: torch's clip_grad_norm_ over sharded gradients, and ours, equal clipping of the plain model."""

import pytest
import torch
from models import stack
from torch.distributed.tensor import DTensor

from harness import (
    assert_same_model,
    backward_of_all_ranks,
    full,
    mesh,
    only_ours,
    randn,
    seeded,
    shard,
    subject,
    threads,
)


def clipped(norm_type, clip, grid=None):
    model, reference = seeded(stack), seeded(stack)
    shard(model, model, **({"mesh": grid} if grid else {}))
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(3):
        for o in (mine, other):
            o.zero_grad()
        backward_of_all_ranks(reference, lambda m, r: m(randn(3, 8, step=step, of_rank=r)).square().sum())
        model(randn(3, 8, step=step)).square().sum().backward()
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        got = clip(model.parameters(), 0.5, norm_type)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        assert want > 0.5, "the test clips"
        assert_same_model(model, reference, 1e-5)
        norm = torch.linalg.vector_norm(
            torch.stack([full(p.grad).norm(norm_type) for p in model.parameters()]), norm_type
        )
        assert norm <= 0.5 * (1 + 1e-5)
        for o in (mine, other):
            o.step()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torch_clipping_over_shards(ranks, norm_type):
    threads(ranks, clipped, norm_type, torch.nn.utils.clip_grad_norm_)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_torch_clipping_over_hybrid_shards(norm_type):
    threads(4, lambda: clipped(norm_type, torch.nn.utils.clip_grad_norm_, mesh(2, 2, names=("replicate", "shard"))))


@only_ours("FSDP2 has no function of its own")
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_own_clipping(norm_type):
    threads(3, lambda: clipped(norm_type, subject().clip_grad_norm_))


def test_total_norm_is_the_same_on_every_rank():
    def body():
        model = seeded(stack)
        shard(model, model)
        model(randn(3, 8)).square().sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    assert len(set(threads(4, body))) == 1


def test_nothing_to_clip():
    def body():
        model = seeded(stack)
        shard(model, model)
        model(randn(3, 8)).mul(1e-6).sum().backward()
        before = [p.grad.to_local().clone() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        assert all(torch.equal(p.grad.to_local(), g) for p, g in zip(model.parameters(), before, strict=True))

    threads(2, body)
