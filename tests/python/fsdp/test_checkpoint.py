"""Checkpoints of sharded models and their optimizers: saved on some ranks, loaded on others, by our own files and by
torch.distributed.checkpoint; what is beside the tensors, and parts of what there is. Folders, failures and asynchronous
saves are in test_checkpoint_failures.py, single tensors of every kind in ../test_checkpoint_tensors.py, what the
trainer and others read in ../test_checkpoint_files.py."""

import json
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from models import Adapted, Mixer, TinyLM, stack
from saved_runs import MAKE, build, spoil, train
from support.optim import assert_same_bits, everything
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ragged_fsdp
from harness import OURS, full, mesh, rank, seeded, shard, threads, tokens, world
from ragged_fsdp import _C, checkpoint, fully_shard
from ragged_fsdp.checkpoint import CheckpointError
from ragged_fsdp.optim import AdamW, tile_rows

pytestmark = pytest.mark.skipif(not OURS, reason="ours alone: the files")


# ---- any number of ranks --------------------------------------------------------------------------------------------


def options_of(way):
    return StateDictOptions(flatten_optimizer_state_dict=way == "dcp, flat")


def dcp_state(model, optimizer, way):
    states = get_optimizer_state_dict(model, optimizer, options=options_of(way))
    return {"model": get_model_state_dict(model), "optim": states}


def save(folder, way, kind):
    model, optimizer = build(kind)
    train(model, optimizer, 0, 2)
    if way != "files":
        dcp.save(dcp_state(model, optimizer, way), checkpoint_id=folder / str(world()))
    else:
        checkpoint.save(folder / str(world()), model, optimizer, step=2)
    return everything(optimizer), train(model, optimizer, 2, 1)


def load(folder, way, kind, writers):
    model, optimizer = build(kind, seed=1, units=False)
    spoil(optimizer)
    if way != "files":
        state = dcp_state(model, optimizer, way)
        dcp.load(state, checkpoint_id=folder / str(writers))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options_of(way))
    else:
        loaded = checkpoint.load(folder / str(writers), model, optimizer)
        assert (loaded.step, loaded.world_size) == (2, writers)
    return everything(optimizer), train(model, optimizer, 2, 1)


# (torch's own loading of torch's own optimizers asks for states of parameters that were never stepped.)
@pytest.mark.parametrize(
    "way, kind",
    [
        *(("files", kind) for kind in MAKE),
        *(("dcp", kind) for kind in ("adamw", "power", "muon", "normuon", "soap")),
        *(("dcp, flat", kind) for kind in ("muon", "soap")),
    ],
)
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path, way, kind):
    for writers in (1, 2, 3, 4):
        saved, continued = threads(writers, save, tmp_path, way, kind)[0]
        if way == "files":
            _C.verify_checkpoint(str(tmp_path / str(writers) / "step-2"))
        for readers in (1, 2, 3, 4):
            for loaded, again in threads(readers, load, tmp_path, way, kind, writers):
                assert_same_bits(loaded, saved)
                if readers == writers or 3 not in (readers, writers):  # a mean over three isn't exact
                    assert_same_bits(again, continued)


def test_hybrid_meshes_save_each_element_once(tmp_path):
    """What is saved on two replicas of two shards is what four shards and one rank load."""

    def save():
        model, optimizer = build("power", grid=mesh(2, 2, names=("replicate", "shard")))
        train(model, optimizer, 0, 2)
        checkpoint.save(tmp_path, model, optimizer, step=2)
        return everything(optimizer)

    def load(hybrid):
        model, optimizer = build("power", 1, grid=mesh(2, 2, names=("replicate", "shard")) if hybrid else mesh())
        checkpoint.load(tmp_path, model, optimizer)
        return everything(optimizer)

    saved = threads(4, save)[0]
    sizes = [file.stat().st_size for file in (tmp_path / "step-2").glob("*.safetensors")]
    assert sum(sizes) < 1.2 * sum(t.nbytes for t in saved), "replicas write nothing"
    for ranks, hybrid in ((4, True), (4, False), (1, False)):
        for loaded in threads(ranks, load, hybrid):
            assert_same_bits(loaded, saved)


