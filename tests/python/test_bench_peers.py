"""The comparison of bench/peers at its smallest: what it measures of FSDP2 and of ours is what can be computed, and a
system that fails becomes a row.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from bench.peers import measuring, models  # noqa: E402
from bench.peers.catalogue import CELLS  # noqa: E402
from bench.peers.page import cell_block  # noqa: E402
from bench.peers.results import Results  # noqa: E402

# Units of ours above half a MiB, so that none are merged, and a root whose two sides have a MiB each.
SIZES = {"layers": 2, "dim": 256, "heads": 2, "feed_forward": 512, "vocabulary": 1024, "sequence": 8}


def call(module: str, *words: Any) -> None:
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=REPO, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(tmp_path: pathlib.Path, cell: str, systems: list[str], rounds: int) -> list[dict[str, Any]]:
    out = tmp_path / f"{cell}.jsonl"
    call("bench.peers.run", "--out", out, "--cells", cell, "--systems", *systems, "--rounds", rounds, "--steps", 1,
         "--repeats", 1, "--sizes", json.dumps(SIZES))  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()]


def config(kind: str) -> models.ModelConfig:
    return models.ModelConfig(kind, **SIZES)


def bytes_of(params: Any) -> int:
    return sum(param.numel() * 4 for param in params)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    systems = ["single", "fsdp2", "ragged", "ragged_in_place"]
    return run(tmp_path_factory.mktemp("llama"), "llama-fp32-2", systems, rounds=2)


def ranks_of(lines: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    return next(line for line in lines if line.get("system") == system)["ranks"]


def test_lines_say_all_that_a_page_needs(llama: list[dict[str, Any]]) -> None:
    assert set(llama[0]["conditions"]) == {
        "python", "versions", "cores", "cpu", "features", "build", "omp_num_threads"}  # fmt: skip
    assert [line["system"] for line in llama[1:]] == ["single", "fsdp2", "ragged", "ragged_in_place"]
    for line in llama[1:]:
        assert "error" not in line
        assert len(line["rounds"]) == 2 and line["steps_a_round"] == 1
        assert all(rank["wall_ms"] > 0 and rank["cpu_ms"] >= rank["update_cpu_ms"] >= 0
                   for of_ranks in line["rounds"] for rank in of_ranks)  # fmt: skip
    block = cell_block(Results(llama), CELLS["llama-fp32-2"])
    for label in ("one process", "FSDP2", "RaggedFSDP, gradients in place"):
        assert f"| {label} |" in block
    assert "doesn't count" not in block


def test_losses_are_those_of_one_process(llama: list[dict[str, Any]]) -> None:
    for line in llama[2:]:
        assert line["loss_difference"] <= 1e-6


def test_bytes_of_fsdp2_are_the_computed_ones(llama: list[dict[str, Any]]) -> None:
    model = models.build(config("llama"))
    whole, layers = bytes_of(model.parameters()), bytes_of(model.layers.parameters())
    gathered = whole + layers  # layers once more in backward
    own = ranks_of(llama, "single")[0]["copied"]
    for rank in ranks_of(llama, "fsdp2"):
        assert rank["parameter_bytes"] == whole
        assert rank["collectives"] == {"allgather_base": [1 + 2 * 2, gathered], "reduce_scatter_base": [3, whole]}
        # A shard into each gather, the whole out of it, and gradients into what is reduced.
        assert rank["copied"] - own == gathered // 2 + gathered + whole
        assert rank["backend_results"] in (0, whole // 2)


def test_bytes_of_ours_are_the_computed_ones(llama: list[dict[str, Any]]) -> None:
    model = models.build(config("llama"))
    whole, layers = bytes_of(model.parameters()), bytes_of(model.layers.parameters())
    norms = bytes_of(module.weight for module in model.modules() if isinstance(module, models.RMSNorm))
    assert norms == sum(1 for name, _ in model.named_parameters() if "norm" in name) * 256 * 4
    assert all(isinstance(module, (nn.Linear, nn.Embedding, models.RMSNorm))
               for module in model.modules() if next(module.parameters(recurse=False), None) is not None)  # fmt: skip
    own = ranks_of(llama, "single")[0]["copied"]
    for system, copied in (("ragged", whole), ("ragged_in_place", norms)):
        for rank in ranks_of(llama, system):
            assert rank["copied"] - own == copied
            calls = dict(rank["collectives"])
            # A byte each: whether it was used; and whether gradients of the head came late.
            assert calls.pop("allreduce") == [1, len(list(model.parameters())) + 1]
            assert calls.pop("alltoall_base") == [2 + 2, whole]  # before the layers, behind them, each
            ((_, gathers),) = calls.items()  # one by one rank's slice
            assert gathers == [2 * (2 + 2 * 2), whole + layers]


def test_memory_handed_out_again_is_another_place() -> None:
    memory = bytearray(256)

    def at_the_same_address() -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float32)

    reduced = at_the_same_address()
    places = measuring.Places()
    places.add([reduced])
    assert not places.take(at_the_same_address())  # what a copy into memory that was reduced into long ago looks like
    assert places.take(reduced.view(2, -1)) and not places.take(reduced)
    places.add(reduced)
    del reduced
    assert not places.take(at_the_same_address())


def test_bytes_at_rest_of_fsdp2_are_parameters_and_moments(llama: list[dict[str, Any]]) -> None:
    whole = bytes_of(models.build(config("llama")).parameters())
    for rank in ranks_of(llama, "fsdp2"):
        # Counts of steps, a loss, and a unit's buffer that a thread of Gloo may not have let go of yet.
        assert 0 <= rank["bytes_at_rest"] - 3 * whole // 2 < whole // 2
        assert rank["peak_bytes"] > rank["bytes_at_rest"]


def test_padding_of_fewer_experts_than_ranks(tmp_path: pathlib.Path) -> None:
    cell = CELLS["moe-fp32-4"]
    lines = run(tmp_path, cell.name, ["fsdp2", "ragged"], rounds=0)
    params = list(models.build(config("moe")).parameters())
    numel = sum(param.numel() for param in params)
    padded = sum(-(-param.shape[0] // 4) * 4 * param[0].numel() for param in params)
    assert ranks_of(lines, "fsdp2")[0]["reduced_elements"] == padded
    rows = Results(lines).rows(cell)
    assert rows["fsdp2"].padding == padded / numel - 1 > 0.2
    assert 0 <= rows["ragged"].padding < 0.001
    assert rows["ragged"].wall is None


def test_a_system_that_fails_is_a_row(tmp_path: pathlib.Path) -> None:
    cell = CELLS["llama-bf16-2"]
    lines = run(tmp_path, cell.name, ["ddp", "fsdp2"], rounds=1)
    failed, trained = lines[1:]
    assert failed["error"] == "NotImplementedError: DDP has no mixed precision of its own with fp32 gradients"
    assert "error" not in trained and trained["loss_difference"] < 0.05
    block = cell_block(Results(lines), cell)
    assert "| DDP | fails: NotImplementedError: DDP has" in block
    assert "| FSDP2 |" in block


def test_models_start_alike_and_split_their_batches() -> None:
    for kind in models.MODELS:
        sizes = config(kind)
        first, second = models.build(sizes), models.build(sizes)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        parts = torch.cat([models.batch(sizes, 3, rank, 3) for rank in range(3)])
        assert len(parts) == 3 * sizes.batch
        assert not torch.equal(parts[: sizes.batch], parts[sizes.batch : 2 * sizes.batch])


def test_dry_run_counts_what_a_large_world_would_move(tmp_path: pathlib.Path) -> None:
    out, ranks = tmp_path / "dry.jsonl", 96
    call("bench.peers.dry_run", "--out", out, "--runs", f"tiny:{ranks}", "--steps", 1)
    line = json.loads(out.read_text().splitlines()[1])
    assert "error" not in line, line
    params = list(models.build(models.MODELS["tiny"]).parameters())
    padded = sum(-(-param.shape[0] // ranks) * ranks * param[0].numel() for param in params)
    assert (line["units"], line["elements"]) == (65, sum(param.numel() for param in params))
    stock, ours = line["systems"]["fsdp2"], line["systems"]["ragged"]
    assert stock["padding"] == pytest.approx(padded / line["elements"] - 1, abs=1e-9)
    assert stock["collectives"] == (1 + 2 * 64) + 65
    assert 0 <= ours["padding"] < 0.02
    assert stock["shard_s"] > 0 and ours["shard_s"] > 0


def test_a_rank_that_dies_ends_its_system_alone(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, signal
from bench.peers.rank import Task
from bench.peers.run import Failed, Group, make_context
context = make_context()
group, other = (Group(Task(name, "tiny", 2, config={{"layers": 2}}), context, {str(tmp_path)!r})
                for name in ("fsdp2", "ddp"))
group.ask("count"), other.ask("count")
os.kill(group.processes[1].pid, signal.SIGKILL)
for _ in range(2):
    try:
        group.ask("step")
        print("no error")
    except Failed as error:
        print(error)
print(len(other.ask("losses")[0]))
other.end()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=os.environ, capture_output=True, text=True)
    first, second, losses = done.stdout.splitlines()
    # Whichever is noticed first: the dead process, or what its neighbour says of it.
    assert first == second != "no error" and ("exit codes" in first or "Error" in first), done.stderr
    assert losses == "4"
