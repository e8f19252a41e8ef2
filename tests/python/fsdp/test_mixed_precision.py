"""Mixed precision: in which dtype parameters, inputs, outputs and reductions are, and that training equals the same
casts by hand.
"""

import pytest
import torch
import torch.distributed as dist
from models import MLP, stack
from torch import nn

from harness import assert_close, full, only_ours, processes, randn, seeded, shard, subject, threads


class Spy(nn.Module):
    """A linear that writes down the dtypes it meets."""

    def __init__(self, seen, name, dim=6, cast=None):
        super().__init__()
        self.lin, self.seen, self.name, self.cast = nn.Linear(dim, dim), seen, name, cast

    def forward(self, x, *more):
        self.seen[self.name] = x.dtype
        for i, y in enumerate(more):
            self.seen[f"{self.name}.{i}"] = y.dtype
        self.seen[f"{self.name}.weight"] = self.lin.weight.dtype
        return self.lin(x.to(self.cast) if self.cast else x)


def policy(*args, **kwargs):
    return subject().MixedPrecisionPolicy(*args, **kwargs)


def chain(seen, **second):
    return nn.Sequential(Spy(seen, "a"), Spy(seen, "b", **second))


def test_half_precision_of_one_unit_casts_its_inputs():
    def body():
        seen = {}
        model = chain(seen)
        subject().fully_shard(model[1], mp_policy=policy(torch.float16))
        subject().fully_shard(model)
        model(torch.zeros(2, 6)).sum().backward()
        assert (seen["a"], seen["b"]) == (torch.float32, torch.float16)
        assert (seen["a.weight"], seen["b.weight"]) == (torch.float32, torch.float16)

    threads(2, body)


def test_inputs_that_the_module_casts_itself():
    def body():
        seen = {}
        model = chain(seen, cast=torch.float16)
        subject().fully_shard(model[1], mp_policy=policy(torch.float16, cast_forward_inputs=False))
        subject().fully_shard(model)
        model(torch.zeros(2, 6)).sum().backward()
        assert (seen["a"], seen["b"], seen["b.weight"]) == (torch.float32, torch.float32, torch.float16)

    threads(2, body)


def test_output_dtype():
    def body():
        seen = {}
        model = chain(seen)
        subject().fully_shard(model[0], mp_policy=policy(torch.float16, output_dtype=torch.float32))
        subject().fully_shard(model)
        model(torch.zeros(2, 6)).sum().backward()
        assert (seen["a"], seen["b"]) == (torch.float16, torch.float32)

    threads(2, body)


@pytest.mark.parametrize("cast", [False, True])
def test_inputs_made_inside_the_model(cast):
    class Model(nn.Module):
        def __init__(self, seen):
            super().__init__()
            self.a, self.b, self.seen = nn.Linear(6, 6), Spy(seen, "b"), seen

        def forward(self, x):
            self.seen["model"] = x.dtype
            return self.b(self.a(x), torch.ones(2, 6))

    def body():
        seen = {}
        model = Model(seen)
        subject().fully_shard(model.b, mp_policy=policy(torch.float16, cast_forward_inputs=cast))
        subject().fully_shard(model, mp_policy=policy(torch.float16))
        model(torch.zeros(2, 6)).sum().backward()
        assert seen["model"] == seen["b"] == torch.float16
        assert seen["b.0"] == (torch.float16 if cast else torch.float32)

    threads(2, body)


def test_integers_are_not_cast():
    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)

        def forward(self, ids, scale):
            assert ids.dtype == torch.int64 and scale.dtype == torch.bfloat16
            return self.embed(ids) * scale

    def body():
        model = shard(Pick(), mp_policy=policy(torch.bfloat16))
        assert model(torch.tensor([1, 2]), torch.ones(4)).dtype == torch.bfloat16

    threads(2, body)


