"""Units laid out in several uniform segments and ragged tails train, forecast and checkpoint like any other. Ours alone: FSDP2 plans nothing."""

import json

import pytest
import torch
from models import TinyLM, stack
from test_training import train

from harness import full, mesh, only_ours, processes, seeded, shard, subject, threads, tokens

pytestmark = only_ours("layouts of our own")


def _split(blocks):
    """Collectives cost nothing, so that buckets fall apart wherever that saves an element."""
    return subject().Planning(max_ragged_blocks=blocks, segment_cost=0, ragged_segment_cost=0, ragged_block_cost=0)


def _kinds(model):
    """Segment kinds of all units, from their plans."""
    plans = [json.loads(group.core.plan_json) for state in model._get_fsdp_state().tree for group in state.groups]
    return [segment["kind"] for plan in plans for segment in plan["segments"]], len(plans)


def _trains(blocks, reshard):
    ours = subject()
    model = seeded(TinyLM)
    shard(model, model.blocks, planning=_split(blocks), shard_policy=ours.rows(5), reshard_after_forward=reshard)
    loss = lambda m, s, r: m(tokens(29, 2, 7, step=s, of_rank=r)).square().mean()  # noqa: E731
    train(model, seeded(TinyLM), loss, steps=3)
    kinds, plans = _kinds(model)
    before, told = ours.stats(model), ours.forecast(model)
    loss(model, 3, torch.distributed.get_rank()).backward()
    after = ours.stats(model)
    for name in ("gathered_bytes", "reduced_bytes", "cast_in", "cast_grad"):
        assert after[name] - before[name] == told[name], name
    return kinds.count("ragged"), len(kinds) - plans


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("blocks", [0, 6])
def test_split_buckets_train(blocks, reshard):
    ragged = extra = 0
    for world in (2, 3, 4, 7):
        (found, more), *_ = threads(world, _trains, blocks, reshard)
        ragged, extra = ragged + found, extra + more
    assert extra > 0
    assert (ragged > 0) == (blocks > 0)


def test_split_buckets_train_over_gloo():
    processes(3, _trains, 6, None)


def test_owners_of_ragged_tails_take_turns():
    def body():
        ours = subject()
        model = seeded(lambda: TinyLM(layers=5))
        shard(model, model.blocks, planning=_split(3), shard_policy=ours.rows(5), mesh=mesh())
        model(tokens(29, 2, 7)).sum().backward()
        firsts = set()
        for state in model._get_fsdp_state().tree:
            for group in state.groups:
                for segment in json.loads(group.core.plan_json)["segments"]:
                    if segment["kind"] == "ragged":
                        firsts.add(next(r for r, (begin, end) in enumerate(segment["owners"]) if end > begin))
        assert len(firsts) > 1
        return [full(p.grad).shape for p in model.parameters()]

    threads(7, body)


def test_stock_collectives_take_one_segment():
    def body():
        model = seeded(TinyLM)
        shard(model, model.blocks, planning=_split(6), shard_policy=subject().rows(5), collectives="stock")
        model(tokens(29, 2, 7)).sum().backward()
        kinds, plans = _kinds(model)
        assert kinds == ["uniform"] * plans

    threads(3, body)


@pytest.mark.parametrize("wrong", [{"strategy": "best"}, {"max_uniform_segments": 0}, {"max_ragged_blocks": -1}])
def test_nonsense_is_refused(wrong):
    def body():
        ours = subject()
        with pytest.raises(ValueError, match=r"Expected"):
            ours.fully_shard(seeded(lambda: stack(1, 5)), planning=ours.Planning(**wrong))

    threads(2, body)


def test_plan_of_a_module_is_what_fully_shard_makes():
    ours = subject()
    with torch.device("meta"):
        told = ours.plan(TinyLM(layers=3), 3, shard_policy=ours.rows(5), dtype=torch.float32)

    def body():
        model = seeded(lambda: TinyLM(layers=3))
        shard(model, model.blocks, shard_policy=ours.rows(5))
        model._get_fsdp_state().lazy_init()
        return {s.name: s.groups[0].core.image_numel for s in model._get_fsdp_state().tree if s.groups}

    (made, *_) = threads(3, body)
    assert {unit.name: unit.image for unit in told.units} == {name or "(root)": numel for name, numel in made.items()}
    assert told.numel == sum(p.numel() for p in TinyLM(layers=3).parameters())
    assert 0 <= told.lower_bound <= told.padding
    assert "over 3 ranks" in str(told) and told.units[0].layout["world_size"] == 3


def test_plan_needs_no_ranks_and_refuses_nonsense():
    ours = subject()
    model = stack(2, 5)
    assert ours.plan(model, 1024).units[0].name == "(root)"
    assert len(ours.plan(model, 7, units=list(model)).units) == 2
    with pytest.raises(ValueError, match="world size"):
        ours.plan(model, 0)
    with pytest.raises(ValueError, match="up.weight"):
        ours.plan(model, 2, units=list(model), shard_policy=lambda name, param: ours.rows(1000) if "up.weight" in name else None)
