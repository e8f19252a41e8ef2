"""What users of FSDP2 have reported, each as a small reproduction: it works here, or an error says plainly that it
doesn't.

The number in a test's docstring is the public issue. Not repeated here: generate() and other methods
(test_forward_methods.py, transformers #42436), extension with an int for reshard_after_forward (test_extensions.py,
#154836), saving on three ranks and loading on two or four (test_state_dict.py, torchtitan #811), copies on the
critical path (test_counts.py, #157027), data parallelism without shards (test_hsdp.py, #152710). What needs a GPU
to show isn't here; costs in time are in bench/.
"""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MLP, Adapted, TinyLM, next_token_loss, stack
from test_training import train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import (
    assert_close,
    assert_same_model,
    backward_of_all_ranks,
    full,
    is_sharded,
    mesh,
    only_ours,
    processes,
    randn,
    rank,
    seeded,
    shard,
    subject,
    threads,
    tokens,
    world,
)

pytestmark = only_ours("these are the reports about FSDP2")


# --- uneven shards, padding, empty ranks --------------------------------------------------------------------------


def test_fewer_rows_than_ranks():
    """#137342: three rows on four ranks; and columns that don't divide."""

    def body():
        build = lambda: nn.Linear(8, 3)
        model = shard(seeded(build))
        train(model, seeded(build), lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean(), steps=3)
        wide = lambda: nn.Linear(10, 4)
        model = shard(seeded(wide), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))
        train(model, seeded(wide), lambda m, s, r: m(randn(2, 10, step=s, of_rank=r)).square().mean(), steps=3)

    threads(4, body)


@pytest.mark.parametrize("ranks", [4, 8])
def test_stacked_experts_are_not_padded(ranks):
    """torchtitan #1561: three experts on four or eight ranks pad to 4/3 or 8/3 where a rank owns whole experts."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 16, 16))

        def forward(self, x):
            return torch.einsum("td,edh->th", x, self.w)

    def body():
        model = shard(seeded(Experts))
        train(model, seeded(Experts), lambda m, s, r: m(randn(2, 16, step=s, of_rank=r)).square().mean(), steps=2)
        held = subject().stats(model)["peak_image_bytes"]
        assert held <= 1.05 * model.w.numel() * 4, held

    threads(ranks, body)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_optimizers_and_clipping_where_ranks_own_nothing(options):
    """Automodel #2997, dion #74: a bias of one element on four ranks leaves three with an empty piece."""

    def body():
        build = lambda: nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))
        model, reference = seeded(build), seeded(build)
        shard(model, model)
        empty = torch.tensor([sum(p.to_local().numel() == 0 for p in model.parameters())])
        dist.all_reduce(empty)
        assert empty > 0, "the test needs empty pieces"
        mine, other = (torch.optim.AdamW(m.parameters(), lr=1e-3, **options) for m in (model, reference))
        for step in range(3):
            backward_of_all_ranks(reference, lambda m, r: m(randn(2, 4, step=step, of_rank=r)).square().mean())
            model(randn(2, 4, step=step)).square().mean().backward()
            for m in (model, reference):
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            for o in (mine, other):
                o.step()
                o.zero_grad()
        assert_same_model(model, reference, 1e-5, grads=False)

    threads(4, body)


