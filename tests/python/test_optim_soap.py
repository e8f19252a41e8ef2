"""ragged_fsdp.optim.SOAP on tensors: against the paper's algorithm in double precision, against the unsharded step bit
for bit, and what is told from it that no matrix is. Models and checkpoints are in fsdp/test_checkpoint.py, the bits of
`ragged train` in test_checkpoint_files.py."""

import copy
import io
import re

import pytest
import torch
import torch.distributed.tensor as stock
from support.layouts import make_mesh, values
from support.optim import assert_same_bits, everything, give_gradients, plain_parameters, stepped, whole
from support.optim import randomly_sharded as sharded
from support.ranks import run_ranks, run_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_fsdp import RaggedShard, RaggedTensor, distribute_tensor
from ragged_fsdp.optim import SOAP, AdamW, matrix_groups

MATRICES = [(24, 40), (40, 24), (33, 33), (1, 7), (31, 13), (64, 5)]
SHAPES = [*MATRICES, (3, 12, 20), (2, 2, 5, 9), (0, 3), (1, 11, 4)]
OFTEN = {"precondition_frequency": 2, "weight_decay": 0.1}


# ---- against the paper ---------------------------------------------------------------------------------------------


class Twin:
    """Algorithms 3 and 4 on one matrix in double precision. A basis isn't unique, so it is checked and taken over."""

    def __init__(self, param, betas, frequency, left, right):
        self.param = param.detach().double()
        self.betas, self.frequency = betas, frequency
        self.sides = [size if there else 0 for size, there in zip(param.shape, (left, right))]
        self.factors = [torch.zeros(size, size).double() for size in self.sides]
        self.bases = [torch.eye(size).double() for size in param.shape]
        self.mean, self.square = torch.zeros(param.shape).double(), torch.zeros(param.shape).double()
        self.steps = 0

    def step(self, grad, lr, decay, found):
        self.steps += 1
        grad, (b1, b2) = grad.double(), self.betas
        self.param = self.param * (1 - lr * decay)
        makes_basis = self.steps == 1 and any(self.sides)
        if not makes_basis:
            left, right = self.bases
            counted = self.steps - any(self.sides)
            self.mean = b1 * self.mean + (1 - b1) * grad
            self.square = b2 * self.square + (1 - b2) * (left.T @ grad @ right) ** 2
            first = (left.T @ self.mean @ right) / (1 - b1**counted)
            second = self.square / (1 - b2**counted)
            self.param = self.param - lr * left @ (first / (second.sqrt() + 1e-8)) @ right.T
        for i, gram in enumerate((grad @ grad.T, grad.T @ grad)):
            if not self.sides[i]:
                continue
            self.factors[i] = b2 * self.factors[i] + (1 - b2) * gram
            due = self.steps > 1 and (self.steps - 1) % self.frequency == 0
            if makes_basis or due:
                self.bases[i] = self._checked(self.factors[i], self.bases[i], found[i].double(), makes_basis)

    def _checked(self, factor, before, basis, first):
        size = 1e-5 * factor.abs().max()
        assert (basis.T @ basis - torch.eye(len(basis))).abs().max() < 1e-5
        if first:
            turned = basis.T @ factor @ basis
            assert (turned - torch.diag(turned.diagonal())).abs().max() < size
            assert (turned.diagonal().diff() < size).all(), "descending"
        else:
            assert (basis.T @ factor @ before).tril(-1).abs().max() < size
        return basis


@pytest.mark.parametrize("options", [{}, {"max_precondition_dim": 24}, {"betas": (0.9, 0.99), "weight_decay": 0.0}])
@pytest.mark.parametrize("world", [1, 3])
def test_eight_steps_are_those_of_the_paper(options, world):
    longest, betas = options.get("max_precondition_dim", 10000), options.get("betas", (0.95, 0.95))

    def body(rank, world):
        params = sharded(world, MATRICES)
        optimizer = SOAP(params, lr=0.02, precondition_frequency=3, **options)
        twins = [Twin(whole(p), betas, 3, *(size <= longest for size in p.shape)) for p in params]
        for step in range(8):
            stepped(optimizer, 1, first=step)
            for param, twin in zip(params, twins, strict=True):
                state = optimizer.state[param]
                found = [whole(state[key]) if key in state else None for key in ("Q_L", "Q_R")]
                twin.step(whole(param.grad), 0.02, options.get("weight_decay", 0.01), found)
                torch.testing.assert_close(whole(param).double(), twin.param, rtol=0, atol=1e-4)
                torch.testing.assert_close(whole(state["exp_avg_sq"]).double(), twin.square, rtol=1e-4, atol=1e-6)
        return True

    assert run_threads(world, body) == [True] * world


