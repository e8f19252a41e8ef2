"""Tensor subclasses with fsdp_pre_all_gather and fsdp_post_all_gather: what travels is theirs to decide."""

import contextlib
import math

import pytest
import torch
import torch.utils._pytree as pytree
from models import stack
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from harness import assert_close, backward_of_all_ranks, full, mesh, only_ours, randn, seeded, shard, subject, threads


class Doubled(torch.Tensor):
    """Two tensors of which the sum is meant: a weight that travels in two parts."""

    @staticmethod
    def __new__(cls, hi, lo):
        return torch.Tensor._make_wrapper_subclass(
            cls, hi.shape, strides=hi.stride(), storage_offset=hi.storage_offset(), dtype=hi.dtype, device=hi.device
        )

    def __init__(self, hi, lo):
        self.hi, self.lo = hi, lo

    def __repr__(self):
        return f"Doubled({self.hi}, {self.lo})"

    def __tensor_flatten__(self):
        return ["hi", "lo"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Doubled(inner["hi"], inner["lo"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outs = []
        for part in ("hi", "lo"):
            pick = lambda t: getattr(t, part)
            outs.append(func(*pytree.tree_map_only(cls, pick, args), **pytree.tree_map_only(cls, pick, kwargs)))
        flat, spec = pytree.tree_flatten(outs[0])
        other = pytree.tree_leaves(outs[1])
        joined = [
            cls(a, b) if isinstance(a, torch.Tensor) and not isinstance(a, cls) else a
            for a, b in zip(flat, other, strict=True)
        ]
        inplace = func._schema.name.endswith("_") and isinstance(args[0], cls)
        return args[0] if inplace else pytree.tree_unflatten(joined, spec)


def pre_short(self, mesh):
    return (self.hi, self.lo), None


def pre_long(self, mesh, outer_size, outer_stride, module, mp_policy):
    assert isinstance(module, nn.Module) and len(outer_size) == len(outer_stride) == 2
    return (self.hi, self.lo), None


def post(self, gathered, metadata, param_dtype, *, out=None):
    hi, lo = gathered
    assert metadata is None
    if out is not None:
        if hi.dtype != param_dtype:
            out.hi.copy_(hi)
            out.lo.copy_(lo)
        else:
            assert out.hi.untyped_storage().data_ptr() == hi.untyped_storage().data_ptr(), "refilled in place"
        return None
    return Doubled(hi, lo).to(param_dtype), (hi, lo)


@contextlib.contextmanager
def extension(pre):
    Doubled.fsdp_pre_all_gather, Doubled.fsdp_post_all_gather = pre, post
    try:
        yield
    finally:
        del Doubled.fsdp_pre_all_gather, Doubled.fsdp_post_all_gather


def doubled_stack():
    model = stack(3, bias=False)
    for m in model:
        for lin in (m.up, m.down):
            lin.weight = nn.Parameter(Doubled(lin.weight.detach(), lin.weight.detach().clone()))
    return model


def hi(t):
    """The first part of a parameter or gradient, whole."""
    t = full(t)
    return t.hi if isinstance(t, Doubled) else t


@pytest.mark.parametrize("pre", [pre_short, pre_long])
@pytest.mark.parametrize("reshard", [True, False])
def test_training_equals_the_plain_model(reshard, pre):
    def body():
        model, plain = seeded(doubled_stack), seeded(lambda: stack(3, bias=False))
        shard(model, model, reshard_after_forward=reshard)
        mine, other = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain))
        for step in range(3):
            backward_of_all_ranks(plain, lambda m, r: m(randn(2, 8, step=step, of_rank=r)).square().sum())
            loss = model(randn(2, 8, step=step)).square().sum()
            loss.backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_close(hi(p.grad), q.grad, what=name)
            for o in (mine, other):
                o.step()
                o.zero_grad()

    with extension(pre):
        threads(2, body)


@pytest.mark.parametrize("reshard", [True, False])
def test_meta_device_and_low_precision(reshard):
    def body():
        with torch.device("meta"):
            model = doubled_stack()
        shard(model, model, reshard_after_forward=reshard, mp_policy=subject().MixedPrecisionPolicy(torch.bfloat16))
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.trunc_normal_(p, std=0.02)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        for step in range(3):
            model(randn(2, 8, step=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with extension(pre_long):
        threads(8, body)


def to_bf16(self, mesh, outer_size, outer_stride, module, mp_policy):
    self.travelled = True
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def from_bf16(self, gathered, metadata, param_dtype, *, out=None):
    (tensor,) = gathered
    assert tensor.dtype == torch.bfloat16
    if out is not None:
        with _unsafe_preserve_version_counter(out):
            out.copy_(tensor[: out.size(0)])  # what FSDP2 hands over still has the padding
        return None
    wide = tensor.to(param_dtype)
    return wide, (tensor, wide)


def test_extension_on_an_instance():
    """No subclass at all: methods put on the local tensor after materialisation."""

    def body():
        model = shard(m := seeded(lambda: stack(3, bias=False)), m)
        reference = seeded(lambda: stack(3, bias=False))
        for p in model.parameters():
            local = p._local_tensor
            local.fsdp_pre_all_gather = to_bf16.__get__(local)
            local.fsdp_post_all_gather = from_bf16.__get__(local)
        with torch.no_grad():
            for p in reference.parameters():
                p.copy_(p.bfloat16())
        for step in range(2):
            torch.testing.assert_close(model(randn(2, 8, step=step)), reference(randn(2, 8, step=step)))
        assert all(getattr(p._local_tensor, "travelled", False) for p in model.parameters() if p.to_local().numel())
        model(randn(2, 8)).sum().backward()

    threads(2, body)


class Rounded(torch.Tensor):
    """fp32 that travels as bf16 and pads its own short shard, as subclasses written for FSDP2 have to."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data):
        self._data = data

    def __repr__(self):
        return f"Rounded({self._data})"

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Rounded(inner["_data"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Rounded.meshes.append(mesh)
        rows = math.ceil(outer_size[0] / mesh.size())
        if self._data.ndim == len(outer_size) and self._data.size(0) < rows:
            padded = torch.zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
            padded[: self._data.size(0)].copy_(self._data)
            return (padded,), None
        return (self._data.to(torch.bfloat16),), None

    fsdp_post_all_gather = from_bf16
    meshes = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda t: t._data
        out = func(*pytree.tree_map_only(cls, unwrap, args), **pytree.tree_map_only(cls, unwrap, kwargs or {}))
        if func._schema.name.endswith("_") and isinstance(args[0], cls):
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out)


def rounded_stack(dim=3):
    model = stack(1, dim, factor=3)[0]
    for lin in (model.up, model.down):
        lin.weight = nn.Parameter(Rounded(lin.weight.detach()))
    return model


@pytest.mark.parametrize("ranks", [2, 8])
def test_uneven_shards_of_a_subclass(ranks):
    """Three rows on two or eight ranks: short and empty pieces."""

    def body():
        model, reference = seeded(rounded_stack), seeded(lambda: stack(1, 3, factor=3)[0])
        shard(model)
        with torch.no_grad():
            for lin in (reference.up, reference.down):
                lin.weight.copy_(lin.weight.bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        out = model(randn(2, 3))
        torch.testing.assert_close(out, reference(randn(2, 3)))
        out.sum().backward()
        optimizer.step()
        assert torch.isfinite(model(randn(2, 3))).all()

    threads(ranks, body)


def test_hook_gets_the_shard_dimension_of_a_hybrid_mesh():
    def body():
        grid = mesh(2, 4, names=("replicate", "shard"))
        model = seeded(lambda: rounded_stack(8))
        shard(model, mesh=grid)
        model(randn(2, 8))

    Rounded.meshes.clear()
    threads(8, body)
    assert Rounded.meshes and all((m.ndim, m.size()) == (1, 4) for m in Rounded.meshes)


class Unpadded(Rounded):
    """Sends just the bytes it has: no rank pads."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self._data.to(torch.bfloat16),), None


@only_ours("FSDP2 needs equal byte counts of all ranks, so that each subclass pads; ours exchanges the counts")
def test_unequal_byte_counts():
    def body():
        def build():
            model = stack(1, 3, factor=3)[0]
            for lin in (model.up, model.down):
                lin.weight = nn.Parameter(Unpadded(lin.weight.detach()))
            return model

        model, reference = seeded(build), seeded(lambda: stack(1, 3, factor=3)[0])
        shard(model)
        with torch.no_grad():
            for lin in (reference.up, reference.down):
                lin.weight.copy_(lin.weight.bfloat16())
        torch.testing.assert_close(model(randn(2, 3)), reference(randn(2, 3)))

    threads(4, body)


def test_extension_with_a_smaller_post_forward_mesh_is_refused():
    """reshard_after_forward=int keeps shards of another size, which a subclass can't be asked for (pytorch #154836)."""

    def body():
        model = nn.Sequential(seeded(lambda: rounded_stack(8)), nn.Linear(8, 8))
        with pytest.raises(NotImplementedError):
            shard(model, [model[0]], reshard_after_forward=2)
            model(randn(2, 8)).sum().backward()

    threads(4, body)
