"""What the tests of `fully_shard` stand on: the implementation under test, ranks as threads or processes, comparisons.

It holds no test and no model. The subject is ragged_fsdp; with RAGGED_TEST_SUBJECT=stock the same tests run against the
FSDP2 of the installed torch, which is how a test shows that it checks FSDP2's contract and not our habits. Tests marked
`only_ours` say why they don't.
"""

import importlib
import os
import threading
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.ranks import run_ranks, run_threads

SUBJECT = os.environ.get("RAGGED_TEST_SUBJECT", "ragged")
OURS = SUBJECT == "ragged"
# Keywords for tests that count dispatcher ops: FSDP2 has only the one way to communicate.
STOCK_OPS = {"collectives": "stock"} if OURS else {}


def subject():
    """The package whose fully_shard is tested."""
    return importlib.import_module("ragged_fsdp" if OURS else "torch.distributed.fsdp")


def only_ours(reason):
    """For behaviour that differs from FSDP2 on purpose, or names it doesn't have."""
    return pytest.mark.skipif(not OURS, reason=f"ours alone: {reason}")


# --- ranks --------------------------------------------------------------------------------------------------------

_build_lock = threading.Lock()


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def threads(world_size, fn, *args, timeout=120.0, **kwargs):
    """fn(*args) on each rank of a threaded group, in this process; the list of what the ranks return.

    Cheap (no start-up, no sockets), but one seed and one set of module-level state for all ranks: build models with
    `seeded` and inputs with `randn`.
    """
    torch.set_num_threads(1)
    return run_threads(world_size, _without_rank, fn, args, kwargs, timeout=timeout)


def processes(world_size, fn, *args, timeout=120.0, **kwargs):
    """fn(*args) on each rank of a real Gloo group, a process each; fn lives at module level and returns plain
    values.
    """
    return run_ranks(world_size, _without_rank, fn, args, kwargs, timeout=timeout)


def _without_rank(_rank, _world, fn, args, kwargs):
    warnings.filterwarnings("ignore", category=UserWarning)
    return fn(*args, **kwargs)


class Collectives(TorchDispatchMode):
    """Counts the calls of c10d's ops on this thread while active: {"all_gather": 3, ...}, by what they do.

    Only over real groups: what a group written in Python runs doesn't pass the dispatcher.
    """

    KINDS = (("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter"), ("allreduce", "all_reduce"))

    def __enter__(self):
        self.calls = dict.fromkeys((kind for _, kind in self.KINDS), 0)
        self.names = set()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            self.names.add(name)
            kind = next((kind for part, kind in self.KINDS if part in name), name)
            self.calls[kind] = self.calls.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


# --- models, data, references -------------------------------------------------------------------------------------


def seeded(build, seed=0):
    """build() with the same random numbers on every rank, also where ranks are threads and share the generator."""
    with _build_lock:
        torch.manual_seed(seed)
        return build()


def randn(*shape, step=0, of_rank=None, dtype=torch.float32):
    """Input of one rank at one step: the same wherever it is asked for."""
    of_rank = rank() if of_rank is None else of_rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7919 * step + of_rank + 1)).to(dtype)


def tokens(vocab, *shape, step=0, of_rank=None):
    of_rank = rank() if of_rank is None else of_rank
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(7919 * step + of_rank + 1))


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape or (world(),), mesh_dim_names=names)


def shard(model, units=(), **options):
    """fully_shard on each unit, then on the model; returns the model."""
    fully_shard = subject().fully_shard
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def full(tensor):
    """The whole of a parameter or gradient as a plain tensor (a collective where it is sharded)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
        if hasattr(tensor, "wait"):
            tensor = tensor.wait()
    return tensor


def backward_of_all_ranks(model, loss_of):
    """Adds the mean over ranks of the gradients to an unsharded model; the loss of this rank."""
    mine = None
    for r in range(world()):
        loss = loss_of(model, r)
        (loss / world()).backward()
        if r == rank():
            mine = loss.detach()
    return mine


def error_norm(got, want):
    """Norm of the difference over norm."""
    got, want = got.double(), want.double()
    scale = want.norm().item()
    return (got - want).norm().item() / (scale if scale else 1.0)


def assert_close(got, want, tolerance=2e-6, what="tensor"):
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    error = error_norm(got, want)
    assert error <= tolerance, f"{what}: off by {error:.2e} of its norm, {tolerance:.0e} allowed (rank {rank()})"


def assert_same_model(sharded, reference, tolerance=2e-6, grads=True):
    """Parameters and gradients of a sharded model equal those of the plain one; collective."""
    pairs = list(zip(sharded.named_parameters(), reference.named_parameters(), strict=True))
    for (name, p), (other, q) in pairs:
        assert name == other
        assert_close(full(p), q.detach(), tolerance, name)
        if grads:
            assert (p.grad is None) == (q.grad is None), (
                f"{name}: gradient {p.grad is not None}, expected {q.grad is not None}"
            )
            if p.grad is not None:
                assert_close(full(p.grad), q.grad, tolerance, f"gradient of {name}")


def is_sharded(parameters):
    """True if all are sharded, False if none is; a mixture is an error of the caller."""
    kinds = {isinstance(p, DTensor) for p in parameters}
    assert len(kinds) == 1, "sharded and unsharded parameters mixed"
    return kinds.pop()