def test_without_bases_it_is_adamw():
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    mine = stepped(SOAP(plain_parameters(MATRICES), max_precondition_dim=0, **options), 4)
    other = stepped(AdamW(plain_parameters(MATRICES), **options), 4)
    for p, q in zip(mine.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert set(mine.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert_same_bits([mine.state[p]["exp_avg_sq"]], [other.state[q]["exp_avg_sq"]])


def test_the_first_gradient_makes_a_basis_and_updates_nothing():
    params = plain_parameters(MATRICES)
    optimizer = stepped(SOAP(params, weight_decay=0.0), 1)
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain_parameters(MATRICES)])
    for param in params:
        state = optimizer.state[param]
        assert state["step"] == 1 and (state["exp_avg"] == 0).all()
        assert (state["Q_L"].T @ state["Q_L"] - torch.eye(len(param))).abs().max() < 1e-5


# ---- sharded is unsharded, bit for bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16, "max_precondition_dim": 24}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_sharded_steps_equal_unsharded_bit_for_bit(options, world):
    want = everything(stepped(SOAP(plain_parameters(SHAPES), **OFTEN, **options)))

    def body(rank, world):
        optimizer = stepped(SOAP(sharded(world, SHAPES, seed=world), **OFTEN, **options))
        held = [value.to_local().numel() for state in optimizer.state.values() for key, value in state.items()
                if key.startswith(("L", "R", "Q_"))]  # fmt: skip
        return everything(optimizer), held

    ranks = run_threads(world, body)
    for got, _ in ranks:
        assert_same_bits(got, want)
    for sizes in zip(*(held for _, held in ranks), strict=True):
        assert sum(size > 0 for size in sizes) == 1, "each factor and basis whole on one rank"


def test_replicas_of_a_hybrid_mesh_take_the_same_step():
    want = everything(stepped(SOAP(plain_parameters(SHAPES), **OFTEN)))

    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        params = sharded(2, SHAPES, mesh=mesh, wrap=lambda ragged: [Replicate(), ragged])
        return everything(stepped(SOAP(params, **OFTEN)))

    for got in run_threads(4, body):
        assert_same_bits(got, want)


def test_stock_dtensors_take_the_same_step_stacks_of_experts_too():
    shapes = [*SHAPES[:7], (5, 4, 6)]
    want = everything(stepped(SOAP(plain_parameters(shapes), **OFTEN)))

    def body(rank, world):
        mesh, params = make_mesh(world), []
        for i, param in enumerate(plain_parameters(shapes)):
            placement = Replicate() if i == 3 else Shard(0)
            params.append(torch.nn.Parameter(stock.distribute_tensor(param.detach(), mesh, [placement])))
        return everything(stepped(SOAP(params, **OFTEN)))

    for got in run_threads(3, body):
        assert_same_bits(got, want)


def test_each_matrix_of_a_stack_or_a_fused_or_flattened_weight_is_one():
    stack, fused = torch.nn.Parameter(values((3, 12, 20))), torch.nn.Parameter(values((30, 20), seed=1))
    kernel = torch.nn.Parameter(values((6, 3, 2, 2), seed=2))
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    parts = [torch.nn.Parameter(part.clone()) for part in fused.detach().split([20, 5, 5])]
    flat = torch.nn.Parameter(kernel.detach().reshape(6, 12).clone())
    groups = [{"params": [stack]}, {"params": [fused], "splits": (20, 5, 5)}, {"params": [kernel], "flatten": True}]
    together, alone = SOAP(groups, **OFTEN), SOAP([*apart, *parts, flat], **OFTEN)
    for step in range(4):
        for i, param in enumerate((stack, fused, kernel)):
            param.grad = values(param.shape, seed=10 * i + step)
        grads = [*stack.grad, *fused.grad.split([20, 5, 5]), kernel.grad.reshape(6, 12)]
        for param, grad in zip([*apart, *parts, flat], grads, strict=True):
            param.grad = grad.clone()
        together.step(), alone.step()
    want = [torch.stack([p.detach() for p in apart]), torch.cat([p.detach() for p in parts]), flat.detach()]
    assert_same_bits([stack.detach(), fused.detach(), kernel.detach().reshape(6, 12)], want)
    assert_same_bits([together.state[fused]["Q_L_1"]], [alone.state[parts[1]]["Q_L"]])
    assert together.state[stack]["R_2"].shape == (20, 20)


