"""ragged_fsdp.checkpoint on tensors alone: every kind and layout, saved by some ranks and loaded by others into other
layouts. Models and optimizers are in fsdp/test_checkpoint.py."""

import math
import random

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import SHAPES, numbered, random_ragged
from support.ranks import run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_fsdp import _C, checkpoint
from ragged_fsdp.placement import RaggedShard, foreign_box
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn]
FULLS = {f"t{i}": numbered(shape) for i, shape in enumerate(SHAPES)}
FULLS |= {f"d{i}": numbered((5, 3)).to(dtype) for i, dtype in enumerate(DTYPES)}


def fill(tensors):
    for tensor in tensors.values():
        (tensor._local_tensor if isinstance(tensor, stock.DTensor) else tensor).zero_()
    return tensors


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, stock.DTensor) else tensor


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_equals(tensors, fulls):
    for name, tensor in tensors.items():
        assert torch.equal(bits(whole(tensor)), bits(fulls[name])), name


def laid_out(kind, fulls, world):
    """The tensors on all ranks, in one of the ways that there are."""
    mesh, rng = init_device_mesh("cpu", (world,)), random.Random(kind)
    found = {}
    for name, full in fulls.items():
        if kind == "plain" or (kind == "columns" and full.ndim < 2):
            found[name] = full.clone()
        elif kind == "transposed":  # memory in another order than the values
            turned = tuple(range(full.ndim))[::-1]
            found[name] = full.permute(turned).clone(memory_format=torch.contiguous_format).permute(turned)
        elif kind == "ragged":
            cut = random_ragged(full.shape, world, rng)
            found[name] = distribute_tensor(full, mesh, [cut], src_data_rank=None)
        elif full.dtype == torch.float8_e4m3fn:  # torch's doesn't cut these
            found[name] = full.clone()
        else:
            placement = Replicate() if kind == "replicated" or full.ndim == 0 else Shard(full.ndim - 1)
            placement = Shard(0) if kind == "rows" and full.ndim else placement
            found[name] = stock.distribute_tensor(full, mesh, [placement], src_data_rank=None)
    return found


KINDS = ["plain", "transposed", "ragged", "replicated", "rows", "columns"]


def save(rank, world, folder, kind):
    checkpoint.save(folder, laid_out(kind, FULLS, world), step=0)


def load(rank, world, folder):
    for kind in KINDS:
        tensors = fill(laid_out(kind, FULLS, world))
        versions = {name: tensor._version for name, tensor in tensors.items()}
        checkpoint.load(folder, tensors)
        assert_equals(tensors, FULLS)
        assert kind != "plain" or all(tensor._version > versions[name] for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_loads_what_any_other_saved(tmp_path, kind):
    for writers in (1, 3, 7):  # more ranks than rows
        run_threads(writers, save, tmp_path / str(writers), kind)
        _C.verify_checkpoint(str(tmp_path / str(writers) / "step-0"))
        for readers in (2, 3):
            run_threads(readers, load, tmp_path / str(writers))


MESHES = [
    ((2, 2), ("rep", "dp"), (Replicate(), None)),
    ((2, 3), ("dp", "tp"), (None, Shard(0))),
    ((2, 2), ("dp", "tp"), (None, Shard(1))),
    ((2, 2), ("ep", "dp"), (Shard(0), None)),
    ((2, 2, 2), ("dp", "ep", "tp"), (None, Shard(0), Shard(1))),
]
WIDE = {f"t{i}": numbered(shape) for i, shape in enumerate([(8, 6), (7, 5), (5, 4, 3), (2, 6, 2, 7), (1, 3)])}


def on_mesh(sizes, names, foreign):
    """Ragged over "dp", the others as given."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    at, found = names.index("dp"), {}
    for i, (name, full) in enumerate(WIDE.items()):
        placements = [*foreign[:at], Replicate(), *foreign[at + 1 :]]
        box, _ = foreign_box(full.shape, mesh, placements)
        strides = [mesh.size(dim) for dim in range(at + 1, mesh.ndim) if foreign[dim] == Shard(0)]
        placements[at] = random_ragged(box, mesh.size(at), random.Random(i + sum(box)), math.prod(strides))
        found[name] = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return found


def save_and_load_on_mesh(rank, world, folder, sizes, names, foreign):
    tensors = on_mesh(sizes, names, foreign)
    checkpoint.save(folder / "mesh", tensors, step=0)
    checkpoint.load(folder / "mesh", fill(tensors))
    assert_equals(tensors, WIDE)
    plain = fill({name: full.clone() for name, full in WIDE.items()})
    checkpoint.load(folder / "mesh", plain)
    assert_equals(plain, WIDE)
    checkpoint.save(folder / "plain", plain, step=0)
    checkpoint.load(folder / "plain", fill(tensors))
    assert_equals(tensors, WIDE)


@pytest.mark.parametrize("sizes, names, foreign", MESHES)
def test_under_tensor_and_expert_parallelism(tmp_path, sizes, names, foreign):
    run_threads(math.prod(sizes), save_and_load_on_mesh, tmp_path, sizes, names, foreign)
    _C.verify_checkpoint(str(tmp_path / "mesh" / "step-0"))


def save_on_a_part(rank, world, folder):
    """Two meshes of two ranks that hold the same: the one with the first rank writes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))["dp"]
    full = numbered((6, 5))
    tensors = {
        "ragged": distribute_tensor(full, mesh, [RaggedShard(2, (7, 23), (6, 5))], src_data_rank=None),
        "rows": stock.distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
    }
    checkpoint.save(folder, tensors, step=0)
    checkpoint.load(folder, fill(tensors))
    assert all(torch.equal(tensor.full_tensor(), full) for tensor in tensors.values())


