"""Clipping: torch's clip_grad_norm_ over sharded gradients, and ours, equal clipping of the plain model."""

import pytest
import torch
from models import stack
from torch.distributed.tensor import DTensor

from harness import (
    Collectives,
    assert_same_model,
    backward_of_all_ranks,
    full,
    mesh,
    only_ours,
    processes,
    randn,
    rank,
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


# --- ours: one reduction, and what a norm that isn't finite does ----------------------------------------------------


def clip_counting(layout, norm_type, foreach):
    """Norms of our function over one of several layouts, and how many collectives it took."""
    model = seeded(stack)
    if layout == "flat":
        shard(model, model)
    elif layout == "hybrid":
        shard(model, model, mesh=mesh(2, 2, names=("replicate", "shard")))
    else:  # units on meshes of their own, and a plain parameter
        shard(model[0], mesh=mesh(2, 2, names=("replicate", "shard")))
        shard(model[1], mesh=mesh())
        shard(model, mesh=mesh(2, 2, names=("other", "shard")), ignored_params={model[2].up.bias})
    for step, param in enumerate(model.parameters()):
        param.grad = torch.empty_like(param)
        param.grad.copy_(randn(*param.shape, step=step, of_rank=0))
    wholes = [randn(*param.shape, step=step, of_rank=0) for step, param in enumerate(model.parameters())]
    want = torch.linalg.vector_norm(torch.cat([whole.reshape(-1) for whole in wholes]).double(), norm_type).item()
    with Collectives() as counted:
        norm = subject().clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
    assert type(norm) is torch.Tensor and norm.dtype == torch.float32 and norm.ndim == 0
    locals_ = [p.grad.to_local() if isinstance(p, DTensor) else p.grad for p in model.parameters()]
    return norm.item(), want, sum(counted.calls.values()), [local.clone() for local in locals_]


def clip_counting_all():
    return [clip_counting(layout, p, None)[:3] for layout in ("flat", "hybrid", "mixed") for p in (2.0, float("inf"))]


@only_ours("counts the collectives of our own function")
def test_own_clipping_reduces_once_over_all_meshes():
    for by_rank in zip(*processes(4, clip_counting_all), strict=True):
        assert len({norm for norm, _, _ in by_rank}) == 1, "equal bits on all ranks"
        assert all(norm == pytest.approx(want, rel=1e-6) and calls == 1 for norm, want, calls in by_rank)


@only_ours("foreach of our own function")
@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_gradients_one_by_one_give_the_same_bits(norm_type):
    together, alone = (threads(3, clip_counting, "flat", norm_type, foreach) for foreach in (True, False))
    for (norm, _, _, grads), (other, _, _, others) in zip(together, alone, strict=True):
        assert norm == other and all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


@only_ours("our own function's contract")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_every_rank_hears_of_a_norm_that_is_not_finite(bad, norm_type):
    def body():
        model = seeded(stack)
        shard(model, model)
        model(randn(3, 8)).square().sum().backward()
        if rank() == 1:
            next(local for p in model.parameters() if (local := p.grad.to_local()).numel())[0] = bad
        before = [p.grad.to_local().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="non-finite"):
            subject().clip_grad_norm_(model.parameters(), 0.5, norm_type, error_if_nonfinite=True)
        for p, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad.to_local(), grad, rtol=0, atol=0, equal_nan=True)
        assert not torch.isfinite(subject().clip_grad_norm_(model.parameters(), 0.5, norm_type))

    threads(3, body)


@only_ours("our own function's contract")
def test_ranks_without_gradients_take_part():
    def body():
        model = seeded(stack)
        shard(model, model)
        if rank() == 0:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        return subject().clip_grad_norm_(model.parameters(), 1.0).item()

    assert len(set(threads(2, body))) == 1
