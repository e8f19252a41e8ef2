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


def _method(name):
    def nothing(self, *args, **kwargs):
        if self.calls is not None:
            self.calls.append((name, args))
        return self._work

    return nothing


class GroupThatDoesNothing(dist.ProcessGroup):
    """`calls`: None, or a list that takes (name, arguments) of each collective."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._size, self._work, self.calls = size, _done(), None

    def size(self):
        return self._size

    def getBackendName(self):
        return NAME

    @property
    def pg_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name


# Both the names up to torch 2.14 and those since.
for _name in (
    "allreduce allreduce_coalesced allgather broadcast barrier "
    "_allgather_base all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
    "reduce_scatter alltoall alltoall_base all_to_all_single"
).split():
    setattr(GroupThatDoesNothing, _name, _method(_name))

NAME = "does_nothing"


def init(world_size):
    """Makes this process rank 0 of `world_size`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: GroupThatDoesNothing(rank, size), devices=["cpu"]
        )
    dist.init_process_group(NAME, rank=0, world_size=world_size, store=dist.HashStore())
