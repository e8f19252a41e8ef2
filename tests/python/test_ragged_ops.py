"""The whitelist of ops on RaggedTensors, each against the same op on the whole tensor; and what isn't on it."""

import math

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import ROWS, SHAPES, expected_piece, layout, make_mesh, values
from support.ranks import run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, foreign_box
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor


# ---- elementwise ------------------------------------------------------------

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
            x, y = (
                distribute_tensor(full_x, mesh, [placement]),
                distribute_tensor(full_y, mesh, [(placement, other)[seed % 2]]),
            )
            expected, result = op(full_x, full_y), op(x, y)
            assert type(result) is RaggedTensor and result.placements == (placement,), name
            assert result.dtype == expected.dtype and result.shape == expected.shape, name
            assert result.to_local().dtype == expected.dtype and result._spec.tensor_meta.dtype == expected.dtype
            assert torch.equal(result.to_local(), expected_piece(expected, mesh, [placement])), (name, shape)
        for name, op in INPLACE.items():
            x, y = (
                distribute_tensor(full_x, mesh, [placement]),
                distribute_tensor(full_y, mesh, [(placement, other)[seed % 2]]),
            )
            pointer, expected = x.to_local().data_ptr(), op(full_x.clone(), full_y)
            assert op(x, y) is x and x.to_local().data_ptr() == pointer, name
            assert torch.equal(x.to_local(), expected_piece(expected, mesh, [placement])), (name, shape)


@pytest.mark.parametrize("world", [1, 3])
def test_elementwise_ops_equal_those_on_the_whole(world):
    run_threads(world, _elementwise)


def _operands(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4))
    x = distribute_tensor(full, mesh, [ROWS])
    shard = stock.distribute_tensor(full, mesh, [Shard(1)])
    assert torch.equal((x + shard).full_tensor(), full + full)
    coefficient = DTensor.from_local(torch.tensor(0.5), mesh, [Replicate()])
    assert torch.equal((x * coefficient).full_tensor(), full * 0.5)
    pending = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])
    assert torch.equal((x * pending).full_tensor(), full * (0.5 * world))
    assert torch.equal((x * torch.tensor([2.0])).full_tensor(), full * 2)
    for other in (full, torch.ones(4), torch.ones(x.to_local().shape)):
        with pytest.raises(
            ValueError, match=r"\[aten.add.Tensor\] .* but got a plain tensor of shape .*distribute_tensor"
        ):
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
    "aten.embedding": lambda x: nn.functional.embedding(torch.tensor([1]), x),
    "aten.nonzero": lambda x: x.nonzero(),
    "aten.random_": lambda x: x.random_(),
}


def _refused(rank, world):
    mesh = make_mesh(world)
    x = distribute_tensor(values((5, 4)), mesh, [ROWS])
    for name, op in REFUSED.items():
        with pytest.raises(
            (NotImplementedError, ValueError, RuntimeError), match=rf"\[({name}).*(full_tensor|distribute_tensor)"
        ):
            op(x)
    with pytest.raises(
        NotImplementedError,
        match=r"\[aten.t.default\] Expected an op that is defined on ragged pieces .*but got t on a "
        r"RaggedTensor of shape \(5, 4\) \(rank \d of 2\)\. Gather first: x.full_tensor\(\)",
    ):
        x.t()


def test_other_ops_are_errors_that_name_them():
    run_threads(2, _refused)


# ---- reductions -------------------------------------------------------------

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
            assert type(result) is DTensor and result.placements == (Replicate(),) and result.dtype == expected.dtype, (
                name
            )
            torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-6, msg=f"{name} {shape}")
        assert x.equal(distribute_tensor(full, mesh, [layout(shape, world, seed + 9)]))
        if full.numel():
            assert not x.equal(x + 1) and not torch.allclose(x, x + 1)
            assert math.isnan(
                distribute_tensor(torch.full(shape, math.nan), mesh, [layout(shape, world, seed)]).max().full_tensor()
            )
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


def _row_norms(rank, world):
    mesh = make_mesh(world)
    full = values((5, 4), 1)
    x = distribute_tensor(full, mesh, [layout((5, 4), world)])
    for op in (lambda t: t.norm(dim=1), lambda t: torch.linalg.vector_norm(t, 3, dim=0, keepdim=True)):
        torch.testing.assert_close(op(x).full_tensor(), op(full))
    torch.testing.assert_close(nn.functional.normalize(x).full_tensor(), nn.functional.normalize(full))


def test_norms_of_rows_gather():
    run_threads(3, _row_norms)


def test_norms_sum_over_foreign_shards_too():
    run_threads(4, _norm_under_foreign_shard)


# ---- optimizers, clipping, scaling ------------------------------------------

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
        ragged = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, i)])) for i, p in enumerate(plain)
        ]
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
            # Fused SGD and Adagrad contract multiply-adds in full vectors and not in the tail, which lies elsewhere
            # in a piece.
            rtol, atol = (1e-6, 1e-7) if name in ("sgd fused", "adagrad fused") else (0.0, 0.0)
            assert type(r) is kind
            torch.testing.assert_close(
                r.detach().full_tensor(), p.detach(), rtol=rtol, atol=atol, msg=f"{name} {p.shape}"
            )
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
            ragged = [
                nn.Parameter(distribute_tensor(p.detach(), mesh, [layout(p.shape, world, i)]))
                for i, p in enumerate(plain)
            ]
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
        grads = [distribute_tensor(full, mesh, [ROWS])]
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
