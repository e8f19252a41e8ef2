"""Training: the sharded model follows the plain one, step by step, in the situations that FSDP2 promises to handle."""

import pytest
import torch
import torch.distributed as dist
from models import MLP, TinyLM, next_token_loss, stack
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.tensor import DTensor

from harness import (
    assert_same_model,
    backward_of_all_ranks,
    full,
    is_sharded,
    only_ours,
    processes,
    randn,
    seeded,
    shard,
    subject,
    threads,
    tokens,
)


def train(model, reference, loss_of, steps=6, lr=1e-2, optimizer=torch.optim.SGD, tolerance=2e-6, **options):
    """Steps both models; loss, gradients and parameters agree at each. loss_of(model, step, rank)."""
    # Ranks that are threads share torch's generator, and recomputation sets its state: not while another rank still builds.
    dist.barrier()
    mine = optimizer(model.parameters(), lr=lr, **options)
    other = optimizer(reference.parameters(), lr=lr, **options)
    for step in range(steps):
        want = backward_of_all_ranks(reference, lambda m, r: loss_of(m, step, r))
        got = loss_of(model, step, dist.get_rank())
        got.backward()
        torch.testing.assert_close(got.detach(), want, rtol=1e-6, atol=1e-6)
        assert_same_model(model, reference, tolerance)
        for o in (mine, other):
            o.step()
            o.zero_grad(set_to_none=step % 2 == 0)
        assert_same_model(model, reference, tolerance, grads=False)


def sum_of_squares(dim, rows=3):
    return lambda model, step, r: model(randn(rows, dim, step=step, of_rank=r)).square().mean()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_one_group(ranks, reshard):
    def body():
        build = lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5))
        model = shard(seeded(build), reshard_after_forward=reshard)
        train(model, seeded(build), sum_of_squares(5), steps=4)

    threads(ranks, body)


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_groups(ranks, reshard):
    def body():
        model = seeded(lambda: TinyLM(layers=3))
        shard(model, model.blocks, reshard_after_forward=reshard)
        train(
            model,
            seeded(lambda: TinyLM(layers=3)),
            lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r)),
        )

    threads(ranks, body)


@pytest.mark.parametrize("foreach", [False, True])
def test_adam(foreach):
    """Adam divides by the root of what it has seen: the tolerance is that of the update, not of the gradient."""

    def body():
        model = seeded(stack)
        shard(model, model)
        reference = seeded(stack)
        mine = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach, eps=1e-4)
        other = torch.optim.Adam(reference.parameters(), lr=1e-3, foreach=foreach, eps=1e-4)
        for step in range(5):
            backward_of_all_ranks(reference, lambda m, r: m(randn(3, 8, step=step, of_rank=r)).square().mean())
            model(randn(3, 8, step=step)).square().mean().backward()
            for o in (mine, other):
                o.step()
                o.zero_grad()
            assert_same_model(model, reference, 1e-5, grads=False)

    threads(3, body)


def _real_processes(reshard):
    model = seeded(lambda: TinyLM(layers=3))
    shard(model, model.blocks, reshard_after_forward=reshard)
    train(
        model, seeded(lambda: TinyLM(layers=3)), lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r))
    )


@pytest.mark.parametrize("ranks,reshard", [(2, True), (3, False), (4, 2)])
def test_several_groups_over_gloo(ranks, reshard):
    processes(ranks, _real_processes, reshard)


def test_forward_inputs_arrive_nested():
    """A module without parameters may be sharded; nested inputs pass through the hooks unharmed."""

    class Adder(nn.Module):
        def forward(self, x, ys, *, extra):
            return x + ys[0] + ys[1]["z"] + extra + 1

    def body():
        model = shard(Adder())
        one = torch.ones(3)
        assert torch.equal(model(one, (one, {"z": one}), extra=one), 5 * one)

    threads(2, body)


@pytest.mark.parametrize("reshard", [None, False, True])
def test_parameters_after_forward(reshard):
    """Which parameters module.parameters() shows after a forward, by the resharding asked for; reshard() is always
    possible.
    """

    def body():
        model, reference = seeded(lambda: nn.Sequential(MLP(3), MLP(3))), seeded(lambda: nn.Sequential(MLP(3), MLP(3)))
        shard(model, (model[0].up, model[0].down), reshard_after_forward=reshard)
        units = [*model[0].parameters()]
        rest = [*model[1].parameters()]
        assert is_sharded(units) and is_sharded(rest)
        model(randn(2, 3))
        # None keeps the root's alone; an explicit True or False holds for the root as well.
        assert is_sharded(model[0].parameters()) == (reshard is not False)
        assert is_sharded(model[1].parameters()) == (reshard is True)
        assert_same_model(model, reference, 0, grads=False)
        for module in model.modules():
            if isinstance(module, subject().FSDPModule):
                module.reshard()
        assert is_sharded(model.parameters())
        assert [id(p) for p in (*model[0].parameters(), *model[1].parameters())] == [id(p) for p in (*units, *rest)]
        assert_same_model(model, reference, 0, grads=False)

    threads(4, body)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_parameters_after_backward_are_sharded(reshard):
    def body():
        model = MLP(8)
        shard(model, (model.up, model.down), reshard_after_forward=reshard)
        assert is_sharded(model.parameters())
        model(randn(2, 8)).sum().backward()
        assert is_sharded(model.parameters())
        for p in model.parameters():
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            assert p.grad.to_local().shape == p.to_local().shape

    threads(4, body)


