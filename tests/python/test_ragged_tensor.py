"""RaggedTensor as a tensor: construction, copies, modules and state dicts, pickling, gradients."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import ROWS, SHAPES, expected_piece, layout, make_mesh, values
from support.ranks import run_ranks, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor


# ---- construction -----------------------------------------------------------


def _construct(rank, world):
    mesh = make_mesh(world)
    local = torch.arange(8.0 if rank == 0 else 12.0)
    tensor = RaggedTensor(local, mesh, [ROWS], (5, 4), requires_grad=True)
    assert isinstance(tensor, DTensor) and tensor.shape == (5, 4) and tensor.stride() == (4, 1) and tensor.requires_grad
    assert tensor.device_mesh is mesh and tensor.placements == (ROWS,) and tensor.ragged == (0, ROWS)
    assert tensor.to_local().data_ptr() == local.data_ptr()
    RaggedTensor(local, mesh, [ROWS], (5, 4), (4, 1))

    parameter = nn.Parameter(tensor)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, RaggedTensor) and parameter.is_leaf
    assert parameter.detach().to_local().data_ptr() == local.data_ptr()
    assert "Parameter RaggedTensor(shape=(5, 4)" in repr(parameter) and "RaggedShard(" in repr(parameter)

    wrapper = RaggedTensor.wrap(local, tensor._spec)
    other = local + 1
    wrapper._local_tensor = other  # an owner may change what a cached wrapper shows
    assert torch.equal((wrapper * 1).to_local(), other)

    for build, text in [
        (
            lambda: RaggedTensor(local.view(-1, 4), mesh, [ROWS], (5, 4)),
            r"a contiguous 1-D local tensor of \d+ elements.*rank \d of 2",
        ),
        (
            lambda: RaggedTensor(torch.ones(3), mesh, [ROWS], (5, 4)),
            r"local tensor of (8|12) elements, but got shape \(3,\)",
        ),
        (lambda: RaggedTensor(local, mesh, [Replicate()], (5, 4)), r"one RaggedShard among the placements"),
        (lambda: RaggedTensor(local, mesh, [ROWS], (4, 5)), r"the shape \(4, 5\) that the other placements leave"),
        (lambda: RaggedTensor(local, mesh, [ROWS], (5, 4), (1, 5)), r"row-major stride \(4, 1\), but got \(1, 5\)"),
        (lambda: RaggedTensor(local, mesh, [ROWS, ROWS], (5, 4)), r"one placement for each"),
        (lambda: RaggedTensor(local, mesh, [RaggedShard(1, (1, 1, 3), (5, 4))], (5, 4)), r"2 local units"),
        (lambda: RaggedTensor(local, mesh, [StridedRaggedShard(1, (2, 3), (5, 4), 2)], (5, 4)), r"split_factor 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            build()


def test_construction_and_its_errors():
    run_threads(2, _construct)


def _two_ragged(rank, world):
    mesh = init_device_mesh("cpu", (2, 1))
    with pytest.raises(ValueError, match="at most one ragged placement"):
        RaggedTensor(torch.ones(1), mesh, [ROWS, ROWS], (5, 4))


def test_two_ragged_dims_are_refused():
    run_threads(2, _two_ragged)


# ---- copies -----------------------------------------------------------------


def _copies(rank, world):
    mesh = make_mesh(world)
    for seed, shape in enumerate(SHAPES):
        full, placement = values(shape, seed), layout(shape, world, seed)
        sources = {
            "plain": full,
            "transposed": full.t().contiguous().t() if full.ndim == 2 else full,
            "bf16": full.to(torch.bfloat16),
            "same": distribute_tensor(full, mesh, [placement]),
            "other": distribute_tensor(full, mesh, [layout(shape, world, seed + 3)]),
            "replicated": DTensor.from_local(full, mesh, [Replicate()]),
            "stock ragged": stock.distribute_tensor(full, mesh, [placement]),
            "whole under ragged": DTensor.from_local(full, mesh, [placement], shape=full.shape, stride=full.stride()),
            "scalar": torch.tensor(2.5),
        }
        if shape and shape[-1]:
            sources["shard"] = stock.distribute_tensor(full, mesh, [Shard(len(shape) - 1)])
        for name, source in sources.items():
            target = distribute_tensor(torch.zeros(shape), mesh, [placement])
            assert target.copy_(source) is target
            expected = torch.zeros(shape).copy_(source if not isinstance(source, DTensor) else full)
            assert torch.equal(target.to_local(), expected_piece(expected, mesh, [placement])), (name, shape)
    target = distribute_tensor(torch.zeros(5, 4), mesh, [layout((5, 4), world)])
    target.copy_(torch.arange(4.0))
    assert torch.equal(target.full_tensor(), torch.arange(4.0).expand(5, 4))
    shard = stock.distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)])
    shard.copy_(target)
    assert torch.equal(shard.full_tensor(), target.full_tensor())
    for bad in (torch.zeros(4, 5), torch.zeros(3), torch.zeros(2, 5, 4)):
        with pytest.raises(ValueError, match=r"\[copy_\] Expected a source of the global shape \(5, 4\)"):
            target.copy_(bad)
    with pytest.raises(ValueError, match=r"\[copy_\] .*full_tensor"):
        torch.zeros(5, 4).copy_(target)


@pytest.mark.parametrize("world", [1, 3])
def test_copy_takes_anything(world):
    run_threads(world, _copies)


def _load_state_dict(rank, world):
    mesh = make_mesh(world)
    plain, model = nn.Linear(4, 5), nn.Linear(4, 5)
    with torch.no_grad():
        for seed, p in enumerate(plain.parameters()):  # the ranks share one default generator: no seeding here
            p.copy_(values(p.shape, seed))
    for name, p in list(model.named_parameters()):
        setattr(
            model, name, nn.Parameter(distribute_tensor(torch.zeros_like(p), mesh, [layout(p.shape, world, len(name))]))
        )
    model.load_state_dict({key: value.clone() for key, value in plain.state_dict().items()})
    for key, value in model.state_dict().items():
        assert type(value) is RaggedTensor and torch.equal(value.full_tensor(), plain.state_dict()[key])
    # What torch's helpers do with a full state dict.
    full = {key: value + 1 for key, value in plain.state_dict().items()}
    model.load_state_dict(
        {k: stock.distribute_tensor(v, mesh, model.state_dict()[k].placements) for k, v in full.items()}
    )
    assert all(torch.equal(value.full_tensor(), full[key]) for key, value in model.state_dict().items())
    before = model.weight
    model.to(torch.bfloat16)
    assert (
        model.weight is before
        and model.weight.dtype == torch.bfloat16
        and model.weight.to_local().dtype == torch.bfloat16
    )
    assert isinstance(model.weight, nn.Parameter) and type(model.weight) is RaggedTensor
    model.to_empty(device="cpu")
    assert type(model.weight) is RaggedTensor and isinstance(model.weight, nn.Parameter)
    model.zero_grad()


def test_modules_load_convert_and_empty():
    run_threads(2, _load_state_dict)


def _helpers(rank, world):
    from torch.distributed.checkpoint import state_dict as helpers

    mesh = make_mesh(world)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model = copy.deepcopy(plain)
    for module in model:
        for name, p in list(module.named_parameters()):
            setattr(
                module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, len(name))]))
            )
    options = helpers.StateDictOptions(full_state_dict=True)
    optims = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for p, r in zip(plain.parameters(), model.parameters()):
        p.grad = values(p.shape, 1)
        r.grad = distribute_tensor(p.grad, mesh, r.placements)
    for optim in optims:
        optim.step()
    for key, value in helpers.get_model_state_dict(model, options=options).items():
        assert type(value) is torch.Tensor and torch.equal(value, plain.state_dict()[key])
    sharded = helpers.get_model_state_dict(model)
    assert all(type(value) is RaggedTensor for value in sharded.values())
    helpers.set_model_state_dict(model, {key: value + 1 for key, value in plain.state_dict().items()}, options=options)
    assert torch.equal(model[1].bias.detach().full_tensor(), plain[1].bias.detach() + 1)
    state = helpers.get_optimizer_state_dict(model, optims[1], options=options)
    expected = helpers.get_optimizer_state_dict(plain, optims[0])
    for name, entry in expected["state"].items():
        assert torch.equal(state["state"][name]["exp_avg"], entry["exp_avg"])
    helpers.set_optimizer_state_dict(model, optims[1], state, options=options)
    restored = optims[1].state[model[0].weight]["exp_avg"]
    assert torch.equal(restored.full_tensor(), expected["state"]["0.weight"]["exp_avg"])
    # torch made stock DTensors of the state: they are adopted at the next step, however the optimizer loops.
    for loop in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        twin = copy.deepcopy(plain)
        twin_optim = torch.optim.AdamW(twin.parameters(), lr=0.1, **loop)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, **loop)
        for p in (*twin.parameters(), *model.parameters()):
            p.grad = None  # torch's helper takes a gradient to mean that the state exists
        full_model = {key: value + 1 for key, value in plain.state_dict().items()}
        twin.load_state_dict(full_model)
        helpers.set_model_state_dict(model, full_model, options=options)
        helpers.set_optimizer_state_dict(twin, twin_optim, copy.deepcopy(expected))
        helpers.set_optimizer_state_dict(model, optim, copy.deepcopy(expected), options=options)
        for p, r in zip(twin.parameters(), model.parameters()):
            p.grad = values(p.shape, 2)
            r.grad = distribute_tensor(p.grad, mesh, r.placements)
        twin_optim.step()
        optim.step()
        for p, r in zip(twin.parameters(), model.parameters()):
            assert type(optim.state[r]["exp_avg_sq"]) is RaggedTensor
            torch.testing.assert_close(r.detach().full_tensor(), p.detach())
    return True


def test_torch_state_dict_helpers():
    assert run_ranks(2, _helpers) == [True, True]


# ---- pickling, deepcopy, data -----------------------------------------------


def _round_trips(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    p = nn.Parameter(distribute_tensor(full, mesh, [ROWS]))
    p.grad = distribute_tensor(full * 2, mesh, [ROWS])
    p.note = "kept"

    twin = copy.deepcopy(p)
    assert type(twin) is RaggedTensor and isinstance(twin, nn.Parameter) and twin.requires_grad and twin.note == "kept"
    assert twin.to_local().data_ptr() != p.to_local().data_ptr() and torch.equal(twin.detach(), p.detach())
    assert torch.equal(twin.grad.full_tensor(), full * 2) and twin.grad is not p.grad
    assert not isinstance(copy.deepcopy(p.detach()), nn.Parameter)
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(p * 2)

    module = nn.Module()
    module.w = p
    assert isinstance(copy.deepcopy(module).w, nn.Parameter)

    for value in (p, p.detach()):
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is RaggedTensor and isinstance(again, nn.Parameter) == isinstance(value, nn.Parameter)
        assert (
            again.placements == (ROWS,)
            and again.requires_grad == value.requires_grad
            and torch.equal(again.detach(), p.detach())
        )
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save({"w": p.detach(), "p": p}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert type(loaded["w"]) is RaggedTensor and torch.equal(loaded["w"].full_tensor(), full)
        assert isinstance(loaded["p"], nn.Parameter)

    inner, context = p.__tensor_flatten__()
    back = RaggedTensor.__tensor_unflatten__({name: getattr(p, name) for name in inner}, context, p.shape, p.stride())
    assert type(back) is RaggedTensor and torch.equal(back.detach(), p.detach())

    p.data = p.data * 3
    assert torch.equal(p.detach().full_tensor(), full * 3) and p.requires_grad and p.note == "kept"
    p.data = p.data.to(torch.bfloat16)
    assert p.dtype == torch.bfloat16 and p.to_local().dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"\[data\] Expected a RaggedTensor of shape \(5, 4\)"):
        p.data = full


def test_deepcopy_pickle_save_flatten_and_data():
    run_threads(2, _round_trips)


def _backward(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    losses = {
        "sum": lambda x: x.sum(),
        "mean of squares": lambda x: (x * x).mean(),
        "norm": lambda x: x.norm(),
        "chain": lambda x: (x.exp() * 2 + x.sigmoid()).sum(),
    }
    for name, loss in losses.items():
        plain = nn.Parameter(full.clone())
        ragged = nn.Parameter(distribute_tensor(full, mesh, [ROWS]))
        loss(plain).backward()
        loss(ragged).backward()
        torch.testing.assert_close(ragged.grad.full_tensor(), plain.grad, msg=name)
        # Whatever the gradient's placement, the optimizer's step is that of the whole.
        for p in (plain, ragged):
            torch.optim.SGD([p], lr=0.1).step()
        torch.testing.assert_close(ragged.detach().full_tensor(), plain.detach(), msg=name)


def _backward_twice(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    plain, ragged = nn.Parameter(full.clone()), nn.Parameter(distribute_tensor(full, mesh, [ROWS]))
    for p in (plain, ragged):
        p.sum().backward()
        (p * p).sum().backward()
        p.sum().backward()
        (p.exp() + p).sum().backward()
    torch.testing.assert_close(ragged.grad.full_tensor(), plain.grad)
    for p in (plain, ragged):
        p.grad = None
        (p * p).sum().backward()
        p.sum().backward()
    assert type(ragged.grad) is RaggedTensor
    torch.testing.assert_close(ragged.grad.full_tensor(), plain.grad)
    (double,) = torch.autograd.grad((ragged.exp() * ragged).sum(), ragged, create_graph=True)
    torch.testing.assert_close(double.full_tensor(), full.exp() * full + full.exp())


def test_backward_twice():
    run_threads(2, _backward_twice)


def test_losses_on_ragged_tensors_have_the_right_gradients():
    run_threads(2, _backward)


def _shared_memory(rank, world):
    tensor = distribute_tensor(values((5, 4)), make_mesh(world), [ROWS])
    assert not tensor.is_shared() and tensor.share_memory_() is tensor and tensor.to_local().is_shared()
    for read in (tensor.tolist, tensor.numpy):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            read()


def test_shared_memory():
    run_threads(2, _shared_memory)
