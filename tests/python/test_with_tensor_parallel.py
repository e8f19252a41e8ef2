"""fully_shard over torch's tensor parallelism, on 2-D and 3-D meshes: training, clipping and checkpoints equal those of one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_threads
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ragged_fsdp import RaggedShard, RaggedTensor, StridedRaggedShard, fully_shard, rows

FULL = StateDictOptions(full_state_dict=True)


class Mlp(nn.Module):
    """Two linear layers, one split by rows and one by columns."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 24)
        self.down = nn.Linear(24, 10)
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _train(rank, world, sizes, names, reference, folder):
    reference = copy.deepcopy(reference)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data_mesh = mesh[names[:-1]] if len(names) > 2 else mesh["dp"]
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=data_mesh, shard_policy=rows(1))
    fully_shard(model, mesh=data_mesh)

    placements = {name: p.placements[-2:] for name, p in model.named_parameters()}
    assert type(placements["0.up.weight"][0]) is StridedRaggedShard and placements["0.up.weight"][1] == Shard(0)
    assert type(placements["0.down.weight"][0]) is RaggedShard and placements["0.down.weight"][1] == Shard(1)
    assert placements["0.down.bias"][1] == Replicate()
    pairs = [(n, p, q) for (n, p), (_, q) in zip(model.named_parameters(), reference.named_parameters())]
    for name, p, q in pairs:
        assert type(p) is RaggedTensor and torch.equal(p.detach().full_tensor(), q), name
        again = stock_distribute(q.detach(), p.device_mesh, p.placements)
        assert torch.equal(again.to_local(), p.detach().to_local()), name

    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (reference, model)]
    replicas = world // mesh.size(mesh.ndim - 1)
    replica = rank // mesh.size(mesh.ndim - 1)
    for step in range(3):
        batches = [torch.randn(3, 10, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(replicas)]
        (sum(reference(x).square().mean() for x in batches) / replicas).backward()
        model(batches[replica]).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.device_mesh.ndim == mesh.ndim], 1e9)
        assert isinstance(norm, DTensor)
        groups = [[p for p in model.parameters() if (p.device_mesh.ndim == mesh.ndim) == tp] for tp in (True, False)]
        norms = [nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in groups]
        torch.testing.assert_close(torch.stack(norms).norm(), expected)
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, 0.01, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p, q in pairs:
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), msg=name)

    full = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(full[name], p.detach().full_tensor()) for name, p, _ in pairs)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    plain = {"model": {name: torch.zeros_like(value) for name, value in full.items()}}
    dcp.load(plain, checkpoint_id=folder)
    assert all(torch.equal(plain["model"][name], value) for name, value in full.items())
    set_model_state_dict(model, {name: value + 1 for name, value in full.items()}, options=FULL)
    for name, value in get_model_state_dict(model, options=FULL).items():
        assert torch.equal(value, full[name] + 1), name


@pytest.mark.parametrize(
    "sizes, names",
    [
        ((2, 2), ("dp", "tp")),
        ((3, 2), ("dp", "tp")),
        ((2, 2, 2), ("rep", "dp", "tp")),
    ],
)
def test_training_equals_one_process(tmp_path, sizes, names):
    world = 1
    for size in sizes:
        world *= size
    run_threads(world, _train, sizes, names, nn.Sequential(Mlp(), Mlp()), tmp_path)
