"""Hybrid sharding: replicas of shard groups, odd sizes, with tensor parallelism as a third dimension."""

import pytest
import torch
import torch.distributed as dist
from models import MLP, stack
from test_training import train
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import assert_same_model, full, mesh, randn, seeded, shard, threads


def build(dim):
    return nn.Sequential(nn.LayerNorm(dim, bias=False), MLP(dim, 3), MLP(dim), MLP(dim, 3))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dim", [3, 16, 17])
def test_two_replicas_of_two_shards(dim, reshard, checkpointed):
    def body():
        model = seeded(lambda: build(dim))
        if checkpointed:
            for m in model[1:]:
                checkpoint(m)
        shard(model, model, mesh=mesh(2, 2, names=("replicate", "shard")), reshard_after_forward=reshard)
        # LayerNorm divides by a variance, which magnifies the rounding of differently ordered sums.
        train(
            model,
            seeded(lambda: build(dim)),
            lambda m, s, r: m(randn(4, dim, step=s, of_rank=r)).square().mean(),
            steps=3,
            tolerance=1e-5,
        )

    threads(4, body)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 3)])
def test_other_shapes(shape):
    """A mesh of one replica is plain sharding; one of single shards is data parallelism without sharding."""

    def body():
        model = seeded(stack)
        shard(model, model, mesh=mesh(*shape, names=("replicate", "shard")))
        train(model, seeded(stack), lambda m, s, r: m(randn(3, 8, step=s, of_rank=r)).square().mean(), steps=3)

    threads(shape[0] * shape[1], body)


def test_replicas_stay_equal_bit_for_bit():
    def body():
        grid = mesh(2, 2, names=("replicate", "shard"))
        model = seeded(stack)
        shard(model, model, mesh=grid)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(randn(3, 8, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p in model.parameters():
            pieces = [torch.empty_like(p.to_local()) for _ in range(2)]
            dist.all_gather(pieces, p.to_local().detach().contiguous(), group=grid.get_group("replicate"))
            assert torch.equal(*pieces)

    threads(4, body)


def test_all_reduce_postponed_to_the_last_micro_batch():
    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model, mesh=mesh(2, 2, names=("replicate", "shard")))
        for k in range(3):
            model.set_requires_all_reduce(k == 2)
            model(randn(2, 8, step=k)).square().sum().backward()
            for r in range(4):
                (reference(randn(2, 8, step=k, of_rank=r)).square().sum() / 4).backward()
        assert_same_model(model, reference)

    threads(4, body)


def two_dimensional(dim, dp_names, tp, grid, reshard, checkpointed):
    model = seeded(lambda: stack(2, dim))
    plan = {f"{i}.{n}": k() for i in range(2) for n, k in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    parallelize_module(model, grid[tp], plan)
    if checkpointed:
        for m in model:
            checkpoint(m)
    return shard(model, model, mesh=grid[dp_names], reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard,checkpointed", [(True, False), (False, True)])
@pytest.mark.parametrize("dim", [4, 10])
@pytest.mark.parametrize("hybrid", [False, True])
def test_with_tensor_parallelism(hybrid, dim, reshard, checkpointed):
    """Ranks of one tensor-parallel group see the same batch; the model trains as if nothing were cut."""

    def body():
        grid = mesh(2, 2, 2, names=("replicate", "shard", "tp")) if hybrid else mesh(2, 2, names=("dp", "tp"))
        dp = ("replicate", "shard") if hybrid else "dp"
        model = two_dimensional(dim, dp, "tp", grid, reshard, checkpointed)
        reference = seeded(lambda: stack(2, dim))
        mine, other = (torch.optim.SGD(m.parameters(), lr=1e-2, foreach=False) for m in (model, reference))
        replicas = dist.get_world_size() // 2
        for step in range(3):
            for r in range(replicas):
                (reference(randn(4, dim, step=step, of_rank=r)).square().sum() / replicas).backward()
            model(randn(4, dim, step=step, of_rank=dist.get_rank() // 2)).square().sum().backward()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5, msg=name)
            for o in (mine, other):
                o.step()
                o.zero_grad()
        for p in model.parameters():
            assert p.device_mesh.ndim == len(p.placements) == grid.ndim
            assert p.device_mesh.mesh_dim_names == grid.mesh_dim_names

    threads(8 if hybrid else 4, body)
