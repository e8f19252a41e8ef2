"""torch.distributed.checkpoint with ragged tensors: save on some ranks and layout, load on others, into and out of
other tensor kinds."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as stock
from support.layouts import SHAPES, expected_piece, numbered, random_ragged
from support.ranks import run_ranks, run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, foreign_box
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor

FULLS = {f"t{i}": numbered(shape) for i, shape in enumerate(SHAPES)}


def _ragged_state(world, seed, fill=True):
    mesh = init_device_mesh("cpu", (world,))
    rng = random.Random(seed)
    return {
        name: distribute_tensor(full if fill else torch.zeros_like(full), mesh, [random_ragged(full.shape, world, rng)])
        for name, full in FULLS.items()
    }


def _save(rank, world, folder):
    dcp.save(_ragged_state(world, 1), checkpoint_id=folder)


def _load(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    state = _ragged_state(world, 2, fill=False)
    dcp.load(state, checkpoint_id=folder)
    for name, full in FULLS.items():
        assert torch.equal(state[name].full_tensor(), full), name
    plain = {name: torch.zeros_like(full) for name, full in FULLS.items()}
    dcp.load(plain, checkpoint_id=folder)
    assert all(torch.equal(plain[name], full) for name, full in FULLS.items())
    shards = {
        name: stock.distribute_tensor(torch.zeros_like(full), mesh, [Shard(full.ndim - 1)])
        for name, full in FULLS.items()
        if full.ndim and full.numel()
    }
    dcp.load(shards, checkpoint_id=folder)
    assert all(torch.equal(shard.full_tensor(), FULLS[name]) for name, shard in shards.items())


@pytest.mark.parametrize("writers, readers", [(1, 3), (2, 2), (3, 2), (4, 7)])
def test_save_here_load_there(tmp_path, writers, readers):
    run_threads(writers, _save, tmp_path)
    run_threads(readers, _load, tmp_path)


def _save_others(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    state = {name: full for name, full in FULLS.items()}
    state["t4"] = stock.distribute_tensor(FULLS["t4"], mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=folder)


def test_load_from_plain_and_sharded(tmp_path):
    run_threads(2, _save_others, tmp_path)
    run_threads(3, _load, tmp_path)


MESHES = [
    ((2, 2), ("rep", "dp"), (Replicate(), None)),
    ((2, 2), ("dp", "tp"), (None, Shard(0))),
    ((2, 2), ("dp", "tp"), (None, Shard(1))),
    ((2, 2), ("ep", "dp"), (Shard(0), None)),
    ((2, 2, 2), ("dp", "ep", "tp"), (None, Shard(0), Shard(1))),
]


def _state_nd(sizes, names, foreign, fulls):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    at = names.index("dp")
    state = {}
    for i, full in enumerate(fulls):
        placements = [*foreign[:at], Replicate(), *foreign[at + 1 :]]
        box, _ = foreign_box(full.shape, mesh, placements)
        factor = 1
        for dim in range(at + 1, mesh.ndim):
            factor *= mesh.size(dim) if foreign[dim] == Shard(0) else 1
        placements[at] = random_ragged(box, mesh.size(at), random.Random(i + sum(box)), factor)
        state[f"t{i}"] = distribute_tensor(full, mesh, placements)
    return state


def _nd(rank, world, folder, sizes, names, foreign):
    fulls = [numbered(shape) for shape in [(8, 6), (7, 5), (5, 4, 3), (2, 6, 2, 7), (1, 3)]]
    state = _state_nd(sizes, names, foreign, fulls)
    dcp.save(state, checkpoint_id=folder)
    again = _state_nd(sizes, names, foreign, [torch.zeros_like(full) for full in fulls])
    dcp.load(again, checkpoint_id=folder)
    plain = {f"t{i}": torch.zeros_like(full) for i, full in enumerate(fulls)}
    dcp.load(plain, checkpoint_id=folder)
    for i, full in enumerate(fulls):
        assert torch.equal(again[f"t{i}"].full_tensor(), full) and torch.equal(plain[f"t{i}"], full)


@pytest.mark.parametrize("sizes, names, foreign", MESHES)
def test_offsets_are_global_under_foreign_shards(tmp_path, sizes, names, foreign):
    world = 1
    for size in sizes:
        world *= size
    run_threads(world, _nd, tmp_path, sizes, names, foreign)


def _boxes(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    rng = random.Random(5)
    for shape in [(3, 4, 5), (3, 3, 3, 3), (4, 1, 5), (2, 6, 2, 7)]:
        full = numbered(shape)
        for _ in range(5):
            tensor = distribute_tensor(full, mesh, [random_ragged(shape, world, rng)])
            chunks = tensor.__create_chunk_list__()
            assert len(chunks) <= 2 * len(shape) - 1 and all(chunk.sizes.numel() > 0 for chunk in chunks)
            items = tensor.__create_write_items__("w", tensor)
            assert [item.index.offset for item in items] == [chunk.offsets for chunk in chunks]
            flat = [tensor.__get_tensor_shard__(item.index) for item in items]
            for item, view in zip(items, flat):
                box = tuple(
                    slice(o, o + n) for o, n in zip(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)
                )
                assert torch.equal(view, full[box]) and item.tensor_data.size == full.shape
            joined = torch.cat([view.reshape(-1) for view in flat]) if flat else torch.empty(0)
            assert torch.equal(joined, expected_piece(full, mesh, tensor.placements))
    with pytest.raises(ValueError, match=r"\[checkpoint\] Expected the offset of one of this rank's boxes of 'w'"):
        from torch.distributed.checkpoint.metadata import MetadataIndex

        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([9, 9, 9, 9])))
    two = init_device_mesh("cpu", (world, 1))
    pending = RaggedTensor(torch.ones(4), two, [Partial(), RaggedShard(1, (1,), (4,))], (4,))
    with pytest.raises(ValueError, match="without pending reductions"):
        pending.__create_chunk_list__()


def test_boxes_are_few_full_and_cover_the_piece():
    run_threads(3, _boxes)


def _async(rank, world, folder):
    state = {"model": _ragged_state(world, 1), "step": 3}
    dcp.async_save(state, checkpoint_id=folder).result()
    dist.barrier()
    again = {"model": _ragged_state(world, 2, fill=False), "step": 0}
    dcp.load(again, checkpoint_id=folder)
    assert again["step"] == 3
    return all(torch.equal(again["model"][name].full_tensor(), full) for name, full in FULLS.items())


def test_async_save_on_gloo_processes(tmp_path):
    assert run_ranks(2, _async, str(tmp_path)) == [True, True]
