"""One ZeRO-3 step beside FSDP2's: bytes written through copies, bytes held unsharded, collectives. Counts, never
times.

FSDP2 casts or copies shards into a buffer, gathers, copies parameters out of it, and copies gradients into the
order of the reduction. A layout in which parameters lie whole in the gathered buffer leaves two writes: a shard's
cast into its place, a gradient's cast into its place. Copies that the model itself makes are subtracted, by running
it unsharded in the same dtype; so is the copy that Gloo makes of a reduction's result, on both sides.
"""

import pytest
import torch
import torch.distributed.fsdp as stock
from copies import COPY_IN_OUT, Copies, UnshardedBytes, backend_copies_results, nbytes
from models import TinyLM, next_token_loss

from harness import STOCK_OPS, Collectives, mesh, only_ours, processes, seeded, subject, tokens

pytestmark = only_ours("it is the comparison with FSDP2")


def build():
    return TinyLM(vocab=64, dim=64, heads=4, layers=6)


def step(model, k=0):
    next_token_loss(model, tokens(64, 2, 9, step=k)).backward()


def sharded(package, bf16, **options):
    model = seeded(build)
    if bf16:
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        package.fully_shard(block, mesh=mesh(), **options)
    model = package.fully_shard(model, mesh=mesh(), **options)
    if package is not stock:
        model.set_merge_bytes(0)  # blocks of a size that counts, in a model that is small enough for a test
    return model


def root_bytes(model, bf16):
    """Unsharded bytes of what the root owns itself: both sides keep it from forward to backward."""
    own = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("blocks."))
    return own * (2 if bf16 else 4)


def copies_of(model, run):
    with Copies() as seen:
        run()
    model_copies = seen.total - (seen.results if backend_copies_results() else 0)
    return seen, model_copies


def delta(before, after):
    return {k: after[k] - before[k] for k in after if isinstance(after[k], (int, float))}


def _measure(bf16):
    plain = seeded(build)
    if bf16:
        plain = plain.bfloat16()
    step(plain)
    with Copies() as compute:
        step(plain)

    theirs, ours = sharded(stock, bf16), sharded(subject(), bf16)
    out = {"bf16": bf16, "root": root_bytes(ours, bf16)}
    for model in (theirs, ours):  # the first step also initialises
        for k in range(2):
            step(model, k)
            model.zero_grad()

    seen, total = copies_of(theirs, lambda: step(theirs))
    out["theirs"] = {"copies": total - compute.total, "by op": seen.by_op, "collectives": seen.collectives}
    theirs.zero_grad()
    with UnshardedBytes(theirs) as held:
        step(theirs)
    out["theirs"]["peak"] = held.peak

    before = subject().stats(ours)
    seen, total = copies_of(ours, lambda: step(ours))
    after = subject().stats(ours)
    out["ours"] = {"copies": total - compute.total, "by op": seen.by_op, "stats": delta(before, after)}
    out["ours"]["peak"], out["compute by op"] = after["peak_image_bytes"], compute.by_op

    before = subject().stats(ours)["pool_reserved_bytes"]  # gradients
    for k in range(3):
        ours.zero_grad()
        step(ours, k)
    out["ours"]["pool grows"] = subject().stats(ours)["pool_reserved_bytes"] - before

    as_stock = sharded(subject(), bf16, **STOCK_OPS)
    step(as_stock)
    with Collectives() as mode:
        step(as_stock)
    out["as stock"] = mode.calls, sorted(mode.names)
    with Collectives() as mode:
        step(theirs)
    out["stock"] = mode.calls, sorted(mode.names)
    return out


def _measure_all():
    return {bf16: _measure(bf16) for bf16 in (False, True)}


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n} ranks")
def measured(request):
    return processes(request.param, _measure_all)


both_dtypes = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


@both_dtypes
def test_half_of_the_copied_bytes(measured, bf16):
    for rank in measured:
        found = rank[bf16]
        assert found["theirs"]["copies"] > 0
        assert found["ours"]["copies"] <= 0.52 * found["theirs"]["copies"], found


@both_dtypes
def test_no_copy_in_and_no_copy_out(measured, bf16):
    for rank in measured:
        found = rank[bf16]
        extra = {k: v - found["compute by op"].get(k, 0) for k, v in found["ours"]["by op"].items()}
        assert not {k: v for k, v in extra.items() if k in COPY_IN_OUT and v}, extra
        stats = found["ours"]["stats"]
        assert stats["copied"] == 0
        # What torch's dispatcher sees beyond the model are the two casts that the runtime says it made.
        assert found["ours"]["copies"] == stats["cast_in"] + stats["cast_grad"], found["ours"]


@both_dtypes
def test_two_thirds_of_the_unsharded_bytes(measured, bf16):
    for rank in measured:
        found = rank[bf16]
        ours, theirs = (found[side]["peak"] - found["root"] for side in ("ours", "theirs"))
        assert 0 < ours <= theirs * 2 / 3, f"{ours} of {theirs}"


@both_dtypes
def test_no_more_collectives(measured, bf16):
    """One small all-reduce a step tells which parameters were used; the gathers and reductions are FSDP2's at most."""
    for rank in measured:
        stats, theirs = rank[bf16]["ours"]["stats"], rank[bf16]["theirs"]["collectives"]
        assert 0 < stats["all_gathers"] <= theirs["_allgather_base_"]
        assert 0 < stats["reduce_scatters"] <= theirs["_reduce_scatter_base_"]
        assert stats["all_reduces"] <= 1


@both_dtypes
def test_stock_collectives_are_the_same_ops(measured, bf16):
    for rank in measured:
        assert rank[bf16]["as stock"] == rank[bf16]["stock"]


@both_dtypes
def test_pool_does_not_grow_after_the_second_step(measured, bf16):
    assert all(rank[bf16]["ours"]["pool grows"] == 0 for rank in measured)


def _nothing_moves():
    model = sharded(subject(), False)
    for k in range(2):
        step(model, k)
        model.zero_grad()
    before = subject().stats(model)
    with Collectives() as mode:
        step(model)
    return mode.calls, delta(before, subject().stats(model)), nbytes(list(model.parameters()))


def test_one_rank_calls_no_collective():
    calls, stats, _ = processes(1, _nothing_moves)[0]
    assert not any(calls.values())
    assert stats["copied"] == 0
