"""Ragged tensors between placements, against slicing the full tensor: 1-D, 2-D and 3-D meshes, autograd, real Gloo
processes."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from support.layouts import SHAPES, expected_piece, numbered, random_ragged
from support.ranks import run_ranks, run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, foreign_box, is_ragged
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor, redistribute


def _check(tensor, full, placements):
    """Type, local piece and whole of a redistributed tensor."""
    assert tuple(tensor.placements) == tuple(placements) and tensor.shape == full.shape and tensor.dtype == full.dtype
    if any(is_ragged(p) for p in placements):
        assert type(tensor) is RaggedTensor
        assert torch.equal(tensor.to_local(), expected_piece(full, tensor.device_mesh, placements)), placements
    else:
        assert type(tensor) is DTensor
        expected = stock_distribute(full, tensor.device_mesh, placements, src_data_rank=None)
        assert torch.equal(tensor.to_local(), expected.to_local()), placements
    assert torch.equal(tensor.full_tensor(), full), placements


def _pairs_1d(rank, world, dtypes):
    rng = random.Random(world)
    mesh = init_device_mesh("cpu", (world,))
    for shape, dtype in itertools.product(SHAPES, dtypes):
        full = numbered(shape, dtype)
        stock = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
        ragged = [random_ragged(shape, world, rng) for _ in range(3)]
        owner = RaggedShard(0, [int(r == world - 1) for r in range(world)], shape)
        tensor = distribute_tensor(full, mesh, [ragged[0]])
        _check(tensor, full, [ragged[0]])
        for goal in [*ragged, owner, *stock]:
            moved = tensor.redistribute(placements=[goal])
            _check(moved, full, [goal])
            _check(redistribute(moved, [ragged[1]]), full, [ragged[1]])
        # A pending sum whose terms add up to the whole, both ways.
        pending = tensor.redistribute(placements=[Partial()])
        assert torch.equal(pending.full_tensor(), full)
        _check(redistribute(pending, [ragged[2]]), full, [ragged[2]])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_pair_on_one_dim(world):
    run_threads(world, _pairs_1d, [torch.float32])


@pytest.mark.parametrize("world", [2, 3])
def test_pairs_on_gloo_processes(world):
    run_ranks(world, _pairs_1d, [torch.float32, torch.bfloat16, torch.int64])


def _reduce_scatter(rank, world, op):
    rng = random.Random(3)
    mesh = init_device_mesh("cpu", (world,))
    for shape, dtype in itertools.product([(5, 4), (7,), (0, 3), ()], [torch.float32, torch.bfloat16]):
        terms = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        stacked = torch.stack([term.float() for term in terms])
        placement = random_ragged(shape, world, rng)
        pending = DTensor.from_local(terms[rank], mesh, [Partial(op)])
        piece = redistribute(pending, [placement]).to_local()
        # In rank order and in fp32, so equal bit for bit.
        total = stacked[0].clone()
        for term in stacked[1:]:
            total = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(total, term)
        if op == "avg":
            total = total / world
        assert torch.equal(piece, expected_piece(total.to(dtype), mesh, [placement]))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_to_ragged_reduces_in_rank_order(op):
    run_threads(3, _reduce_scatter, op)


class _Collectives(TorchDispatchMode):
    """Names of the c10d ops that ran under it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def _counts(rank, world):
    """What travels: one all-to-all for ragged to ragged and for a reduction, nothing from Replicate and to Partial."""
    mesh = init_device_mesh("cpu", (world,))
    full = numbered((6, 4))
    a, b = RaggedShard(1, (1, 2), (6, 4)), RaggedShard(2, (5, 7), (6, 4))
    tensor = distribute_tensor(full, mesh, [a])

    def count(action):
        with _Collectives() as mode:
            action()
        return mode.seen

    assert count(lambda: tensor.redistribute(placements=[b])) == ["alltoall_base_"]
    assert count(lambda: tensor.redistribute(placements=[Shard(1)])) == ["alltoall_base_"]
    assert count(lambda: tensor.redistribute(placements=[a])) == []
    assert count(lambda: tensor.redistribute(placements=[Partial()])) == []
    replicated = tensor.redistribute(placements=[Replicate()])
    assert count(lambda: redistribute(replicated, [b])) == []
    pending = DTensor.from_local(full, mesh, [Partial()])
    assert count(lambda: redistribute(pending, [b])) == ["alltoall_base_"]


