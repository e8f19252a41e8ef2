"""A thousand steps without a leak, several models and ranks in one process, checkpointing of both kinds, compiled
blocks.
"""

import datetime
import gc
import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from models import Block, TinyLM, next_token_loss, stack
from test_training import train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from harness import assert_same_model, mesh, only_ours, processes, randn, rank, seeded, shard, subject, threads, tokens

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * PAGE


def _thousand_steps():
    """Growth of resident bytes and of the number of Python objects over 1,000 steps after 500."""
    model = shard(m := seeded(lambda: stack(2, 32)), m)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = randn(2, 32)

    def run(steps):
        for step in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 0)
        gc.collect()
        return resident_bytes(), len(gc.get_objects())

    before, after = run(500), run(1000)
    return [b - a for a, b in zip(before, after, strict=True)]


def test_no_leak_in_a_thousand_steps():
    for grown, objects in processes(2, _thousand_steps, timeout=300):
        assert objects < 100, f"{objects} more Python objects after 1,000 steps"
        # One unit's image (33 KB) leaked a step would be 33 MB; the allocator's own wandering stays below one.
        assert grown < 4 << 20, f"{grown} bytes more after 1,000 steps"


def _left_over():
    model = shard(m := seeded(stack), m)
    model(randn(2, 8)).sum().backward()
    gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, m
    gc.collect()
    return sum(r() is not None for r in gone)


def test_a_model_is_freed_with_its_last_reference():
    """In processes: a collection that another thread has begun would make gc.collect() return at once."""
    assert processes(2, _left_over) == [0, 0]


def test_two_models_take_turns():
    def body():
        models = [shard(m := seeded(stack, seed), m) for seed in (1, 2)]
        references = [seeded(stack, seed) for seed in (1, 2)]
        for step in range(3):
            x = randn(2, 8, step=step)
            # Forward of both before a backward of either, and one inside the other's graph.
            a, b = models[0](x), models[1](x)
            b.square().mean().backward()
            a.square().mean().backward()
            for reference in references:
                for r in range(dist.get_world_size()):
                    (reference(randn(2, 8, step=step, of_rank=r)).square().mean() / dist.get_world_size()).backward()
            for model, reference in zip(models, references, strict=True):
                assert_same_model(model, reference)
                for m in (model, reference):
                    with torch.no_grad():
                        for p in m.parameters():
                            p -= 0.1 * p.grad
                            p.grad = None

    threads(2, body)


def test_two_models_chained_in_one_graph():
    def body():
        models = [shard(m := seeded(stack, seed), m) for seed in (1, 2)]
        references = [seeded(stack, seed) for seed in (1, 2)]
        models[1](models[0](randn(2, 8))).square().mean().backward()
        for r in range(dist.get_world_size()):
            (references[1](references[0](randn(2, 8, of_rank=r))).square().mean() / dist.get_world_size()).backward()
        for model, reference in zip(models, references, strict=True):
            assert_same_model(model, reference)

    threads(2, body)