def test_models_of_fsdp2_and_of_ours_load_each_others(tmp_path):
    def build(package, seed):
        model = seeded(Mixer, seed)
        for unit in (model.up, model.down):
            package.fully_shard(unit)
        package.fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def body():
        packages = {"ours": ragged_fsdp, "stock": torch.distributed.fsdp}
        for name, package in packages.items():
            model, optimizer = build(package, 0)
            train(model, optimizer, 0, 2)
            checkpoint.save(tmp_path / name, model, optimizer, step=2)
            want = everything(optimizer)
            for other in packages.values():
                model, optimizer = build(other, 1)
                assert checkpoint.load(tmp_path / name, model, optimizer).step == 2
                assert_same_bits(everything(optimizer), want)

    threads(3, body)


def test_models_of_fsdp2_under_tensor_parallelism(tmp_path):
    def body():
        grid = mesh(2, 2, names=("dp", "tp"))

        def build(package, seed):
            model = seeded(lambda: stack(2, 6), seed)
            plan = {f"{i}.up": ColwiseParallel() for i in range(2)} | {f"{i}.down": RowwiseParallel() for i in range(2)}
            parallelize_module(model, grid["tp"], plan)
            package.fully_shard(model, mesh=grid["dp"])
            return model

        plain = seeded(lambda: stack(2, 6)).state_dict()
        for name, package in (("ours", ragged_fsdp), ("stock", torch.distributed.fsdp)):
            checkpoint.save(tmp_path / name, build(package, 0), step=0)
            other = build(ragged_fsdp, 1)
            checkpoint.load(tmp_path / name, other)
            whole = seeded(lambda: stack(2, 6), 2)
            checkpoint.load(tmp_path / name, whole)
            for key, tensor in plain.items():
                assert torch.equal(full(other.state_dict()[key]), tensor), key
                assert torch.equal(whole.state_dict()[key], tensor), key

    threads(4, body)


def test_a_model_from_the_meta_device(tmp_path):
    def body():
        model, optimizer = build("power")
        train(model, optimizer, 0, 2)
        checkpoint.save(tmp_path, model, optimizer, step=2)
        with torch.device("meta"):
            other = Mixer()
        fully_shard(other, shard_policy=tile_rows)
        with pytest.raises(ValueError, match="on the meta device"):
            checkpoint.load(tmp_path, other, allow_unused=True)
        other.to_empty(device="cpu")
        again = MAKE["power"](other)
        checkpoint.load(tmp_path, other, again)
        assert_same_bits(everything(again), everything(optimizer))
        assert_same_bits(train(other, again, 2, 1), train(model, optimizer, 2, 1))

    threads(2, body)


def test_between_a_forward_that_gathered_and_its_backward(tmp_path):
    """Parameters that a forward left gathered are saved and loaded as shards; the next forward sees what was loaded."""

    def body():
        model = seeded(TinyLM)
        fully_shard(model, reshard_after_forward=False)
        ids = tokens(29, 2, 5, of_rank=0)
        with torch.no_grad():
            before = model(ids)
            checkpoint.save(tmp_path, model, step=0)
            for p in model.parameters():
                p.zero_()
            assert not torch.equal(model(ids), before)
            checkpoint.load(tmp_path, model)
            assert torch.equal(model(ids), before)

    threads(2, body)


def test_without_process_groups(tmp_path):
    model = seeded(Mixer)
    optimizer = MAKE["torch"](model)
    train(model, optimizer, 0, 2)
    saved = checkpoint.save(tmp_path, model, optimizer, step=2, extra="alone")
    assert saved.folder == tmp_path / "step-2" and saved.bytes > 0
    other = seeded(Mixer, 1)
    fresh = MAKE["torch"](other)
    assert checkpoint.load(saved.folder, other, fresh).extra == "alone"
    assert_same_bits(train(other, fresh, 2, 1), train(model, optimizer, 2, 1))


# ---- what is beside the tensors -------------------------------------------------------------------------------------


def test_extras_and_generators(tmp_path):
    extra = {"scheduler": {"last_epoch": 7, "rates": [1e-3, 0.1 + 0.2]}, "position": [3, None], "text": "a\nü"}

    def save():
        model, _ = build("adamw")
        checkpoint.save(tmp_path, model, step=5, extra=extra, rank_extra={"rank": rank()})

    def load(ranks):
        model, _ = build("adamw", 1)
        loaded = checkpoint.load(tmp_path, model)
        assert loaded.extra == extra and loaded.facts["step"] == 5
        assert loaded.rank_extra == ({"rank": rank()} if ranks == 2 else None)

    threads(2, save)
    for ranks in (2, 3):
        threads(ranks, load, ranks)


