"""Gradient accumulation: with and without synchronisation, whole model or parts of it, and the flags that pipelines
set.
"""

import pytest
import torch
import torch.distributed as dist
from models import stack
from torch import nn

from harness import STOCK_OPS, Collectives, assert_same_model, mesh, processes, randn, seeded, shard, subject, threads


def build():
    return nn.Sequential(nn.Linear(8, 8), *stack(3))


def accumulate(grid, reshard, mode, flag, keep=False, offload=False, steps=3, micro=3):
    """Micro-batches, the last of which synchronises, against summed gradients of the plain model; collectives by
    kind.
    """
    model, reference = seeded(build), seeded(build)
    options = {"mesh": grid, "reshard_after_forward": reshard} | STOCK_OPS
    if offload:
        options["offload_policy"] = subject().CPUOffloadPolicy(pin_memory=False)
    shard(model, model[1:], **options)
    root_keeps = reshard is not False
    if root_keeps:
        model.set_reshard_after_forward(False, recurse=False)
    mine, other = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference))
    found = []
    for step in range(steps):
        with Collectives() as mode_:
            for k in range(micro):
                last = k == micro - 1
                targets = {"all": [(model, True)], "root": [(model, False)], "some": [(m, True) for m in model[1:3]]}[
                    mode
                ]
                for module, recurse in targets:
                    getattr(module, flag)(last, recurse=recurse)
                    if keep:
                        module.set_reshard_after_backward(last, recurse=recurse)
                model(randn(2, 8, step=10 * step + k)).square().sum().backward()
        found.append(mode_.calls)
        for k in range(micro):
            for r in range(dist.get_world_size()):
                x = randn(2, 8, step=10 * step + k, of_rank=r)
                (reference(x).square().sum() / dist.get_world_size()).backward()
        assert_same_model(model, reference)
        for o in (mine, other):
            o.step()
            # Gradients that stay as zeros take the other way into the next accumulation.
            o.zero_grad(set_to_none=step % 2 == 0)
        assert_same_model(model, reference, grads=False)
    return found


@pytest.mark.parametrize("mode", ["all", "root", "some"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_without_synchronisation_until_the_last(ranks, reshard, mode):
    threads(ranks, lambda: accumulate(mesh(), reshard, mode, "set_requires_gradient_sync"))


@pytest.mark.parametrize("mode", ["all", "some"])
@pytest.mark.parametrize("flag", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_hybrid(flag, mode):
    """set_requires_all_reduce reduces within the shard group each time and across replicas at the end."""
    threads(4, lambda: accumulate(mesh(2, 2, names=("replicate", "shard")), True, mode, flag))


def test_parameters_kept_between_micro_batches():
    threads(2, lambda: accumulate(mesh(), False, "all", "set_requires_gradient_sync", keep=True))


def test_with_offload():
    threads(2, lambda: accumulate(mesh(), True, "all", "set_requires_gradient_sync", offload=True))


def test_synchronising_every_micro_batch():
    def body():
        model, reference = seeded(build), seeded(build)
        shard(model, model[1:])
        for k in range(3):
            model(randn(2, 8, step=k)).square().sum().backward()
            for r in range(dist.get_world_size()):
                (reference(randn(2, 8, step=k, of_rank=r)).square().sum() / dist.get_world_size()).backward()
        assert_same_model(model, reference)

    threads(3, body)


def _counts():
    out = {}
    for mode in ("all", "root", "some"):
        for reshard in (True, False):
            out[mode, reshard] = accumulate(mesh(), reshard, mode, "set_requires_gradient_sync", steps=1)[0]
    out["kept"] = accumulate(mesh(), False, "all", "set_requires_gradient_sync", keep=True, steps=1)[0]
    return out


@pytest.fixture(scope="module")
def counted():
    return processes(2, _counts)[0]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode,reductions", [("all", 4), ("root", 4 + 3 * 2), ("some", 4 + 2 * 2)])
def test_only_the_synchronised_units_reduce(counted, mode, reductions, reshard):
    found = counted[mode, reshard]
    assert found["reduce_scatter"] == reductions
    # Root and three units in forward; the units again in backward where they were freed; every micro-batch.
    assert found["all_gather"] == (4 + (3 if reshard else 0)) * 3


def test_one_gather_a_unit_while_parameters_stay(counted):
    assert counted["kept"]["all_gather"] == 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_one_forward_one_backward_schedule(ahead, keep):
    """The flags a pipeline stage sets around its micro-batches."""

    def body():
        model, reference = seeded(build), seeded(build)
        shard(model, model[1:], reshard_after_forward=False)
        if ahead:
            for m in model.modules():
                if isinstance(m, subject().FSDPModule):
                    m.unshard(async_op=True)
        for k in range(3):
            last = k == 2
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if keep:
                model.set_reshard_after_backward(last)
            model(randn(2, 8, step=k)).square().sum().backward()
            for r in range(dist.get_world_size()):
                (reference(randn(2, 8, step=k, of_rank=r)).square().sum() / dist.get_world_size()).backward()
        assert_same_model(model, reference)

    threads(2, body)


def test_all_forwards_then_all_backwards():
    def body():
        model, reference = seeded(build), seeded(build)
        shard(model, model[1:])
        losses = [model(randn(2, 8, step=k)).square().sum() for k in range(3)]
        for k, loss in enumerate(losses):
            model.set_requires_gradient_sync(k == 2)
            loss.backward()
            for r in range(dist.get_world_size()):
                (reference(randn(2, 8, step=k, of_rank=r)).square().sum() / dist.get_world_size()).backward()
        assert_same_model(model, reference)

    threads(2, body)
