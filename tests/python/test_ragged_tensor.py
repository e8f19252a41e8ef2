"""RaggedTensor as a tensor: construction, whitelist of ops, optimizers, norms, copies, pickling, torch's state-dict helpers."""

import copy
import io
import math
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import SHAPES, expected_piece, numbered, random_ragged
from support.ranks import run_ranks, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, foreign_box
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor

A = RaggedShard(1, (2, 3), (5, 4))
B = RaggedShard(2, (1, 19), (5, 4))


def make_mesh(world):
    return init_device_mesh("cpu", (world,))


def layout(shape, world, seed=0):
    return random_ragged(shape, world, random.Random(seed))


def values(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- construction -----------------------------------------------------------------------------------------------------------


def _construct(rank, world):
    mesh = make_mesh(world)
    local = torch.arange(8.0 if rank == 0 else 12.0)
    tensor = RaggedTensor(local, mesh, [A], (5, 4), requires_grad=True)
    assert isinstance(tensor, DTensor) and tensor.shape == (5, 4) and tensor.stride() == (4, 1) and tensor.requires_grad
    assert tensor.device_mesh is mesh and tensor.placements == (A,) and tensor.ragged == (0, A)
    assert tensor.to_local().data_ptr() == local.data_ptr()
    RaggedTensor(local, mesh, [A], (5, 4), (4, 1))

    parameter = nn.Parameter(tensor)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, RaggedTensor) and parameter.is_leaf
    assert parameter.detach().to_local().data_ptr() == local.data_ptr()
    assert "Parameter RaggedTensor(shape=(5, 4)" in repr(parameter) and "RaggedShard(" in repr(parameter)

    wrapper = RaggedTensor.wrap(local, tensor._spec)
    other = local + 1
    wrapper._local_tensor = other  # an owner may change what a cached wrapper shows
    assert torch.equal((wrapper * 1).to_local(), other)

    for build, text in [
        (lambda: RaggedTensor(local.view(-1, 4), mesh, [A], (5, 4)), r"a contiguous 1-D local tensor of \d+ elements.*rank \d of 2"),
        (lambda: RaggedTensor(torch.ones(3), mesh, [A], (5, 4)), r"local tensor of (8|12) elements, but got shape \(3,\)"),
        (lambda: RaggedTensor(local, mesh, [Replicate()], (5, 4)), r"one RaggedShard among the placements"),
        (lambda: RaggedTensor(local, mesh, [A], (4, 5)), r"the shape \(4, 5\) that the other placements leave"),
        (lambda: RaggedTensor(local, mesh, [A], (5, 4), (1, 5)), r"row-major stride \(4, 1\), but got \(1, 5\)"),
        (lambda: RaggedTensor(local, mesh, [A, A], (5, 4)), r"one placement for each"),
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
        RaggedTensor(torch.ones(1), mesh, [A, A], (5, 4))


def test_two_ragged_dims_are_refused():
    run_threads(2, _two_ragged)


# ---- elementwise ------------------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "add": lambda x, y: x + y,
    "radd": lambda x, y: 2 + x,
    "rsub": lambda x, y: 1 - x,
    "mul scalar": lambda x, y: x * 0.5,
    "div": lambda x, y: x / (y.abs() + 1),
    "pow": lambda x, y: x.abs().pow(1.5) + x**2,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.3),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where scalar": lambda x, y: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(x < 0, 7.0),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "gelu": lambda x, y: nn.functional.gelu(x),
    "sign": lambda x, y: x.sign() + x.exp() + x.tanh() + x.sigmoid() + x.erf(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "compare": lambda x, y: (x > y) & (x != 0) | torch.isnan(x),
    "isfinite": lambda x, y: torch.isfinite(x / y),
    "scalar tensor": lambda x, y: x * torch.tensor(3.0),
    "to": lambda x, y: x.to(torch.bfloat16),
    "double": lambda x, y: x.double() + y,
    "clone": lambda x, y: x.clone().contiguous(),
    "zeros_like": lambda x, y: torch.zeros_like(x) + torch.ones_like(y) + torch.full_like(x, 2.0),
    "channels last": lambda x, y: torch.zeros_like(x, memory_format=torch.preserve_format),
    "view": lambda x, y: x.view(x.shape).reshape(x.shape).view_as(x),
    "new_zeros": lambda x, y: x.new_zeros(x.shape) + x.new_ones(x.shape),
    "nan_to_num": lambda x, y: (x / 0).nan_to_num(0.0, 1.0, -1.0),
    "float": lambda x, y: (x > 0).float(),
}

