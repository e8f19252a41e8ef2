"""ragged_fsdp.optim over sharded models: the same steps as torch.optim over FSDP2's way of training, no collectives in
the step, checkpoints at other world sizes. The step itself is in ../test_optim_adamw.py."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Mixer, TinyLM, next_token_loss
from support.optim import assert_same_bits, everything
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import ragged_fsdp
from harness import (
    OURS,
    Collectives,
    assert_close,
    backward_of_all_ranks,
    full,
    mesh,
    processes,
    rank,
    seeded,
    threads,
    tokens,
)
from ragged_fsdp import fully_shard
from ragged_fsdp.optim import SOAP, AdamW, AdamW8bit, Muon, matrix_groups, tile_rows

pytestmark = pytest.mark.skipif(not OURS, reason="ours alone: the optimizers")


def sharded(units=True, policy=tile_rows, grid=None, **options):
    model = seeded(Mixer)
    for unit in (model.up, model.down) if units else ():
        fully_shard(unit, shard_policy=policy, mesh=grid, **options)
    fully_shard(model, shard_policy=policy, mesh=grid, **options)
    return model


MAKE = {
    "adamw": lambda model: AdamW(model.named_parameters(), lr=0.01, betas=(0.9, 0.95)),
    "bf16 states": lambda model: AdamW(model.named_parameters(), lr=0.01, state_dtype=torch.bfloat16),
    "power": lambda model: AdamW8bit(model.named_parameters(), lr=0.01),
    "dynamic": lambda model: AdamW8bit(model.named_parameters(), lr=0.01, format="dynamic"),
    "normuon": lambda model: Muon(
        matrix_groups(model.named_parameters()), lr=0.01, normuon=True, momentum_format="power"
    ),
    "soap": lambda model: SOAP(matrix_groups(model.named_parameters()), lr=0.01, precondition_frequency=2),
}


def train(model, optimizer, steps=3, first=0):
    """The same gradients on any number of ranks: all take the same batch."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        next_token_loss(model, tokens(64, 2, 9, step=step, of_rank=0)).backward()
        optimizer.step()
    return everything(optimizer)


def test_training_equals_torch_over_the_plain_model():
    def body():
        model, reference = sharded(), seeded(Mixer)
        mine, other = AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(reference.parameters(), lr=0.01)
        for step in range(5):
            mine.zero_grad(), other.zero_grad()
            batch = tokens(64, 2, 9, step=step)
            backward_of_all_ranks(
                reference, lambda m, r, step=step: next_token_loss(m, tokens(64, 2, 9, step=step, of_rank=r))
            )
            next_token_loss(model, batch).backward()
            mine.step(), other.step()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(full(p), q.detach(), 2e-5, name)

    threads(3, body)


@pytest.mark.parametrize("kind", MAKE)
def test_number_of_ranks_does_not_show_in_the_bits(kind):
    def body():
        model = sharded()
        return train(model, MAKE[kind](model))

    alone = seeded(Mixer)
    want = train(alone, MAKE[kind](alone))
    for world in (1, 2, 4):  # the mean of equal gradients is exact there
        for got in threads(world, body):
            assert_same_bits(got, want)


@pytest.mark.parametrize("kind", ["power", "normuon", "soap"])
def test_hybrid_mesh_gives_the_same_bits(kind):
    def body():
        model = sharded(grid=mesh(2, 2, names=("replicate", "shard")))
        return train(model, MAKE[kind](model))

    alone = seeded(Mixer)
    want = train(alone, MAKE[kind](alone))
    for got in threads(4, body):
        assert_same_bits(got, want)


def test_masters_of_a_model_in_bf16():
    def body():
        model = seeded(lambda: Mixer().bfloat16())
        fully_shard(model, shard_policy=tile_rows, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        optimizer = AdamW8bit(model.named_parameters(), lr=1e-4, master_weights=True)
        train(model, optimizer)
        for p in model.parameters():
            if p.requires_grad:
                assert_same_bits([full(p)], [full(optimizer.state[p]["master"]).bfloat16()])
        return True

    assert threads(3, body) == [True] * 3


def count_collectives():
    model = sharded()
    counts = []
    for kind, nonfinite in (("adamw", "ignore"), ("power", "ignore"), ("power", "skip")):
        optimizer = MAKE[kind](model)
        optimizer.nonfinite = nonfinite
        next_token_loss(model, tokens(64, 2, 9)).backward()
        with Collectives() as counted:
            optimizer.step()
        counts.append(sum(counted.calls.values()))
    return counts


def test_the_step_has_no_collective_but_the_check_for_bad_gradients():
    assert processes(2, count_collectives) == [[0, 0, 1]] * 2


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save(folder, kind, flatten):
    model = sharded()
    optimizer = MAKE[kind](model)
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder)
    saved = everything(optimizer)
    return saved, train(model, optimizer, first=3)


