"""What a rank measures: bytes that copying operations wrote, collectives and their bytes, live bytes.

Counts are taken at torch's dispatcher, which passes every operation of the driving thread, those issued from C++ too.
It passes none of the copies that a backend makes on threads of its own (Gloo copies within most of its collectives);
those are left out for all systems alike. Torch's profiler passes the same operations, but not the sizes of their
results or of lists of tensors, so it is used for live bytes alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that write a copy of their input into their first argument or `out`, and into a new tensor.
INTO_FIRST = {"copy_", "_foreach_copy_", "index_copy_", "all_gather_copy_in", "split_with_sizes_copy"}
INTO_RESULT = {"cat", "stack", "clone", "_to_copy", "constant_pad_nd", "_chunk_cat", "chunk_cat",
               "chunk_cat_mixed_dtype"}  # fmt: skip
REDUCE_SCATTERS = {"_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
REDUCTIONS = REDUCE_SCATTERS | {"allreduce_", "alltoall_base_", "alltoall_", "allreduce_coalesced_", "reduce_"}


def nbytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class Places:
    """Where tensors lie. A place is forgotten with its storage: memory that is handed out again is another place."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], StorageWeakRef] = {}

    @staticmethod
    def _keys(tree: Any) -> dict[tuple[int, int], StorageWeakRef]:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # of a living storage: cdata is its own
        return {(ref.cdata, tensor.data_ptr()): ref for ref, tensor in zip(refs, tensors, strict=True)}

    def add(self, tree: Any) -> None:
        self._of |= self._keys(tree)

    def take(self, tree: Any) -> bool:
        """Whether one of them is here. They are no longer."""
        keys = self._keys(tree)
        found = any(key in self._of for key in keys)
        for key in keys:
            self._of.pop(key, None)
        return found


class Operations(TorchDispatchMode):
    """Counts what the driving thread does while active.

    copied: bytes written by copying operations, without `results`: those that a backend writes when it puts out what
    it has reduced, as Gloo does in wait() for a reduce-scatter. by_operation splits `copied`.
    collectives: [calls, bytes of the whole buffer] by name. reduced_elements: what was given to reductions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: dict[str, int] = {}
        self.results = self.operations = self.reduced_elements = 0
        self.collectives: dict[str, list[int]] = {}
        self._reduced_into = Places()

    @property
    def copied(self) -> int:
        return sum(self.by_operation.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # seen again as what it does to its local tensors
        self.operations += 1
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            self._collective(name, args)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if name in INTO_FIRST or name in INTO_RESULT:
            written = kwargs.get("out")
            if written is None:
                written = args[0] if name in INTO_FIRST else out
            self._copy(name, written)
        return out

    def _copy(self, name: str, written: Any) -> None:
        if name == "copy_" and self._reduced_into.take(written):
            self.results += nbytes(written)
        else:
            self.by_operation[name] = self.by_operation.get(name, 0) + nbytes(written)

    def _collective(self, name: str, args: Any) -> None:
        tensors = [[leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in args[:2]]
        entry = self.collectives.setdefault(name.strip("_"), [0, 0])
        entry[0] += 1
        numels = [sum(leaf.numel() for leaf in each) for each in tensors]
        if name == "alltoall_base_" and sends_nothing_to_itself(args):
            # Of two ranks: what one keeps isn't given to the call, and is what comes in for it.
            entry[1] += sum(map(nbytes, tensors))
            self.reduced_elements += sum(numels)
            return
        # The root of a scatter names its slice once a rank.
        entry[1] += nbytes(tensors[0]) if name == "scatter_" else max(map(nbytes, tensors))
        if name in REDUCTIONS:
            self.reduced_elements += max(numels)
        if name in REDUCE_SCATTERS:
            self._reduced_into.add(tensors[0])


def sends_nothing_to_itself(args: Any) -> bool:
    """Of alltoall_base_'s arguments: output, input, group, and how many elements come from and go to each rank."""
    group, counts = dist.ProcessGroup.unbox(args[2]), args[3:5]
    return group.size() == 2 and all(each and each[group.rank()] == 0 for each in counts)


def report_memory(on: bool) -> None:
    """Whether torch's CPU allocator keeps count of what it has handed out, on all threads."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = on


def release_free_memory() -> None:
    """What building and instruments have left in malloc's hands goes back: all systems of a cell share the memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class LiveBytes:
    """What torch's CPU allocator has handed out, all threads counted: `peak` since this began, `at_rest` when it
    ended. To begin before the model is built. The allocator reports its total to the profiler at each of this thread's
    calls, which is where the numbers are read.
    """

    def __enter__(self) -> LiveBytes:
        report_memory(True)
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)  # fmt: skip
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        report_memory(False)
        pending = list(self._profile.profiler.kineto_results.experimental_event_tree())
        totals = []
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            if event.tag == torch._C._profiler._EventType.Allocation:
                totals.append((event.start_time_ns, event.extra_fields.total_allocated))
        self.peak, self.at_rest = max(total for _, total in totals), max(totals)[1]
        del self._profile