@pytest.mark.parametrize("numel", [1, 2])
def test_tiny_parameter_alone_on_one_rank(numel):
    """#144045: a parameter of one or two elements in a unit of its own, in a world of one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(numel, 1, bias=False)

        def forward(self, x):
            return self.inner(x)

    def body():
        model = seeded(Model)
        shard(model, [model.inner])
        model(torch.ones(3, numel)).sum().backward()
        assert torch.equal(full(model.inner.weight.grad), torch.full((1, numel), 3.0))

    threads(1, body)


# --- tied weights -------------------------------------------------------------------------------------------------


def test_weights_tied_again_after_sharding():
    """#176076: embedding and head in units of their own, tied afterwards: with five rows on two ranks the last was
    never updated.
    """

    def body():
        model = seeded(lambda: TinyLM(vocab=5))
        subject().fully_shard(model.embed)
        subject().fully_shard(model.head)
        subject().fully_shard(model)
        with pytest.raises(Exception, match=r"embed\.weight|head\.weight") as error:
            model.head.weight = model.embed.weight
            next_token_loss(model, tokens(5, 2, 7)).backward()
        assert "fully_shard([" in str(error.value), "the remedy is the list form"

    threads(2, body)


def test_tied_weights_in_a_list_of_uneven_rows():
    def body():
        build = lambda: TinyLM(vocab=5, tied=True)
        model = seeded(build)
        shard(model, [[model.embed, model.head], *model.blocks])
        train(model, seeded(build), lambda m, s, r: next_token_loss(m, tokens(5, 2, 7, step=s, of_rank=r)), steps=3)

    threads(2, body)


# --- dtypes -------------------------------------------------------------------------------------------------------


def test_parameters_of_two_dtypes_in_one_unit():
    """#156784: a bf16 linear and an fp32 norm in one call."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.lin(x.bfloat16()).float())

    def body():
        model, reference = seeded(Mixed), seeded(Mixed)
        shard(model)
        backward_of_all_ranks(reference, lambda m, r: m(randn(4, 8, of_rank=r)).square().mean() * world())
        model(randn(4, 8)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.dtype == p.grad.dtype == q.dtype
            assert_close(
                full(p.grad).float(), q.grad.float() / world(), 2e-2 if q.dtype == torch.bfloat16 else 2e-6, name
            )

    threads(2, body)


def test_parameter_first_used_in_the_last_micro_batch():
    """#196996: one unit's gradients accumulate in fp32 while another's first one arrives in bf16."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, use_b):
            y = self.a(x)
            return self.b(y) if use_b else y

    def body():
        model = seeded(Skips)
        shard(model, mp_policy=subject().MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        model.set_requires_gradient_sync(False)
        model(randn(2, 8), False).sum().backward()
        model.set_requires_gradient_sync(True)
        model(randn(2, 8, step=1), True).sum().backward()
        reference = seeded(Skips).bfloat16()
        sums = None
        for r in range(world()):
            for step, use_b in ((0, False), (1, True)):
                reference.zero_grad()
                reference(randn(2, 8, step=step, of_rank=r).bfloat16(), use_b).sum().backward()
                mine = [
                    torch.zeros_like(p).float() if p.grad is None else p.grad.float() for p in reference.parameters()
                ]
                sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
        for (name, p), g in zip(model.named_parameters(), sums, strict=True):
            assert_close(full(p.grad), g / world(), 2e-6, name)

    threads(2, body)


def test_fp32_gradients_of_a_bf16_model():
    """#106395: reduced in fp32, the gradient of a bf16 parameter loses its digits when stored; asked for fp32, it
    keeps them or says no.
    """

    def body():
        model = seeded(lambda: nn.Linear(8, 8, bias=False)).bfloat16()
        try:
            for p in model.parameters():
                p.grad_dtype = torch.float32
            shard(model, mp_policy=subject().MixedPrecisionPolicy(reduce_dtype=torch.float32))
            model(randn(4, 8).bfloat16()).sum().backward()
        except Exception as error:
            assert "grad_dtype" in str(error)
        else:
            assert model.weight.grad.dtype == torch.float32, "silently rounded"

    threads(2, body)


def test_small_updates_survive_with_fp32_masters():
    """The remedy that always works: fp32 parameters, bf16 compute."""

    def body():
        model = seeded(lambda: nn.Linear(8, 8, bias=False))
        before = model.weight.detach().clone()
        shard(model, mp_policy=subject().MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = full(model.weight) - before
        assert (moved < 0).all() and moved.abs().max() < 1e-5

    threads(2, body)


# --- frozen parameters --------------------------------------------------------------------------------------------


def test_adapters_and_frozen_weight_in_one_unit():
    """#91167: one flag for a whole unit can't hold both; and the frozen part reserves no gradient memory."""

    def body():
        model = seeded(Adapted)
        shard(model)
        train(model, seeded(Adapted), lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean(), steps=3)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
        assert subject().stats(model)["peak_reduce_bytes"] <= 2 * 1.5 * trained

    threads(2, body)


def test_frozen_backbone_is_not_gathered_in_backward():
    """UniRL #321: nothing below the first trained unit needs parameters in backward."""

    def body():
        model = seeded(lambda: stack(4))
        for unit in model[:3]:
            unit.requires_grad_(False)
        shard(model, model)
        for step in range(2):
            loss = model(randn(2, 8, step=step)).sum()
            before = subject().stats(model)["all_gathers"]
            loss.backward()
            assert subject().stats(model)["all_gathers"] - before <= 1, "only the trained unit"

    threads(2, body)


def test_frozen_bytes_beside_adapters():
    """litgpt #1417: a frozen uint8 weight and bf16 adapters in a unit."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 255, (8, 8), dtype=torch.uint8), requires_grad=False)
            self.adapter = nn.Linear(8, 8, bias=False).bfloat16()

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) / 255 - 0.5) + self.adapter(x)

    def body():
        model, reference = seeded(Quantised), seeded(Quantised)
        shard(model)
        x = randn(2, 8).bfloat16()
        assert torch.equal(model(x), reference(x))
        model(x).sum().backward()
        assert model.codes.grad is None and model.adapter.weight.grad is not None
        assert torch.equal(full(model.codes), reference.codes)

    threads(2, body)


# --- unused, divergent, conditional -------------------------------------------------------------------------------


class Branches(nn.Module):
    """Which branch runs is the caller's choice: a mixture of experts without tokens, a modality that a batch lacks."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, branch):
        x = self.trunk(x)
        return {"a": self.a, "b": self.b}[branch](x)


def _divergent(separate):
    model, reference = seeded(Branches), seeded(Branches)
    shard(model, (model.trunk,) if separate else ())
    for step in range(3):
        pick = lambda r: "ab"[(r + step) % 2] if step < 2 else "a"
        backward_of_all_ranks(reference, lambda m, r: m(randn(2, 8, step=step, of_rank=r), pick(r)).square().sum())
        model(randn(2, 8, step=step), pick(rank())).square().sum().backward()
        assert_same_model(model, reference)
        assert all(p.grad is None for p in model.never.parameters()), "nobody used it"
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_use_different_parameters(ranks, separate):
    """#158719, torchtitan #2747: FSDP2 reduces what got a gradient, so that sizes differ by rank."""
    threads(ranks, _divergent, separate)


def test_ranks_that_use_different_parameters_over_gloo():
    processes(2, _divergent, False)


def _one_rank_skips():
    """The error text on the rank that waits; the group is its own, so that the default one stays whole."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    grid = DeviceMesh.from_group(group, "cpu")
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    shard(model, model, mesh=grid)
    model(randn(2, 8)).sum().backward()
    text = None
    if rank() == 0:
        try:
            model(randn(2, 8)).sum().backward()
        except Exception as error:
            text = str(error)
    dist.barrier()
    return text


def test_forward_on_one_rank_only_ends_with_the_units_name():
    """#148334: a collective that the others never join, and no word of which."""
    text = processes(2, _one_rank_skips)[0]
    assert text is not None, "it neither waited nor failed"
    assert "unit '0 to 1, 2 units'" in text, text
    assert "all_gather" in text and "rank 0 of 2" in text, text


def test_dead_branch():
    """#65195: parameters that no forward ever touches."""

    def body():
        model = seeded(Branches)
        shard(model, (model.a, model.b, model.never))
        reference = seeded(Branches)
        train(model, reference, lambda m, s, r: m(randn(2, 8, step=s, of_rank=r), "a").square().mean(), steps=3)

    threads(2, body)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.fail = stack(3), None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.fail == ("forward", i):
                raise ArithmeticError("out of something")
            x = layer(x)
            if self.fail == ("backward", i):
                x.register_hook(self._raise)
        return x

    @staticmethod
    def _raise(_):
        raise ArithmeticError("out of something")


def _recovers(where):
    model, reference = seeded(Fragile), seeded(Fragile)
    shard(model, model.layers)
    loss = lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean()
    train(model, reference, loss, steps=1)
    model.fail = where
    with pytest.raises(ArithmeticError):
        loss(model, 0, rank()).backward()
    model.fail = None
    model.zero_grad()
    train(model, reference, loss, steps=2)


@pytest.mark.parametrize("where", [("forward", 0), ("forward", 2), ("backward", 0), ("backward", 2)], ids=str)
def test_exception_then_a_good_step(where):
    """composer #3866: out of memory in one step, and every later one fails on what it left behind."""
    threads(2, _recovers, where)


def test_exception_then_a_good_step_over_gloo():
    processes(2, _recovers, ("backward", 1))


# --- several forwards, odd graphs ---------------------------------------------------------------------------------


class Stashes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out, self.h = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        self.h = self.lin(x).relu()
        return self.out(self.h)


@pytest.mark.parametrize("separate", [False, True])
def test_loss_of_a_tensor_that_was_not_returned(separate):
    """#173709 (a): a stashed activation; no hook sits on it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.tail = Stashes(), nn.Linear(8, 8)

        def forward(self, x):
            return self.tail(self.inner(x))

    def body():
        model = seeded(Model)
        shard(model, (model.inner, model.tail) if separate else ())

        def loss(m, step, r):
            m(randn(2, 8, step=step, of_rank=r))
            return m.inner.h.square().mean()

        train(model, seeded(Model), loss, steps=3)

    threads(2, body)


def test_in_place_change_of_an_output_that_is_a_view():
    """#173709 (b): autograd rewrites the view's history and drops the hook."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.again = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.again(self.lin(x)).view(-1, 4)

    def body():
        model = nn.Sequential(seeded(Viewed), nn.Flatten(0))
        reference = nn.Sequential(seeded(Viewed), nn.Flatten(0))
        shard(model, [model[0]])

        def loss(m, step, r):
            out = m[0](randn(2, 8, step=step, of_rank=r))
            out.add_(1)
            return out.square().mean()

        model(randn(2, 8))
        train(model, reference, loss, steps=3)

    threads(2, body)


def test_list_unit_of_which_a_module_is_called_again():
    """#173709 (c): fully_shard([norm, head]), the head called twice in a step."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)

        def forward(self, x):
            x = self.norm(self.body(x))
            return self.head(x) + self.head(x * 2).relu()

    def body():
        model = seeded(Model)
        shard(model, (model.body, [model.norm, model.head]))
        train(
            model,
            seeded(Model),
            lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean(),
            steps=3,
            tolerance=1e-5,
        )

    threads(2, body)


def test_parameter_read_outside_of_its_unit():
    """#156535: the parent uses a child's weight without calling the child: an error that says what to do."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(x, self.child.weight)

    def body():
        model = seeded(Parent)
        shard(model, [model.child])
        with pytest.raises(Exception, match=r"(?i)gather|unshard|full_tensor"):
            model(randn(2, 8))

    threads(2, body)


def test_average_of_parameters_without_a_copy_of_the_module():
    """#82070: deepcopy is refused; sharded clones do for a moving average, and give a full state dict."""

    def body():
        model, reference = seeded(stack), seeded(stack)
        shard(model, model)
        with pytest.raises(AssertionError, match="deepcopy"):
            copy.deepcopy(model)
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        plain = {n: p.detach().clone() for n, p in reference.named_parameters()}

        def update(m, step):
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(1.5 + step)

        for step in range(2):
            for m, mean in ((model, average), (reference, plain)):
                update(m, step)
                torch._foreach_lerp_(list(mean.values()), [p.detach() for p in m.parameters()], 0.1)
        for name, value in average.items():
            assert isinstance(value, DTensor)
            assert_close(full(value), plain[name], what=name)

    threads(3, body)


def test_what_parameters_are_after_forward():
    """#131965: None keeps the root's parameters and drops the others'; an explicit value holds for all."""

    def body():
        for option, root, child in ((None, False, True), (True, True, True), (False, False, False)):
            model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
            shard(model, [model[0]], reshard_after_forward=option)
            model(randn(2, 4))
            assert (is_sharded(model[1].parameters()), is_sharded(model[0].parameters())) == (root, child)

    threads(2, body)


# --- gradients ----------------------------------------------------------------------------------------------------


def test_clipping_returns_the_norm_of_all_ranks():
    """#170862: a norm that is one rank's part shows in logs that differ by rank."""

    def body():
        model = shard(m := seeded(stack), m)
        model(randn(2, 8)).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        whole = torch.stack([full(p.grad).norm() for p in model.parameters()]).norm()
        local = norm.to_local() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(local, whole)

    threads(3, body)


def test_register_hook_on_a_sharded_parameter_fires():
    """torchrec #4268: autograd never touches the sharded parameter; its hook is called all the same, once, with the
    gradient.
    """

    def body():
        model = shard(m := seeded(stack), m)
        seen = {}
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: seen.setdefault(name, []).append(g.shape))
        model(randn(2, 8)).square().sum().backward()
        assert seen == {n: [p.shape] for n, p in model.named_parameters()}

    threads(2, body)


