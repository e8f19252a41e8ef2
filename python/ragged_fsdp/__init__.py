"""RaggedFSDP: fully sharded data parallel training that cuts no block and copies nothing.

A drop-in for torch.distributed.fsdp.fully_shard (FSDP2):

    from ragged_fsdp import fully_shard, MixedPrecisionPolicy, rows

    for layer in model.layers:
        fully_shard(layer, mp_policy=mp, shard_policy=rows(32))
    fully_shard(model, mp_policy=mp)
"""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp._compat import check_torch

check_torch()

from ragged_fsdp import _C  # noqa: E402
from ragged_fsdp._C import CheckpointError, CommError, InvalidArgument, RaggedError, initial_values  # noqa: E402
from ragged_fsdp.blocks import Block, elements, rows, tile, whole  # noqa: E402
from ragged_fsdp.clip import clip_grad_norm_  # noqa: E402
from ragged_fsdp.fully_shard import fully_shard  # noqa: E402
from ragged_fsdp.install import install, uninstall  # noqa: E402
from ragged_fsdp.mesh import DataParallelMeshDims  # noqa: E402
from ragged_fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx  # noqa: E402
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard  # noqa: E402
from ragged_fsdp.plan import ModelPlan, UnitPlan, plan  # noqa: E402
from ragged_fsdp.planning import Planning  # noqa: E402
from ragged_fsdp.state_dict import set_model_state_dict, set_optimizer_state_dict  # noqa: E402
from ragged_fsdp.summary import forecast, reset_peaks, stats, summary  # noqa: E402
from ragged_fsdp.tensor import RaggedTensor, distribute_tensor, redistribute  # noqa: E402

from ragged_fsdp import checkpoint  # noqa: E402  (needs the others)

__version__: str = _C.version

__all__ = [
    "Block",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommError",
    "DataParallelMeshDims",
    "FSDPModule",
    "InvalidArgument",
    "MixedPrecisionPolicy",
    "ModelPlan",
    "OffloadPolicy",
    "Planning",
    "RaggedError",
    "RaggedShard",
    "RaggedTensor",
    "StridedRaggedShard",
    "UnitPlan",
    "UnshardHandle",
    "checkpoint",
    "clip_grad_norm_",
    "distribute_tensor",
    "elements",
    "forecast",
    "fully_shard",
    "initial_values",
    "install",
    "plan",
    "redistribute",
    "register_fsdp_forward_method",
    "reset_peaks",
    "rows",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
    "stats",
    "summary",
    "tile",
    "uninstall",
    "whole",
]
