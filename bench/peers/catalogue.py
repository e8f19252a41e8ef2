"""What is compared: systems, models, and cells: a model, a dtype and a number of ranks. Plain data without torch, so
that pages can be made where there is none.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class System:
    label: str
    package: str  # whose version is stated
    module: str = ""  # imported before anything is measured
    ours: bool = False
    sharded: bool = True
    base: str = "single"  # the unsharded run that it is compared with


SYSTEMS = {
    "single": System("one process", "torch", sharded=False),
    "single_cpp": System("one process, C++", "torch", "ragged_peer", sharded=False, base="single_cpp"),
    "ddp": System("DDP", "torch", sharded=False),
    "fsdp1": System("FSDP1", "torch"),
    "fsdp2": System("FSDP2", "torch"),
    "deepspeed": System("DeepSpeed ZeRO-3", "deepspeed", "deepspeed"),
    "megatron_v1": System("Megatron-FSDP v1", "megatron-fsdp", "megatron_fsdp"),
    "megatron_v2": System("Megatron-FSDP v2", "megatron-fsdp", "megatron_fsdp"),
    "ragged_torch_adamw": System("RaggedFSDP, torch's AdamW", "ragged_fsdp", "ragged_fsdp", True),
    "ragged": System("RaggedFSDP", "ragged_fsdp", "ragged_fsdp.optim", True),
    "ragged_in_place": System("RaggedFSDP, gradients in place", "ragged_fsdp", "ragged_fsdp.optim", True),
    "ragged_cpp": System("RaggedFSDP C++", "ragged_fsdp", "ragged_peer", True, base="single_cpp"),
    "ragged_cpp_over_weights": System("RaggedFSDP C++, over weights", "ragged_fsdp", "ragged_peer", True, base="single_cpp"),
}  # fmt: skip
UNSHARDED = ("single", "single_cpp")  # trained by one process
RIVALS = tuple(name for name, system in SYSTEMS.items() if not system.ours and name not in UNSHARDED)
SHARDING_RIVALS = tuple(name for name in RIVALS if SYSTEMS[name].sharded)
OURS = tuple(name for name, system in SYSTEMS.items() if system.ours)

MODELS = {
    "llama": "Llama-like: 4 blocks of dim 512, SwiGLU 1,408, vocabulary 4,096, untied, 64 tokens a rank",
    "moe": "Mixture of experts: 2 blocks of dim 256, 6 stacked experts of 512 a block, top 2, 64 tokens a rank",
    "tiny": "64 units of one 64 x 64 linear layer each, 8 rows a rank",
    "lora": "LoRA: the Llama-like model frozen, adapters of rank 8 on all its projections",
    "mixed": "Mixed dtypes: the Llama-like model with projections in bf16 beside norms and embedding in fp32",
}
CPP_MODELS = ("llama", "moe", "tiny")  # those of peer.cpp
UNITS = {"llama": 5, "moe": 3, "tiny": 65, "lora": 5, "mixed": 5}  # the root's included


@dataclasses.dataclass(frozen=True)
class Cell:
    model: str
    bf16: bool  # bf16 compute, fp32 masters and reductions
    world: int

    @property
    def dtype(self) -> str:
        return "bf16" if self.bf16 else "fp32"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}-{self.world}"

    @property
    def systems(self) -> tuple[str, ...]:
        """Where there is no C++ model, one row says so."""
        if self.model in CPP_MODELS:
            return tuple(SYSTEMS)
        return tuple(name for name in SYSTEMS if name not in ("single_cpp", "ragged_cpp_over_weights"))


CELLS = {
    cell.name: cell
    for cell in (
        Cell("llama", False, 2), Cell("llama", False, 4), Cell("llama", True, 2), Cell("moe", False, 2),
        Cell("moe", False, 4), Cell("tiny", False, 1), Cell("tiny", False, 2), Cell("lora", False, 2),
        Cell("lora", False, 4), Cell("mixed", False, 2),
    )
}  # fmt: skip
LOSS_TOLERANCE = 1e-6  # fp32 runs further from single-process training don't count
COMPARED_STEPS = 5  # losses compared with the reference; rounding grows with every step, in all systems