def by_hand(master, inputs, low, reduce):
    """Loss of this rank and gradients of the same step without sharding: low copies, per-rank backward, mean in
    `reduce`.
    """
    loss, grads = None, None
    for r, x in enumerate(inputs):
        copy = seeded(stack).to(low)
        with torch.no_grad():
            for p, q in zip(copy.parameters(), master.parameters(), strict=True):
                p.copy_(q)
        value = copy(x.to(low)).square().float().sum()
        value.backward()
        loss = value.detach() if r == dist.get_rank() else loss
        mine = [p.grad.to(reduce) for p in copy.parameters()]
        grads = mine if grads is None else [a + b for a, b in zip(grads, mine, strict=True)]
    return loss, [(g / len(inputs)).float() for g in grads]


def _low_precision_training(low, reduce, world_tolerance, reshard):
    model, master = seeded(stack), seeded(stack)
    shard(model, model, mp_policy=policy(low, reduce), reshard_after_forward=reshard)
    mine, other = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, master))
    for step in range(4):
        inputs = [randn(4, 8, step=step, of_rank=r) for r in range(dist.get_world_size())]
        want, grads = by_hand(master, inputs, low, reduce)
        loss = model(inputs[dist.get_rank()]).square().float().sum()
        loss.backward()
        assert torch.equal(loss.detach(), want), "the forward is the same arithmetic"
        for (name, p), q, g in zip(model.named_parameters(), master.parameters(), grads, strict=True):
            assert p.dtype == p.grad.dtype == torch.float32, "the optimizer sees masters, whatever travelled"
            assert_close(full(p.grad), g, world_tolerance, name)
            # From here on both go the same way: rounding in bf16 of nearly equal masters would part them.
            q.grad = full(p.grad).clone()
        for o in (mine, other):
            o.step()
            o.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bf16_compute_and_fp32_reduction(ranks, reshard):
    threads(ranks, _low_precision_training, torch.bfloat16, torch.float32, 2e-6, reshard)


def test_bf16_compute_and_bf16_reduction():
    threads(2, _low_precision_training, torch.bfloat16, torch.bfloat16, 1e-2, True)


def test_bf16_over_gloo():
    processes(2, _low_precision_training, torch.bfloat16, torch.float32, 2e-6, True)


def test_fp32_compute_and_bf16_reduction():
    def body():
        model = seeded(stack)
        shard(model, model, mp_policy=policy(reduce_dtype=torch.bfloat16))
        model(randn(4, 8)).sum().backward()
        for p in model.parameters():
            assert p.grad.dtype == torch.float32
            local = p.grad.to_local()
            assert torch.equal(local, local.bfloat16().float()), "what was reduced had bf16's digits"

    threads(2, body)


def test_accumulation_without_synchronisation_happens_in_the_reduce_dtype():
    """Three bf16 micro-batches summed in fp32, as FSDP2 does, not in bf16."""

    def body():
        policy_ = policy(torch.bfloat16, torch.float32)
        model = shard(seeded(lambda: nn.Linear(8, 1, bias=False)), mp_policy=policy_)
        # bf16 can't hold 256 + 1: a bf16 sum would stay at 256.
        for scale, last in ((256.0, False), (1.0, False), (1.0, True)):
            model.set_requires_gradient_sync(last)
            (model(torch.ones(1, 8)) * scale).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((1, 8), 258.0))

    threads(2, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_in_its_own_precision(dtype):
    """A policy of its own keeps a norm in fp32 between low-precision linears."""

    def body():
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        seen = []
        model[1].register_forward_pre_hook(lambda m, a: seen.append(m.weight.dtype))
        for m in model:
            kind = policy(torch.float32, output_dtype=dtype) if isinstance(m, nn.LayerNorm) else policy(dtype)
            subject().fully_shard(m, mp_policy=kind)
        subject().fully_shard(model, mp_policy=policy(dtype))
        out = model(randn(3, 8))
        assert out.dtype == dtype and seen == [torch.float32]
        out.sum().backward()
        assert all(torch.isfinite(full(p.grad)).all() for p in model.parameters())

    threads(2, body)


@only_ours("the summary is ours")
def test_summary_names_the_dtypes():
    def body():
        model = shard(MLP(), mp_policy=policy(torch.bfloat16, torch.float32))
        text = str(subject().summary(model)).lower()
        assert "bf16" in text or "bfloat16" in text

    threads(2, body)