INPLACE = {
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "iadd": lambda x, y: x.__iadd__(y),
    "mul_": lambda x, y: x.mul_(0.9).mul_(y),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3.0),
    "addcdiv_": lambda x, y: x.addcdiv_(x, y.abs() + 1, value=-0.1),
    "lerp_": lambda x, y: x.lerp_(y, 0.1),
    "clamp_": lambda x, y: x.clamp_(min=0.0),
    "erfinv_": lambda x, y: x.clamp_(-0.9, 0.9).erfinv_(),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, -1.0),
    "out": lambda x, y: torch.mul(x, y, out=x),
    "copy_": lambda x, y: x.copy_(y),
}


def _elementwise(rank, world):
    mesh = make_mesh(world)
    for seed, shape in enumerate(SHAPES):
        full_x, full_y = values(shape, 1), values(shape, 2)
        placement, other = layout(shape, world, seed), layout(shape, world, seed + 100)
        for name, op in ELEMENTWISE.items():
            # y lies otherwise for half of the shapes: it's brought to x's placement.
            x, y = distribute_tensor(full_x, mesh, [placement]), distribute_tensor(full_y, mesh, [(placement, other)[seed % 2]])
            expected, result = op(full_x, full_y), op(x, y)
            assert type(result) is RaggedTensor and result.placements == (placement,), name
            assert result.dtype == expected.dtype and result.shape == expected.shape, name
            assert result.to_local().dtype == expected.dtype and result._spec.tensor_meta.dtype == expected.dtype
            assert torch.equal(result.to_local(), expected_piece(expected, mesh, [placement])), (name, shape)
        for name, op in INPLACE.items():
            x, y = distribute_tensor(full_x, mesh, [placement]), distribute_tensor(full_y, mesh, [(placement, other)[seed % 2]])
            pointer, expected = x.to_local().data_ptr(), op(full_x.clone(), full_y)
            assert op(x, y) is x and x.to_local().data_ptr() == pointer, name
            assert torch.equal(x.to_local(), expected_piece(expected, mesh, [placement])), (name, shape)


@pytest.mark.parametrize("world", [1, 3])
def test_elementwise_ops_equal_those_on_the_whole(world):
    run_threads(world, _elementwise)


def _operands(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    x = distribute_tensor(full, mesh, [A])
    shard = stock.distribute_tensor(full, mesh, [Shard(1)])
    assert torch.equal((x + shard).full_tensor(), full + full)
    coefficient = DTensor.from_local(torch.tensor(0.5), mesh, [Replicate()])
    assert torch.equal((x * coefficient).full_tensor(), full * 0.5)
    pending = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])
    assert torch.equal((x * pending).full_tensor(), full * (0.5 * world))
    assert torch.equal((x * torch.tensor([2.0])).full_tensor(), full * 2)
    for other in (full, torch.ones(4), torch.ones(x.to_local().shape)):
        with pytest.raises(ValueError, match=r"\[aten.add.Tensor\] .* but got a plain tensor of shape .*distribute_tensor"):
            x + other
    with pytest.raises(ValueError, match="a DTensor of shape"):
        x + DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    with pytest.raises(ValueError, match="written to be a RaggedTensor"):
        torch.ones(5, 4).add_(x)


def test_operands_that_lie_otherwise():
    run_threads(2, _operands)


