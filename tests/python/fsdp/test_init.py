"""Construction: devices, meshes, refusals, meta-device initialisation and what may happen to parameters before the
first step.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from models import MLP, Block, TinyLM, next_token_loss, stack
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import OURS, assert_same_model, full, mesh, randn, rank, seeded, shard, subject, threads, tokens, world


def test_states_stay_on_the_meshs_device():
    def body():
        model = shard(MLP(buffer=True), mesh=mesh())
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.device.type == "cpu"
        assert not isinstance(model.offset, DTensor), "buffers are left alone"

    threads(1, body)


def test_tensor_parallel_states_stay_on_the_meshs_device():
    def body():
        grid = mesh(2, 2, names=("dp", "tp"))
        model = parallelize_module(MLP(buffer=True), grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh=grid["dp"])
        for p in model.parameters():
            assert isinstance(p, DTensor) and p.device.type == p._local_tensor.device.type == "cpu"

    threads(4, body)


def test_mesh_of_three_dimensions_is_refused():
    def body():
        with pytest.raises(ValueError, match="fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh"):
            subject().fully_shard(MLP(), mesh=mesh(world(), 1, 1))

    threads(4, body)


def test_hybrid_mesh_needs_names():
    def body():
        with pytest.raises(AssertionError, match="mesh_dim_names"):
            subject().fully_shard(MLP(), mesh=mesh(2, 2))

    threads(4, body)


def test_scalar_parameter_is_refused_by_name():
    def body():
        model = stack(2, 3)
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        with pytest.raises(ValueError, match="Change temperature to a 1D tensor with numel equal to 1"):
            subject().fully_shard(model)

    threads(2, body)


def test_non_contiguous_parameter_is_refused():
    def body():
        conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        with pytest.raises(NotImplementedError, match="does not support non-contiguous parameters"):
            subject().fully_shard(conv)

    threads(2, body)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_shards_hold_the_model_once(ranks):
    """Any world size, sizes that divide by nothing: the pieces of all ranks are the model, in order."""

    def body():
        reference = seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 11, bias=False), nn.LayerNorm(11)))
        model = shard(seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 11, bias=False), nn.LayerNorm(11))))
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(p, DTensor) and p.shape == q.shape and p.stride() == q.stride()
            assert torch.equal(full(p), q)
            sizes = torch.tensor([p.to_local().numel()])
            dist.all_reduce(sizes)
            assert sizes.item() == q.numel(), "padding doesn't show in the local tensors"

    threads(ranks, body)


def test_ignored_parameters_are_left_alone():
    def body():
        model = stack(2)
        kept = model[0].up.weight
        before = kept.detach().clone()
        shard(model, [model[0]], ignored_params={kept})
        assert model[0].up.weight is kept and not isinstance(kept, DTensor) and torch.equal(kept, before)
        model(randn(2, 8)).sum().backward()
        assert kept.grad is not None and not isinstance(kept.grad, DTensor)
        assert isinstance(model[0].down.weight, DTensor)

    threads(2, body)


@pytest.mark.parametrize("dim", [8, 3])
@pytest.mark.parametrize("default_mesh", [False, True])
def test_meta_device_then_reset_parameters(dim, default_mesh):
    def body():
        grid = mesh()
        with torch.device("meta"):
            model = nn.Sequential(MLP(dim, buffer=True), MLP(dim))
            shard(model, model, **({} if default_mesh else {"mesh": grid}))
        assert all(p.device.type == "meta" for p in model.parameters())
        _materialize_and_train(model, dim)

    threads(4, body)


@pytest.mark.parametrize("dim", [8, 3])
def test_meta_device_with_tensor_parallel(dim):
    def body():
        grid = mesh(2, 2, names=("dp", "tp"))
        with torch.device("meta"):
            model = parallelize_module(
                MLP(dim, buffer=True), grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            shard(model, (model.up, model.down), mesh=grid["dp"])
        assert all(p.device.type == "meta" for p in model.parameters())
        _materialize_and_train(model, dim)

    threads(4, body)


def _materialize_and_train(model, dim):
    model.to_empty(device="cpu")
    assert all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(1337)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for p in model.parameters():
        assert not (p.to_local() == 1337).any(), "reset_parameters reached every shard"
    model(randn(4, dim)).sum().backward()
    optimizer.step()
    for p in model.parameters():
        assert torch.isfinite(p.to_local()).all()


def test_forward_on_meta_parameters_names_them():
    def body():
        with torch.device("meta"):
            model = nn.Sequential(MLP(), MLP())
            shard(model, model)
        with pytest.raises(RuntimeError, match="materialized from meta device.*0.up.weight"):
            model(torch.randn(2, 8))

    threads(2, body)


def test_parameter_replaced_before_first_forward():
    """A parameter assigned after fully_shard, computed from sharded ones, is taken up at the first forward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.scale = nn.Parameter(torch.empty(3))

        def forward(self, x):
            return self.b(self.a(x)).sum() + self.scale.sum()

    def body():
        with torch.device("meta"):
            model = Model()
        shard(model, (model.a, model.b))
        model.a.to_empty(device="cpu")
        model.b.to_empty(device="cpu")
        for p in (model.a.weight, model.b.weight):
            torch.nn.init.ones_(p)
        with torch.no_grad():
            whole = full(model.a.weight).norm(dim=1) + full(model.b.weight).norm(dim=1)
            model.scale = nn.Parameter(distribute_tensor(whole, model.scale.device_mesh, model.scale.placements))
        loss = model(torch.zeros(2, 3))
        assert loss.item() == pytest.approx(6 * 3**0.5)
        loss.backward()
        assert torch.equal(full(model.scale.grad), torch.ones(3))

    threads(2, body)


