"""Loading a full state dict that only rank 0 has."""

import copy
import random

import torch
from support.layouts import random_ragged
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict as torch_set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from ragged_fsdp import fully_shard
from ragged_fsdp.state_dict import set_model_state_dict, set_optimizer_state_dict
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor

OPTIONS = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _ragged(world, device="cpu"):
    mesh = init_device_mesh("cpu", (world,))
    rng = random.Random(world)
    with torch.device(device):
        model = (
            copy.deepcopy(_plain())
            if device == "cpu"
            else nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        )
    for module in model:
        for name, p in list(module.named_parameters()):
            zero = torch.zeros_like(p.detach())
            setattr(module, name, nn.Parameter(distribute_tensor(zero, mesh, [random_ragged(p.shape, world, rng)])))
    return model


def _load(rank, world):
    plain = _plain()
    for device in ("cpu", "meta"):
        model = _ragged(world, device)
        set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=OPTIONS)
        for key, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, RaggedTensor) else value
            assert torch.equal(whole, plain.state_dict()[key]), key
        assert all(type(p) is RaggedTensor and isinstance(p, nn.Parameter) for p in model.parameters())

    optims = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, _ragged(world))]
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    optims[0].step()
    full = get_optimizer_state_dict(plain, optims[0])
    target = _ragged(world)
    optim = torch.optim.AdamW(target.parameters(), lr=0.5)
    set_optimizer_state_dict(target, optim, full if rank == 0 else {}, options=OPTIONS)
    for (name, p), q in zip(target.named_parameters(), plain.parameters()):
        state, expected = optim.state[p], optims[0].state[q]
        assert type(state["exp_avg"]) is RaggedTensor and state["exp_avg"].placements == p.placements, name
        assert (
            torch.equal(state["exp_avg_sq"].full_tensor(), expected["exp_avg_sq"]) and state["step"] == expected["step"]
        )
    assert optim.param_groups[0]["lr"] == 0.1
    return True


def _torch_into_meta(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    plain = _plain()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    torch_set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=OPTIONS)
    plain.eval()
    model.eval()
    x = torch.ones(2, 4)
    assert torch.equal(model(x), plain(x))
    return all(type(p) is RaggedTensor for p in model.parameters())


def test_torchs_own_function_loads_meta_models():
    assert run_ranks(2, _torch_into_meta) == [True, True]


def test_rank0_alone_has_the_state():
    assert run_ranks(2, _load) == [True, True]