def load(folder, kind, flatten, units):
    model = sharded(units)
    optimizer = MAKE[kind](model)
    train(model, optimizer, steps=1)  # not fresh
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    loaded = everything(optimizer)
    return loaded, train(model, optimizer, first=3)


@pytest.mark.parametrize(
    "kind, writers, readers, flatten",
    [("adamw", 2, 4, False), ("bf16 states", 1, 2, True), ("power", 2, 4, True), ("power", 4, 1, False),
     ("dynamic", 4, 2, False), ("power", 2, 3, True)],
)  # fmt: skip
def test_saved_on_some_ranks_and_loaded_on_others(tmp_path, kind, writers, readers, flatten):
    saved, continued = threads(writers, save, tmp_path, kind, flatten)[0]
    for loaded, again in threads(readers, load, tmp_path, kind, flatten, False):
        assert_same_bits(loaded, saved)
        if readers != 3:  # a mean over three isn't exact
            assert_same_bits(again, continued)


def full_round_trip(kind):
    model = sharded()
    optimizer = MAKE[kind](model)
    train(model, optimizer)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    want = everything(optimizer)
    for from_rank0 in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        other = sharded(units=False)
        again = MAKE[kind](other)
        given = copy.deepcopy(state) if rank() == 0 or not options.broadcast_from_rank0 else {}
        if not options.broadcast_from_rank0:
            box = [given]
            dist.broadcast_object_list(box, src=0)
            given = box[0]
        ragged_fsdp.set_optimizer_state_dict(other, again, given, options=options)
        got = everything(again)
        skip = 0
        for param in (p for group in again.param_groups for p in group["params"]):
            if param.requires_grad:
                keys = sorted(again.state[param])
                assert_same_bits(got[skip + 1 : skip + 1 + len(keys)], want[skip + 1 : skip + 1 + len(keys)])
            skip += 1 + len(again.state.get(param, {}))
    return True


@pytest.mark.parametrize("kind", ["bf16 states", "power", "normuon", "soap"])
def test_full_state_dicts_load_from_rank_0_and_from_all(kind):
    assert processes(3, full_round_trip, kind) == [True] * 3


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_an_optimizer_built_before_fully_shard_says_so_at_the_step(make):
    def body():
        model = seeded(lambda: TinyLM())
        early = list(model.parameters())
        optimizer = make(model.named_parameters())
        fully_shard(model)
        next_token_loss(model, tokens(29, 2, 5)).backward()
        text = r"one that fully_shard has replaced since, as 'embed.weight' \(param 'embed.weight'\). Build the optim"
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        with pytest.raises(ValueError, match="Build the optimizer after fully_shard"):
            make(early)

    threads(2, body)


def test_a_unit_that_cuts_tiles_names_the_policy_that_does_not():
    def body():
        model = sharded(policy=None)
        with pytest.raises(ValueError, match="shard_policy=ragged_fsdp.optim.tile_rows") as error:
            AdamW8bit(model.named_parameters())
        AdamW(model.parameters())
        return str(error.value)

    assert len(set(threads(3, body))) == 1


def test_unit_inputs_are_fresh_after_a_step():
    """The kernel writes through pointers; a unit that stays gathered has to hear of it."""

    def body():
        model, reference = sharded(units=False, reshard_after_forward=False), seeded(Mixer)
        mine, other = AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(reference.parameters(), lr=0.1)
        batch = tokens(64, 2, 9, of_rank=0)
        for m, o in ((model, mine), (reference, other)):
            next_token_loss(m, batch)  # no backward: stays gathered
            next_token_loss(m, batch).backward()
            o.step()
        assert_close(model(batch).detach(), reference(batch).detach(), 1e-4)

    threads(2, body)