def test_masters_are_exact_and_parameters_their_image():
    low = plain_parameters(MATRICES, torch.bfloat16)
    high = [torch.nn.Parameter(p.detach().float()) for p in low]
    mine, exact = SOAP(low, master_weights=True, **OFTEN), SOAP(high, **OFTEN)
    for step in range(4):
        give_gradients(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        mine.step(), exact.step()
    for p, q in zip(low, high, strict=True):
        assert_same_bits([mine.state[p]["master"], p.detach()], [q.detach(), q.detach().bfloat16()])


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
        for i, shape in enumerate([(24, 40), (24, 40), (12, 12), (12, 12)]):
            units = (1, 1) if cut else (i % 2, 1 - i % 2)
            placements = [RaggedShard(1, units, shape)]
            param = torch.nn.Parameter(distribute_tensor(values(shape), make_mesh(world), placements))
            param._ragged_fsdp_unit_number = i // 2  # as fully_shard leaves it
            params.append(param)
        optimizer = SOAP(params)
        give_gradients(params, 0)
        with Counted() as counted:
            optimizer.step()
        counts.append(getattr(counted, "calls", 0))
    return counts


def test_two_collectives_for_each_unit_with_cut_matrices_and_none_for_whole_ones():
    assert run_ranks(2, count_collectives) == [[4, 0]] * 2


# ---- groups and options --------------------------------------------------------------------------------------------


def named_parameters():
    shapes = [("embed.weight", (10, 6)), ("layers.0.w", (12, 20)), ("layers.1.w", (12, 20)), ("layers.0.b", (20,))]
    return [(name, torch.nn.Parameter(values(shape, seed=i))) for i, (name, shape) in enumerate(shapes)]


def test_what_is_no_matrix_gets_adamw_in_the_same_step():
    params, others = named_parameters(), named_parameters()
    optimizer = SOAP(matrix_groups(params), lr=0.01, weight_decay=0.05, adamw_state_dtype=torch.bfloat16)
    rest = [p for name, p in others if not name.endswith(".w")]
    alone = AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.05, state_dtype=torch.bfloat16)
    for step in range(4):
        give_gradients([p for _, p in params], step), give_gradients([p for _, p in others], step)
        optimizer.step(), alone.step()
    for i in (0, 3):
        assert_same_bits([params[i][1].detach()], [others[i][1].detach()])
    assert optimizer.state[params[1][1]]["exp_avg"].dtype == torch.float32


def test_groups_have_rates_and_bases_of_their_own():
    first, second = plain_parameters(MATRICES[:3]), plain_parameters(MATRICES[:3])
    options = [{"lr": 0.1, "max_precondition_dim": 30}, {"betas": (0.8, 0.9), "precondition_frequency": 1}]
    alone = [stepped(SOAP(group, **one)) for group, one in zip((first, second), options, strict=True)]
    groups = [{"params": plain_parameters(MATRICES[:3]), **one} for one in options]
    together = SOAP(groups)
    for step in range(5):
        for group in together.param_groups:
            give_gradients(group["params"], step)
        together.step()
    assert_same_bits(everything(together), everything(alone[0]) + everything(alone[1]))


def test_table_names_optimizer_states_and_bytes_of_layers_that_are_alike():
    lines = SOAP(matrix_groups(named_parameters())).table().splitlines()
    assert [line.split() for line in lines] == [
        "parameter shape optimizer states block bytes".split(),
        # 2 (12 x 12 + 20 x 20 + 12 x 20) numbers of 4 bytes, twice
        "layers.*.w x 2 12 x 20 soap fp32 matrix 12,544".split(),
        "embed.weight 10 x 6 adamw fp32 element 480".split(),
        "layers.*.b 20 adamw fp32 element 160".split(),
        "states on this rank 13,184".split(),
    ]

    def body(rank, world):
        lines = SOAP(sharded(world, [(12, 20), (12, 20)])).table().splitlines()
        return int(lines[-1].split()[-1].replace(",", ""))

    assert sum(run_threads(3, body)) == 12544


