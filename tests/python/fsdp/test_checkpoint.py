"""Checkpoints of sharded models and their optimizers: saved on some ranks, loaded on others, by our own files and by
torch.distributed.checkpoint; asynchronous; what fails and what is left then. Single tensors of every kind are in
../test_checkpoint_tensors.py, what the trainer and others read in ../test_checkpoint_files.py."""

import json
import os
import random
import resource

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Adapted, Mixer, TinyLM, next_token_loss
from support.optim import assert_same_bits, everything
from support.ranks import RankError
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from harness import OURS, full, mesh, processes, rank, seeded, shard, threads, tokens, world
from ragged_fsdp import _C, checkpoint, fully_shard
from ragged_fsdp.checkpoint import CheckpointError
from ragged_fsdp.optim import AdamW, AdamW8bit, Muon, muon_groups, tile_rows

pytestmark = pytest.mark.skipif(not OURS, reason="ours alone: the files")

MAKE = {
    "adamw": lambda model: AdamW(model.named_parameters(), lr=0.01, betas=(0.9, 0.95)),
    "bf16 states": lambda model: AdamW(model.named_parameters(), lr=0.01, state_dtype=torch.bfloat16),
    "power": lambda model: AdamW8bit(model.named_parameters(), lr=0.01),
    "dynamic": lambda model: AdamW8bit(model.named_parameters(), lr=0.01, format="dynamic"),
    "muon": lambda model: Muon(muon_groups(model.named_parameters()), lr=0.01),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def build(kind, seed=0, units=True, grid=None):
    """A model with a tie, a frozen parameter and one that no step reaches, and its optimizer."""
    model = seeded(Mixer, seed)
    for unit in (model.up, model.down) if units else ():
        fully_shard(unit, shard_policy=tile_rows, mesh=grid)
    fully_shard(model, shard_policy=tile_rows, mesh=grid)
    return model, MAKE[kind](model)


def train(model, optimizer, first, steps):
    """The same gradients on any number of ranks: all take the same batch."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        next_token_loss(model, tokens(64, 2, 9, step=step, of_rank=0)).backward()
        optimizer.step()
    return everything(optimizer)


def spoil(optimizer):
    """Values that no run has, in every state."""
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                (value._local_tensor if isinstance(value, DTensor) else value).fill_(3)


# ---- any number of ranks --------------------------------------------------------------------------------------------


def dcp_state(model, optimizer):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def save(folder, way, kind):
    model, optimizer = build(kind)
    train(model, optimizer, 0, 2)
    if way == "dcp":
        dcp.save(dcp_state(model, optimizer), checkpoint_id=folder / str(world()))
    else:
        checkpoint.save(folder / str(world()), model, optimizer, step=2)
    return everything(optimizer), train(model, optimizer, 2, 1)


def load(folder, way, kind, writers):
    model, optimizer = build(kind, seed=1, units=False)
    spoil(optimizer)
    if way == "dcp":
        state = dcp_state(model, optimizer)
        dcp.load(state, checkpoint_id=folder / str(writers))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    else:
        loaded = checkpoint.load(folder / str(writers), model, optimizer)
        assert (loaded.step, loaded.world_size) == (2, writers)
    return everything(optimizer), train(model, optimizer, 2, 1)


# (torch's own loading of torch's own optimizers asks for states of parameters that were never stepped.)
@pytest.mark.parametrize(
    "way, kind", [*(("files", kind) for kind in MAKE), *(("dcp", kind) for kind in ("adamw", "power", "muon"))]
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


# ---- folders --------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_latest_names_the_last(tmp_path):
    def body():
        model, optimizer = build("adamw")
        for step in (1, 2, 3, 10):
            checkpoint.save(tmp_path, model, optimizer, step=step, keep=2, extra=step)
        checkpoint.save(tmp_path, model, optimizer, step=10, keep=2, extra="again")
        assert checkpoint.load(tmp_path, model, optimizer).extra == "again"
        assert checkpoint.load(tmp_path / "step-3", model, optimizer).step == 3

    threads(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-10", "step-3"]
    assert (tmp_path / "latest").read_text() == "step-10\n"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-10" / "shard-00002.json").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"
    assert checkpoint.latest(tmp_path / "none") is None


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_named_and_changes_nothing(tmp_path):
    def save():
        model, optimizer = build("adamw")
        train(model, optimizer, 0, 1)
        checkpoint.save(tmp_path, model, optimizer, step=1)

    def load(match):
        model, optimizer = build("adamw", 1)
        before = everything(optimizer)
        with pytest.raises(CheckpointError, match=match):
            checkpoint.load(tmp_path / "step-1", model, optimizer)
        assert_same_bits(everything(optimizer), before)

    threads(2, save)
    folder = tmp_path / "step-1"
    data = folder / "shard-00002-model-00001-of-00001.safetensors"
    for path, at, match in (
        (data, -1, "tensor '.*' in '.*shard-00002-model-00001"),
        (data, 50, "header.*shard-00002-model"),
        (folder / "shard-00001.json", 300, "shard-00001.json"),
        (folder / "checkpoint.json", 400, "checkpoint.json"),
    ):
        good = path.read_bytes()
        flip(path, at)
        threads(3, load, match)
        path.write_bytes(good)
    data.write_bytes(good[:-1])
    threads(1, load, "Expected a file of .* bytes")


def test_other_models_and_optimizers_are_refused(tmp_path):
    def body():
        model, optimizer = build("power")
        checkpoint.save(tmp_path, model, optimizer, step=1)
        for kind, match in (
            ("dynamic", "in format 'dynamic 32x32', but .* 'power 32x32'"),
            ("adamw", "Expected tensor 'state.experts.exp_avg'"),
        ):
            other, another = build(kind, 1)
            before = everything(another)
            with pytest.raises(CheckpointError, match=match):
                checkpoint.load(tmp_path, other, another)
            assert_same_bits(everything(another), before)
        lm = shard(seeded(TinyLM))
        with pytest.raises(CheckpointError, match=r"'embed.weight' of shape \[29, 12\], but .* has \[64, 72\]"):
            checkpoint.load(tmp_path, lm, allow_unused=True)
        with pytest.raises(CheckpointError, match="none. Give the folder"):
            checkpoint.load(tmp_path / "elsewhere", model, optimizer)
        with pytest.raises(ValueError, match="has no name in the model"):
            checkpoint.save(tmp_path, lm, optimizer, step=2)

    threads(2, body)


# ---- failures are the same on all ranks, and leave what was there ------------------------------------------------------


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_one_rank_can_not_save_is_an_error_on_all(tmp_path):
    def body():
        model, optimizer = build("adamw")
        checkpoint.save(tmp_path, model, optimizer, step=1)
        for options, match in (
            ({"rank_extra": object() if rank() == 1 else 1}, r"rank_extra to be JSON.*\(rank 1 of 3\)"),
            ({"extra": rank()}, "same step, tensors and facts on all ranks"),
            ({"step": rank()}, "same step"),
            ({"step": -1}, "a step of at least 0"),
        ):
            with pytest.raises(ValueError, match=match):
                checkpoint.save(tmp_path, model, optimizer, **{"step": 2, **options})
        with pytest.raises(ValueError, match="same step, tensors"):
            checkpoint.save(tmp_path, {"a": torch.ones(2)} | ({"b": torch.ones(1)} if rank() else {}), step=2)
        with pytest.raises(ValueError, match="complex64.*'odd'|ComplexFloat.*'odd'"):
            checkpoint.save(tmp_path, {"odd": torch.zeros(1, dtype=torch.complex64)}, step=2)
        with pytest.raises(ValueError, match="'here' on the meta device"):
            checkpoint.save(tmp_path, {"here": torch.zeros(1, device="meta")}, step=2)
        checkpoint.load(tmp_path, model, optimizer)

    threads(3, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("not a folder")

    def body():
        model, _ = build("adamw")
        with pytest.raises(CheckpointError, match="make the folder"):
            checkpoint.save(tmp_path / "root", model, step=1)

    threads(2, body)


def fail_to_write(folder, way):
    """Rank 1's disk is full, as far as it can tell: its files may have 1 kB."""
    model, optimizer = build("adamw")
    checkpoint.save(folder, model, optimizer, step=1)
    dist.barrier()
    before = contents(folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    errors = []
    for step in (2, 3):
        try:
            if way == "save":
                checkpoint.save(folder, model, optimizer, step=step)
            elif way == "next call":
                checkpoint.async_save(folder, model, optimizer, step=step)
            else:
                checkpoint.async_save(folder, model, optimizer, step=step).result()
        except CheckpointError as error:
            errors.append(str(error))
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    dist.barrier()
    assert contents(folder) == before
    checkpoint.save(folder, model, optimizer, step=4)
    checkpoint.load(folder, model, optimizer)
    return errors


@pytest.mark.parametrize("way", ["save", "result", "next call"])
def test_a_full_disk_on_one_rank(tmp_path, way):
    errors = processes(3, fail_to_write, tmp_path, way)
    # The error of an asynchronous save surfaces at the next call, which begins nothing then.
    assert len(errors[0]) == (1 if way == "next call" else 2)
    assert errors[0] == errors[1] == errors[2]
    assert all("shard-00002" in text and "(rank 1 of 3)" in text for text in errors[0]), errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-4"]


# ---- asynchronous ---------------------------------------------------------------------------------------------------


def test_an_asynchronous_save_holds_what_was_there_at_the_call(tmp_path):
    def body():
        model, optimizer = build("muon")
        train(model, optimizer, 0, 2)
        saved = everything(optimizer)
        pending = checkpoint.async_save(tmp_path, model, optimizer, step=2, extra=[1])
        train(model, optimizer, 2, 2)
        spoil(optimizer)
        first = pending.result()
        assert pending.done() and first is pending.result() and first.folder == tmp_path / "step-2"
        assert checkpoint.load(first.folder, model, optimizer).extra == [1]
        assert_same_bits(everything(optimizer), saved)

    threads(3, body)


def test_the_next_call_publishes(tmp_path):
    def body():
        model, optimizer = build("adamw")
        one = checkpoint.Checkpointer(tmp_path, keep=0)
        pending = [one.async_save(model, optimizer, step=step) for step in (1, 2, 3)]
        assert [p._owner is None for p in pending] == [True, True, False]
        written, total, seconds = pending[2].progress()
        assert 0 <= written <= total and seconds >= 0
        assert checkpoint.latest(tmp_path).name == "step-2"
        dist.barrier()
        assert one.finish().step == 3 and one.finish() is None
        again = checkpoint.async_save(tmp_path, model, optimizer, step=4, keep=0)
        assert checkpoint.load(tmp_path, model, optimizer).step == 4, "load publishes what is pending"
        assert again.done() and again.result().step == 4

    threads(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2", "step-3", "step-4"]


def collectives_of_writers(folder):
    """How many operations the group counts while ranks write, and while they publish."""
    model, optimizer = build("adamw")
    group = dist.group.WORLD
    pending = checkpoint.async_save(folder, model, optimizer, step=1)
    counts = [group._get_sequence_number_for_group()]
    while not pending.done():
        pass
    counts.append(group._get_sequence_number_for_group())
    pending.result()
    counts.append(group._get_sequence_number_for_group())
    return counts[1] - counts[0], counts[2] > counts[1]


def test_the_writing_thread_issues_no_collective(tmp_path):
    assert processes(2, collectives_of_writers, tmp_path) == [(0, True), (0, True)]


def test_what_nobody_finished_is_not_published(tmp_path):
    def body():
        model, optimizer = build("adamw")
        one = checkpoint.Checkpointer(tmp_path)
        one.save(model, optimizer, step=1)
        one.async_save(model, optimizer, step=2)
        del one  # as a run that ends without a word

    threads(2, body)
    assert checkpoint.latest(tmp_path).name == "step-1" and not (tmp_path / "step-2").exists()
    checkpoint.Checkpointer(tmp_path)  # the next run sweeps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
