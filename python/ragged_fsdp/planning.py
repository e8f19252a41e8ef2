"""How a unit's bucket is laid out: values for the planner (ragged/plan/planner.h). Defaults suit training; tests and comparisons set others."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ragged_fsdp import _C


@dataclasses.dataclass(frozen=True)
class Planning:
    """Which layouts the planner may choose, and what a collective costs it, in elements of padding that it would rather carry.

    strategy: "auto" splits a bucket into uniform segments and a ragged tail where that pays; "single" makes one uniform segment in module order, the
        smallest there is; "paper" is veScale-FSDP's own search for it (Algorithm 1).
    max_uniform_segments, max_ragged_blocks: bounds for "auto"; 0 blocks: no ragged tail.
    split_bytes: a unit with units inside (the root: embedding, norm, head) is planned as two buckets, what lies behind the last of them and the
        rest, where each has at least so many bytes. The first of the two is then reduced before backward enters the inner units, and neither
        waits in a buffer for the other. On a CPU alone, where memory goes back as soon as it is free; 0: never.
    segment_cost, ragged_segment_cost, ragged_block_cost: another uniform segment, a ragged one, and each of its blocks.
    """

    strategy: Literal["auto", "single", "paper"] = "auto"
    max_uniform_segments: int = 3
    max_ragged_blocks: int = 64
    segment_cost: int = 32768
    ragged_segment_cost: int = 32768
    ragged_block_cost: int = 512
    split_bytes: int = 1 << 20

    def to_core(self) -> Any:
        """As the extension takes it. Raises InvalidArgument for an unknown strategy."""
        return _C.PlanOptions(
            self.strategy,
            self.max_uniform_segments,
            self.max_ragged_blocks,
            self.segment_cost,
            self.ragged_segment_cost,
            self.ragged_block_cost,
        )