def test_meshes_of_a_part_of_the_ranks(tmp_path):
    run_threads(4, save_on_a_part, tmp_path)


def save_mistaken(rank, world, folder):
    """Each rank says that it holds all of what it has a half of: nobody wrote the rest, and rank 0 notices."""
    mesh = init_device_mesh("cpu", (world,))
    good = {"w": distribute_tensor(numbered((4, 2)), mesh, [RaggedShard(1, (1, 1), (4, 2))], src_data_rank=None)}
    checkpoint.save(folder, good, step=0)
    cut = RaggedShard(1, (1, 0), (4, 2)) if rank == 1 else RaggedShard(1, (1, 1), (4, 2))
    begin, end = cut.interval(rank)
    bad = RaggedTensor(torch.zeros(end - begin), mesh, [cut], (4, 2))
    with pytest.raises(checkpoint.CheckpointError, match="each element of tensor 'w' once, but 4 is missing"):
        checkpoint.save(folder, {"w": bad}, step=1)
    checkpoint.load(folder, fill(good))
    assert torch.equal(good["w"].full_tensor(), numbered((4, 2)))


def test_nothing_is_published_that_lacks_an_element(tmp_path):
    run_threads(2, save_mistaken, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0"]


def refused(rank, world, folder):
    mesh = init_device_mesh("cpu", (world, 1))
    pending = RaggedTensor(torch.ones(4 // world), mesh, [RaggedShard(1, (1,) * world, (4,)), Partial()], (4,))
    with pytest.raises(ValueError, match="without pending sums, but got .*'w'"):
        checkpoint.save(folder, {"w": pending}, step=0)
    with pytest.raises(ValueError, match="dense tensors"):
        checkpoint.save(folder, {"w": torch.eye(3).to_sparse()}, step=0)
    with pytest.raises(ValueError, match="Expected tensors, but got a int named 'w'"):
        checkpoint.save(folder, {"w": 3}, step=0)


def test_what_has_no_values_of_its_own_is_refused(tmp_path):
    run_threads(2, refused, tmp_path)


def other_group(rank, world, folder):
    """Ranks 1 and 2 of three save and load by themselves."""
    import torch.distributed as dist

    group = dist.new_group([1, 2])
    if rank > 0:
        mesh = stock.DeviceMesh("cpu", [1, 2])
        tensors = {"w": distribute_tensor(numbered((5, 2)), mesh, [RaggedShard(1, (2, 3), (5, 2))], src_data_rank=None)}
        tensors["plain"] = numbered((3,))
        checkpoint.save(folder, tensors, step=1, process_group=group)
        checkpoint.load(folder, fill(tensors), process_group=group)
        assert torch.equal(tensors["plain"], numbered((3,)))
        assert torch.equal(tensors["w"]._local_tensor, numbered((5, 2)).view(-1)[slice(*((0, 4), (4, 10))[rank - 1])])
    dist.barrier()


def test_a_group_of_ones_own(tmp_path):
    from support.ranks import run_ranks

    run_ranks(3, other_group, tmp_path)
    assert _C.checkpoint_index(str(tmp_path / "step-1"))["world_size"] == 2
