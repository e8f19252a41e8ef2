"""RaggedShard as a value, and under torch's own distribute_tensor and full_tensor."""

import copy
import io
import pickle
import random

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import SHAPES, expected_piece, numbered, random_ragged
from support.ranks import run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, foreign_box, is_ragged


def test_units_are_normalised_and_equality_is_strict_by_type():
    a, b = RaggedShard(1, (2, 4), (6, 4)), RaggedShard((0,), [1, 2], torch.Size((6, 4)))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a.local_units == (1, 2) and a.dims == (0,) and a.shape == (6, 4)
    strided = StridedRaggedShard(1, (1, 2), (6, 4), 2)
    assert strided != a and a != strided and strided != StridedRaggedShard(1, (1, 2), (6, 4), 3)
    assert a != Partial() and Partial() != a and a != RaggedShard(1, (1, 2), (3, 8))
    assert is_ragged(a) and is_ragged(strided) and not is_ragged(Partial()) and not is_ragged(Shard(0))


def test_intervals_follow_the_formula():
    assert RaggedShard(1, (2, 3), (5, 4)).intervals() == ((0, 8), (8, 20))
    assert RaggedShard(2, (1, 0, 4), (5, 4)).intervals() == ((0, 4), (4, 4), (4, 20))
    assert RaggedShard(0, (0, 1, 0), (5, 4)).interval(1) == (0, 20)
    assert RaggedShard(1, (0, 0), (0, 3)).intervals() == ((0, 0), (0, 0))
    assert RaggedShard.from_intervals((5, 4), [(0, 8), (8, 20)]) == RaggedShard(1, (2, 3), (5, 4))


def test_round_trips():
    for placement in (RaggedShard(1, (1, 2), (6, 4)), StridedRaggedShard(2, (1, 2), (6, 4), 2)):
        assert pickle.loads(pickle.dumps(placement)) == placement
        assert copy.deepcopy(placement) is placement and copy.copy(placement) is placement
        file = io.BytesIO()
        torch.save(placement, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == placement
        assert eval(repr(placement)) == placement


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: RaggedShard((1,), (1, 2), (6, 4)),
            r"\[RaggedShard\] Expected dims to be a prefix .* but got \(1,\)\. ",
        ),
        (lambda: RaggedShard(1, (1, 4), (6, 4)), r"whose sum divides the 6 cells .* their sum is 5"),
        (lambda: RaggedShard(3, (1, 1), (6, 4)), r"dims"),
        (lambda: RaggedShard(0, (1, 1), (3,)), r"exactly one non-zero unit"),
        (lambda: RaggedShard(1, (-1, 2), (3,)), r"units >= 0, but got -1"),
        (lambda: RaggedShard(1, (), (3,)), r"."),
        (lambda: StridedRaggedShard(1, (1, 2), (3,), 0), r"split_factor >= 1, but got 0"),
    ],
)
def test_nonsense_is_a_value_error(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_placements_are_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        RaggedShard(1, (1, 2), (6, 4)).dims = (0, 1)


def _stock_1d(rank, world):
    rng = random.Random(7)
    mesh = init_device_mesh("cpu", (world,))
    for shape in SHAPES:
        full = numbered(shape)
        placement = random_ragged(shape, world, rng)
        source = full if rank == 0 else torch.full_like(full, -1)  # rank 0's values count
        tensor = stock.distribute_tensor(source, mesh, [placement])
        assert torch.equal(tensor.to_local(), expected_piece(full, mesh, [placement])), (shape, placement)
        assert tensor.to_local().ndim == 1 and tensor.shape == full.shape
        whole = tensor.full_tensor()
        # On one rank torch asks no placement to gather, and so leaves the piece flat.
        assert torch.equal(whole.view(full.shape) if world == 1 else whole, full)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_torch_distributes_and_gathers_ragged(world):
    run_threads(world, _stock_1d)


def _stock_nd(rank, world, sizes, names, foreign, source_rank):
    rng = random.Random(11)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    at = names.index("dp")
    for shape in [(8, 6), (7, 5), (5, 4, 3), (4, 9)]:
        full = numbered(shape)
        placements = [*foreign[:at], Replicate(), *foreign[at + 1 :]]
        box, _ = foreign_box(shape, mesh, placements)
        factor = 1
        for dim in range(at + 1, mesh.ndim):
            factor *= mesh.size(dim) if foreign[dim] == Shard(0) else 1
        # Ranks with different foreign pieces may have different units: seed by what is left here.
        placements[at] = random_ragged(box, mesh.size(at), random.Random(rng.random() + sum(box)), factor)
        source = full if rank == 0 or source_rank is None else torch.full_like(full, -1)
        tensor = stock.distribute_tensor(source, mesh, placements, src_data_rank=source_rank)
        piece = tensor.to_local()
        assert type(piece) is torch.Tensor and piece.ndim == 1
        assert torch.equal(piece, expected_piece(full, mesh, placements)), (shape, placements)
        assert piece.untyped_storage().nbytes() == piece.numel() * piece.element_size(), "the whole is kept alive"


@pytest.mark.parametrize("source_rank", [0, None])
@pytest.mark.parametrize(
    "sizes, names, foreign",
    [
        ((2, 2), ("dp", "tp"), (None, Shard(0))),
        ((2, 2), ("dp", "tp"), (None, Shard(1))),
        ((3, 2), ("dp", "tp"), (None, Shard(0))),
        ((2, 2), ("ep", "dp"), (Shard(0), None)),
        ((2, 2), ("rep", "dp"), (Replicate(), None)),
        ((2, 2, 2), ("rep", "dp", "tp"), (Replicate(), None, Shard(0))),
        ((2, 2, 2), ("rep", "dp", "tp"), (Replicate(), None, Shard(1))),
        ((2, 2, 2), ("dp", "ep", "tp"), (None, Shard(0), Shard(1))),
        ((2, 2), ("dp", "tp"), (None, Replicate())),
    ],
)
def test_torch_distributes_ragged_under_foreign_shards(sizes, names, foreign, source_rank):
    world = 1
    for size in sizes:
        world *= size
    run_threads(world, _stock_nd, sizes, names, foreign, source_rank)


def _wrong_shape(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(
        ValueError, match=r"\[distribute_tensor\] Expected a tensor of shape \(5, 4\).*\(rank \d of 2\)"
    ):
        stock.distribute_tensor(torch.ones(4, 5), mesh, [RaggedShard(1, (2, 3), (5, 4))])


def test_torch_distribute_of_another_shape_is_an_error():
    run_threads(2, _wrong_shape)
