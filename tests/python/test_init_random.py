"""Random fills of ragged tensors: the values are a function of seed, call order and global element index, for any
world and layout."""

import math
import random

import pytest
import torch
from support.layouts import random_ragged
from support.ranks import run_ranks, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ragged_fsdp.placement import RaggedShard, foreign_box
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor

SHAPES = [(5, 4), (7,), (), (0, 3), (3, 2, 2)]

FILLS = {
    "uniform": lambda t, g: t.uniform_(-1, 2, generator=g),
    "normal": lambda t, g: t.normal_(0.5, 2.0, generator=g),
    "exponential": lambda t, g: t.exponential_(2.0, generator=g),
    "bernoulli": lambda t, g: t.bernoulli_(0.3, generator=g),
    "init.normal": lambda t, g: nn.init.normal_(t, 0.0, 0.02, generator=g),
    "init.uniform": lambda t, g: nn.init.uniform_(t, -0.1, 0.1, generator=g),
    "init.trunc_normal": lambda t, g: nn.init.trunc_normal_(t, 0.0, 1.0, -2.0, 2.0, generator=g),
    "init.trunc_normal far": lambda t, g: nn.init.trunc_normal_(t, 0.0, 1.0, 1.5, 3.0, generator=g),
    "init.kaiming": lambda t, g: nn.init.kaiming_uniform_(t, a=5**0.5, generator=g) if t.ndim > 1 and t.numel() else t,
    "init.xavier": lambda t, g: nn.init.xavier_normal_(t, generator=g) if t.ndim > 1 and t.numel() else t,
}


def _filled(mesh, placements_of, dtype):
    """{(fill, shape): whole tensor} with one generator for all, as a model's initialisation has."""
    generator = torch.Generator().manual_seed(1234)
    wholes = {}
    for name, fill in FILLS.items():
        for i, shape in enumerate(SHAPES):
            tensor = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements_of(shape, i))
            with torch.no_grad():
                fill(tensor, generator)
            assert type(tensor) is RaggedTensor
            wholes[name, shape] = tensor.full_tensor()
    return wholes


def _one_dim(rank, world, dtype):
    mesh = init_device_mesh("cpu", (world,))
    rng = random.Random(world)
    return _filled(mesh, lambda shape, i: [random_ragged(shape, world, rng)], dtype)


def _two_dims(rank, world, foreign, at):
    mesh = init_device_mesh("cpu", (2, world // 2))

    def placements_of(shape, i):
        shard = foreign if isinstance(foreign, Replicate) or len(shape) > foreign.dim else Replicate()
        placements = [shard, Replicate()] if at == 1 else [Replicate(), shard]
        box, _ = foreign_box(shape, mesh, placements)
        factor = mesh.size(1) if at == 0 and shard == Shard(0) else 1
        placements[at] = random_ragged(box, mesh.size(at), random.Random(i + sum(box)), factor)
        return placements

    return _filled(mesh, placements_of, torch.float32)


@pytest.fixture(scope="module")
def reference():
    return run_threads(1, _one_dim, torch.float32)[0]


def _same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


@pytest.mark.parametrize("world", [2, 3, 7])
def test_values_dont_depend_on_world_or_layout(reference, world):
    assert all(_same(wholes, reference) for wholes in run_threads(world, _one_dim, torch.float32))


@pytest.mark.parametrize("foreign, at", [(Replicate(), 1), (Shard(0), 0), (Shard(1), 0), (Shard(0), 1)])
def test_nor_on_replicas_and_foreign_shards(reference, foreign, at):
    assert all(_same(wholes, reference) for wholes in run_threads(4, _two_dims, foreign, at))


def test_low_precision_stays_in_range():
    for wholes in run_threads(2, _one_dim, torch.bfloat16):
        for shape in SHAPES:
            whole = wholes["uniform", shape]
            assert whole.dtype == torch.bfloat16 and bool(((whole >= -1) & (whole <= 2)).all())


def _distribution(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    n = 300_007  # more than one internal chunk, prime
    tensor = distribute_tensor(torch.zeros(n), mesh, [RaggedShard(1, (100_000, 200_007), (n,))])
    generator = torch.Generator().manual_seed(5)
    uniform = tensor.uniform_(generator=generator).full_tensor().double()
    assert (
        0 <= uniform.min()
        and uniform.max() < 1
        and abs(uniform.mean() - 0.5) < 0.003
        and abs(uniform.var() - 1 / 12) < 0.001
    )
    counts = torch.histc(uniform, 100, 0, 1)
    assert (counts - n / 100).abs().max() < 6 * math.sqrt(n / 100)
    normal = tensor.normal_(1.0, 2.0, generator=generator).full_tensor().double()
    standard = (normal - 1) / 2
    assert abs(standard.mean()) < 0.01 and abs(standard.std() - 1) < 0.01 and abs((standard**4).mean() - 3) < 0.1
    neighbours = (standard[1:] * standard[:-1]).mean()
    assert abs(neighbours) < 0.01, "consecutive elements are independent"
    again = tensor.normal_(1.0, 2.0, generator=generator).full_tensor().double()
    assert abs(((again - 1) * (normal - 1)).mean()) < 0.05, "so are consecutive fills"
    assert abs(tensor.exponential_(4.0, generator=generator).mean().full_tensor() - 0.25) < 0.01
    assert abs(tensor.bernoulli_(0.3, generator=generator).mean().full_tensor() - 0.3) < 0.01
    assert not torch.equal(torch.rand_like(tensor).full_tensor(), torch.rand_like(tensor).full_tensor())


def test_distributions():
    run_threads(2, _distribution)


def _model(rank, world, seed):
    """The usual path: build on meta, lay out, to_empty, reset_parameters. Ranks are seeded differently; rank 0's seed
    counts."""
    torch.manual_seed(seed if rank == 0 else seed + rank)
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Embedding(11, 3))
    rng = random.Random(world)
    for module in model:
        for name, p in list(module.named_parameters()):
            setattr(
                module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [random_ragged(p.shape, world, rng)]))
            )
            assert getattr(module, name).is_meta
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    assert all(type(p) is RaggedTensor and isinstance(p, nn.Parameter) for p in model.parameters())
    return [p.detach().full_tensor() for p in model.parameters()]


def test_meta_models_initialise_alike_on_gloo_processes():
    one, two = run_ranks(1, _model, 3), run_ranks(2, _model, 3)
    for per_rank in two:
        for a, b in zip(one[0], per_rank):
            assert torch.equal(a, b)
    assert torch.equal(one[0][2], torch.ones(5)) and one[0][0].abs().max() <= 1 / math.sqrt(7)
    assert one[0][4].std() > 0.5
