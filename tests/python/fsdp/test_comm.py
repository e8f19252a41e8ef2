"""Which collectives run and when: counted through the dispatcher with FSDP2's own ops; manual gathering; divide
factors.
"""

import pytest
import torch
import torch.distributed as dist
from models import MLP, TinyLM, next_token_loss, stack
from test_training import train
from torch import nn

from harness import (
    STOCK_OPS,
    Collectives,
    assert_same_model,
    backward_of_all_ranks,
    full,
    is_sharded,
    mesh,
    only_ours,
    processes,
    randn,
    seeded,
    shard,
    subject,
    threads,
    tokens,
)


def counts(run):
    """Calls by kind while run() runs; through FSDP2's own two ops and the all-reduce, and no other."""
    with Collectives() as mode:
        run()
    assert mode.names <= {"_allgather_base_", "_reduce_scatter_base_", "allreduce_"}, mode.names
    return mode.calls


def lm(reshard, **options):
    model = seeded(lambda: TinyLM(layers=3))
    return shard(model, model.blocks, reshard_after_forward=reshard, **STOCK_OPS, **options)


def loss_of(model):
    return next_token_loss(model, tokens(29, 2, 7))


def _forward_and_backward(reshard, root_keeps):
    model = lm(reshard)
    if root_keeps:
        model.set_reshard_after_forward(False, recurse=False)
    loss = []
    forward = counts(lambda: loss.append(loss_of(model)))
    return forward, counts(loss[0].backward)


def _on_four_ranks():
    """One start of processes for several tests; what each counted, by name."""
    out = {reshard: _forward_and_backward(reshard, True) for reshard in (True, False, 2)}
    model = lm(True, mesh=mesh(2, 2, names=("replicate", "shard")))
    out["hybrid"] = counts(lambda: loss_of(model).backward())
    return out


@pytest.fixture(scope="module")
def on_four_ranks():
    found = processes(4, _on_four_ranks)
    assert all(f == found[0] for f in found), "ranks disagree"
    return found[0]


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_counts_of_a_step(on_four_ranks, reshard):
    """One gather a unit in forward, again in backward where it was freed, one reduction a unit."""
    forward, backward = on_four_ranks[reshard]
    assert forward == {"all_gather": 4, "reduce_scatter": 0, "all_reduce": 0}
    assert backward == {"all_gather": 0 if reshard is False else 3, "reduce_scatter": 4, "all_reduce": 0}


def test_hybrid_sharding_adds_an_all_reduce_a_unit(on_four_ranks):
    assert on_four_ranks["hybrid"] == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 4}


def _many_counts():
    out = {"root reshards": _forward_and_backward(True, False)}
    model = lm(False)
    loss = loss_of(model)
    kept = is_sharded(model.parameters())
    for module in model.modules():
        if isinstance(module, subject().FSDPModule):
            module.reshard()
    out["by hand"] = kept, is_sharded(model.parameters()), counts(loss.backward)

    model = lm(True)
    step = lambda: loss_of(model).backward()
    out["set reshard"] = [counts(step)["all_gather"]]
    for value, recurse in ((False, True), (True, False)):
        model.set_reshard_after_forward(value, recurse=recurse)
        out["set reshard"].append(counts(step)["all_gather"])

    model = seeded(TinyLM)
    shard(model, [model.embed], **STOCK_OPS)
    model.embed.set_unshard_in_backward(False)
    loss = loss_of(model)
    out["no gather"] = counts(loss.backward), full(model.embed.weight.grad)
    return out


@pytest.fixture(scope="module")
def many_counts():
    return processes(2, _many_counts)[0]


def test_counts_where_the_root_reshards_too(many_counts):
    forward, backward = many_counts["root reshards"]
    assert forward["all_gather"] == backward["all_gather"] == 4


def test_reshard_by_hand(many_counts):
    before, after, backward = many_counts["by hand"]
    assert (before, after) == (False, True)
    assert backward == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 0}


def test_set_reshard_after_forward(many_counts):
    # All eight, forward and backward; kept everywhere; then only the root gathers again.
    assert many_counts["set reshard"] == [8, 4, 5]


def test_no_gather_in_backward_on_request(many_counts):
    """An embedding's weight, for one, isn't read in backward."""
    found, gradient = many_counts["no gather"]
    assert found["all_gather"] == 0 and gradient.abs().sum() > 0


def test_unshard_of_a_module_without_parameters():
    def body():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard(model, model)
        model.unshard(async_op=True).wait()
        assert model.unshard() is None

    threads(2, body)


