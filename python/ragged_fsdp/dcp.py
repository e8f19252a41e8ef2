"""What torch.distributed.checkpoint (DCP) asks of a RaggedTensor: the boxes of its piece, in the coordinates of the full
tensor.

A flat interval of an n-D tensor is at most 2n-1 boxes, each a contiguous slice of the local tensor; saving and
loading touch nothing else and need no communication. Replicas offer the same boxes and DCP keeps one. Reading and
writing files is DCP's business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor.placement_types import Partial

from ragged_fsdp.placement import RaggedShard, foreign_box, invalid, ragged_mesh_dim
from ragged_fsdp.redistribute import flat_boxes


class RaggedCheckpointing:
    """The three methods by which DCP recognises a tensor that describes itself."""

    _spec: Any
    _local_tensor: torch.Tensor

    def _checkpoint_boxes(self) -> list[tuple[torch.Size, torch.Tensor]]:
        # (offset in the full tensor, n-D view of the local tensor) of each box.
        mesh, placements, shape = self._spec.mesh, self._spec.placements, self._spec.tensor_meta.shape
        for placement in placements:
            if isinstance(placement, Partial) and not isinstance(placement, RaggedShard):
                raise invalid(
                    "checkpoint",
                    "a tensor without pending reductions",
                    placement,
                    "Redistribute it first: Partial to Replicate.",
                    mesh,
                )
        mesh_dim = ragged_mesh_dim(placements)
        ragged = placements[mesh_dim]
        sizes, origin = foreign_box(shape, mesh, placements)
        rank = mesh.get_local_rank(mesh_dim)
        if shape.numel() == 0:
            # DCP takes a tensor that nobody writes for a missing one: one rank writes the nothing.
            first = all(index == 0 for index in mesh.get_coordinate())
            return [(torch.Size(origin), self._local_tensor.view(shape))] if first else []
        boxes = flat_boxes(self._local_tensor, sizes, ragged.interval(rank))
        return [(torch.Size(a + b for a, b in zip(origin, offset)), view) for (offset, _), view in boxes]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=view.shape),
                    properties=properties,
                    size=self._spec.tensor_meta.shape,
                ),
            )
            for offset, view in self._checkpoint_boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=view.shape) for offset, view in self._checkpoint_boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offset, view in self._checkpoint_boxes():
            if offset == index.offset:
                return view
        raise invalid(
            "checkpoint",
            f"the offset of one of this rank's boxes of '{index.fqn}'",
            index.offset,
            "The tensor's placement has changed since the checkpoint was planned.",
            self._spec.mesh,
        )