REFUSED = {
    "aten.mm": lambda x: x @ torch.ones(4, 2),
    "aten.t.": lambda x: x.t(),
    "aten.transpose": lambda x: x.transpose(0, 1),
    "aten.select": lambda x: x[0],
    "aten.slice": lambda x: x[:, 1:],
    "aten.view": lambda x: x.view(20),
    "aten.cat": lambda x: torch.cat([x, x]),
    "aten.stack": lambda x: torch.stack([x, x]),
    "aten.var": lambda x: x.var(),
    "aten.sort": lambda x: x.sort(),
    "aten.cumsum": lambda x: x.cumsum(0),
    "aten._softmax": lambda x: x.softmax(0),
    "aten.argmax": lambda x: x.argmax(),
    "aten.new_empty_strided|aten.unsqueeze": lambda x: x.unsqueeze(0),
    "aten.sum": lambda x: x.sum(0),
    "aten.mean": lambda x: x.mean(-1, keepdim=True),
    "aten.linalg_vector_norm": lambda x: x.norm(dim=1),
    "aten.embedding": lambda x: nn.functional.embedding(torch.tensor([1]), x),
    "aten.nonzero": lambda x: x.nonzero(),
    "aten.random_": lambda x: x.random_(),
}


def _refused(rank, world):
    mesh = make_mesh(world)
    x = distribute_tensor(values((5, 4)), mesh, [A])
    for name, op in REFUSED.items():
        with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=rf"\[({name}).*(full_tensor|distribute_tensor)"):
            op(x)
    with pytest.raises(NotImplementedError, match=r"\[aten.t.default\] Expected an op that is defined on ragged pieces .*but got t on a "
                       r"RaggedTensor of shape \(5, 4\) \(rank \d of 2\)\. Gather first: x.full_tensor\(\)"):
        x.t()


def test_other_ops_are_errors_that_name_them():
    run_threads(2, _refused)


# ---- reductions -------------------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum dims": lambda x: x.sum(dim=tuple(range(x.ndim))),
    "sum dtype": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "any": lambda x: (x > 1).any(),
    "all": lambda x: (x > -1).all(),
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3.0),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0),
    "norm 0.5": lambda x: torch.linalg.vector_norm(x, 0.5),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -math.inf),
    "norm -2": lambda x: torch.linalg.vector_norm(x, -2.0),
    "norm dtype": lambda x: torch.linalg.vector_norm(x, 2, dtype=torch.float64),
    "foreach": lambda x: torch._foreach_norm([x, x * 2], 2)[1],
    "foreach inf": lambda x: torch._foreach_norm([x], math.inf)[0],
    "max": lambda x: x.max(),
    "min": lambda x: x.amin(),
}


def _reductions(rank, world):
    mesh = make_mesh(world)
    for seed, shape in enumerate(SHAPES):
        full = values(shape, 3)
        x = distribute_tensor(full, mesh, [layout(shape, world, seed)])
        for name, op in REDUCTIONS.items():
            if full.numel() == 0 and name in ("max", "min", "norm inf", "norm -inf", "foreach inf", "norm -2", "mean"):
                continue
            expected, result = op(full), op(x)
            assert type(result) is DTensor and result.placements == (Replicate(),) and result.dtype == expected.dtype, name
            torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-6, msg=f"{name} {shape}")
        assert x.equal(distribute_tensor(full, mesh, [layout(shape, world, seed + 9)]))
        if full.numel():
            assert not x.equal(x + 1) and not torch.allclose(x, x + 1)
            assert math.isnan(distribute_tensor(torch.full(shape, math.nan), mesh, [layout(shape, world, seed)]).max().full_tensor())
        assert torch.allclose(x, x + 1e-9)
    x = distribute_tensor(values((), 1), mesh, [layout((), world)])
    assert x.item() == values((), 1).item()


@pytest.mark.parametrize("world", [1, 2, 7])
def test_reductions_equal_those_of_the_whole(world):
    run_threads(world, _reductions)