def test_broadcast_from_rank_0_into_a_meta_model():
    def body():
        with torch.device("meta"):
            model = TinyLM()
        shard(model, model.blocks, mesh=mesh())
        whole = seeded(TinyLM).state_dict() if rank() == 0 else None
        pieces = {}
        for name, p in model.state_dict().items():
            value = whole[name].clone() if rank() == 0 else torch.empty(p.shape, dtype=p.dtype)
            dist.broadcast(value, src=0)
            pieces[name] = nn.Parameter(distribute_tensor(value, p.device_mesh, p.placements))
        model.load_state_dict(pieces, assign=True)
        assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
        reference = shard(seeded(TinyLM))
        ids = tokens(29, 2, 9)
        losses = [next_token_loss(m, ids) for m in (model, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(full(p), full(q))
            torch.testing.assert_close(full(p.grad), full(q.grad))

    threads(4, body)


def test_replicas_are_aligned_by_a_broadcast():
    def body():
        grid = mesh(2, 2, names=("replicate", "shard"))
        model = MLP(buffer=True)
        shard(model, mesh=grid)
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]
        with torch.no_grad():
            for t in local:
                t.fill_(grid.get_local_rank("replicate"))
        group = grid.get_group("replicate")
        for t in local:
            dist.broadcast(t.detach(), src=dist.get_process_group_ranks(group)[0], group=group)
        assert all((t == 0).all() for t in local), "to_local() is the storage, not a copy"
        model(randn(2, 8)).sum().backward()

    threads(4, body)


OLD_PLACES = """
import torch.distributed as dist
if {ours}:
    import ragged_fsdp
    ragged_fsdp.install()
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed._composable.fsdp.fully_shard import FSDPModule
from torch.distributed.fsdp import fully_shard as newer
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
fully_shard(model[0], mp_policy=MixedPrecisionPolicy())
newer(model)
assert isinstance(model[0], FSDPModule) and isinstance(model, FSDPModule)
if {ours}:
    assert fully_shard is newer is ragged_fsdp.fully_shard
    assert all(isinstance(p, ragged_fsdp.RaggedTensor) for p in model.parameters())
"""


def test_places_that_scripts_import_from():
    """The old ones too; for ours after install(), which is explicit and so needs a process of its own here."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_PLACES.format(ours=OURS)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_modules_attributes_survive():
    """What a module holds beside parameters stays: hooks, buffers, plain attributes, training flag."""

    def body():
        model = Block(12, 3)
        model.note, called = "kept", []
        model.register_forward_hook(lambda *_: called.append(1))
        model.eval()
        shard(model)
        assert model.note == "kept" and not model.training
        model(randn(2, 4, 12))
        assert called == [1]

    threads(2, body)


def test_forward_equals_the_plain_model_before_any_step():
    def body():
        reference, model = seeded(TinyLM), shard(m := seeded(TinyLM), m.blocks)
        ids = tokens(29, 2, 9)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), reference(ids))
        for module in model.modules():
            if isinstance(module, subject().FSDPModule):
                module.reshard()
        assert_same_model(model, reference, tolerance=0, grads=False)

    threads(3, body)
