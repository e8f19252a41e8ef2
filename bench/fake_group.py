"""A process group that does nothing: any world size in one process, so that what remains of a step is the
framework's own host time.

It computes no result and copies no byte (torch's own fake group copies once a rank, which at 1,024 ranks is most of
a step), so losses and gradients over it are meaningless. Only what FSDP2 and RaggedFSDP call is there; anything
else is torch's error for a missing method.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


def _done():
    future = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


class GroupThatDoesNothing(dist.ProcessGroup):
    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._size, self._work = size, _done()

    def size(self):
        return self._size

    def getBackendName(self):
        return NAME

    @property
    def pg_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def _nothing(self, *args, **kwargs):
        return self._work

    allreduce = allreduce_coalesced = allgather = broadcast = barrier = _nothing
    # Both the names up to torch 2.14 and those since.
    _allgather_base = all_gather_single = all_gather_single_coalesced = allgather_into_tensor_coalesced = _nothing
    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = (
        _nothing
    )
    reduce_scatter = alltoall = alltoall_base = all_to_all_single = _nothing


NAME = "does_nothing"


def init(world_size):
    """Makes this process rank 0 of `world_size`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: GroupThatDoesNothing(rank, size), devices=["cpu"]
        )
    dist.init_process_group(NAME, rank=0, world_size=world_size, store=dist.HashStore())
