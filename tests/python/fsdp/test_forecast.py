"""What a step moves and holds equals what the plans alone said before it; summary and print show the units. Ours alone: FSDP2 plans nothing."""

import pytest
import torch
from models import MLP, stack
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import full, only_ours, processes, randn, seeded, shard, subject, threads

pytestmark = only_ours("plans, forecasts and counters of our own")

# What is counted in stats() and forecast alike; peaks are compared as they are, the rest as the difference over a step.
COUNTED = ("gathered_bytes", "reduced_bytes", "all_gathers", "reduce_scatters", "cast_in", "cast_grad", "added", "copied")
PEAKS = ("peak_image_bytes", "peak_reduce_bytes")


def _step_as_forecast(micro_batches, policy, reshard):
    ours = subject()
    model = seeded(lambda: stack(3, 5))
    shard(model, model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(number):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro + 1 == micro_batches)
            model(randn(3, 5, step=10 * number + micro)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    held = ours.stats(model)["pool_reserved_bytes"]  # gradients, until the next forward sees that they were cleared
    ours.reset_peaks(model)
    before = ours.stats(model)
    step(2)
    after, told = ours.stats(model), ours.forecast(model, micro_batches=micro_batches)
    for name in COUNTED:
        assert after[name] - before[name] == told[name], name
    for name in PEAKS:
        assert after[name] == told[name], name
    assert after["peak_image_bytes"] <= told["image_bytes_bound"]
    for number in range(3, 6):
        step(number)
    assert ours.stats(model)["pool_reserved_bytes"] == held
    with torch.no_grad():
        model(randn(3, 5, step=0))
    for module in model.modules():
        if isinstance(module, ours.FSDPModule):
            module.reshard()
    assert ours.stats(model)["pool_reserved_bytes"] == 0, "on a CPU nothing is kept"


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_step_is_as_forecast(micro_batches, reshard):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for world in (1, 2, 3):
        threads(world, _step_as_forecast, micro_batches, policy, reshard)


def test_step_is_as_forecast_over_gloo():
    processes(2, _step_as_forecast, 2, MixedPrecisionPolicy(), None)


def _trained(merge_bytes):
    """(losses and parameters, collectives) of some steps."""
    ours = subject()
    model = shard(m := seeded(lambda: stack(4, 5)), m)
    model.set_merge_bytes(merge_bytes)
    before = ours.stats(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for number in range(3):
        loss = model(randn(3, 5, step=number)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    after = ours.stats(model)
    parameters = [full(p) for p in model.parameters()]
    return [*seen, *parameters], *(after[name] - before[name] for name in ("all_gathers", "reduce_scatters"))


def _merged_and_alone():
    alone, *collectives = _trained(0)
    for merge_bytes in (2048, None):
        merged, *fewer = _trained(merge_bytes)
        assert all(torch.equal(a, b) for a, b in zip(alone, merged, strict=True))
        assert all(few < many for few, many in zip(fewer, collectives, strict=True)), (fewer, collectives)


def test_small_units_share_collectives_and_change_no_bit():
    for ranks in (2, 3):
        processes(ranks, _merged_and_alone)


def test_bytes_to_merge_are_checked():
    def body():
        model = shard(m := seeded(lambda: stack(2, 5)), m)
        for wrong in (-1, True, 0.5):
            with pytest.raises(ValueError, match="Expected None or bytes of at least 0"):
                model.set_merge_bytes(wrong)
        model(randn(2, 5))
        with pytest.raises(RuntimeError, match="must be called on the root"):
            model[0].set_merge_bytes(0)

    threads(1, body)


def _all_reduces(static_use):
    ours = subject()
    model = shard(m := seeded(lambda: stack(2, 5)), m)
    model.set_static_use(static_use)
    counts = []
    for step in range(3):
        before = ours.stats(model)["all_reduces"]
        model(randn(2, 5, step=step)).square().sum().backward()
        counts.append(ours.stats(model)["all_reduces"] - before)
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    return counts[1:]


@pytest.mark.parametrize("static_use", [True, False])
def test_used_flags_are_one_all_reduce_a_backward_or_none(static_use):
    assert threads(2, _all_reduces, static_use) == [[0 if static_use else 1] * 2] * 2


def test_gradient_memory_comes_back_with_the_next_forward():
    def body():
        ours = subject()
        model = shard(m := seeded(lambda: stack(2, 5)), m)
        for step in range(4):
            model(randn(2, 5, step=step)).square().sum().backward()
            held = ours.stats(model)["gradient_bytes_in_use"]
            assert held == 4 * sum(group.core.local_numel for state in model._get_fsdp_state().tree for group in state.groups)
            model.zero_grad()
            with torch.no_grad():
                model(randn(2, 5))
            assert ours.stats(model)["gradient_bytes_in_use"] == 0

    threads(2, body)


def test_summary_and_print_show_units_layouts_and_padding():
    def body():
        ours = subject()
        model = seeded(lambda: stack(2, 5))
        shard(model, model, shard_policy=ours.rows(4))
        text, printed = ours.summary(model), repr(model)
        for name in ("0", "1"):
            (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
            core = model[int(name)]._get_fsdp_state().groups[0].core
            assert f"{core.image_numel:,}" in line and f"{core.padding:,}" in line and "float32" in line
            assert f"{core.image_numel:,} elements over 2 ranks, padding {core.padding:,}" in printed
        assert "over 2 ranks" in text.splitlines()[-1]

    threads(2, body)


def test_numbers_of_a_module_that_is_not_sharded():
    with pytest.raises(ValueError, match="Expected a module that fully_shard was applied to, but got MLP"):
        subject().summary(MLP())