def test_what_travels():
    run_ranks(2, _counts)  # calls on a threaded group don't pass the dispatcher, where they could be counted


def _memory(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    full = numbered((6, 4))
    placement = RaggedShard(1, (1, 2), (6, 4))
    replicated = DTensor.from_local(full, mesh, [Replicate()])
    for tensor in (
        redistribute(replicated, [placement]),
        distribute_tensor(full, mesh, [placement], src_data_rank=None),
    ):
        tensor.detach().zero_()
        assert full.sum() == 300, "a shard must not be a view of the whole"
        assert tensor.to_local().untyped_storage().nbytes() == tensor.to_local().numel() * 4


def test_shards_are_no_views_of_the_whole():
    run_threads(2, _memory)


MESHES = [
    ((2, 2), ("rep", "dp"), (Replicate(), None)),
    ((2, 2), ("dp", "tp"), (None, Shard(0))),
    ((2, 2), ("dp", "tp"), (None, Shard(1))),
    ((2, 2), ("ep", "dp"), (Shard(0), None)),
    ((3, 2), ("dp", "tp"), (None, Shard(0))),
    ((2, 2, 2), ("rep", "dp", "tp"), (Replicate(), None, Shard(0))),
    ((2, 2, 2), ("dp", "ep", "tp"), (None, Shard(0), Shard(1))),
]


def _placements_nd(shape, mesh, foreign, at, seed):
    placements = [*foreign[:at], Replicate(), *foreign[at + 1 :]]
    box, _ = foreign_box(shape, mesh, placements)
    factor = 1
    for dim in range(at + 1, mesh.ndim):
        factor *= mesh.size(dim) if foreign[dim] == Shard(0) else 1
    placements[at] = random_ragged(box, mesh.size(at), random.Random(seed + sum(box)), factor)
    return placements


def _pairs_nd(rank, world, sizes, names, foreign):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    at = names.index("dp")
    for seed, shape in enumerate([(8, 6), (7, 5), (5, 4, 3)]):
        full = numbered(shape)
        source = _placements_nd(shape, mesh, foreign, at, seed)
        tensor = distribute_tensor(full if rank == 0 else full - 1, mesh, source)
        _check(tensor, full, source)
        others = [
            _placements_nd(shape, mesh, foreign, at, seed + 50),
            [Replicate()] * mesh.ndim,
            [*foreign[:at], Replicate(), *foreign[at + 1 :]],
            [*foreign[:at], Shard(0), *foreign[at + 1 :]],
            [*foreign[:at], Shard(1), *foreign[at + 1 :]],
            _placements_nd(shape, mesh, [Replicate()] * mesh.ndim, at, seed + 70),
            [Shard(0), *[Replicate()] * (mesh.ndim - 1)],
            # The ragged dim itself moves to another mesh dim.
            _placements_nd(shape, mesh, [Replicate()] * mesh.ndim, (at + 1) % mesh.ndim, seed + 90),
        ]
        for goal in others:
            moved = tensor.redistribute(placements=goal)
            _check(moved, full, goal)
            _check(redistribute(moved, source), full, source)


@pytest.mark.parametrize("sizes, names, foreign", MESHES)
def test_pairs_on_many_dims(sizes, names, foreign):
    world = 1
    for size in sizes:
        world *= size
    run_threads(world, _pairs_nd, sizes, names, foreign)


def _hsdp_partial(rank, world):
    """The partial gradient of HSDP: ragged over shard, pending over replicate."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    full = numbered((5, 4))
    a, b = RaggedShard(1, (2, 3), (5, 4)), RaggedShard(2, (1, 3), (5, 4))
    begin, end = a.interval(mesh.get_local_rank("dp"))
    local = full.view(-1)[begin:end] * (1 + mesh.get_local_rank("rep"))
    tensor = RaggedTensor(local.clone(), mesh, [Partial(), a], (5, 4))
    for goal in ([Replicate(), a], [Replicate(), b], [Replicate(), Replicate()]):
        _check(tensor.redistribute(placements=goal), full * 3, goal)
    assert torch.equal(tensor.full_tensor(), full * 3)
    both = DTensor.from_local(full * (1 + rank), mesh, [Partial(), Partial()])
    _check(redistribute(both, [Replicate(), a]), full * 10, [Replicate(), a])
    with pytest.raises(ValueError, match="Partial"):
        tensor.redistribute(placements=[Partial("max"), a])
    with pytest.raises(ValueError, match="without pending reductions"):
        tensor.norm()
    assert torch.equal((tensor + tensor).full_tensor(), full * 6)
    with pytest.raises(ValueError, match="without pending reductions"):
        tensor.sqrt()


def test_partial_beside_ragged():
    run_threads(4, _hsdp_partial)


def _autograd(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    full = numbered((5, 4))
    placement = RaggedShard(1, (2, 3), (5, 4))
    weight = torch.arange(20.0).view(5, 4)

    def fresh():
        return torch.nn.Parameter(distribute_tensor(full, mesh, [placement]))

    p = fresh()
    (p.full_tensor() * weight).sum().backward()
    assert type(p.grad) is RaggedTensor and torch.equal(p.grad.full_tensor(), weight)
    p = fresh()
    (p.full_tensor(grad_placements=[Partial()]) * weight).sum().backward()
    assert torch.equal(p.grad.full_tensor(), weight * world)
    p = fresh()
    (p.to_local() * 3).sum().backward()
    assert type(p.grad) is RaggedTensor and torch.equal(p.grad.full_tensor(), torch.full((5, 4), 3.0))
    p = fresh()
    moved = p.redistribute(placements=[Shard(0)])
    (moved * stock_distribute(weight, mesh, [Shard(0)])).sum().backward()
    assert p.grad.placements == (placement,) and torch.equal(p.grad.full_tensor(), weight)
    p = fresh()
    (p * p).sum().backward()
    assert torch.equal(p.grad.full_tensor(), 2 * full)


def test_autograd_through_redistribution():
    run_threads(2, _autograd)


def _errors(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    tensor = distribute_tensor(numbered((5, 4)), mesh, [RaggedShard(1, (2, 3), (5, 4))])
    for goal, text in [
        (
            [RaggedShard(1, (1, 1, 3), (5, 4))],
            r"Expected 2 local units, one for each rank of mesh dim 0, but got \(1, 1, 3\)",
        ),
        ([RaggedShard(1, (1, 3), (4, 5))], r"the shape \(5, 4\) that the other placements leave"),
        ([StridedRaggedShard(1, (2, 3), (5, 4), 2)], r"split_factor 1"),
        ([Replicate(), Replicate()], r"one placement for each of the 1 mesh dims"),
        ([Partial("max")], r"a target without a new Partial"),
    ]:
        with pytest.raises(ValueError, match=rf"\[redistribute\] .*{text}"):
            tensor.redistribute(placements=goal)
    with pytest.raises(ValueError, match="placements"):
        tensor.redistribute()
    dist.barrier()  # nobody is left in a collective


def test_bad_targets_fail_on_every_rank():
    run_threads(2, _errors)


def _gloo_2d(rank, world):
    for names, foreign in [(("rep", "dp"), (Replicate(), None)), (("dp", "tp"), (None, Shard(0)))]:
        _pairs_nd(rank, world, (2, 2), names, foreign)


def test_two_dims_on_gloo_processes():
    run_ranks(4, _gloo_2d)
