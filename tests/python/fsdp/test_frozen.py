"""Frozen parameters: mixed with trainable ones in a group, alone in one, unfrozen later."""

import pytest
import torch
import torch.nn.functional as F
from models import Adapted, stack
from test_training import train
from torch import nn

from harness import assert_same_model, backward_of_all_ranks, randn, seeded, shard, threads


def square(m, step, r):
    return m(randn(3, 8, step=step, of_rank=r)).square().mean()


def biases_only(model):
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


@pytest.mark.parametrize("after", [False, True], ids=["before-sharding", "after-sharding"])
@pytest.mark.parametrize("reshard", [True, False])
def test_biases_train_and_weights_do_not_in_one_group(reshard, after):
    def body():
        reference = biases_only(seeded(stack))
        model = seeded(stack)
        if not after:
            biases_only(model)
        shard(model, model, reshard_after_forward=reshard)
        if after:
            biases_only(model)
        train(model, reference, square)
        assert all((p.grad is None) for n, p in model.named_parameters() if "weight" in n)

    threads(3, body)


@pytest.mark.parametrize("unfreeze", [False, True])
def test_frozen_and_trainable_groups_alternate(unfreeze):
    def body():
        build = lambda: nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(8, 8), nn.ReLU())])
        model, reference = seeded(build), seeded(build)
        shard(model, [m for m in model if isinstance(m, nn.Linear)])
        mine, other = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference))
        for m in (model, reference):
            for i in (0, 4, 8):
                m[i].requires_grad_(False)
        for step in range(4):
            if unfreeze and step == 2:
                for m in (model, reference):
                    m.requires_grad_(True)
            backward_of_all_ranks(reference, lambda m, r: square(m, step, r))
            square(model, step, torch.distributed.get_rank()).backward()
            assert_same_model(model, reference)
            for o in (mine, other):
                o.step()
                o.zero_grad()

    threads(2, body)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_trainable_and_frozen_modules_called_many_times(reshard):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen, self.trained = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = self.frozen(F.relu(self.trained(x)))
                with torch.no_grad():  # the same layer again, without a graph
                    extra = F.relu(self.trained(x))
                x = x + extra
            return x

    def body():
        model = seeded(Loop)
        shard(model, (model.first, model.frozen, model.trained), reshard_after_forward=reshard)
        train(model, seeded(Loop), lambda m, s, r: m(randn(4, 5, step=s, of_rank=r)).square().mean())

    threads(2, body)


def test_frozen_embedding_below_trained_layers():
    """No input of any unit needs a gradient, and the first unit never gets one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.embed.requires_grad_(False)

        def forward(self, ids):
            return self.down(self.up(self.embed(ids)).relu())

    def body():
        model = seeded(Model)
        shard(model, (model.embed, model.up, model.down))
        ids = torch.arange(11).view(1, 11)
        train(model, seeded(Model), lambda m, s, r: m((ids + s + r) % 11).square().mean())

    threads(2, body)


def test_low_rank_adapters_beside_a_frozen_weight():
    def body():
        build = lambda: nn.Sequential(*[Adapted() for _ in range(3)])
        model = seeded(build)
        shard(model, model)
        train(model, seeded(build), square)

    threads(3, body)