def test_mistakes_raise_at_construction():
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in [(4, 6), (6,)])
    for params, options, text in [
        ([("norm.weight", vector)], {}, r"\(6,\) \(param 'norm.weight'\). Put it into a group with algorithm='adamw'"),
        ([matrix], {"betas": (0.9, 1.0)}, r"two betas in \[0, 1\)"),
        ([matrix], {"eps": -1.0}, "eps >= 0"),
        ([matrix], {"lr": -1.0}, "lr >= 0"),
        ([matrix], {"precondition_frequency": 0}, "precondition_frequency of at least 1, a whole number, but got 0"),
        ([matrix], {"precondition_frequency": 2.5}, "at least 1, a whole number, but got 2.5"),
        ([matrix], {"max_precondition_dim": -1}, "max_precondition_dim of at least 0"),
        ([matrix], {"wire_dtype": torch.float16}, "wire_dtype float32 or bfloat16"),
        ([matrix], {"nonfinite": "stop"}, "nonfinite to be one of"),
        ([{"params": [matrix], "state_dtype": torch.bfloat16}], {}, "options of soap in a group with algorithm 'soap'"),
        ([{"params": [matrix], "algorithm": "adamw", "splits": (2, 2)}], {}, "options of adamw in a group"),
        ([{"params": [matrix], "algorithm": "muon"}], {}, "algorithm 'soap' or 'adamw'"),
        ([{"params": [matrix], "splits": (3, 2)}], {}, "splits of at least 1 row that add up to 4"),
        ([{"params": [matrix], "precondition_freqency": 3}], {}, "Did you mean 'precondition_frequency'"),
    ]:
        with pytest.raises(ValueError, match=text):
            SOAP(params, **options)


def test_parameters_that_tensor_parallelism_cuts_raise_on_all_ranks_alike():
    def body(rank, world):
        mesh, texts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
        for shape, placements in [
            ((8, 10), [RaggedShard(1, (1, 1), (8, 5)), Shard(1)]),
            ((4, 6, 5), [RaggedShard(1, (1, 1), (2, 6, 5)), Shard(0)]),
        ]:
            shard = distribute_tensor(values(shape), mesh, placements)
            with pytest.raises(ValueError, match="whole parameters across tensor-parallel ranks") as error:
                SOAP([torch.nn.Parameter(shard)])
            texts.append(str(error.value))
        return texts

    assert len({tuple(texts) for texts in run_threads(4, body)}) == 1


def test_schedulers_may_change_rates_betas_and_the_frequency():
    mine, other = SOAP(plain_parameters(MATRICES), precondition_frequency=7), SOAP(plain_parameters(MATRICES), **OFTEN)
    mine.param_groups[0].update(precondition_frequency=2, weight_decay=0.1)
    plans = mine._plans_of(0)
    assert_same_bits(everything(stepped(mine)), everything(stepped(other)))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(mine, 0.1, total_steps=10)
    before = mine.param_groups[0]["betas"]
    mine.step(), scheduler.step()
    assert mine.param_groups[0]["betas"] != before
    mine.step()
    assert mine._plans_of(0) is plans, "a schedule costs no plan, which would be a collective"
    mine.param_groups[0]["betas"] = (0.9, 1.5)
    with pytest.raises(ValueError, match="beta2"):
        mine.step()


# ---- what torch's optimizers do ------------------------------------------------------------------------------------


def test_parameters_without_gradients_are_untouched_their_count_included():
    params = plain_parameters(MATRICES)
    optimizer = stepped(SOAP(params, **OFTEN), 2)
    before = everything(optimizer)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert_same_bits(everything(optimizer), before)
    optimizer.zero_grad(set_to_none=False)
    params[1].grad = torch.ones(MATRICES[1])
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 3, 2, 2, 2, 2]


def test_closures_frozen_parameters_and_gradients_that_are_not_finite():
    params = plain_parameters(MATRICES[:3])
    params[2].requires_grad_(False)
    optimizer = SOAP(params, nonfinite="skip")
    assert params[2] not in optimizer.state

    def closure():
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params[:2])
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(12)]
    assert losses[-1] < losses[1] and torch.equal(params[2], plain_parameters(MATRICES[:3])[2])
    before = everything(optimizer)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert_same_bits(everything(optimizer), before)
    assert optimizer.nonfinite_steps == 1


