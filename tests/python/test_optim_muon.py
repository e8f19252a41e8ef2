"""ragged_fsdp.optim.Muon on tensors: against torch.optim.Muon with its iteration in fp32, against the unsharded step
bit for bit, and what is told from it that no matrix is. Models and checkpoints are in fsdp/test_optim.py."""

import copy
import math

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import make_mesh, values
from support.optim import assert_same_bits, everything, give_gradients, plain_parameters, sharded_parameters
from support.optim import randomly_sharded as sharded
from support.optim import stepped, whole
from support.ranks import run_ranks, run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_fsdp import _C, RaggedShard, distribute_tensor
from ragged_fsdp.optim import AdamW, Muon, muon_groups

pytestmark = pytest.mark.skipif(not hasattr(_C, "MuonPlan"), reason="the extension has no Muon")

MATRICES = [(24, 40), (40, 24), (33, 33), (1, 7), (64, 5)]
EXACT = {"wire_dtype": torch.float32, "ns_dtype": torch.float32}


def orthogonalised(grad, ns_coefficients, ns_steps, eps):
    """torch's iteration without its casts to bfloat16."""
    a, b, c = ns_coefficients
    x = grad.double().T if grad.size(0) > grad.size(1) else grad.double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if grad.size(0) > grad.size(1) else x).to(grad.dtype)


# ---- against torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.8}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_steps": 3},
     {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8}],
)  # fmt: skip
@pytest.mark.parametrize("world", [1, 3])
def test_twenty_steps_equal_those_of_torch_in_fp32(monkeypatch, options, world):
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalised)
    theirs = stepped(torch.optim.Muon(plain_parameters(MATRICES), lr=0.02, **options), 20)
    want = [p.detach() for p in theirs.param_groups[0]["params"]]

    def body(rank, world):
        ours = sharded(world, MATRICES)
        stepped(Muon(ours, lr=0.02, **options, **EXACT), 20)
        return [whole(p) for p in ours]

    for got in run_threads(world, body):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_default_steps_are_torchs_to_some_percent():
    begin, ours, theirs = (plain_parameters(MATRICES[:3]) for _ in range(3))
    stepped(Muon(ours, lr=0.02, weight_decay=0.0), 1), stepped(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0), 1)
    for a, b, p in zip(ours, theirs, begin, strict=True):
        assert (a - b).norm() <= 0.08 * (b - p).norm()


# ---- sharded is unsharded, bit for bit -----------------------------------------------------------------------------

SHAPES = [*MATRICES, (3, 12, 20), (2, 2, 5, 9)]


