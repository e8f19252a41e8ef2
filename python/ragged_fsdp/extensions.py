"""Tensor subclasses that gather themselves: FSDP2's `fsdp_pre_all_gather` / `fsdp_post_all_gather` protocol (float8, NF4, MX formats).

A group of such parameters has no image: each rank asks its pieces for the tensors to gather, they travel as bytes, and the subclass makes the
unsharded parameter of what arrived. Ranks may give different numbers of bytes. Pieces are whole rows of the first dim, as even as can be, and
the protocol sees them as [rows, ...]; methods that were set on a local tensor itself see that tensor. No zero-copy claim is made here.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ragged_fsdp import _C
from ragged_fsdp.mesh import DataMesh

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_subclass(tensor: torch.Tensor) -> bool:
    """A wrapper subclass other than DTensor: its values can't lie in a flat buffer."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def has_protocol(local: torch.Tensor) -> bool:
    """The local tensor, or its class, defines both methods."""
    return hasattr(local, _PRE) and hasattr(local, _POST)


class ExtensionGatherer:
    """Gathers the parameters of one group. The extension calls gather(), finish() and drop() at the unit's events."""

    def __init__(self, params: list[Any], mesh: DataMesh, param_dtype: torch.dtype | None, policy: MixedPrecisionPolicy) -> None:
        self._pieces = [_Piece(param, mesh, param_dtype, policy) for param in params]
        self._group = mesh.mesh.get_group(mesh.mesh.ndim - 1)
        self._counts: list[list[int]] | None = None  # by rank, by gathered tensor: bytes
        self._inputs: list[torch.Tensor] = []
        self._buffer: torch.Tensor | None = None
        self._work: Any = None

    @torch.no_grad()
    def gather(self) -> None:
        """Issues the gather of all parameters of the group."""
        self._inputs = [tensor for piece in self._pieces for tensor in piece.before_gather()]
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._inputs]
        device = self._inputs[0].device
        ranks = dist.get_world_size(self._group)
        if self._counts is None:
            self._counts = self._exchange(sizes, ranks, device)
        elif self._counts[dist.get_rank(self._group)] != sizes:
            raise _C.InvalidArgument(
                f"[unshard] Expected {_PRE} to give the same numbers of bytes each time, but got {sizes} after "
                f"{self._counts[dist.get_rank(self._group)]} (param '{self._pieces[0].name}' and others, rank {dist.get_rank()} of "
                f"{dist.get_world_size()}). Pad what varies."
            )
        longest = max(sum(counts) for counts in self._counts)
        mine = torch.empty(longest, dtype=torch.uint8, device=device)
        position = 0
        for tensor, size in zip(self._inputs, sizes, strict=True):
            if size:
                mine[position : position + size].view(tensor.dtype).copy_(tensor.reshape(-1))
            position += size
        self._buffer = torch.empty(ranks * longest, dtype=torch.uint8, device=device)
        self._work = dist.all_gather_into_tensor(self._buffer, mine, group=self._group, async_op=True)

    def _exchange(self, sizes: list[int], ranks: int, device: torch.device) -> list[list[int]]:
        mine = torch.tensor(sizes, dtype=torch.int64, device=device)
        everyone = torch.empty(ranks * len(sizes), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(everyone, mine, group=self._group)
        return everyone.view(ranks, -1).tolist()

    @torch.no_grad()
    def finish(self) -> list[nn.Parameter] | None:
        """Waits, and makes the unsharded parameters; returns them if they are new objects."""
        if self._work is not None:
            self._work.wait()
        assert self._buffer is not None and self._counts is not None
        by_rank = self._buffer.view(len(self._counts), -1)
        offsets = [0] * len(self._counts)
        position, made = 0, []
        for piece in self._pieces:
            parts: list[list[torch.Tensor]] = []
            for like in self._inputs[position : position + piece.inputs]:
                slices = []
                for rank, counts in enumerate(self._counts):
                    size = counts[position]
                    slices.append(by_rank[rank, offsets[rank] : offsets[rank] + size].view(like.dtype))
                    offsets[rank] += size
                parts.append(slices)
                position += 1
            made.append(piece.after_gather(parts))
        self._buffer = self._work = None
        self._inputs = []
        return None if None in made else made

    def drop(self) -> None:
        """Frees what the unsharded parameters are made of; they stay, without bytes."""
        for piece in self._pieces:
            piece.free()


class _Piece:
    """One parameter: asks its local tensor, keeps what is gathered in storages that live on and only lose their bytes."""

    def __init__(self, param: Any, mesh: DataMesh, param_dtype: torch.dtype | None, policy: MixedPrecisionPolicy) -> None:
        self.name = param.name
        self.inputs = 0
        self._param = param
        self._mesh = mesh.mesh if mesh.mesh.ndim == 1 else mesh.mesh[mesh.mesh.mesh_dim_names[-1]]  # type: ignore[index]
        self._dtype = param_dtype or param.sharded.dtype
        self._policy = policy
        self._metadata: Any = None
        self._input_shapes: list[torch.Size] = []
        self._outputs: list[torch.Tensor] = []
        self._to_free: list[torch.Tensor] = []
        self._unsharded: nn.Parameter | None = None

    @property
    def _local(self) -> Any:
        return self._param.sharded._local_tensor

    def before_gather(self) -> tuple[torch.Tensor, ...]:
        local = self._local
        self._metadata = None
        if not has_protocol(local):
            if is_subclass(local):
                raise _C.InvalidArgument(
                    f"[unshard] Expected {type(local).__name__} to define {_PRE} and {_POST}, but it doesn't (param '{self.name}'). Define them, or "
                    "shard plain tensors."
                )
            tensors: Any = (local.to(self._dtype),)
        else:
            shape = self._param.local_shape
            if hasattr(type(local), _PRE):
                rows = local.numel() // max(1, math.prod(shape[1:]))
                local = local.view(rows, *shape[1:])
            tensors, self._metadata = self._ask(local)
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        self._input_shapes = [tensor.shape for tensor in tensors]
        self.inputs = len(tensors)
        return tensors

    def _ask(self, local: Any) -> Any:
        method = getattr(local, _PRE)
        if len(inspect.signature(method).parameters) == 1:
            return method(self._mesh)
        shape = torch.Size(self._param.local_shape)
        stride = torch.empty(shape, device="meta").stride()
        return method(self._mesh, shape, stride, self._param.places[0][0], self._policy)

    def after_gather(self, parts: list[list[torch.Tensor]]) -> nn.Parameter | None:
        """`parts[i][r]` is rank r's i-th tensor, flat. Returns the parameter when it is made, None when it is filled again."""
        first = self._unsharded is None
        for i, slices in enumerate(parts):
            trimmed = [self._without_padding(part, rank, i) for rank, part in enumerate(slices)]
            numel = sum(part.numel() for part in trimmed)
            if first:
                self._outputs.append(torch.empty(numel, dtype=slices[0].dtype, device=slices[0].device))
            else:
                _allocate(self._outputs[i], numel)
            with _unsafe_preserve_version_counter(self._outputs[i]):
                torch.cat(trimmed, out=self._outputs[i])
        shaped = tuple(self._shaped(i, output) for i, output in enumerate(self._outputs))
        if first:
            return self._make(shaped)
        for tensor in self._to_free:
            _allocate(tensor, tensor.numel())
        local = self._local
        if has_protocol(local):
            assert self._unsharded is not None
            with _unsafe_preserve_version_counter(self._unsharded):
                getattr(local, _POST)(shaped, self._metadata, self._dtype, out=self._unsharded)
        return None

    def _make(self, outputs: tuple[torch.Tensor, ...]) -> nn.Parameter:
        local, shape = self._local, torch.Size(self._param.local_shape)
        unsharded: Any = outputs[0]
        if has_protocol(local):
            unsharded, to_free = getattr(local, _POST)(outputs, self._metadata, self._dtype)
            known = {id(tensor.untyped_storage()) for tensor in self._outputs}
            self._to_free = [tensor for tensor in to_free if id(tensor.untyped_storage()) not in known and not _shares(tensor, self._outputs)]
        if unsharded.shape != shape:
            unsharded = unsharded.reshape(-1)[: shape.numel()].view(shape)
        self._unsharded = nn.Parameter(unsharded, requires_grad=self._param.sharded.requires_grad)
        return self._unsharded

    def _without_padding(self, part: torch.Tensor, rank: int, i: int) -> torch.Tensor:
        """Extensions written for FSDP2 pad short pieces to the longest; what isn't in the tensor isn't kept."""
        shape = tuple(self._param.local_shape)
        if len(self._input_shapes[i]) != len(shape) or tuple(self._input_shapes[i][1:]) != shape[1:]:
            return part
        row = max(1, math.prod(shape[1:]))
        rows = [(end - begin) // row for begin, end in self._param.ragged.intervals()]
        return part[: rows[rank] * row] if part.numel() == max(rows) * row else part

    def _shaped(self, i: int, output: torch.Tensor) -> torch.Tensor:
        shape, inner = self._param.local_shape, self._input_shapes[i][1:]
        if len(self._input_shapes[i]) == 1 and output.numel() == math.prod(shape):
            return output.view(shape)
        return output.view(-1, *inner)

    def free(self) -> None:
        for tensor in (*self._outputs, *self._to_free):
            tensor.untyped_storage().resize_(0)


def _shares(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)


def _allocate(tensor: torch.Tensor, numel: int) -> None:
    size = numel * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.size() != size:
        storage.resize_(size)