@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_restored_optimizer_continues_bit_for_bit(way, world):
    def body(rank, world):
        params = sharded(world, SHAPES, seed=2)
        optimizer = stepped(SOAP(params, **OFTEN), 3)
        if way == "deepcopy":
            other = copy.deepcopy(optimizer)
        elif way == "pickle":
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            other = SOAP([torch.nn.Parameter(p.detach().clone()) for p in params], **OFTEN)
            other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        else:
            other = SOAP([torch.nn.Parameter(p.detach().clone()) for p in params])
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return everything(stepped(other, 3, first=3)), everything(stepped(optimizer, 3, first=3))

    want = everything(stepped(SOAP(plain_parameters(SHAPES), **OFTEN), 6))
    for again, straight in run_threads(world, body):
        assert_same_bits(straight, want)
        assert_same_bits(again, want)


def owners(optimizer):
    """By parameter, of its first state."""
    params = optimizer.param_groups[0]["params"]
    return [optimizer.state[param]["L"].ragged[1].local_units for param in params]


def test_states_follow_the_roots_that_another_frequency_gives():
    # Matrices whose roots differ between a refresh a step and none: costs of operations and memory balance otherwise.
    shapes = [(30, 20), (8, 70), (30, 70), (90, 70), (20, 30), (8, 90), (8, 90)]

    def body(rank, world):
        optimizer = stepped(SOAP(sharded(world, shapes, seed=4), precondition_frequency=1000), 2)
        optimizer.param_groups[0]["precondition_frequency"] = 1
        other = copy.deepcopy(optimizer)  # has no plan yet
        before = owners(other)
        stepped(other, 3, first=2), stepped(optimizer, 3, first=2)
        return before == owners(optimizer), before == owners(other), everything(other), everything(optimizer)

    for stayed, stayed_too, got, want in run_threads(3, body):
        assert stayed and not stayed_too, "else the test tests nothing"
        assert_same_bits(got, want)


def test_state_dicts_of_other_shapes_or_options_raise_and_change_nothing():
    saved = stepped(SOAP(plain_parameters([(12, 20)])), 2).state_dict()
    for build, text in [
        (lambda: SOAP(plain_parameters([(12, 20)]), max_precondition_dim=15), r"states \['L', 'Q_L', 'exp"),
        (lambda: SOAP(plain_parameters([(20, 12)])), r"'L' of shape \(20, 20\) in .*got shape \(12, 12"),
        (lambda: SOAP([{"params": plain_parameters([(12, 20)]), "splits": (6, 6)}]), r"Expected the states \['L_0', "),
        (lambda: AdamW(plain_parameters([(12, 20)])), r"Expected the states \['exp_avg', 'exp_avg_sq', 'step'\]"),
    ]:
        optimizer = stepped(build(), 1)
        before = everything(optimizer)
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(copy.deepcopy(saved))
        assert_same_bits(everything(optimizer), before)


def test_whole_states_of_one_process_load_into_any_number_of_ranks():
    optimizer = stepped(SOAP(plain_parameters(SHAPES), **OFTEN), 3)
    saved, want = copy.deepcopy(optimizer.state_dict()), everything(stepped(optimizer, 2, first=3))
    start = [p.detach() for p in stepped(SOAP(plain_parameters(SHAPES), **OFTEN), 3).param_groups[0]["params"]]

    def body(rank, world):
        params = sharded(world, SHAPES, seed=5)
        for param, value in zip(params, start, strict=True):
            with torch.no_grad():
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None))
        other = SOAP(params, **OFTEN)
        other.load_state_dict(copy.deepcopy(saved))
        return everything(stepped(other, 2, first=3))

    for got in run_threads(3, body):
        assert_same_bits(got, want)


def test_groups_added_later_are_stepped_too():
    params = plain_parameters(MATRICES[:2])
    optimizer, other = SOAP([params[0]], **OFTEN), SOAP(plain_parameters(MATRICES[:2]), **OFTEN)
    optimizer.add_param_group({"params": [params[1]]})
    assert_same_bits(everything(stepped(optimizer)), everything(stepped(other)))
    with pytest.raises(ValueError, match=re.escape("shape (3,)")):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2
