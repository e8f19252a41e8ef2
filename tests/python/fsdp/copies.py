"""Counts what a step writes and holds: bytes through torch's copying ops, FSDP2's unsharded bytes. No test, nothing
of ours.

The same numbers are behind tests (test_counts.py) and the table of bench/fsdp2_bytes.py.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Ops that write a copy of their input; the size is that of what they write.
INTO_FIRST = {"copy_", "_foreach_copy_", "index_copy_", "all_gather_copy_in", "split_with_sizes_copy"}
INTO_RESULT = {
    "cat",
    "stack",
    "clone",
    "_to_copy",
    "constant_pad_nd",
    "_chunk_cat",
    "chunk_cat",
    "chunk_cat_mixed_dtype",
}
COPY_IN_OUT = {"all_gather_copy_in", "split_with_sizes_copy", "_chunk_cat", "chunk_cat", "chunk_cat_mixed_dtype", "cat"}


def nbytes(tree):
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


class Copies(TorchDispatchMode):
    """While active on this thread: `by_op` bytes written by copying ops, `results` bytes that reductions put out."""

    def __enter__(self):
        self.by_op, self.results, self.collectives = {}, 0, {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._schema.name.split("::")[1]
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            self.collectives[name] = self.collectives.get(name, 0) + 1
            if name == "_reduce_scatter_base_":
                self.results += nbytes(args[0])
        written = None
        if name in INTO_FIRST:
            written = nbytes(kwargs["out"]) if kwargs.get("out") is not None else nbytes(args[0])
        elif name in INTO_RESULT:
            written = nbytes(kwargs["out"]) if kwargs.get("out") is not None else nbytes(out)
        if written is not None:
            self.by_op[name] = self.by_op.get(name, 0) + written
        return out

    @property
    def total(self):
        return sum(self.by_op.values())


def backend_copies_results(group=None):
    """Whether this backend's reduce-scatter shows a copy of its result; Gloo's does, at wait()."""
    mine, whole = torch.zeros(8), torch.zeros(8 * dist.get_world_size(group))
    with Copies() as seen:
        dist.reduce_scatter_tensor(mine, whole, group=group)
    return seen.total == nbytes(mine)


class UnshardedBytes(TorchDispatchMode):
    """Peak bytes in FSDP2's gather buffers and unsharded parameters, sampled at every op of this thread.

    It reads FSDP2's own lists of what it has gathered, since nothing public tells.
    """

    def __init__(self, model):
        super().__init__()
        states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        groups = {id(g): g for s in states for g in s._fsdp_param_groups}.values()
        self.params = [p for g in groups for p in g.fsdp_params]
        self.buffers, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "c10d::_allgather_base_":
            storage = args[0].untyped_storage()
            self.buffers[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.buffers = {k: v for k, v in self.buffers.items() if not v[0].expired()}
        held = {k: size for k, (_, size) in self.buffers.items()}
        for p in self.params:
            for t in p.all_gather_outputs:
                held[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(held.values()))
        return out