def test_models_on_different_meshes():
    """One over all ranks, one over pairs: state hangs on the process group, not on the process."""

    def body():
        grid = mesh(2, 2, names=("a", "b"))
        whole, part = shard(m := seeded(stack, 1), m), shard(n := seeded(stack, 2), n, mesh=grid["b"])
        reference = seeded(stack, 2)
        x = randn(2, 8)
        (whole(x).square().mean() + part(x).square().mean()).backward()
        pair = [r for r in range(4) if r // 2 == rank() // 2]
        for r in pair:
            (reference(randn(2, 8, of_rank=r)).square().mean() / 2).backward()
        assert_same_model(part, reference)

    threads(4, body)


@pytest.mark.parametrize("ranks", [2, 5])
def test_worlds_one_after_another_in_a_process(ranks):
    """Groups come and go; nothing of an earlier world shows in a later one."""

    def body():
        train(
            shard(m := seeded(stack), m),
            seeded(stack),
            lambda m, s, r: m(randn(2, 8, step=s, of_rank=r)).square().mean(),
            steps=2,
        )

    for n in (ranks, 1, ranks):
        threads(n, body)


class Checkpointed(nn.Module):
    """Calls its units under torch's checkpoint function: recomputation runs the units' own forward hooks."""

    def __init__(self, reentrant):
        super().__init__()
        self.embed, self.blocks, self.reentrant = (
            nn.Linear(12, 12),
            nn.ModuleList(Block(12, 3) for _ in range(3)),
            reentrant,
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint_function_around_units(reentrant, reshard):
    def body():
        build = lambda: Checkpointed(reentrant)
        model = seeded(build)
        shard(model, model.blocks, reshard_after_forward=reshard)
        train(model, seeded(build), lambda m, s, r: m(randn(2, 4, 12, step=s, of_rank=r)).square().mean(), steps=3)

    threads(2, body)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint_function_inside_units(reentrant):
    class Inside(Block):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    def body():
        build = lambda: nn.Sequential(nn.Linear(12, 12), Inside(12, 3), Inside(12, 3))
        model = seeded(build)
        shard(model, model[1:])
        train(model, seeded(build), lambda m, s, r: m(randn(2, 4, 12, step=s, of_rank=r)).square().mean(), steps=3)

    threads(2, body)


@pytest.mark.parametrize("wrap_first", [True, False], ids=["wrapper-inside", "wrapper-outside"])
@pytest.mark.parametrize(
    "impl", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT], ids=["reentrant", "non-reentrant"]
)
def test_checkpoint_wrapper_inside_and_outside(impl, wrap_first):
    def body():
        model, reference = seeded(TinyLM), seeded(TinyLM)
        for i, block in enumerate(reference.blocks):
            reference.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
        for i, block in enumerate(model.blocks):
            if wrap_first:
                model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
                subject().fully_shard(model.blocks[i])
            else:
                subject().fully_shard(block)
                model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
        subject().fully_shard(model)
        train(model, reference, lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r)), steps=3)

    threads(2, body)


def _with_dropout():
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 12), Block(12, 3, dropout=0.3), Block(12, 3, dropout=0.3)))
    plain = seeded(lambda: nn.Sequential(nn.Linear(12, 12), Block(12, 3, dropout=0.3), Block(12, 3, dropout=0.3)))
    for m in (model, plain):
        for i in (1, 2):
            m[i] = checkpoint_wrapper(m[i], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    shard(model, model[1:])
    outs = []
    for m in (model, plain):
        torch.manual_seed(5)
        out = m(randn(2, 4, 12, of_rank=0)).square().mean()
        out.backward()
        outs.append(out.detach())
    assert torch.equal(*outs)
    assert_same_model(model, plain)


def test_recomputation_repeats_the_dropout():
    processes(2, _with_dropout)


def _compiled(backend, how):
    build = lambda: TinyLM(layers=1 if backend == "inductor" else 2)
    model, reference = seeded(build), seeded(build)
    for i, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend)
            subject().fully_shard(block)
        else:
            model.blocks[i] = torch.compile(block, backend=backend)
            subject().fully_shard(model.blocks[i])
    subject().fully_shard(model)
    loss = lambda m, s, r: next_token_loss(m, tokens(29, 2, 7, step=s, of_rank=r))
    for step in range(3):
        got = loss(model, step, rank())
        got.backward()
        for r in range(dist.get_world_size()):
            want = loss(reference, step, r)
            (want / dist.get_world_size()).backward()
            if r == rank():
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for p, (name, q) in zip(model.parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=name)
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p -= 0.05 * p.grad
                p.grad = None


@pytest.mark.parametrize("backend,how", [("eager", "in place"), ("eager", "wrapped"), ("inductor", "in place")])
def test_blocks_compiled_before_sharding(backend, how):
    """Processes, since the compiler's caches are per process and threads of ranks would share them."""
    processes(2, _compiled, backend, how, timeout=300)


def _deadline():
    """A rank that raises before its collectives shows on the others as an error that names what they waited for."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    grid = DeviceMesh.from_group(group, "cpu")
    model = shard(m := seeded(stack), m, mesh=grid)
    model(randn(2, 8)).sum().backward()
    text = ""
    try:
        if rank() == 1:
            raise ArithmeticError("only here")
        model(randn(2, 8)).sum().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier()
    return text


@only_ours("FSDP2 shows the backend's message alone")
def test_exception_on_one_rank_alone():
    waiting, failed = processes(2, _deadline)
    assert failed.startswith("ArithmeticError")
    assert "CommError" in waiting and "rank 0 of 2" in waiting


def test_warnings_are_rare():
    """A plain training step warns of nothing."""

    def body():
        model = shard(m := seeded(stack), m)
        model(randn(2, 8)).sum().backward()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        threads(1, body)
    mine = [str(w.message) for w in seen if "ragged" in str(w.filename)]
    assert not mine