def test_generators_go_on_where_they_were():
    torch.manual_seed(3)
    random.seed(3)
    torch.rand(5), random.gauss(0, 1)
    state = json.loads(json.dumps(checkpoint.rng_state()))
    drawn = torch.rand(3), random.random(), random.gauss(0, 1)
    checkpoint.set_rng_state(state)
    again = torch.rand(3), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]


@pytest.mark.parametrize("restore", [True, False])
def test_options_of_groups(tmp_path, restore):
    def options(model, lr):
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        return [{"params": decayed, "lr": torch.tensor(lr)}, {"params": others, "lr": 2 * lr, "betas": (lr, 0.5)}]

    def body():
        model, _ = build("adamw")
        optimizer = AdamW(options(model, 0.25))
        checkpoint.save(tmp_path, model, optimizer, step=0)
        again = AdamW(options(model, 0.125))
        rate = again.param_groups[0]["lr"]
        checkpoint.load(tmp_path, model, again, restore_options=restore)
        lr = 0.25 if restore else 0.125
        assert again.param_groups[0]["lr"] is rate and rate.item() == lr
        assert again.param_groups[1]["lr"] == 2 * lr and again.param_groups[1]["betas"] == (lr, 0.5)

    threads(2, body)


def test_names_are_those_of_the_trainer_and_ties_are_stored_once(tmp_path):
    def body():
        model, optimizer = build("power")
        train(model, optimizer, 0, 3)
        checkpoint.save(tmp_path, model, optimizer, step=3)

    threads(2, body)
    index = _C.checkpoint_index(str(tmp_path / "step-3"))
    assert "embed.weight" in index["tensors"] and "head.weight" not in index["tensors"]
    assert index["facts"]["tied.head.weight"] == "embed.weight"
    assert index["facts"]["optimizer.steps.up.weight"] == 3 and index["facts"]["optimizer.steps.idle.weight"] == 0
    assert index["facts"]["optimizer.kind.up.weight"] == "adamw8bit"
    assert index["tensors"]["state.up.weight.exp_avg.codes"] == ("U8", (104, 72), "power 32x32")
    assert index["tensors"]["state.up.weight.exp_avg_sq.scales"] == ("F32", (4, 3), "power 32x32")
    assert index["tensors"]["state.up.bias.exp_avg"] == ("F32", (104,), "")
    assert not any("frozen" in name for name in index["tensors"] if name.startswith("state."))


# ---- parts of what there is -----------------------------------------------------------------------------------------


def test_a_parameter_that_was_frozen_begins_anew(tmp_path):
    def body():
        def adapted(frozen):
            model = seeded(Adapted)
            model.base.requires_grad_(not frozen)
            shard(model)
            return model, AdamW(model.parameters(), lr=0.1)

        model, optimizer = adapted(frozen=True)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path, model, optimizer, step=1)
        other, again = adapted(frozen=False)
        other(torch.ones(2, 8)).sum().backward()
        again.step()
        checkpoint.load(tmp_path, other, again)
        for name, p in other.named_parameters():
            state = again.state[p]
            assert state["step"].item() == (0 if "base" in name else 1)
            assert ("base" in name) == (not full(state["exp_avg"]).any())
        # The other way round there is a state that nobody wants.
        checkpoint.save(tmp_path, other, again, step=2)
        with pytest.raises(CheckpointError, match="a use for tensor 'state.base"):
            checkpoint.load(tmp_path, model, optimizer)
        checkpoint.load(tmp_path, model, optimizer, allow_unused=True)

    threads(2, body)


def test_model_alone_and_tensors_by_name(tmp_path):
    def body():
        model, optimizer = build("adamw")
        checkpoint.save(tmp_path, model, optimizer, step=1)
        other, _ = build("adamw", 1)
        with pytest.raises(CheckpointError, match="a use for tensor"):
            checkpoint.load(tmp_path, other)
        checkpoint.load(tmp_path, other, allow_unused=True)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p._local_tensor, q._local_tensor)
        bias = {"up.bias": torch.zeros(104)}
        checkpoint.load(tmp_path, bias, allow_unused=True)
        assert torch.equal(bias["up.bias"], full(model.up.bias))

    threads(3, body)
