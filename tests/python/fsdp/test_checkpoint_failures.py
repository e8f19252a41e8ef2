"""Folders of checkpoints, what fails and what is left then, and asynchronous saves. Processes that are killed are in
the trainer's tests, and a writer that hangs in tests/checkpoint/tree_test.cpp: the code is the same."""

import resource
import weakref

import pytest
import torch
import torch.distributed as dist
from models import TinyLM
from saved_runs import build, spoil, train
from support.optim import assert_same_bits, everything

from harness import OURS, processes, rank, seeded, shard, threads
from ragged_fsdp import checkpoint
from ragged_fsdp.checkpoint import CheckpointError

pytestmark = pytest.mark.skipif(not OURS, reason="ours alone: the files")


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


# ---- failures are the same on all ranks, and leave what was there ---------------------------------------------------


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
        assert checkpoint.load(tmp_path / "step-4", model, optimizer).step == 4, "load publishes what is pending"
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
        ended = weakref.ref(one)
        del one  # as a run that ends without a word
        assert ended() is None, "waits for its thread here, not when the collector comes by"

    threads(2, body)
    assert checkpoint.latest(tmp_path).name == "step-1" and not (tmp_path / "step-2").exists()
    checkpoint.Checkpointer(tmp_path)  # the next run sweeps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
