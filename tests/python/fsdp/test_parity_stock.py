"""Ten steps beside FSDP2 itself, on the same process group: loss, gradients and parameters at each step.

What is compared is a drop-in's promise, so FSDP2 is the reference and not an unsharded model. In fp32 two correct
runs differ by the order of their sums only: 2e-6 of a tensor's norm, 1e-6 for the loss. A large learning rate of
Adam would turn such rounding into steps of the full size wherever a gradient is almost zero, hence SGD with
momentum, and Adam with a small rate.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from models import TinyLM, next_token_loss
from torch.distributed._composable import checkpoint
from torch.distributed.tensor import distribute_tensor

from harness import assert_close, full, mesh, processes, seeded, subject, threads, tokens

STEPS = 10


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-5)


@dataclasses.dataclass
class Case:
    build: Callable = TinyLM
    prepare: Callable = lambda model: model
    reshard: object = None
    hybrid: bool = False
    bf16: bool = False
    micro: int = 1
    sync_each: bool = False
    all_reduce_last: bool = False
    optimizer: Callable = sgd
    lists: bool = False  # the embedding alone, norm and head as one list, as trainers do


def checkpointed(model):
    for block in model.blocks:
        checkpoint(block)
    return model


def frozen(model):
    model.embed.requires_grad_(False)
    for name, p in model.blocks.named_parameters():
        p.requires_grad_("bias" in name or "qkv" in name)
    model.blocks[0].requires_grad_(False)
    return model


CASES = {
    "plain": Case(reshard=True),
    "keep-after-forward": Case(reshard=False),
    "post-forward-mesh": Case(reshard=2),  # on two ranks the same as True
    "adamw": Case(optimizer=adamw),
    "lists": Case(lists=True),
    "hybrid": Case(hybrid=True),
    "mixed-precision": Case(bf16=True),
    "accumulate-unsynchronised": Case(micro=3),
    "accumulate-synchronised": Case(micro=3, sync_each=True),
    "accumulate-mixed-precision": Case(micro=3, bf16=True),
    "hybrid-accumulate": Case(hybrid=True, micro=3, all_reduce_last=True),
    "checkpointing": Case(prepare=checkpointed),
    "frozen": Case(prepare=frozen),
    "tied": Case(build=lambda: TinyLM(tied=True)),
    "tied-hybrid-mixed": Case(build=lambda: TinyLM(tied=True), hybrid=True, bf16=True),
}


def sharded(package, case, grid):
    model = case.prepare(seeded(case.build))
    options = {"mesh": grid, "reshard_after_forward": case.reshard}
    if case.bf16:
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = list(model.blocks)
    if case.lists:
        units += [model.embed, [model.norm, model.head]]
    for unit in units:
        package.fully_shard(unit, **options)
    package.fully_shard(model, **options)
    return model, case.optimizer([p for p in model.parameters() if p.requires_grad])


def micro_batches(model, case, step):
    losses = []
    for k in range(case.micro):
        last = k == case.micro - 1
        if case.all_reduce_last:
            model.set_requires_all_reduce(last)
        elif not case.sync_each:
            model.set_requires_gradient_sync(last)
        loss = next_token_loss(model, tokens(29, 3, 8, step=10 * step + k)) / case.micro
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def compare(name):
    case = CASES[name]
    grid = mesh(2, dist.get_world_size() // 2, names=("replicate", "shard")) if case.hybrid else mesh()
    (theirs, their_optimizer), (ours, our_optimizer) = (sharded(p, case, grid) for p in (stock, subject()))
    for step in range(STEPS):
        want, got = micro_batches(theirs, case, step), micro_batches(ours, case, step)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda m: f"loss of step {step}: {m}")
        pairs = list(zip(ours.named_parameters(), theirs.named_parameters(), strict=True))
        for (n, p), (other, q) in pairs:
            assert n == other and p.requires_grad == q.requires_grad
            assert (p.grad is None) == (q.grad is None), f"step {step}: gradient of {n}"
            if p.grad is not None:
                assert p.grad.dtype == q.grad.dtype
                assert_close(full(p.grad), full(q.grad), 2e-6, f"step {step}: gradient of {n}")
        for optimizer in (their_optimizer, our_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 2)
        for (n, p), (_, q) in pairs:
            assert p.dtype == q.dtype
            assert_close(full(p), full(q), 2e-6, f"step {step}: {n}")
            if case.bf16:
                # Masters that differ in the last bit may round to different bf16: each step starts from equal ones.
                with torch.no_grad():
                    p.copy_(distribute_tensor(full(q), p.device_mesh, p.placements, src_data_rank=None))


def needs_even(name):
    return CASES[name].hybrid or CASES[name].reshard == 2


# Threads where the world size matters; the odd one leaves uneven and short shards on both sides.
RANKS = [(4 if needs_even(name) else 3, name) for name in CASES] + [(1, "plain"), (1, "mixed-precision"), (7, "plain")]


@pytest.mark.parametrize("ranks,name", RANKS)
def test_parity(ranks, name):
    threads(ranks, compare, name)


OVER_GLOO = (
    "plain",
    "lists",
    "hybrid",
    "mixed-precision",
    "accumulate-unsynchronised",
    "hybrid-accumulate",
    "checkpointing",
    "frozen",
    "tied",
)


def _over_gloo():
    failed = {}
    for name in OVER_GLOO:
        try:
            compare(name)
        except AssertionError as error:  # on all ranks alike: comparisons are of whole tensors, losses aside
            failed[name] = str(error)
    return failed


def test_parity_over_gloo():
    """One start of real processes, where collectives are asynchronous and sum in another order."""
    assert processes(2, _over_gloo) == [{}] * 2
