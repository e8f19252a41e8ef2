"""State dicts: what they hold and alias, full ones out and in, tensor-parallel models, saving on one world and
loading on another.
"""

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import MLP, TinyLM, stack
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import OURS, full, is_sharded, mesh, only_ours, processes, randn, rank, seeded, shard, subject, threads


def equal(state, plain):
    """Each value of a sharded state dict is, whole, that of the plain one."""
    assert list(state) == list(plain)
    for name, value in state.items():
        assert torch.equal(full(value), plain[name]), name


@pytest.mark.parametrize("dim", [2, 3, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_and_values(ranks, dim):
    def body():
        model = seeded(lambda: stack(2, dim))
        plain = {n: t.clone() for n, t in model.state_dict().items()}
        shard(model, model)
        equal(model.state_dict(), plain)
        assert all(isinstance(t, DTensor) for t in model.state_dict().values())

    threads(ranks, body)


@pytest.mark.parametrize("hybrid", [False, True])
def test_load_into_another_model(hybrid):
    def body():
        grid = mesh(2, 2, names=("replicate", "shard")) if hybrid else mesh()
        source, target = (shard(m := seeded(lambda: stack(2, 5), seed), m, mesh=grid) for seed in (1, 2))
        saved = {n: t.detach().clone() for n, t in source.state_dict().items()}
        target.load_state_dict(saved)
        for p, q in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
        # A loaded model trains on.
        target(randn(2, 5)).sum().backward()

    threads(4, body)


def test_assigned_state_dict_becomes_the_parameters():
    def body():
        source, target = (shard(m := seeded(lambda: stack(2, 5), seed), m) for seed in (1, 2))
        target.load_state_dict({n: t.detach().clone() for n, t in source.state_dict().items()}, assign=True)
        outputs = [m(randn(2, 5)) for m in (source, target)]
        assert torch.equal(*outputs)
        target.zero_grad()
        outputs[1].sum().backward()
        with torch.no_grad():
            for p in target.parameters():
                p -= p.grad
        assert not torch.equal(target(randn(2, 5)), outputs[1]), "the step reached what forward gathers"

    threads(2, body)


def test_state_dict_after_a_forward_that_keeps_parameters():
    def body():
        model = seeded(lambda: stack(2, 5))
        plain = {n: t.clone() for n, t in model.state_dict().items()}
        shard(model, model, reshard_after_forward=False)
        model(randn(2, 5))
        assert not is_sharded(model.parameters())
        equal(model.state_dict(), plain)

    threads(2, body)


def test_cached_state_dict_follows_the_optimizer():
    """A state dict aliases the shards: one taken before training shows the steps taken since."""

    def body():
        model = shard(m := seeded(lambda: stack(2, 5)), m)
        cached = model.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(randn(2, 5, step=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local(), cached[name].to_local())
            assert value.to_local().data_ptr() == cached[name].to_local().data_ptr()

    threads(2, body)


@pytest.mark.parametrize("offload", [False, True])
def test_full_state_dict(offload):
    """full_state_dict gathers everywhere; with cpu_offload only rank 0 keeps it."""

    def body():
        model = seeded(TinyLM)
        plain = {n: t.clone() for n, t in model.state_dict().items()}
        shard(model, model.blocks)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
        if offload and rank() > 0:
            assert whole == {}
            return
        assert list(whole) == list(plain)
        for name, value in whole.items():
            assert not isinstance(value, DTensor) and torch.equal(value, plain[name])

    threads(4, body)


def _set_full(broadcast):
    model = seeded(TinyLM, 2)
    shard(model, model.blocks)
    plain = seeded(TinyLM, 1).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    # torch's own slices by a rule that knows even shards only, so the package has one; for all else ours calls torch's.
    load = subject().set_model_state_dict if broadcast and OURS else set_model_state_dict
    load(model, dict(plain) if rank() == 0 or not broadcast else {}, options=options)
    equal(model.state_dict(), plain)


def test_set_full_state_dict():
    processes(3, _set_full, False)


def test_set_full_state_dict_from_rank_0():
    processes(3, _set_full, True)


def _optimizer_state():
    def trained(seed, steps):
        model = shard(m := seeded(lambda: stack(2, 5), seed), m)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            model(randn(2, 5, step=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (model, optimizer), (other, fresh) = trained(1, 2), trained(2, 1)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))  # step counts are no copies
    set_optimizer_state_dict(other, fresh, state, options=options)
    for m, o in ((model, optimizer), (other, fresh)):
        m(randn(2, 5, step=9)).square().sum().backward()
        o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p), full(q))


def test_optimizer_state_through_full_dicts():
    processes(2, _optimizer_state)


def tensor_parallel(model, grid):
    plan = {
        f"{i}.{name}": kind() for i in range(3) for name, kind in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    parallelize_module(model, grid["tp"], plan)
    dp = grid["replicate", "shard"] if grid.ndim == 3 else grid["dp"]
    return shard(model, model, mesh=dp)


@pytest.mark.parametrize("dim", [4, 6])
@pytest.mark.parametrize("hybrid", [False, True])
def test_tensor_parallel_model(hybrid, dim):
    """Sharded over data-parallel ranks what tensor parallelism has cut before: the whole is still the plain model."""

    def body():
        grid = mesh(2, 2, 2, names=("replicate", "shard", "tp")) if hybrid else mesh(2, 2, names=("dp", "tp"))
        plain = seeded(lambda: stack(3, dim))
        state = {n: t.clone() for n, t in plain.state_dict().items()}
        model, other = (tensor_parallel(seeded(lambda: stack(3, dim), seed), grid) for seed in (0, 1))
        equal(model.state_dict(), state)
        for p in model.parameters():
            assert p.device_mesh.ndim == grid.ndim and p.device_mesh.mesh_dim_names == grid.mesh_dim_names
        other.load_state_dict({n: t.detach().clone() for n, t in model.state_dict().items()})
        equal(other.state_dict(), state)

    threads(8 if hybrid else 4, body)


def _save(path, dim):
    model = seeded(lambda: nn.Sequential(nn.Linear(4, dim), MLP(dim)))
    shard(model, model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)


def _load(path, dim):
    model = seeded(lambda: nn.Sequential(nn.Linear(4, dim), MLP(dim)), 1)
    shard(model, model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    equal(model.state_dict(), seeded(lambda: nn.Sequential(nn.Linear(4, dim), MLP(dim))).state_dict())


@pytest.mark.parametrize("save_ranks,load_ranks", [(3, 2), (2, 4)])
def test_checkpoint_on_one_world_loads_on_another(save_ranks, load_ranks):
    """A [5, 4] weight on three ranks: uneven and, for FSDP2, short pieces."""
    path = tempfile.mkdtemp(prefix="ragged_dcp_")
    try:
        processes(save_ranks, _save, path, 5)
        processes(load_ranks, _load, path, 5)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@only_ours("FSDP2 shards hold padding rows or empty pieces; ours hold nothing beside the elements")
def test_state_dict_holds_each_element_once():
    def body():
        model = shard(m := seeded(lambda: stack(2, 5)), m)
        storages = {
            t.to_local().untyped_storage().data_ptr(): t.to_local().untyped_storage()
            for t in model.state_dict().values()
        }
        mine = torch.tensor([sum(s.nbytes() for s in storages.values())])
        dist.all_reduce(mine)
        need = sum(p.numel() * 4 for p in model.parameters())
        # Alignment between tensors and at the segments' ends, a few hundred bytes; never another copy.
        assert need <= mine.item() <= need + 64 * dist.get_world_size() * sum(1 for _ in model.parameters())

    threads(3, body)
