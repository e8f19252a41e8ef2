"""What a unit holds behind its inner units is a bucket of its own, reduced before backward enters these; and what happens when a gradient of it
comes later after all."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import TinyLM, next_token_loss
from test_training import train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import assert_same_model, backward_of_all_ranks, only_ours, processes, randn, seeded, shard, subject, threads, tokens

pytestmark = only_ours("FSDP2 has one bucket a unit and dtype")


def splitting(split_bytes=1):
    return subject().Planning(split_bytes=split_bytes)


class Net(nn.Module):
    """One matrix before the layers and one behind them; `forward` is a test's."""

    def __init__(self, run=lambda m, x: m.head(m.through(m.before(x)))):
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)
        self.run = run

    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, x):
        return self.run(self, x)


def names_of_groups(model):
    return [sorted(param.name for param in group.params) for group in model._get_fsdp_state().groups]


def test_which_parameters_lie_behind():
    def body():
        model = seeded(Net)
        shard(model, model.layers, planning=splitting())
        assert names_of_groups(model) == [["before.weight"], ["head.bias", "head.weight", "norm.bias", "norm.weight"]]
        for layer in model.layers:
            assert len(layer._get_fsdp_state().groups) == 1, "nothing is inside"
        tied = seeded(Net)
        tied.head.weight = tied.before.weight
        shard(tied, tied.layers, planning=splitting())
        assert names_of_groups(tied) == [["before.weight"], ["head.bias", "norm.bias", "norm.weight"]]
        for split_bytes in (0, 257, subject().Planning().split_bytes):  # 256 lie before
            model = seeded(Net)
            shard(model, model.layers, planning=splitting(split_bytes))
            assert len(names_of_groups(model)) == 1
        model = seeded(Net)
        shard(model, model.layers, planning=splitting(), collectives="stock")
        assert len(names_of_groups(model)) == 1, "the collectives of FSDP2"

    threads(2, body)


def loss_of(model, step, r):
    return model(randn(3, 8, step=step, of_rank=r)).square().mean()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_training_follows_the_plain_model(ranks, reshard):
    def body():
        model = seeded(Net)
        shard(model, model.layers, planning=splitting(), reshard_after_forward=reshard)
        train(model, seeded(Net), loss_of, steps=4)
        assert [group.core.is_behind for group in model._get_fsdp_state().groups] == [False, True]

    threads(ranks, body)


def _order_and_buffers():
    """What comes first, and how many bytes of reduce buffers there are at most."""
    found = {}
    for split_bytes in (0, 1):
        model = seeded(Net)
        shard(model, model.layers, planning=splitting(split_bytes))
        model.set_merge_bytes(0)  # layers one by one
        for _ in range(2):
            loss_of(model, 0, dist.get_rank()).backward()
            model.zero_grad()
        subject().reset_peaks(model)
        held = []
        out = model.before.register_forward_hook(lambda module, args, out: out.register_hook(lambda g: held.append(reduced(model))) and None)
        before = reduced(model)
        loss_of(model, 0, dist.get_rank()).backward()
        out.remove()
        stats, told = subject().stats(model), subject().forecast(model)
        assert stats["peak_reduce_bytes"] == told["peak_reduce_bytes"]
        assert stats["peak_image_bytes"] == told["peak_image_bytes"]
        found[split_bytes] = (held[0] - before, stats["peak_reduce_bytes"])
    return found


def reduced(model):
    return subject().stats(model)["reduced_bytes"]


def test_it_is_reduced_first_and_holds_no_buffer_then():
    head, before, layer = 4 * (64 + 8 + 16), 4 * 64, 4 * (64 + 8)  # no padding
    for found in processes(2, _order_and_buffers):
        (late, most), (early, less) = found[0], found[1]
        assert late == 2 * layer and early == 2 * layer + head
        assert most == head + before + layer and less == max(head, layer, before)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_are_as_forecast(micro_batches):
    from test_forecast import COUNTED, PEAKS

    def body():
        ours = subject()
        model = seeded(Net)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, model.layers, planning=splitting(), mp_policy=policy)
        for step in range(3):
            ours.reset_peaks(model)
            before = ours.stats(model) if step else None
            for micro in range(micro_batches):
                model.set_requires_gradient_sync(micro + 1 == micro_batches)
                loss_of(model, micro, dist.get_rank()).backward()
            after = ours.stats(model)
            model.zero_grad()
            told = ours.forecast(model, micro_batches=micro_batches)
            for name in COUNTED if step else ():
                assert after[name] - before[name] == told[name], name
            for name in PEAKS:
                assert after[name] == told[name], name

    for world in (1, 2, 3):
        threads(world, body)


