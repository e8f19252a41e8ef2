"""Which elements of a tensor this rank holds, and whether it writes them: from placements that all ranks know.

RaggedTensors, stock DTensors and plain tensors become parts, `_C.CheckpointPart`: a flat interval of the tensor, or of
the box of it that tensor parallelism left here, and its memory. No names, no files, no communication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Replicate

from ragged_fsdp import _C
from ragged_fsdp.checkpoint.groups import Ranks
from ragged_fsdp.placement import RaggedShard, foreign_box, invalid
from ragged_fsdp.tensor import RaggedTensor

Box = tuple[Sequence[int], Sequence[int]]  # offset, size


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor and what it is called in the files. `format` says what the numbers mean where they are codes."""

    name: str
    tensor: torch.Tensor
    format: str = ""


@dataclasses.dataclass(frozen=True)
class _Cut:
    begin: int
    end: int
    within: Box | None
    writes: bool
    placement: str


class Parts:
    """The parts of a list of entries. Memory that isn't 1-D and contiguous takes part as a copy; `copy_back()` brings
    what was loaded into the copies home."""

    def __init__(self, entries: Sequence[Entry], ranks: Ranks, operation: str) -> None:
        self.parts: list[Any] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in entries:
            self.parts.append(self._part(entry, ranks, operation))

    def _part(self, entry: Entry, ranks: Ranks, operation: str) -> Any:
        local = _local_of(entry, operation)
        flat = local.reshape(-1)
        if flat.numel() and flat.data_ptr() != local.data_ptr():
            self._copies.append((local, flat))
        cut = _cut_of(entry, local, ranks, operation)
        try:
            return _C.CheckpointPart(
                name=entry.name,
                local=flat,
                shape=list(entry.tensor.shape),
                begin=cut.begin,
                end=cut.end,
                within=cut.within,
                writes=cut.writes,
                announces_empty=ranks.is_first,
                format=entry.format,
                placement=cut.placement,
            )
        except _C.InvalidArgument as error:
            raise _C.InvalidArgument(f"{error} (param '{entry.name}')") from None

    @torch.no_grad()
    def copy_back(self) -> None:
        """After a load."""
        for local, flat in self._copies:
            local.copy_(flat.view(local.shape))


def _local_of(entry: Entry, operation: str) -> torch.Tensor:
    tensor = entry.tensor
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_meta:
        raise invalid(operation, "tensors with memory", f"'{entry.name}' on the meta device",
                      "Call model.to_empty(device=..) first, and fill buffers that aren't saved.")  # fmt: skip
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or local.layout != torch.strided:
        raise invalid(operation, "dense tensors whose memory is their values",
                      f"a {type(local).__name__} in '{entry.name}'",
                      "Dequantise it, or save its parts as tensors.")  # fmt: skip
    return local.detach()


def _cut_of(entry: Entry, local: torch.Tensor, ranks: Ranks, operation: str) -> _Cut:
    tensor = entry.tensor
    if not isinstance(tensor, DTensor):
        return _Cut(0, local.numel(), None, ranks.is_first, "Replicate()")
    mesh, placements, shape = tensor._spec.mesh, tensor._spec.placements, tuple(tensor.shape)
    for placement in placements:
        if isinstance(placement, Partial) and not isinstance(placement, RaggedShard):
            raise invalid(operation, "tensors without pending sums", f"{placement} in '{entry.name}'",
                          "Redistribute it first.", mesh)  # fmt: skip
    text = ", ".join(map(str, placements))
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # other ranks hold it
        return _Cut(0, 0, None, False, text)
    # Of the ranks that hold the same, the first of the mesh writes; of meshes that hold the same, the first.
    copies = (at for at, placement in zip(coordinate, placements, strict=True) if isinstance(placement, Replicate))
    writes = all(at == 0 for at in copies) and bool((mesh.mesh == ranks.first).any())
    if isinstance(tensor, RaggedTensor):
        mesh_dim, ragged = tensor.ragged
        size, offset = foreign_box(shape, mesh, placements)
        begin, end = ragged.interval(coordinate[mesh_dim])
    else:
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        begin, end = 0, math.prod(size)
    if begin == end:
        return _Cut(0, 0, None, writes, text)
    within = None if tuple(size) == shape else (list(offset), list(size))
    return _Cut(begin, end, within, writes, text)
