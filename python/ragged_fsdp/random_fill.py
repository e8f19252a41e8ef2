"""Random values for ragged tensors that depend on (seed, order of calls, global element index) and on nothing else.

The same model initialised on any number of ranks, with any blocks, replicas or tensor parallelism, starts with the
same bits, and nobody holds a whole tensor. Element i of a fill is a hash of the fill's 64-bit seed and i (SplitMix64,
Steele et al. 2014: its state is a counter, so any element can be computed alone). The seed is drawn from torch's
generator, one draw a fill on every rank, and rank 0's counts, so that replicas agree even where the ranks were seeded
differently. Values differ from those that torch would draw for a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_fsdp import flat
from ragged_fsdp.placement import foreign_box, ragged_mesh_dim

_CHUNK = 1 << 18  # elements at a time: the int64 temporaries stay in cache
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}

Sampler = Callable[[torch.Tensor, torch.dtype], torch.Tensor]  # (64 random bits as int64, dtype to fill) -> values


def fill_(local: torch.Tensor, spec: DTensorSpec, sampler: Sampler, generator: torch.Generator | None) -> None:
    """Fills the 1-D piece of a ragged tensor; every rank of the mesh calls it."""
    if local.is_meta:
        return
    seed = _common_seed(spec, generator)
    for first in range(0, local.numel(), _CHUNK):
        last = min(first + _CHUNK, local.numel())
        index = _global_index(spec, first, last, local.device)
        local[first:last] = sampler(_hash(index, seed), local.dtype)


def uniform(low: float, high: float) -> Sampler:
    """[low, high), with as many random digits as the dtype has."""

    def sample(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return low + _unit(bits, _DIGITS.get(dtype, 53)) * (high - low)

    return sample


def normal(mean: float, std: float) -> Sampler:
    """By the inverse error function in fp64: tails reach 8 standard deviations."""

    def sample(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        centred = _unit(bits, 53).add_(2.0**-54).mul_(2.0).sub_(1.0)
        return torch.erfinv(centred).mul_(math.sqrt(2.0) * std).add_(mean)

    return sample


def exponential(rate: float) -> Sampler:
    """Density rate * exp(-rate x)."""

    def sample(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.log1p(-_unit(bits, 53)).div_(-rate)

    return sample


def bernoulli(probability: float) -> Sampler:
    """One with this probability, else zero."""

    def sample(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _unit(bits, 53) < probability

    return sample


def _common_seed(spec: DTensorSpec, generator: torch.Generator | None) -> int:
    device = generator.device if generator is not None else torch.device("cpu")
    drawn = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, generator=generator, device=device)
    mesh = spec.mesh
    drawn = drawn.to(mesh.device_type)
    for dim in range(mesh.ndim):
        flat.broadcast_(drawn, mesh.get_group(dim), 0)
    return int(drawn.item())


def _global_index(spec: DTensorSpec, first: int, last: int, device: torch.device) -> torch.Tensor:
    # Where elements [first, last) of the local piece lie in the row-major global tensor.
    meta: Any = spec.tensor_meta
    mesh_dim = ragged_mesh_dim(spec.placements)
    begin, _ = spec.placements[mesh_dim].interval(spec.mesh.get_local_rank(mesh_dim))  # type: ignore[index, union-attr]
    index = torch.arange(begin + first, begin + last, dtype=torch.int64, device=device)
    sizes, offsets = foreign_box(meta.shape, spec.mesh, spec.placements)
    if sizes == tuple(meta.shape):
        return index
    result = torch.zeros_like(index)
    for size, offset, stride in zip(reversed(sizes), reversed(offsets), reversed(meta.stride)):
        result += (index % size + offset) * stride
        index = index // size
    return result


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _xor_shift(x: torch.Tensor, shift: int) -> torch.Tensor:
    # int64 shifts copy the sign: masking makes them the unsigned shifts of the definition.
    return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))


def _hash(index: torch.Tensor, seed: int) -> torch.Tensor:
    x = index * _signed(0x9E3779B97F4A7C15) + _signed(seed + 0x9E3779B97F4A7C15)
    x = _xor_shift(x, 30) * _signed(0xBF58476D1CE4E5B9)
    x = _xor_shift(x, 27) * _signed(0x94D049BB133111EB)
    return _xor_shift(x, 31)


def _unit(bits: torch.Tensor, digits: int) -> torch.Tensor:
    # [0, 1) in steps of 2^-digits, fp64.
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).to(torch.float64) * 2.0**-digits