def _norm_under_foreign_shard(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = values((7, 5), 1)
    for foreign in (Shard(0), Shard(1), Replicate()):
        box, _ = foreign_box(full.shape, mesh, [Replicate(), foreign])
        x = distribute_tensor(full, mesh, [RaggedShard(2, (1, box[0] * box[1] - 1), box), foreign])
        torch.testing.assert_close(x.norm().full_tensor(), full.norm())
        torch.testing.assert_close(x.sum().full_tensor(), full.sum())
        torch.testing.assert_close(x.mean().full_tensor(), full.mean())


def test_norms_sum_over_foreign_shards_too():
    run_threads(4, _norm_under_foreign_shard)


# ---- optimizers, clipping, scaling ------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adam amsgrad fused": (torch.optim.Adam, {"fused": True, "amsgrad": True, "weight_decay": 0.1}),
    "adam tensor lr": (torch.optim.Adam, {"fused": True, "lr": torch.tensor(0.01)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"foreach": True}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True, "momentum": 0.1}),
    "nadam": (torch.optim.NAdam, {"foreach": True}),
    "lion-like": (torch.optim.Adamax, {"foreach": False}),
}


def _optimizers(rank, world):
    mesh = make_mesh(world)
    shapes = [(5, 4), (7,), (), (0, 3), (3, 2, 2)]
    for name, (cls, options) in OPTIMIZERS.items():
        plain = [nn.Parameter(values(shape, i)) for i, shape in enumerate(shapes)]
        ragged = [nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, i)])) for i, p in enumerate(plain)]
        if name not in ("sgd fused", "adagrad fused"):  # which torch doesn't have for its DTensors
            # A list may be mixed: the last is a stock DTensor.
            ragged[-1] = nn.Parameter(stock.distribute_tensor(plain[-1].detach(), mesh, [Shard(0)]))
        kinds = [type(p) for p in ragged]
        expected, actual = cls(plain, **options), cls(ragged, **options)
        for step in range(3):
            for i, (p, r) in enumerate(zip(plain, ragged)):
                p.grad = values(p.shape, 10 * step + i)
                r.grad = distribute_tensor(p.grad, mesh, r.placements)
            expected.step()
            actual.step()
            actual.zero_grad()
        for p, r, kind in zip(plain, ragged, kinds):
            # Fused SGD and Adagrad contract multiply-adds in full vectors and not in the tail, which lies elsewhere in a piece.
            rtol, atol = (1e-6, 1e-7) if name in ("sgd fused", "adagrad fused") else (0.0, 0.0)
            assert type(r) is kind
            torch.testing.assert_close(r.detach().full_tensor(), p.detach(), rtol=rtol, atol=atol, msg=f"{name} {p.shape}")
            for key, state in actual.state[r].items():
                if isinstance(state, torch.Tensor) and state.shape == p.shape and p.ndim:
                    assert isinstance(state, kind) and state.placements == r.placements, (name, key)


@pytest.mark.parametrize("world", [1, 3])
def test_optimizers_equal_those_on_the_whole(world):
    run_threads(world, _optimizers)


def _clip(rank, world):
    mesh = make_mesh(world)
    shapes = [(5, 4), (7,), (0, 3), (3, 2, 2)]
    for norm_type in (2.0, 1.0, math.inf):
        for foreach in (None, False, True):
            plain = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
            ragged = [nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, i)])) for i, p in enumerate(plain)]
            ragged[-1] = nn.Parameter(stock.distribute_tensor(plain[-1].detach(), mesh, [Shard(0)]))
            for i, (p, r) in enumerate(zip(plain, ragged)):
                p.grad = values(p.shape, i) * 10
                r.grad = distribute_tensor(p.grad, mesh, r.placements)
            if norm_type == math.inf:  # torch itself refuses the largest of nothing
                plain = [p for p in plain if p.numel()]
            expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type, foreach=foreach)
            actual = torch.nn.utils.clip_grad_norm_(ragged, 1.0, norm_type, foreach=foreach)
            torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-6, atol=0)
            for p in plain:
                r = next(r for r in ragged if r.shape == p.shape)
                torch.testing.assert_close(r.grad.full_tensor(), p.grad, rtol=1e-6, atol=0)
    torch.nn.utils.clip_grad_value_(ragged[:2], 0.01)
    assert ragged[0].grad.abs().max().full_tensor() <= 0.01


def test_clipping_mixes_with_other_dtensors():
    run_threads(3, _clip)