def _mean_of_ones():
    model = shard(nn.Linear(4, 4, bias=False))
    model(torch.ones(1, 4)).sum().backward()
    return full(model.weight.grad)


def test_gradients_over_gloo_are_means_not_sums():
    """#162338: Gloo's reduce-scatter takes AVG for SUM without a word."""
    for gradient in processes(2, _mean_of_ones):
        assert torch.equal(gradient, torch.ones(4, 4))


class Fused(torch.autograd.Function):
    """A linear whose backward adds the weight's gradient where it is told to, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(g.t() @ x)
        return g @ weight, None


def test_weight_gradient_written_into_its_place():
    """TransformerEngine #2698: fused accumulation needs a buffer to write to; where there is none, nothing pretends."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return Fused.apply(x, self.weight) if hasattr(self.weight, "main_grad") else F.linear(x, self.weight)

    def body():
        model, reference = seeded(Layer), seeded(Layer)
        shard(model)
        backward_of_all_ranks(reference, lambda m, r: m(randn(2, 8, of_rank=r)).square().mean())
        model(randn(2, 8)).square().mean().backward()
        assert_same_model(model, reference)

    threads(2, body)


# --- memory and speed, as counts ----------------------------------------------------------------------------------


def test_many_small_parameters_share_one_allocation():
    """#134191: an optimizer may run over one flat tensor instead of a thousand."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.ps = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(200))

        def forward(self, x):
            return sum(x * p for p in self.ps)

    def body():
        model = shard(seeded(Many))
        model(randn(64)).sum().backward()
        owned = [p for p in model.parameters() if p.to_local().numel()]
        assert len({p.to_local().untyped_storage().data_ptr() for p in owned}) == 1
        assert len({p.grad.to_local().untyped_storage().data_ptr() for p in owned}) == 1

    threads(2, body)


# --- layouts and meshes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_tensor_parallelism_with_a_mesh_dimension_of_one(shape):
    """#119937: strided shards at their corner."""

    def body():
        grid = mesh(*shape, names=("dp", "tp"))
        model, reference = seeded(MLP), seeded(MLP)
        parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh=grid["dp"])
        replicas = shape[0]
        for r in range(replicas):
            (reference(randn(2, 8, of_rank=r)).square().sum() / replicas).backward()
        model(randn(2, 8, of_rank=rank() // shape[1])).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(full(p), q[1].detach(), msg=name)
            torch.testing.assert_close(full(p.grad), q[1].grad, msg=name)

    threads(2, body)


@pytest.mark.parametrize("policy,block", [("rows", 8 * 16), ("tile", 8 * 16), ("elements", 64)])
def test_no_border_cuts_a_quantisation_block(policy, block):
    """#169320: 8 by 8 blocks of a [20, 16] weight on three ranks; a row chunk of seven would cut them."""

    def body():
        api = subject()
        chosen = {"rows": lambda: api.rows(8), "tile": lambda: api.tile(8, 8), "elements": lambda: api.elements(64)}[
            policy
        ]()
        model = shard(seeded(lambda: nn.Linear(16, 20)), shard_policy=lambda name, p: chosen if p.ndim == 2 else None)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world())]
        dist.all_gather(sizes, torch.tensor([model.weight.to_local().numel()]))
        borders = torch.cumsum(torch.cat(sizes), 0).tolist()
        assert borders[-1] == 320
        assert all(b % block == 0 or b == 320 for b in borders), borders
        train(
            model,
            seeded(lambda: nn.Linear(16, 20)),
            lambda m, s, r: m(randn(2, 16, step=s, of_rank=r)).square().mean(),
            steps=2,
        )

    threads(3, body)


def newton_schulz(g, steps=5):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.t()
        x = 1.5 * x - 0.5 * a @ x
    return x


def test_matrix_update_on_the_rank_that_owns_the_matrix():
    """torchtitan #1630: Newton-Schulz needs a whole matrix; with whole() one rank has it and nobody gathers."""

    def body():
        build = lambda: nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])
        model = shard(seeded(build), shard_policy=lambda name, p: subject().whole())
        reference = seeded(build)
        backward_of_all_ranks(reference, lambda m, r: m(randn(3, 6, of_rank=r)).square().sum())
        model(randn(3, 6)).square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            local, grad = p.to_local(), p.grad.to_local()
            owners = torch.tensor([int(local.numel() == p.numel())])
            assert local.numel() in (0, p.numel())
            if owners:
                with torch.no_grad():
                    local.sub_(0.1 * newton_schulz(grad.view(6, 6)).flatten())
            dist.all_reduce(owners)
            assert owners == 1
            with torch.no_grad():
                q -= 0.1 * newton_schulz(q.grad)
            assert_close(full(p), q.detach(), 1e-5)

    threads(3, body)
