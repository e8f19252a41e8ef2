"""Collectives over flat intervals of one process group: gather, exchange, scatter and reduce-scatter of uneven
contiguous pieces.

Plain 1-D tensors and lists of (begin, end), one a rank; no placements. Data that is only moved travels as bytes,
since backends differ in the dtypes that they know. All calls are blocking and must be made by every rank of the
group; a group of one moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ragged_fsdp import _C

Interval = tuple[int, int]

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided: not every backend averages
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def gather(local: torch.Tensor, intervals: Sequence[Interval], group: dist.ProcessGroup) -> torch.Tensor:
    """All pieces in order: 1-D, `local`'s dtype, new memory on every rank."""
    total = max((end for _, end in intervals), default=0)
    if group.size() == 1 or local.is_meta:
        return local.clone() if group.size() == 1 else local.new_empty(total)
    full = local.new_empty(total)
    if total == 0:
        return full
    lengths = {end - begin for begin, end in intervals}
    if len(lengths) == 1:
        dist.all_gather_into_tensor(_bytes(full), _bytes(local.contiguous()), group=group)
        return full
    # Each owner broadcasts into its slice of the result: no padding, no second copy.
    begin, end = intervals[group.rank()]
    full[begin:end].copy_(local)
    works = [
        dist.broadcast(_bytes(full[begin:end]), group=group, group_src=rank, async_op=True)
        for rank, (begin, end) in enumerate(intervals)
        if end > begin
    ]
    for work in works:
        if work is not None:
            work.wait()
    return full


def exchange(
    local: torch.Tensor, source: Sequence[Interval], target: Sequence[Interval], group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's `target` interval, made of what the ranks hold by `source`: one uneven all-to-all, only overlaps
    travel.

    Pieces on both sides ascend with the rank, so the send buffer is `local` and the receive buffer is the result.
    """
    rank, ranks = group.rank(), group.size()
    begin, end = target[rank]
    if list(source) == list(target):
        return local.clone()
    sends, receives = [0] * ranks, [0] * ranks
    for from_rank, to_rank, first, last in _C.overlaps(list(source), list(target)):
        if from_rank == rank:
            sends[to_rank] += last - first
        if to_rank == rank:
            receives[from_rank] += last - first
    return all_to_all(local, sends, receives, end - begin, group)


def scatter(
    full: torch.Tensor, intervals: Sequence[Interval], group: dist.ProcessGroup, source_rank: int
) -> torch.Tensor:
    """This rank's interval of `full` (1-D) as `source_rank` of the group has it."""
    rank, ranks = group.rank(), group.size()
    begin, end = intervals[rank]
    if ranks == 1 or full.is_meta:
        return full[begin:end].clone()
    sends = [last - first if rank == source_rank else 0 for first, last in intervals]
    receives = [end - begin if peer == source_rank else 0 for peer in range(ranks)]
    return all_to_all(full if rank == source_rank else full[:0], sends, receives, end - begin, group)


def reduce_scatter(
    full: torch.Tensor, intervals: Sequence[Interval], group: dist.ProcessGroup, reduce_op: str = "sum"
) -> torch.Tensor:
    """This rank's interval of the reduction of all ranks' `full` (1-D).

    Slices travel once, by all-to-all, and are reduced here in rank order, in fp32 for narrower floats: the result
    doesn't depend on the backend's algorithm. On NCCL, equal pieces take its reduce-scatter.
    """
    rank, ranks = group.rank(), group.size()
    begin, end = intervals[rank]
    length = end - begin
    if ranks == 1 or full.is_meta:
        return full[begin:end].clone()
    lengths = [last - first for first, last in intervals]
    if reduce_op in ("sum", "avg") and len(set(lengths)) == 1 and full.device.type == "cuda":
        piece = full.new_empty(length)
        dist.reduce_scatter_tensor(piece, full, group=group)
        return piece.div_(ranks) if reduce_op == "avg" else piece
    slices = all_to_all(full, lengths, [length] * ranks, length * ranks, group).view(ranks, length)
    narrow = full.dtype in (torch.bfloat16, torch.float16)
    total = slices[0].to(torch.float32) if narrow else slices[0].clone()
    for other in slices[1:]:
        if reduce_op in ("sum", "avg"):
            total += other
        elif reduce_op == "max":
            torch.maximum(total, other.to(total.dtype), out=total)
        elif reduce_op == "min":
            torch.minimum(total, other.to(total.dtype), out=total)
        else:
            total *= other
    if reduce_op == "avg":
        total = total / ranks
    return total.to(full.dtype)


def all_reduce_(tensor: torch.Tensor, group: dist.ProcessGroup, reduce_op: str = "sum") -> torch.Tensor:
    """Reduces `tensor` in place; reduce_op is "sum", "avg", "max", "min" or "product"."""
    if group.size() == 1 or tensor.is_meta:
        return tensor
    if tensor.dtype == torch.bool:
        wide = tensor.to(torch.uint8)
        dist.all_reduce(wide, op=_REDUCE[reduce_op], group=group)
        return tensor.copy_(wide)
    dist.all_reduce(tensor, op=_REDUCE[reduce_op], group=group)
    return tensor.div_(group.size()) if reduce_op == "avg" else tensor


def all_to_all(
    send: torch.Tensor, sends: Sequence[int], receives: Sequence[int], length: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """1-D tensor of `length` elements received in rank order; sends[r] elements of `send` go to rank r, in order."""
    received = send.new_empty(length)
    if group.size() == 1:
        return received.copy_(send)
    if send.is_meta:
        return received
    width = send.element_size()
    dist.all_to_all_single(
        _bytes(received),
        _bytes(send.contiguous()),
        [count * width for count in receives],
        [count * width for count in sends],
        group=group,
    )
    return received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, source_rank: int) -> torch.Tensor:
    """Overwrites a contiguous 1-D tensor by what `source_rank` of the group has."""
    if group.size() > 1 and not tensor.is_meta and tensor.numel() > 0:
        dist.broadcast(_bytes(tensor), group=group, group_src=source_rank)
    return tensor
