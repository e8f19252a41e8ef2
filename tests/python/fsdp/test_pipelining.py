"""Pipeline stages of torch.distributed.pipelining that are sharded inside: the schedule drives unshard, synchronisation and finalisation through
FSDPModule's methods. Not a test of the schedules."""

import pytest
import torch
import torch.distributed as dist
from models import MLP
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from harness import full, mesh, only_ours, processes, rank, seeded, subject

DIM, MICRO = 6, 4


def _whole(stages):
    return nn.Sequential(*[nn.Sequential(MLP(DIM), MLP(DIM)) for _ in range(stages)])


def _loss(output, target):
    return (output - target).square().sum()


def _train(schedule_class, stages_each, steps):
    grid = mesh(2, 2, names=("pp", "dp"))
    pipeline, data = grid.get_group("pp"), grid["dp"]
    place, replica = grid.get_local_rank("pp"), grid.get_local_rank("dp")
    count = 2 * stages_each
    reference = seeded(lambda: _whole(count))
    mine = [place + 2 * i for i in range(stages_each)]
    fully_shard = subject().fully_shard
    parts = {}
    for index in mine:
        part = seeded(lambda: _whole(count))[index]
        for block in part:
            fully_shard(block, mesh=data)
        parts[index] = fully_shard(part, mesh=data)
    if stages_each > 1:
        subject().share_comm_ctx(list(parts.values()))
    stages = [PipelineStage(part, index, count, torch.device("cpu"), group=pipeline) for index, part in parts.items()]
    schedule = schedule_class(stages[0] if stages_each == 1 else stages, MICRO, loss_fn=_loss, scale_grads=False)
    for step in range(steps):
        batches = [torch.randn(2 * MICRO, DIM, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        targets = [torch.randn(2 * MICRO, DIM, generator=torch.Generator().manual_seed(100 + 10 * step + r)) for r in range(2)]
        arguments = (batches[replica],) if 0 in parts else ()
        schedule.step(*arguments, **({"target": targets[replica]} if count - 1 in parts else {}))
        reference.zero_grad()
        sum(_loss(reference(x), y) / 2 for x, y in zip(batches, targets, strict=True)).backward()
        for index, part in parts.items():
            for (name, p), q in zip(part.named_parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m: f"{index}.{name}: {m}")
            part.zero_grad()
            assert all(not hasattr(p, "grad") or p.grad is None for p in part.parameters())
    dist.barrier()
    return rank()


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=["gpipe", "1f1b"])
def test_one_sharded_stage_a_rank(schedule):
    processes(4, _train, schedule, 1, 2)


@only_ours("FSDP2's implicit prefetch loses its place when interleaved stages share a context (IndexError in torch 2.15)")
def test_several_stages_a_rank_share_buffers():
    processes(4, _train, ScheduleInterleaved1F1B, 2, 2)
