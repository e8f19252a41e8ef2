"""ragged_fsdp.optim.AdamW and AdamW8bit on tensors: against torch.optim, against the unsharded step bit for bit, and
what torch.optim.Optimizer promises. Models and checkpoints are in fsdp/test_optim.py."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import make_mesh, values
from support.optim import (
    SHAPES,
    assert_same_bits,
    everything,
    give_gradients,
    plain_parameters,
    sharded_parameters,
    tiled,
    whole,
)
from support.ranks import run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ragged_fsdp import RaggedShard, distribute_tensor
from ragged_fsdp.optim import AdamW, AdamW8bit, tile_rows
from ragged_fsdp.optim.pieces import place_of, tile_scales_like

KINDS = {
    "fp32": lambda params: AdamW(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "bf16": lambda params: AdamW(params, lr=0.01, weight_decay=0.1, state_dtype=torch.bfloat16),
    "power": lambda params: AdamW8bit(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "dynamic": lambda params: AdamW8bit(params, lr=0.01, format="dynamic"),
    "power of all matrices": lambda params: AdamW8bit(
        [{"params": [p for p in params if p.ndim > 1], "state_format": "power", "weight_decay": 0.3},
         {"params": [p for p in params if p.ndim < 2]}], lr=0.02, maximize=True),
}  # fmt: skip


def stepped(optimizer, steps=20, first=0):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()
    return optimizer


# ---- against torch.optim ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.9)}, {"weight_decay": 0.0, "eps": 1e-3}])
def test_fifty_steps_equal_those_of_torch(options):
    ours, theirs = plain_parameters(), plain_parameters()
    mine, other = AdamW(ours, lr=0.01, **options), torch.optim.AdamW(theirs, lr=0.01, **options)
    for step in range(50):
        for params, optimizer in ((ours, mine), (theirs, other)):
            give_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert set(mine.state[a]) == set(other.state[b])


@pytest.mark.parametrize("world", [2, 3])
def test_fifty_sharded_steps_equal_those_of_torch(world):
    def body(rank, world):
        theirs = plain_parameters()
        ours = sharded_parameters(make_mesh(world))
        mine, other = AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
        for step in range(50):
            for params, optimizer in ((ours, mine), (theirs, other)):
                give_gradients(params, step)
                optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(whole(a), b.detach(), rtol=1e-6, atol=1e-6)

    run_threads(world, body)


def test_8_bits_stay_near_fp32():
    ours, exact = stepped(KINDS["power"](plain_parameters()), 10), stepped(KINDS["fp32"](plain_parameters()), 10)
    begin = plain_parameters()
    for a, b, p in zip(ours.param_groups[0]["params"], exact.param_groups[0]["params"], begin, strict=True):
        if p.numel():
            assert (a - b).norm() <= 0.15 * (b - p).norm()
            assert not torch.equal(a, b) or "exp_avg" in ours.state[a]


# ---- sharded is unsharded, bit for bit -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsharded():
    return {name: everything(stepped(kind(plain_parameters()))) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_sharded_steps_equal_unsharded_bit_for_bit(unsharded, name, world):
    def body(rank, world):
        return everything(stepped(KINDS[name](sharded_parameters(make_mesh(world), seed=world))))

    for got in run_threads(world, body):
        assert_same_bits(got, unsharded[name])


@pytest.mark.parametrize("name", ["fp32", "power"])
def test_replicas_of_a_hybrid_mesh_take_the_same_step(unsharded, name):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        params = sharded_parameters(mesh, wrap=lambda ragged: [Replicate(), ragged])
        return everything(stepped(KINDS[name](params)))

    for got in run_threads(4, body):
        assert_same_bits(got, unsharded[name])


def test_stock_dtensors_take_the_same_step(unsharded):
    def body(rank, world):
        found = []
        for name in ("fp32", "power"):
            params = []
            for i, param in enumerate(plain_parameters()):
                # Half of 200 rows is no multiple of 32; of the stack, matrices stay whole.
                placement = Shard(0) if i % 2 and (name == "fp32" or param.ndim != 2) else Replicate()
                shard = stock.distribute_tensor(param.detach(), make_mesh(world), [placement])
                params.append(torch.nn.Parameter(shard))
            found.append(everything(stepped(KINDS[name](params))))
        return found

    for fp32, power in run_threads(2, body):
        assert_same_bits(fp32, unsharded["fp32"])
        assert_same_bits(power, unsharded["power"])


def test_stock_shards_on_borders_of_tiles_take_the_same_step():
    (alone,) = plain_parameters([(128, 65)])
    want = everything(stepped(AdamW8bit([alone])))

    def body(rank, world):
        whole = plain_parameters([(128, 65)])[0].detach()
        param = torch.nn.Parameter(stock.distribute_tensor(whole, make_mesh(world), [Shard(0)]))
        return everything(stepped(AdamW8bit([param])))

    for got in run_threads(4, body):
        assert_same_bits(got, want)


def test_tensor_parallel_shards_have_tiles_of_their_own():
    """Each rank's matrix is stepped as the same matrix by itself would be."""
    shape = (96, 100)

    def body(rank, world, dim):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = values(shape)
        local = tuple(size // 2 if d == dim else size for d, size in enumerate(shape))
        ragged = tiled(local, 2, 3)
        if dim == 0:
            from ragged_fsdp import StridedRaggedShard

            ragged = StridedRaggedShard(len(ragged.dims), ragged.local_units, ragged.shape, 2)
        param = torch.nn.Parameter(distribute_tensor(full, mesh, [ragged, Shard(dim)], src_data_rank=None))
        begin = mesh.get_local_rank("tp") * local[dim]
        alone = torch.nn.Parameter(full.narrow(dim, begin, local[dim]).contiguous())
        mine = AdamW8bit([{"params": [param], "state_format": "power"}])
        other = AdamW8bit([{"params": [alone], "state_format": "power"}])
        for step in range(3):
            gradient = values(shape, seed=50 + step)
            param.grad = distribute_tensor(gradient, mesh, [ragged, Shard(dim)], src_data_rank=None)
            alone.grad = gradient.narrow(dim, begin, local[dim]).contiguous()
            mine.step(), other.step()
        assert_same_bits([whole(param).narrow(dim, begin, local[dim]).contiguous()], [alone.detach()])
        scales = whole(mine.state[param]["exp_avg_scales"])
        assert scales.shape == ((4, 4) if dim == 0 else (3, 4))

    for dim in (0, 1):
        run_threads(4, body, dim)


def test_parameters_that_are_not_contiguous_are_stepped_in_place():
    base = [values((40, 120), seed=3) for _ in range(2)]
    turned, straight = torch.nn.Parameter(base[0].T), torch.nn.Parameter(base[1].T.contiguous())
    address = turned.data_ptr()
    for kind in ("fp32", "power"):
        assert_same_bits(everything(stepped(KINDS[kind]([turned]))), everything(stepped(KINDS[kind]([straight]))))
    assert turned.data_ptr() == address and not turned.is_contiguous()


# ---- 8-bit states --------------------------------------------------------------------------------------------------


def is_8bit(optimizer):
    return ["exp_avg_codes" in optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def test_what_is_kept_in_8_bits_depends_on_the_global_shape_alone():
    want = [True, True, True, True, True, True, True, False, False, False, False]
    assert is_8bit(KINDS["power"](plain_parameters())) == want

    def body(rank, world):
        return is_8bit(KINDS["power"](sharded_parameters(make_mesh(world))))

    assert run_threads(7, body) == [want] * 7


def test_embeddings_are_found_by_name_and_groups_decide_over_rules():
    shapes = {"model.embed_tokens.weight": (64, 80), "wte.weight": (64, 80), "layers.0.q_proj.weight": (64, 80)}
    named = [(name, torch.nn.Parameter(values(shape))) for name, shape in shapes.items()]
    assert is_8bit(AdamW8bit(named)) == [False, False, True]
    assert is_8bit(AdamW8bit([p for _, p in named])) == [True, True, True]
    assert is_8bit(AdamW8bit(named, embeddings=None)) == [True, True, True]
    assert is_8bit(AdamW8bit(named, embeddings=r"q_proj")) == [True, True, False]
    groups = [{"params": named[:1], "state_format": "dynamic"}, {"params": named[1:], "state_format": "fp32"}]
    assert is_8bit(AdamW8bit(groups)) == [True, False, False]
    with pytest.raises(ValueError, match="a parameter whose name `embeddings` finds, but got none for 'nothing'"):
        AdamW8bit(named, embeddings="nothing")
    with pytest.raises(ValueError, match=r"Pass model.named_parameters\(\)"):
        AdamW8bit([p for _, p in named], embeddings="wte")


def test_scales_follow_the_rows_of_the_parameter():
    def body(rank, world):
        mesh = make_mesh(world)
        for seed in range(6):
            for shape in [(40, 33), (3, 40, 70), (2, 2, 33, 64), (64, 5), (1, 1)]:
                param = distribute_tensor(values(shape), mesh, [tiled(shape, world, seed)])
                scales = tile_scales_like(param, "w")
                stack = shape[:-2]
                assert tuple(scales.shape) == (*stack, -(-shape[-2] // 32), -(-shape[-1] // 32))
                # The slow twin: mark every element with the number of its tile, cut, and see whose tiles are here.
                rows, columns = torch.arange(shape[-2]) // 32, torch.arange(shape[-1]) // 32
                number = rows[:, None] * scales.shape[-1] + columns[None]
                matrices = torch.arange(shape[:-2].numel() if hasattr(stack, "numel") else torch.Size(stack).numel())
                number = (matrices.view(*stack, 1, 1) * (scales.shape[-1] * scales.shape[-2]) + number).reshape(-1)
                place = place_of(param)
                here = sorted(set(number[place.begin : place.end].tolist()))
                begin, end = scales.ragged[1].interval(rank)
                assert here == list(range(begin, end)) and scales.to_local().numel() == end - begin

    run_threads(3, body)


def test_a_border_through_a_tile_raises_on_all_ranks_alike():
    def body(rank, world):
        mesh = make_mesh(world)
        shard = distribute_tensor(values((64, 80)), mesh, [RaggedShard(1, (10, 54), (64, 80))])
        with pytest.raises(ValueError) as error:
            AdamW8bit([("layers.0.w", torch.nn.Parameter(shard))])
        assert len(AdamW([torch.nn.Parameter(shard)]).param_groups) == 1
        shards = stock.distribute_tensor(values((66, 80)), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="whole strips of 32 rows"):
            AdamW8bit([torch.nn.Parameter(shards)])
        return str(error.value)

    first, second = run_threads(2, body)
    assert first == second
    assert first == (
        "[AdamW8bit] Expected ranks to own whole strips of 32 rows of each matrix, but got a cut before row 10 of a "
        "parameter of shape (64, 80) (param 'layers.0.w'). Shard with fully_shard(.., "
        "shard_policy=ragged_fsdp.optim.tile_rows), or give this parameter state_format='fp32' in a group of its own."
    )


def test_tile_rows_keeps_strips_of_32_rows():
    blocks = [tile_rows("w", torch.empty(shape)) for shape in [(5,), (40, 3), (7, 3), (2, 9, 3), (0, 3)]]
    assert [block and (block.kind, block.count) for block in blocks] == [
        None, ("rows", 32), ("rows", 7), ("rows", 9), ("rows", 1),
    ]  # fmt: skip


# ---- fewer bits in parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_masters_are_exact_and_parameters_their_image(make):
    low, high = plain_parameters(dtype=torch.bfloat16), plain_parameters(dtype=torch.bfloat16)
    high = [torch.nn.Parameter(p.detach().float()) for p in high]
    mine, exact = make(low, lr=1e-4, master_weights=True), make(high, lr=1e-4)
    for step in range(10):
        give_gradients(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        mine.step(), exact.step()
    for p, q in zip(low, high, strict=True):
        assert_same_bits([mine.state[p]["master"], p.detach()], [q.detach(), q.detach().bfloat16()])
        assert "master" not in exact.state[q]


def test_masters_follow_parameters_that_somebody_else_writes():
    (param,) = plain_parameters([(8, 9)], torch.bfloat16)
    optimizer = AdamW([param], lr=1e-4, master_weights=True)
    give_gradients([param], 0), optimizer.step()
    master = optimizer.state[param]["master"].clone()
    with torch.no_grad():
        param[3, 4] = 100.0
    param.grad.zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    expected = master.clone()
    expected[3, 4] = 100.0
    assert_same_bits([optimizer.state[param]["master"]], [expected])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_masters_a_parameter_is_rounded_at_each_step(dtype):
    params = plain_parameters(dtype=dtype)
    optimizer = AdamW(params, lr=0.01)
    for step in range(5):
        exact = [torch.nn.Parameter(p.detach().float()) for p in params]
        other = AdamW(exact, lr=0.01)
        for p, q in zip(params, exact, strict=True):
            other.state[q] = copy.deepcopy(optimizer.state[p])
        give_gradients(params, step)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.float()
        optimizer.step(), other.step()
        assert_same_bits([p.detach() for p in params], [q.detach().to(dtype) for q in exact])
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in params)


# ---- what torch.optim.Optimizer promises ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save", "optimizer deepcopy"])
def test_a_restored_optimizer_continues_bit_for_bit(name, way):
    params = plain_parameters()
    optimizer = stepped(KINDS[name](params), 5)
    if way == "optimizer deepcopy":
        other = copy.deepcopy(optimizer)
        again = [p for group in other.param_groups for p in group["params"]]
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        if way == "torch.save":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        again = plain_parameters()
        with torch.no_grad():
            for p, q in zip(again, params, strict=True):
                p.copy_(q)
        other = KINDS[name](again)
        other.load_state_dict(saved)
    assert_same_bits(everything(stepped(other, 5, first=5)), everything(stepped(optimizer, 5, first=5)))


def test_sharded_state_dicts_pickle_and_load():
    def body(rank, world):
        mesh = make_mesh(world)
        optimizer = stepped(KINDS["power"](sharded_parameters(mesh)), 3)
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        params = sharded_parameters(mesh)
        other = KINDS["power"](params)
        with torch.no_grad():
            for p, q in zip(params, optimizer.param_groups[0]["params"], strict=True):
                p.copy_(q)
        other.load_state_dict(saved)
        assert_same_bits(everything(stepped(other, 3, first=3)), everything(stepped(optimizer, 3, first=3)))
        # Whole tensors load as well, and so does another cut.
        full = copy.copy(saved)
        full["state"] = {i: {k: whole(v) for k, v in state.items()} for i, state in saved["state"].items()}
        third = KINDS["power"](sharded_parameters(mesh, seed=5))
        third.load_state_dict(full)
        fourth = KINDS["power"](sharded_parameters(mesh, seed=6))
        fourth.load_state_dict(third.state_dict())
        for state, mine in zip(full["state"].values(), fourth.state.values(), strict=True):
            assert_same_bits([whole(mine[k]) for k in state], list(state.values()))

    run_threads(3, body)


def test_loading_casts_nothing():
    params = plain_parameters(dtype=torch.bfloat16)
    optimizer = stepped(AdamW8bit(params, master_weights=True), 300 // 60)
    for state in optimizer.state.values():
        state["step"].fill_(1001.0)  # bf16 can't hold it
    other = AdamW8bit(plain_parameters(dtype=torch.bfloat16), master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert_same_bits([mine[k] for k in theirs], list(theirs.values()))
    for p, q in zip(other.param_groups[0]["params"], params, strict=True):
        assert torch.equal(p, q), "the parameter is the loaded master's image"


def test_states_of_torch_load_and_wrong_ones_raise_before_anything_changes():
    params = plain_parameters()
    theirs = stepped(torch.optim.AdamW(plain_parameters(), lr=0.03), 4)
    mine = AdamW(params)
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == 0.03
    assert all(state["step"].item() == 4.0 for state in mine.state.values())
    before = copy.deepcopy(mine.state_dict())
    amsgrad = stepped(torch.optim.AdamW(plain_parameters(), amsgrad=True), 1)
    narrow = stepped(AdamW(plain_parameters(), state_dtype=torch.bfloat16), 1)
    coded = stepped(AdamW8bit(plain_parameters()), 1)
    for wrong, text in ((amsgrad, "saved by another optimizer"), (narrow, "in torch.bfloat16"), (coded, "'exp_avg'")):
        with pytest.raises(ValueError, match=text):
            mine.load_state_dict(wrong.state_dict())
    with pytest.raises(ValueError, match=r"in the format 'power', but got 'dynamic' in group 0"):
        coded.load_state_dict(stepped(AdamW8bit(plain_parameters(), format="dynamic"), 1).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        mine.load_state_dict({"state": {}, "param_groups": []})
    for a, b in zip(before["state"].values(), mine.state.values(), strict=True):
        assert_same_bits(list(a.values()), [b[k] for k in a])


def test_a_parameter_that_a_state_dict_lacks_begins_anew():
    first, second = (stepped(AdamW(plain_parameters([(4, 5), (6,)])), 2) for _ in range(2))
    saved = first.state_dict()
    saved["state"] = {0: saved["state"][0]}
    second.load_state_dict(saved)
    steps = [state["step"].item() for state in second.state.values()]
    assert steps == [2.0, 0.0]


def test_schedulers_closures_hooks_and_tensor_rates():
    params = plain_parameters([(5, 6)])
    optimizer = AdamW(params, lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    other_params = plain_parameters([(5, 6)])
    other = torch.optim.AdamW(other_params, lr=0.1)
    other_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=4)

    def closure_of(params):
        def closure():
            assert torch.is_grad_enabled()
            loss = sum(p.square().sum() for p in params)
            for p in params:
                p.grad = None
            loss.backward()
            return loss

        return closure

    for _ in range(4):
        loss = optimizer.step(closure_of(params))
        torch.testing.assert_close(loss, other.step(closure_of(other_params)))
        scheduler.step(), other_scheduler.step()
    torch.testing.assert_close(params, other_params, rtol=1e-6, atol=1e-6)
    assert seen == ["before", "after"] * 4
    optimizer.zero_grad()
    assert params[0].grad is None
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(AdamW(params), 0.1, total_steps=5)  # cycles betas too
    one_cycle.optimizer.step(closure_of(params)), one_cycle.step()


def test_parameters_without_gradients_are_untouched_and_have_states():
    params = plain_parameters([(5, 6), (7,), (8,)])
    params[2].requires_grad_(False)
    optimizer = AdamW(params)
    params[0].grad = torch.ones(5, 6)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params[:2]] == [1.0, 0.0]
    assert_same_bits([p.detach() for p in params[1:]], [p.detach() for p in plain_parameters([(5, 6), (7,), (8,)])[1:]])
    assert set(optimizer.state_dict()["state"]) == {0, 1}, "a frozen parameter has no state"
    params[2].requires_grad_(True)
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}, "an unfrozen one does"
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert len(optimizer.state) == 4 and optimizer.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_gradient_scaler(make):
    def body(rank, world):
        mesh = make_mesh(world)
        # With the scale 1024 every product is exact, so the step is that of the true gradients.
        params, others = sharded_parameters(mesh), sharded_parameters(mesh)
        mine, other = make(params), make(others)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scaler.scale(torch.zeros(()))
        for step in range(4):
            give_gradients(params, step, 1024.0), give_gradients(others, step)
            if step == 2 and rank == world - 1:
                local = next(p.grad.to_local() for p in params if p.grad.to_local().numel())
                local[0] = float("inf")
            if step == 3:  # the scale was halved on every rank
                assert scaler.get_scale() == 512.0
                give_gradients(params, step, 512.0)
                scaler.unscale_(mine)
            scaler.step(mine)
            scaler.update()
            if step != 2:
                other.step()
        assert_same_bits(everything(mine), everything(other))
        assert not hasattr(mine, "found_inf")

    run_threads(3, body)


# ---- gradients that aren't finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_steps_with_bad_gradients_are_skipped_or_raise_on_all_ranks(make, bad):
    def body(rank, world):
        for policy in ("skip", "raise"):
            params = sharded_parameters(make_mesh(world))
            optimizer = stepped(make(params, nonfinite=policy), 2)
            before = everything(optimizer)
            give_gradients(params, 2)
            if rank == world - 1:
                next(p.grad.to_local() for p in params if p.grad.to_local().numel())[-1] = bad
            if policy == "raise":
                with pytest.raises(RuntimeError, match="Expected finite gradients, but got NaN or Inf in"):
                    optimizer.step()
            else:
                optimizer.step()
            assert_same_bits(everything(optimizer), before)
            assert optimizer.nonfinite_steps == 1
            assert copy.deepcopy(optimizer).nonfinite_steps == 1
            stepped(optimizer, 1)
            assert optimizer.nonfinite_steps == 1

    run_threads(3, body)


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, text",
    [
        ({"foreach": True}, "foreach None or False, but got True"),
        ({"fused": False}, "fused None or True"),
        ({"capturable": True}, "capturable=False"),
        ({"differentiable": True}, "differentiable=False"),
        ({"amsgrad": True}, "amsgrad=False"),
        ({"lr": -1.0}, "lr >= 0"),
        ({"lr": float("nan")}, "lr >= 0"),
        ({"betas": (0.9, 1.0)}, r"two betas in \[0, 1\)"),
        ({"eps": -1e-8}, "eps >= 0"),
        ({"nonfinite": "skipp"}, "nonfinite to be one of"),
    ],
)
@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_options_out_of_range_raise(make, options, text):
    with pytest.raises(ValueError, match=text):
        make(plain_parameters([(3, 4)]), **options)


def test_bad_groups_and_parameters_raise_and_leave_the_optimizer_as_it_was():
    optimizer = AdamW(plain_parameters([(3, 4)]))
    param = torch.nn.Parameter(torch.ones(3))
    for group, text in [
        ({"params": [param], "weight_decy": 0.1}, "'weight_decy' in a parameter group. Did you mean 'weight_decay'"),
        ({"params": []}, "parameters in each group, but got none in group 1"),
        ({"params": [param], "state_dtype": torch.float16}, "state_dtype float32 or bfloat16"),
        ({"params": [torch.nn.Parameter(torch.ones(3).double())]}, "or float16, but got torch.float64"),
        ({"params": [torch.nn.Parameter(torch.ones(3, device="meta"))]}, "one on the meta device"),
    ]:
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [param], "_mine": 1})
    with pytest.raises(ValueError, match="format to be one of"):
        AdamW8bit([param], format="linear")
    with pytest.raises(ValueError, match="matrices where state_format is 'power'"):
        AdamW8bit([{"params": [param], "state_format": "power"}])
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="gradients that lie as their parameters do, dense"):
        optimizer.step()


def test_shapes_cover_what_they_claim():
    assert {shape[-2] for shape in SHAPES if len(shape) > 1} >= {1, 31, 32, 33, 40}