@pytest.mark.parametrize("options", [EXACT, {}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_sharded_steps_equal_unsharded_bit_for_bit(options, world):
    want = everything(stepped(Muon(plain_parameters(SHAPES), **options)))

    def body(rank, world):
        return everything(stepped(Muon(sharded(world, SHAPES, seed=world), **options)))

    for got in run_threads(world, body):
        assert_same_bits(got, want)


@pytest.mark.parametrize("replicas", ["repeat", "share"])
def test_replicas_of_a_hybrid_mesh_take_the_same_step(replicas):
    want = everything(stepped(Muon(plain_parameters(SHAPES))))

    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        params = sharded(2, SHAPES, mesh=mesh, wrap=lambda ragged: [Replicate(), ragged])
        return everything(stepped(Muon(params, replicas=replicas)))

    for got in run_threads(4, body):
        assert_same_bits(got, want)


def test_stock_dtensors_take_the_same_step():
    want = everything(stepped(Muon(plain_parameters(SHAPES[:6]))))

    def body(rank, world):
        mesh, params = make_mesh(world), []
        for i, param in enumerate(plain_parameters(SHAPES[:6])):
            placement = Replicate() if i == 3 else Shard(0)
            params.append(torch.nn.Parameter(stock.distribute_tensor(param.detach(), mesh, [placement])))
        return everything(stepped(Muon(params)))

    for got in run_threads(3, body):
        assert_same_bits(got, want)


def test_each_matrix_of_a_stack_or_a_fused_weight_is_one():
    stack = torch.nn.Parameter(values((3, 12, 20)))
    fused = torch.nn.Parameter(values((30, 20), seed=1))
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    parts = [torch.nn.Parameter(part.clone()) for part in fused.detach().split([20, 5, 5])]
    together = Muon([{"params": [stack]}, {"params": [fused], "splits": (20, 5, 5)}])
    alone = Muon([*apart, *parts])
    for step in range(3):
        stack.grad, fused.grad = values((3, 12, 20), seed=10 + step), values((30, 20), seed=20 + step)
        for param, grad in zip([*apart, *parts], [*stack.grad, *fused.grad.split([20, 5, 5])], strict=True):
            param.grad = grad.clone()
        together.step(), alone.step()
    want = [torch.stack([p.detach() for p in apart]), torch.cat([p.detach() for p in parts])]
    assert_same_bits([stack.detach(), fused.detach()], want)


def test_masters_are_exact_and_parameters_their_image():
    low = plain_parameters(MATRICES, torch.bfloat16)
    high = [torch.nn.Parameter(p.detach().float()) for p in low]
    mine, exact = Muon(low, master_weights=True), Muon(high)
    for step in range(3):
        give_gradients(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        mine.step(), exact.step()
    for p, q in zip(low, high, strict=True):
        assert_same_bits([mine.state[p]["master"], p.detach()], [q.detach(), q.detach().bfloat16()])


# ---- NorMuon, and momenta in 8 bits --------------------------------------------------------------------------------

TILED = [(1, 4200), (31, 140), (32, 130), (33, 129), (40, 105), (200, 33), (3, 40, 70), (5, 8), (0, 3)]


class RowTwin:
    """NorMuon's update of one matrix (arXiv 2510.05491) from the momentum, in double precision."""

    def __init__(self, param, beta):
        self.param, self.beta, self.square = param.detach().double(), beta, torch.zeros(param.shape[0]).double()
        self.momentum = torch.zeros(param.shape).double()

    def step(self, grad, lr):
        self.momentum = 0.95 * self.momentum + 0.05 * grad.double()
        nesterov = 0.95 * self.momentum + 0.05 * grad.double()
        update = orthogonalised(nesterov, (3.4445, -4.7750, 2.0315), 5, 1e-30)
        self.square = self.beta * self.square + (1 - self.beta) * (update**2).mean(1)
        scaled = update / self.square.sqrt()[:, None]
        scaled *= update.norm() / scaled.norm()
        self.param -= lr * max(1, self.param.shape[0] / self.param.shape[1]) ** 0.5 * scaled


@pytest.mark.parametrize("world", [1, 3])
def test_normuon_divides_rows_by_the_root_of_their_moving_mean_square(world):
    def body(rank, world):
        params = sharded(world, MATRICES)
        optimizer = Muon(params, lr=0.02, weight_decay=0.0, normuon=True, row_beta2=0.9, **EXACT)
        twins = [RowTwin(whole(p), 0.9) for p in params]
        for step in range(6):
            stepped(optimizer, 1, first=step)
            for param, twin in zip(params, twins, strict=True):
                twin.step(whole(param.grad), 0.02)
                torch.testing.assert_close(whole(param).double(), twin.param, rtol=1e-4, atol=1e-5)
                rows = whole(optimizer.state[param]["row_exp_avg_sq"]).double()
                torch.testing.assert_close(rows, twin.square, rtol=1e-4, atol=1e-6)
        return True

    assert run_threads(world, body) == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_normuon_sharded_equals_unsharded_bit_for_bit(world):
    want = everything(stepped(Muon(plain_parameters(SHAPES), normuon=True)))

    def body(rank, world):
        return everything(stepped(Muon(sharded(world, SHAPES, seed=world), normuon=True)))

    for got in run_threads(world, body):
        assert_same_bits(got, want)


@pytest.mark.parametrize("options", [{"momentum_format": "power", "normuon": True}, {"momentum_format": "dynamic"}])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_momenta_in_tiles_sharded_equal_unsharded_bit_for_bit(options, world):
    want = everything(stepped(Muon(plain_parameters(TILED), **options)))

    def body(rank, world):
        return everything(stepped(Muon(sharded_parameters(make_mesh(world), TILED, seed=world), **options)))

    for got in run_threads(world, body):
        assert_same_bits(got, want)


@pytest.mark.parametrize("momentum_format", ["power", "dynamic"])
def test_a_step_from_codes_is_the_step_from_what_they_decode_to(momentum_format):
    (coded,), (exact,) = plain_parameters([(70, 45)]), plain_parameters([(70, 45)])
    mine, other = Muon([coded], momentum_format=momentum_format), Muon([exact])
    for step in range(4):
        state, place = mine.state[coded], ((70, 45), 0, 70 * 45, momentum_format, True)
        before = _C.decode_tiles(state["momentum_codes"].reshape(-1), state["momentum_scales"].reshape(-1), *place)
        with torch.no_grad():
            other.state[exact]["momentum_buffer"].copy_(before.view(70, 45)), exact.copy_(coded)
        stepped(mine, 1, first=step), stepped(other, 1, first=step)
        assert_same_bits([coded.detach()], [exact.detach()])
        after = _C.decode_tiles(state["momentum_codes"].reshape(-1), state["momentum_scales"].reshape(-1), *place)
        want = other.state[exact]["momentum_buffer"]
        assert (after.view(70, 45) - want).norm() < 0.02 * want.norm()


def test_groups_have_formats_of_their_own_and_flattened_tiles_are_those_of_the_flat_matrix():
    kernel, flat = torch.nn.Parameter(values((40, 3, 5, 3))), torch.nn.Parameter(values((40, 3, 5, 3)).reshape(40, 45))
    shapes = [(40, 45), (33, 34)]
    rest, alone = plain_parameters(shapes), plain_parameters(shapes)
    tiles = {"momentum_format": "power", "normuon": True, "row_beta2": 0.9}
    mine = Muon([{"params": [kernel], "flatten": True, **tiles}, {"params": rest, "momentum_format": "bf16"}])
    others = [Muon([flat], **tiles), Muon(alone, state_dtype=torch.bfloat16)]
    for step in range(4):
        flat.grad = values((40, 45), seed=step)
        kernel.grad = flat.grad.reshape(kernel.shape).clone()
        give_gradients(rest, step), give_gradients(alone, step)
        for optimizer in (mine, *others):
            optimizer.step()
    assert_same_bits([t.reshape(-1) for t in everything(mine)], [t.reshape(-1) for o in others for t in everything(o)])
    assert mine.state[kernel]["momentum_scales"].shape == (2, 2) and mine.state[kernel]["row_exp_avg_sq"].shape == (40,)
    assert [line.split()[-4:] for line in mine.table().splitlines()[1:-1]] == [
        ["32x32", "32", "rows", f"{1800 + 16 + 160:,}"], ["muon", "bf16", "element", "3,600"],
        ["muon", "bf16", "element", "2,244"],
    ]  # fmt: skip


def test_stock_dtensors_and_flattened_ones_cut_by_rows_keep_tiles_and_rows():
    shapes, options = [(64, 45), (128, 2, 5, 3)], {"momentum_format": "power", "normuon": True}

    def groups(params):
        return [{"params": params[:1]}, {"params": params[1:], "flatten": True}]

    want = everything(stepped(Muon(groups(plain_parameters(shapes)), **options)))

    def body(rank, world):
        mesh = make_mesh(world)
        params = [
            torch.nn.Parameter(stock.distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain_parameters(shapes)
        ]
        return everything(stepped(Muon(groups(params), **options)))

    for got in run_threads(2, body):
        assert_same_bits(got, want)


def test_a_cut_through_a_tile_names_the_remedy_on_all_ranks_alike():
    def body(rank, world):
        param = distribute_tensor(values((64, 8)), make_mesh(world), [RaggedShard(1, (1, 3), (64, 8))])
        with pytest.raises(ValueError, match="strips of 32 rows") as error:
            Muon([("w", torch.nn.Parameter(param))], momentum_format="power")
        kernel = distribute_tensor(values((64, 2, 4)), make_mesh(world), [RaggedShard(1, (1, 3), (64, 2, 4))])
        with pytest.raises(ValueError, match=r"Let shard_policy return ragged_fsdp.blocks.elements\(256\) for it"):
            Muon([{"params": [torch.nn.Parameter(kernel)], "flatten": True, "momentum_format": "power"}])
        assert "(param 'w'). Shard with fully_shard(.., shard_policy=ragged_fsdp.optim.tile_rows)" in str(error.value)
        return str(error.value)

    texts = run_threads(2, body)
    assert texts[0] == texts[1]
    assert texts[0].endswith("or give this parameter momentum_format='fp32' in a group of its own.")


# ---- collectives ---------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls = getattr(self, "calls", 0) + 1
        return func(*args, **(kwargs or {}))


def count_collectives(rank, world):
    """Of a step over two units with cut matrices, and over matrices that ranks hold whole."""
    counts = []
    for cut in (True, False):
        params = []
        for i, shape in enumerate([(24, 40), (16, 8), (12, 12), (9, 4)]):
            units = (1, 1) if cut and shape[0] % 2 == 0 else (1, 0)
            placements = [RaggedShard(1, units, shape)]
            param = torch.nn.Parameter(distribute_tensor(values(shape), make_mesh(world), placements))
            param._ragged_fsdp_unit_number = i // 2  # as fully_shard leaves it
            params.append(param)
        optimizer = Muon(params)
        give_gradients(params, 0)
        with Counted() as counted:
            optimizer.step()
        counts.append(getattr(counted, "calls", 0))
    return counts


def test_two_collectives_for_each_unit_with_cut_matrices_and_none_for_whole_ones():
    assert run_ranks(2, count_collectives) == [[4, 0]] * 2


# ---- groups, options, states -----------------------------------------------------------------------------------------


def test_what_is_no_matrix_gets_adamw_in_the_same_step():
    named = [("embed.weight", (10, 6)), ("layers.0.w", (12, 20)), ("layers.0.b", (20,)), ("lm_head.weight", (10, 6))]

    def parameters():
        return [(name, torch.nn.Parameter(values(shape, seed=i))) for i, (name, shape) in enumerate(named)]

    params, others = parameters(), parameters()
    groups = muon_groups(params)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["layers.0.w"], ["embed.weight", "layers.0.b", "lm_head.weight"],
    ]  # fmt: skip
    optimizer = Muon(groups, lr=0.01, weight_decay=0.05)
    alone = AdamW([p for i, (_, p) in enumerate(others) if i != 1], lr=0.01, betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(4):
        give_gradients([p for _, p in params], step), give_gradients([p for _, p in others], step)
        optimizer.step(), alone.step()
    for i in (0, 2, 3):
        assert_same_bits([params[i][1].detach()], [others[i][1].detach()])
    assert not torch.equal(params[1][1], values((12, 20), seed=1))
    assert set(optimizer.state[params[1][1]]) == {"momentum_buffer"}
    with pytest.raises(ValueError, match="a parameter of two dims whose name isn't excluded"):
        muon_groups([("b", params[2][1])])


def test_mistakes_raise_at_construction():
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in [(4, 6), (6,)])
    for params, options, text in [
        ([("norm.weight", vector)], {}, r"\(6,\) \(param 'norm.weight'\). Put it into a group with algorithm='adamw'"),
        ([matrix], {"adjust_lr_fn": "spectral"}, "'original' or 'match_rms_adamw'"),
        ([matrix], {"eps": 1e-8}, "there is nothing for it to do"),
        ([matrix], {"ns_coefficients": "kellr"}, "kellr"),
        ([matrix], {"ns_coefficients": (1.0, 2.0)}, "name of a set or three numbers"),
        ([matrix], {"ns_coefficients": (1.0, 2.0, float("nan"))}, "name of a set or three numbers"),
        ([matrix], {"momentum": 1.0}, r"momentum in \[0, 1\)"),
        ([matrix], {"replicas": "both"}, "'repeat' or 'share'"),
        ([matrix], {"row_beta2": 1.0}, r"row_beta2 in \[0, 1\)"),
        ([matrix], {"momentum_format": "fp8"}, "momentum_format to be one of"),
        ([matrix], {"state_dtype": torch.float16}, "state_dtype float32 or bfloat16"),
        ([{"params": [matrix], "algorithm": "adamw", "normuon": True}], {}, "options of adamw in a group"),
        ([matrix], {"wire_dtype": torch.float16}, "wire_dtype float32 or bfloat16"),
        ([{"params": [matrix], "betas": (0.9, 0.9)}], {}, "options of muon in a group with algorithm 'muon'"),
        ([{"params": [matrix], "algorithm": "adamw", "nesterov": True}], {}, "options of adamw in a group"),
        ([{"params": [matrix], "algorithm": "sgd"}], {}, "algorithm 'muon' or 'adamw'"),
        ([{"params": [matrix], "splits": (3, 2)}], {}, "splits of at least 1 row that add up to 4"),
    ]:
        with pytest.raises(ValueError, match=text):
            Muon(params, **options)


def test_tensor_parallel_pieces_of_a_matrix_raise_and_whole_experts_do_not():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns = [RaggedShard(1, (1, 1), (8, 5)), Shard(1)]
        rows = [Shard(0), RaggedShard(1, (1, 1), (4, 10))]
        for placements in (columns, rows):
            shard = distribute_tensor(values((8, 10)), mesh, placements)
            with pytest.raises(ValueError, match="whole matrices across tensor-parallel ranks"):
                Muon([torch.nn.Parameter(shard)])
        full = values((4, 6, 5))
        experts = torch.nn.Parameter(
            distribute_tensor(full, mesh, [Shard(0), RaggedShard(3, (1, 2), (2, 6, 5))], src_data_rank=None)
        )
        return everything(stepped(Muon([experts])))

    want = everything(stepped(Muon([torch.nn.Parameter(values((4, 6, 5)))])))
    for got in run_threads(4, body):
        assert_same_bits(got, want)


def test_schedulers_may_change_rate_and_momentum():
    params, others = plain_parameters(MATRICES), plain_parameters(MATRICES)
    mine, other = Muon(params, momentum=0.5), Muon(others, momentum=0.9)
    mine.param_groups[0]["momentum"], mine.param_groups[0]["lr"] = 0.9, other.param_groups[0]["lr"]
    plans = mine._plans_of(0)
    assert_same_bits(everything(stepped(mine)), everything(stepped(other)))
    assert mine._plans_of(0) is plans, "a schedule of the momentum costs no plan, which would be a collective"
    mine.param_groups[0]["momentum"] = 1.0
    with pytest.raises(ValueError, match=r"momentum in \[0, 1\)"):
        mine.step()
    mine.param_groups[0]["momentum"] = 0.9
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.1)
    mine.step(), scheduler.step()
    assert math.isclose(mine.param_groups[0]["lr"], 1e-4)


@pytest.mark.parametrize("options", [{}, {"momentum_format": "power", "normuon": True}], ids=["fp32", "8 bits"])
@pytest.mark.parametrize("way", ["state dict", "deepcopy"])
def test_a_restored_optimizer_continues_bit_for_bit(way, options):
    params = plain_parameters(MATRICES)
    optimizer = stepped(Muon(params, **options), 3)
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        again = copy.deepcopy(params)
        other = Muon(again, **options)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_bits(everything(stepped(other, 3, first=3)), everything(stepped(optimizer, 3, first=3)))


def test_states_in_another_format_raise_and_change_nothing():
    saved = stepped(Muon(plain_parameters([(40, 33)]), momentum_format="power", normuon=True), 2).state_dict()
    for options, text in [
        ({"momentum_format": "dynamic", "normuon": True}, "Build the optimizer with momentum_format='power'"),
        ({"normuon": True}, "Build the optimizer with momentum_format='power'"),
        ({"momentum_format": "power"}, r"Expected the states \['momentum_codes', 'momentum_scales'\], but got"),
    ]:
        optimizer = stepped(Muon(plain_parameters([(40, 33)]), **options), 1)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(copy.deepcopy(saved))
        assert_same_bits(everything(optimizer), before)


def test_parameters_without_gradients_are_untouched():
    params = plain_parameters(MATRICES)
    optimizer = Muon(params)
    params[1].grad = torch.ones(MATRICES[1])
    optimizer.step()
    for i, (p, q) in enumerate(zip(params, plain_parameters(MATRICES), strict=True)):
        assert torch.equal(p, q) == (i != 1)
    assert all((optimizer.state[p]["momentum_buffer"] == 0).all() for i, p in enumerate(params) if i != 1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_size_of_the_gradient_does_not_matter(scale):
    (small,), (plain,) = plain_parameters([(8, 12)]), plain_parameters([(8, 12)])
    mine, other = (Muon([p], weight_decay=0.0, momentum=0.0, **EXACT) for p in (small, plain))
    small.grad, plain.grad = values((8, 12), seed=1) * scale, values((8, 12), seed=1)
    mine.step(), other.step()
    assert (small - plain).norm() <= 1e-4 * (plain - plain_parameters([(8, 12)])[0]).norm()
    small.grad.zero_()
    before = small.detach().clone()
    mine.step()
    assert torch.equal(small, before), "a matrix of zeros gives no update"