def _scaler(rank, world):
    mesh = make_mesh(world)
    for poison in (False, True):
        full = torch.full((5, 4), 8.0)
        if poison:
            full[4, 3] = math.inf  # on the last rank only
        grads = [distribute_tensor(full, mesh, [A])]
        found, inverse = torch.zeros(()), torch.tensor(0.25)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        assert found.item() == float(poison), "every rank learns of it"
        assert torch.equal(grads[0].full_tensor(), full * 0.25)


def test_gradient_scaler_tells_every_rank():
    run_threads(2, _scaler)


def _lists(rank, world):
    mesh = make_mesh(world)
    fulls = [values((5, 4), 1), values((7,), 2), values((3, 2, 2), 3)]
    xs = [distribute_tensor(f, mesh, [layout(f.shape, world, i)]) for i, f in enumerate(fulls)]
    ys = [distribute_tensor(f + 1, mesh, [layout(f.shape, world, i + 5)]) for i, f in enumerate(fulls)]
    for result, expected in zip(torch._foreach_add(xs, ys, alpha=2), fulls):
        assert torch.equal(result.full_tensor(), expected + 2 * (expected + 1))
    for result, expected in zip(torch._foreach_mul(xs, [1.0, 2.0, 3.0]), [f * (i + 1) for i, f in enumerate(fulls)]):
        assert torch.equal(result.full_tensor(), expected)
    torch._foreach_copy_(xs, fulls)
    assert all(torch.equal(x.full_tensor(), full) for x, full in zip(xs, fulls))
    torch._foreach_copy_(xs, ys)
    torch._foreach_sqrt_([x.abs_() for x in xs])
    for x, f in zip(xs, fulls):
        assert torch.equal(x.full_tensor(), (f + 1).abs().sqrt())
    torch._foreach_zero_(xs)
    assert all(x.abs().sum().full_tensor() == 0 for x in xs)
    with pytest.raises(ValueError, match="everything that is written to lie as"):
        state = [torch.zeros_like(y) for y in ys]
        steps = [torch.zeros(()) for _ in xs]
        torch._fused_adam_(xs, ys, state, state, [], steps, lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
                           amsgrad=False, maximize=False)  # fmt: skip


def test_lists_of_tensors():
    run_threads(2, _lists)


# ---- copies -----------------------------------------------------------------------------------------------------------------


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
        setattr(model, name, nn.Parameter(distribute_tensor(torch.zeros_like(p), mesh, [layout(p.shape, world, len(name))])))
    model.load_state_dict({key: value.clone() for key, value in plain.state_dict().items()})
    for key, value in model.state_dict().items():
        assert type(value) is RaggedTensor and torch.equal(value.full_tensor(), plain.state_dict()[key])
    # What torch's helpers do with a full state dict.
    full = {key: value + 1 for key, value in plain.state_dict().items()}
    model.load_state_dict({k: stock.distribute_tensor(v, mesh, model.state_dict()[k].placements) for k, v in full.items()})
    assert all(torch.equal(value.full_tensor(), full[key]) for key, value in model.state_dict().items())
    before = model.weight
    model.to(torch.bfloat16)
    assert model.weight is before and model.weight.dtype == torch.bfloat16 and model.weight.to_local().dtype == torch.bfloat16
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
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, len(name))])))
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
    return True


def test_torch_state_dict_helpers():
    assert run_ranks(2, _helpers) == [True, True]


# ---- pickling, deepcopy, data -----------------------------------------------------------------------------------------------


def _round_trips(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    p = nn.Parameter(distribute_tensor(full, mesh, [A]))
    p.grad = distribute_tensor(full * 2, mesh, [A])
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
        assert again.placements == (A,) and again.requires_grad == value.requires_grad and torch.equal(again.detach(), p.detach())
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
        ragged = nn.Parameter(distribute_tensor(full, mesh, [A]))
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
    plain, ragged = nn.Parameter(full.clone()), nn.Parameter(distribute_tensor(full, mesh, [A]))
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
    with warnings.catch_warnings():
        run_threads(2, _backward)
