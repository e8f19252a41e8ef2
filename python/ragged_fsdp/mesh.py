"""The data-parallel mesh of a fully_shard call: which process groups shard and replicate, on which device. No tensors."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ragged_fsdp import _C

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # older than 2.13

    @dataclasses.dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Names of the mesh dims that shard and replicate."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


COLLECTIVES = ("auto", "stock")


@dataclasses.dataclass(frozen=True)
class DataMesh:
    """`mesh` is 1-D (shard) or 2-D (replicate, shard); `spmd_mesh` is the full one whose dims `dims` names, where the caller gave that."""

    mesh: DeviceMesh
    device: torch.device
    groups: Any  # _C.MeshGroups
    shard: Any  # _C.Communicator
    replicate: Any
    spmd_mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None

    @property
    def shard_size(self) -> int:
        return self.shard.size

    @property
    def is_hybrid(self) -> bool:
        return self.mesh.ndim == 2

    def small_group(self, size: int) -> Any:
        """The communicator of this rank's `size` neighbours on the shard dim. Makes process groups, the same on all ranks, once a size."""
        group = self.mesh.get_group(self.mesh.ndim - 1)
        key = (self.device, self.shard.is_stock, size)
        with _communicators_lock:
            known = _communicators.setdefault(group, {})
        if key not in known:
            small = DeviceMesh(self.mesh.device_type, self.mesh.mesh.reshape(-1, size), mesh_dim_names=("_outer", "_small"))
            known[key] = _communicator(small, 1, self.device, self.shard.is_stock)
        return known[key]


def names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One name, several or none, as a tuple."""
    return () if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, collectives: str | None) -> DataMesh:
    """Raises ValueError for a mesh that isn't 1-D or 2-D, unknown dim names, or unnamed dims of a 2-D one. Makes no group but the default
    mesh's, where none is given."""
    if collectives is None:
        collectives = os.environ.get("RAGGED_COLLECTIVES", "auto")
    if collectives not in COLLECTIVES:
        raise _C.InvalidArgument(f"[fully_shard] Expected collectives to be one of {COLLECTIVES}, but got {collectives!r}.")
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        kind = torch.accelerator.current_accelerator(check_available=True)
        mesh = init_device_mesh("cpu" if kind is None else kind.type, (dist.get_world_size(),))
    spmd_mesh = None
    if dims is not None:
        spmd_mesh = mesh
        mesh = _named_submesh(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, getattr(torch, device.type).current_device())
    stock = collectives == "stock"
    shard = _communicator(mesh, mesh.ndim - 1, device, stock)
    replicate = _communicator(mesh, 0, device, stock) if mesh.ndim == 2 else _C.Communicator(None, device, "replicate")
    groups = _mesh_groups(mesh, shard, replicate, device)
    return DataMesh(mesh, device, groups, shard, replicate, spmd_mesh, dims)


def _named_submesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    shard, replicate = names(dims.shard), names(dims.replicate)
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in shard + replicate:
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    if not shard:
        raise NotImplementedError(
            f"[fully_shard] Expected dp_mesh_dims to name a shard dim, but got replicate={replicate} alone. For pure replication give the mesh "
            "a shard dim of size 1."
        )

    def submesh(of: tuple[str, ...]) -> DeviceMesh:
        return mesh[of[0]] if len(of) == 1 else mesh[of]._flatten("_".join(of))

    return submesh(shard) if not replicate else DeviceMesh._concatenate([submesh(replicate), submesh(shard)])


# One communicator a process group and setting, so that counters add up over the units of a model. Keyed by the group object, never by its
# name: ranks may be threads of one process.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
_communicators_lock = threading.Lock()


def _mesh_groups(mesh: DeviceMesh, shard: Any, replicate: Any, device: torch.device) -> Any:
    """One a mesh and setting: the units on it take turns in who owns their ragged tails."""
    ranks = mesh.mesh.flatten().tolist()
    with _communicators_lock:
        known = _communicators.setdefault(mesh.get_group(mesh.ndim - 1), {})
        key = ("groups", device, shard.is_stock, tuple(ranks), mesh.ndim)
        if key not in known:
            known[key] = _C.MeshGroups(shard, replicate, ranks, dist.get_rank(), device)
        return known[key]


def communicator_of(mesh: DeviceMesh, dim: int, device: torch.device) -> Any:
    """The communicator over one dim of a mesh, for tensors that lie on it; the one that fully_shard made, if it did."""
    group = mesh.get_group(dim)
    with _communicators_lock:
        known = _communicators.get(group, {})
        for stock in (False, True):
            if (device, stock) in known:
                return known[device, stock]
    return _communicator(mesh, dim, device, os.environ.get("RAGGED_COLLECTIVES") == "stock")


def communicator_of_group(group: dist.ProcessGroup | None) -> Any:
    """The communicator over a process group, for what isn't laid out on a mesh; None: over this process alone."""
    if group is None:
        return _C.Communicator(None, torch.device("cpu"), "alone")
    on_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return _communicator_over(group, "all", device, False)


def _communicator(mesh: DeviceMesh, dim: int, device: torch.device, stock: bool) -> Any:
    label = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else ("shard", "replicate")[dim == 0 and mesh.ndim == 2]
    return _communicator_over(mesh.get_group(dim), label, device, stock)


def _communicator_over(group: dist.ProcessGroup, label: str, device: torch.device, stock: bool) -> Any:
    check = os.environ.get("RAGGED_CHECK", "0")
    if check not in ("0", "1"):
        raise _C.InvalidArgument(f"[fully_shard] Expected RAGGED_CHECK to be 0 or 1, but got {check!r}.")
    with _communicators_lock:
        known = _communicators.setdefault(group, {})
        if (device, stock) not in known:
            known[device, stock] = _C.Communicator(group.group_name, device, label, stock, check == "1")
        return known[device, stock]