def test_to_another_dtype_after_sharding():
    def body():
        model, reference = seeded(lambda: MLP(4)), seeded(lambda: MLP(4)).double()
        shard(model, (model.up, model.down))
        model.to(torch.float64)
        for p in model.parameters():
            assert p.dtype == p.to_local().dtype == torch.float64
        train(
            model,
            reference,
            lambda m, s, r: m(randn(2, 4, step=s, of_rank=r, dtype=torch.float64)).sum(),
            tolerance=1e-14,
        )
        model(randn(2, 4, dtype=torch.float64)).sum().backward()
        assert all(p.grad.dtype == p.grad.to_local().dtype == torch.float64 for p in model.parameters())

    threads(2, body)


def test_backward_through_the_root_then_through_a_child():
    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model)
        mine, other = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference))
        for pick in (lambda m: m, lambda m: m[0], lambda m: m):
            backward_of_all_ranks(reference, lambda m, r: pick(m)(randn(4, 8, of_rank=r)).square().sum())
            pick(model)(randn(4, 8)).square().sum().backward()
            assert_same_model(model, reference)
            for o in (mine, other):
                o.step()
                o.zero_grad()

    threads(2, body)


@pytest.mark.parametrize("reshard", [True, False])
def test_module_called_twice_in_a_forward(reshard):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x):
            return self.outer(self.inner(x) + self.inner(2 * x).relu())

    def body():
        model = seeded(Twice)
        shard(model, [model.inner], reshard_after_forward=reshard)
        train(model, seeded(Twice), sum_of_squares(4))

    threads(2, body)


def test_two_forwards_then_one_backward():
    def body():
        model = seeded(stack)
        shard(model, model)

        def loss(m, step, r):
            return (m(randn(2, 8, step=step, of_rank=r)) * m(randn(2, 8, step=step + 100, of_rank=r))).mean()

        train(model, seeded(stack), loss)

    threads(2, body)


@pytest.mark.parametrize("depth", [1, 2])
def test_explicit_prefetch(depth):
    def body():
        model = seeded(lambda: TinyLM(layers=5))
        shard(model, model.blocks)
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            if blocks[i + 1 : i + 1 + depth]:
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
            if i:
                block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])
        train(
            model,
            seeded(lambda: TinyLM(layers=5)),
            lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r)),
            steps=4,
        )

    threads(2, body)


@pytest.mark.parametrize("inside", [True, False], ids=["checkpoint-then-shard", "blocks-of-checkpointed-parts"])
@pytest.mark.parametrize("reshard", [True, False])
def test_composable_activation_checkpointing(inside, reshard):
    def body():
        model = seeded(TinyLM)
        for block in model.blocks:
            checkpoint(block if inside else block.ffn)
        shard(model, model.blocks, reshard_after_forward=reshard)
        train(model, seeded(TinyLM), lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r)), steps=4)

    threads(2, body)


@pytest.mark.parametrize("reshard", [True, False])
def test_cpu_offload(reshard):
    """pin_memory is the default of CPUOffloadPolicy and needs a driver; on a CPU mesh it has nothing to do."""

    def body():
        model = seeded(stack)
        policy = subject().CPUOffloadPolicy(pin_memory=False)
        shard(model, model, reshard_after_forward=reshard, offload_policy=policy)
        train(model, seeded(stack), sum_of_squares(8))
        assert all(p.device.type == "cpu" for p in model.parameters())

    threads(2, body)


@only_ours("stock's default CPUOffloadPolicy() fails without a driver; on a CPU mesh we don't pin")
def test_cpu_offload_with_the_default_policy():
    def body():
        model = seeded(stack)
        shard(model, model, offload_policy=subject().CPUOffloadPolicy())
        train(model, seeded(stack), sum_of_squares(8), steps=2)

    threads(2, body)


def test_unshard_ahead_of_each_child():
    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model)

        def ahead(m, step, r):
            if m is model:
                for child in m:
                    child.unshard(async_op=True)
            return m(randn(3, 8, step=step, of_rank=r)).square().mean()

        train(model, reference, ahead)

    threads(2, body)


def test_no_grad_forward_between_steps():
    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model)

        def evaluated(m, step, r):
            with torch.no_grad():
                m(randn(2, 8, step=step + 50, of_rank=r))
            return m(randn(3, 8, step=step, of_rank=r)).square().mean()

        train(model, reference, evaluated)

    threads(3, body)


def test_optimizer_made_before_first_forward_sees_the_same_parameters():
    """Parameter objects survive steps: an optimizer that holds them needs no second look."""

    def body():
        model = shard(m := seeded(stack), m)
        before = [id(p) for p in model.parameters()]
        storages = [p.to_local().data_ptr() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(randn(2, 8, step=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [id(p) for p in model.parameters()] == before
        assert [p.to_local().data_ptr() for p in model.parameters()] == storages

    threads(2, body)


def test_gradients_are_the_mean_over_ranks():
    def body():
        model = shard(nn.Linear(4, 1, bias=False))
        model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        mean = sum(range(dist.get_world_size())) / dist.get_world_size()
        assert torch.equal(full(model.weight.grad), torch.full((1, 4), mean))

    threads(4, body)