@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_before_any_forward(async_op):
    def body():
        model, reference = shard(seeded(lambda: MLP(4))), seeded(lambda: MLP(4))
        handle = model.unshard(async_op=async_op)
        if async_op:
            handle.wait()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert not hasattr(p, "placements") and torch.equal(p, q)
        model.reshard()
        assert is_sharded(model.parameters())
        assert_same_model(model, reference, 0, grads=False)

    threads(2, body)


class Overlapped(nn.Module):
    """Units inside a plain module, gathered ahead while other collectives of the user's run."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.a, self.b = MLP(), MLP()

    def forward(self, x):
        y = (x @ self.mix).relu()
        work = dist.all_reduce(y, async_op=True)
        for unit in (self.a, self.b):
            if isinstance(unit, subject().FSDPModule):
                unit.unshard(async_op=True)
        work.wait()
        return self.a(y) + self.b(y)


def _overlapped():
    model, reference = seeded(Overlapped), seeded(Overlapped)
    shard_ = subject().fully_shard
    shard_(model.a, reshard_after_forward=False)
    shard_(model.b)
    for step in range(3):
        x = randn(2, 8, step=step)
        losses = [m(x).square().mean() for m in (model, reference)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for p in reference.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        dist.all_reduce(model.mix.grad)
        model.mix.grad /= dist.get_world_size()
        assert_same_model(model, reference)
        with torch.no_grad():
            for m in (model, reference):
                for p in m.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None


def test_unshard_ahead_beside_the_users_own_collectives():
    processes(2, _overlapped)


def test_prefetch_of_a_unit_that_backward_has_finished():
    def body():
        model = seeded(MLP)
        shard(model, (model.up, model.down))
        model.up.set_modules_to_backward_prefetch([model.down])
        train(model, seeded(MLP), lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean())

    threads(2, body)


def _divided(factor):
    model, reference = seeded(stack), seeded(stack)
    shard(model, model)
    model.set_gradient_divide_factor(factor)
    for child in model:
        child.set_gradient_divide_factor(factor)
    model(randn(2, 8)).square().sum().backward()
    backward_of_all_ranks(
        reference, lambda m, r: m(randn(2, 8, of_rank=r)).square().sum() * (dist.get_world_size() / factor)
    )
    assert_same_model(model, reference)


@only_ours("FSDP2 asks Gloo for a pre-multiplied sum, which Gloo refuses; we sum and scale")
@pytest.mark.parametrize("factor", [1.0, 4.0, 3.5])
def test_gradient_divide_factor(factor):
    processes(2, _divided, factor)


def test_sum_instead_of_mean():
    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model)
        for m in (model, *model):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
        model(randn(2, 8)).square().sum().backward()
        backward_of_all_ranks(reference, lambda m, r: m(randn(2, 8, of_rank=r)).square().sum() * dist.get_world_size())
        assert_same_model(model, reference)

    threads(2, body)


def test_all_reduce_hook_sees_the_reduced_gradient():
    def body():
        seen = []
        model = shard(nn.Linear(4, 4, bias=False))
        model.set_all_reduce_hook(lambda flat: seen.append(flat.detach().clone()))
        model(torch.ones(1, 4)).sum().backward()
        local = model.weight.grad.to_local().flatten()
        assert len(seen) == 1 and torch.equal(seen[0][: local.numel()], local)

    threads(2, body)


@only_ours("FSDP2 lets one replace its collectives; a layout without copies leaves nothing to replace")
def test_custom_collectives_are_refused_with_the_reason():
    def body():
        model = shard(MLP())
        for setter in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
            with pytest.raises(Exception, match=r"(?i)custom|collective"):
                setter(object())

    threads(1, body)


@pytest.mark.parametrize("factor,world", [(3, 4), (0, 4)])
def test_reshard_to_a_size_that_does_not_divide_is_refused(factor, world):
    def body():
        with pytest.raises((ValueError, ZeroDivisionError, AssertionError)) as error:
            subject().fully_shard(MLP(), reshard_after_forward=factor)
        assert factor == 0 or str(factor) in str(error.value)

    threads(world, body)


def test_share_comm_ctx_between_roots():
    def body():
        models = [seeded(MLP) for _ in range(2)]
        for m in models:
            shard(m, (m.up, m.down))
        subject().share_comm_ctx(models)
        reference = nn.Sequential(seeded(MLP), seeded(MLP))
        for step in range(2):
            x = randn(2, 8, step=step)
            models[1](models[0](x)).square().mean().backward()
            backward_of_all_ranks(reference, lambda m, r: m(randn(2, 8, step=step, of_rank=r)).square().mean())
            for m, q in zip(models, reference, strict=True):
                assert_same_model(m, q)
                m.zero_grad()
            reference.zero_grad()

    threads(2, body)
