"""On a CPU the root's image goes in backward once nobody holds its parameters; whoever does, or comes back for them, has them."""

import pytest
import torch
import torch.nn.functional as F
from test_training import train
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import only_ours, randn, seeded, shard, subject, threads


class Doubled(torch.autograd.Function):
    """x W^T whose context keeps W as an attribute, which autograd doesn't see."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x


class Between(nn.Module):
    """Layers that become units, and what the root owns before, between and behind them."""

    def __init__(self, middle=lambda model, x: model.middle(x), before=lambda model, x: model.before(x)):
        super().__init__()
        self.before, self.middle, self.head = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.run_middle, self.run_before = middle, before
        self.held = []

    def forward(self, x):
        return self.head(self.layers[1](self.run_middle(self, self.layers[0](self.run_before(self, x)))))

    def watch(self):
        """Notes in `held` how many bytes of images there are while backward is in the first layer."""

        def note(_):
            self.held.append(subject().stats(self)["image_bytes_in_use"])

        self.layers[0][0].register_forward_hook(lambda module, args, out: out.register_hook(note) and None)


def follows(build, ranks=(1, 2, 3), steps=3, watched=False):
    def body():
        model = seeded(build)
        shard(model, model.layers)
        if watched:
            model.watch()
        train(model, seeded(build), lambda m, s, r: m(randn(3, 6, step=s, of_rank=r)).square().mean(), steps=steps)
        return model.held

    return [held for world in ranks for held in threads(world, body)]


def rows(model, x):
    return F.embedding(x.argmax(1), model.before.weight)


def product(model, x):
    """Saves the weight, for the input's gradient."""
    return model.before(x.clone().requires_grad_())


@only_ours("FSDP2 keeps the root's parameters to the end of backward")
def test_what_nobody_holds_is_gone_when_backward_enters_a_layer():
    layer, root = 4 * (6 * 6 + 6 + 2), 4 * 3 * 6 * 6  # padded to 16 bytes
    assert [held for held, *_ in follows(lambda: Between(before=rows), ranks=(1,), watched=True)] == [layer]
    assert [held for held, *_ in follows(lambda: Between(before=product), ranks=(1,), watched=True)] == [layer + root]  # needs its weight
    assert all(layer <= held < root for ranks in follows(lambda: Between(before=rows), watched=True) for held in ranks)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_of_the_root_runs_again(reentrant):
    middle = lambda model, x: checkpoint(model.middle, x, use_reentrant=reentrant)
    follows(lambda: Between(middle=middle, before=rows))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_region_of_several_modules_runs_again(reentrant):
    """Of the root's own and of a unit, whose second run also enters the unit."""
    middle = lambda model, x: checkpoint(lambda y: model.middle(model.layers[1](model.middle(y))), x, use_reentrant=reentrant)
    follows(lambda: Between(middle=middle, before=rows))


def test_a_custom_function_that_keeps_the_parameter():
    follows(lambda: Between(middle=lambda model, x: Doubled.apply(x, model.middle.weight), before=rows))


def test_a_loss_of_parameters_after_forward():
    """As the root stays gathered after its forward, so do its parameters for what comes before backward."""

    def body():
        build = lambda: Between(before=rows)
        model = seeded(build)
        shard(model, model.layers)
        loss = lambda m, s, r: m(randn(3, 6, step=s, of_rank=r)).square().mean() + m.head.weight.square().sum()
        train(model, seeded(build), loss, steps=3)

    threads(2, body)


class OwnsAll(nn.Module):
    """The root's parameters are its own, so that no module tells when they are used again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = self.layers[0](x)
        x = checkpoint(lambda y: y @ self.weight, x, use_reentrant=False)
        return self.layers[1](x)


def test_parameters_of_the_root_itself_stay():
    def body():
        model = seeded(OwnsAll)
        shard(model, model.layers)
        train(model, seeded(OwnsAll), lambda m, s, r: m(randn(3, 6, step=s, of_rank=r)).square().mean(), steps=3)

    threads(2, body)


@only_ours("FSDP2 keeps the root's parameters to the end of backward")
@pytest.mark.parametrize("keep", [False, True])
def test_a_weight_used_again_without_its_module_is_told_to_be_kept(keep):
    build = lambda: Between(middle=lambda model, x: checkpoint(lambda y: F.linear(y, model.middle.weight), x, use_reentrant=False), before=rows)

    def body():
        model = seeded(build)
        shard(model, model.layers)
        model.set_keep_unsharded_storage(keep, recurse=False)
        if keep:
            train(model, seeded(build), lambda m, s, r: m(randn(3, 6, step=s, of_rank=r)).square().mean(), steps=3)
            return
        with pytest.raises(Exception, match="set_keep_unsharded_storage"):
            model(randn(3, 6)).square().mean().backward()

    threads(2, body)
