"""AdamW whose moments are bytes: one scale a tile of 32 x 32 elements, whole tiles on every rank."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from ragged_fsdp import blocks
from ragged_fsdp.optim import adam
from ragged_fsdp.optim.adamw import AdamW
from ragged_fsdp.optim.base import ParamsT, ShardedOptimizer, refuse_switches
from ragged_fsdp.optim.errors import refuse
from ragged_fsdp.optim.pieces import TILE

SMALLEST = 4096  # elements; smaller parameters keep fp32 moments
EMBEDDINGS = r"(^|\.)(embed\w*|tok_embeddings|wte|wpe)\."


def tile_rows(name: str, param: torch.Tensor) -> blocks.Block | None:
    """The shard_policy that AdamW8bit needs: `fully_shard(.., shard_policy=tile_rows)`. Strips of 32 rows of each
    matrix stay on one rank (all rows of a matrix with fewer), so that no 32 x 32 tile is cut; parameters below 2-D as
    they like."""
    return blocks.rows(max(1, min(TILE, param.shape[-2]))) if param.ndim >= 2 else None


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments: uint8 codes that lie as the parameter does, and fp32 scales, one for each tile of 32 x
    32 elements of a matrix (of each matrix of a stack). Moments are decoded, advanced and used in fp32, and encoded
    after the update. Ranks own whole tiles, so the step needs no communication and its bits don't depend on how many
    ranks there are: shard with `shard_policy=ragged_fsdp.optim.tile_rows`.

    format: "power" (an element is a fixed power of its code: no table, and encoding twice changes nothing) or "dynamic"
        (the maps of Dettmers et al., arXiv 2110.02861, as bitsandbytes builds them).
    embeddings: regular expression; parameters whose name it finds keep fp32 moments. It needs names: pass
        model.named_parameters(). Rows of an embedding get gradients so unevenly that 8 bits lose their second moments.
        The default finds the usual names, and nothing where there are no names; None turns it off; one of your own that
        finds nothing raises.
    state_format: an option of a parameter group: "fp32", "power" or "dynamic" for its parameters, whatever their names
        and sizes.
    Else a parameter is kept in 8 bits if it has two dims or more and at least 4096 elements, by its global shape, so
    that neither ranks nor their number change the decision.

    States: step, and exp_avg, exp_avg_sq where fp32, else exp_avg_codes, exp_avg_scales, exp_avg_sq_codes,
    exp_avg_sq_scales. Checkpoints move codes as bytes. Raises InvalidArgument at construction, on all ranks alike,
    where a rank's border cuts a tile. The other arguments are AdamW's.
    """

    operation = "AdamW8bit"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        format: str = "power",
        embeddings: str | None = EMBEDDINGS,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        nonfinite: str = "ignore",
    ) -> None:
        refuse_switches(self.operation, foreach, fused, capturable, differentiable, amsgrad)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
                    "format": format, "state_format": None, "master_weights": master_weights}  # fmt: skip
        self._embeddings = embeddings
        self._found_embeddings = 0
        ShardedOptimizer.__init__(self, params, defaults, nonfinite)
        if embeddings not in (None, EMBEDDINGS) and not self._found_embeddings:
            named = any("param_names" in group for group in self.param_groups)
            remedy = "Correct the expression." if named else "Pass model.named_parameters(), which has names."
            refuse(self.operation, "a parameter whose name `embeddings` finds", f"none for {embeddings!r}", remedy)

    def _check_group(self, group: dict[str, Any]) -> None:
        adam.check_options(self.operation, group)
        given = group["state_format"]
        if given not in (None, "fp32", *adam.FORMATS):
            refuse(self.operation, f"state_format to be one of {('fp32', *adam.FORMATS)}", repr(given),
                   "Leave it out to decide by size and name.")  # fmt: skip
        if given in adam.FORMATS:
            group["format"] = given
        if group["format"] not in adam.FORMATS:
            refuse(self.operation, f"format to be one of {adam.FORMATS}", repr(group["format"]),
                   "state_format='fp32' of a group keeps its moments in fp32.")  # fmt: skip

    def _moments(self, group: dict[str, Any], param: torch.Tensor, name: str) -> torch.dtype | str:
        given = group["state_format"]
        if given == "fp32":
            return torch.float32
        if given is not None:
            if param.ndim < 2:
                refuse(self.operation, f"matrices where state_format is '{given}'", f"shape {tuple(param.shape)}",
                       "Leave state_format out for it, or say 'fp32'.", name)  # fmt: skip
            return given
        small = param.ndim < 2 or math.prod(param.shape) < SMALLEST
        return torch.float32 if small or self._is_embedding(group, name) else group["format"]

    def _is_embedding(self, group: dict[str, Any], name: str) -> bool:
        return bool(self._embeddings and "param_names" in group and re.search(self._embeddings, name))

    def _check_param(self, param: torch.Tensor, name: str) -> None:
        super()._check_param(param, name)
        self._found_embeddings += self._is_embedding(self.param_groups[-1], name)

    def _check_loaded_group(self, group: dict[str, Any], saved: dict[str, Any], position: int) -> None:
        if any("exp_avg_codes" in self.state.get(param, {}) for param in group["params"]):
            if (other := saved.get("format", group["format"])) != group["format"]:
                refuse("load_state_dict", f"8-bit states in the format '{group['format']}'",
                       f"'{other}' in group {position}", f"Build the optimizer with format='{other}'.")  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_embeddings": self._embeddings, "_found_embeddings": self._found_embeddings}