# ---- gradients that come later ----


def of_rank(model, step, r):
    """loss_of, where `run` asks which step and rank it is."""
    model.step, model.rank = step, r
    return loss_of(model, step, r)


def used_before_too(model, x):
    return model.head(model.through(model.before(F.linear(x, model.head.weight))))


def reached_by_another_way(model, x):
    y = model.before(x)
    return model.head(model.through(y)) + F.linear(y, model.head.weight)


@pytest.mark.parametrize("run", [used_before_too, reached_by_another_way])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_head_that_is_used_before_the_layers_too(ranks, run):
    def body():
        build = lambda: Net(run)
        model = seeded(build)
        shard(model, model.layers, planning=splitting())
        train(model, seeded(build), loss_of, steps=4)
        if run is used_before_too:
            assert not model._get_fsdp_state().groups[1].core.is_behind, "learned"

    threads(ranks, body)


def test_one_rank_alone_uses_it_before():
    """The others learn of it from the flags, and reduce with it."""

    def run(model, x):
        return used_before_too(model, x) if model.step == 2 and model.rank == 1 else model.head(model.through(model.before(x)))

    def body():
        build = lambda: Net(run)
        model = seeded(build)
        shard(model, model.layers, planning=splitting())
        train(model, seeded(build), of_rank, steps=5)
        assert not model._get_fsdp_state().groups[1].core.is_behind

    threads(3, body)


def test_one_rank_alone_does_not_use_it():
    def run(model, x):
        y = model.through(model.before(x))
        return y if model.step % 2 == 1 and model.rank == 0 else model.head(y)

    def body():
        build = lambda: Net(run)
        model = seeded(build)
        shard(model, model.layers, planning=splitting())
        train(model, seeded(build), of_rank, steps=4)

    threads(3, body)


def test_static_use_refuses_a_latecomer():
    def body():
        model = seeded(lambda: Net(used_before_too))
        shard(model, model.layers, planning=splitting())
        model.set_static_use(True)
        with pytest.raises(Exception, match="split_bytes=0"):
            loss_of(model, 0, dist.get_rank()).backward()

    threads(2, body)


@pytest.mark.parametrize("last_alone", [True, False])
def test_accumulation(last_alone):
    """Kept unreduced until the last micro-batch, or reduced each time."""

    def body():
        model, reference = seeded(Net), seeded(Net)
        shard(model, model.layers, planning=splitting())
        for step in range(2):
            for micro in range(3):
                number = 10 * step + micro
                backward_of_all_ranks(reference, lambda m, r: loss_of(m, number, r))
                if last_alone:
                    model.set_requires_gradient_sync(micro == 2)
                loss_of(model, number, dist.get_rank()).backward()
            assert_same_model(model, reference, 2e-6)
            model.zero_grad()
            reference.zero_grad()

    threads(3, body)


def test_hybrid_sharding_and_two_graphs():
    def body():
        from harness import mesh

        model = seeded(lambda: TinyLM(layers=3))
        shard(model, model.blocks, planning=splitting(), mesh=mesh(2, 2, names=("replicate", "shard")))

        def twice(m, step, r):
            return sum(next_token_loss(m, tokens(29, 2, 7, step=10 * step + i, of_rank=r)) for i in range(2))

        train(model, seeded(lambda: TinyLM(layers=3)), twice, steps=3)

    threads(4, body)


def test_a_backward_that_fails_is_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    def run(model, x):
        y = model.before(x)
        return model.head(model.through(Fails.apply(y) if model.fails else y))

    def body():
        build = lambda: Net(run)
        model, reference = seeded(build), seeded(build)
        model.fails = reference.fails = False
        shard(model, model.layers, planning=splitting())
        loss_of(model, 0, dist.get_rank()).backward()
        model.zero_grad()
        model.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model, 1, dist.get_rank()).backward()
        model.fails = False
        train(model, reference, loss_of, steps=2)

    threads(2, body)
