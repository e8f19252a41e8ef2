"""initial_values: the numbers that C++'s init_parameters() draws, against a slow twin of the generator."""

import math

import pytest
import torch

from ragged_fsdp import InvalidArgument, initial_values


def philox(counter, key):
    """Philox4x32-10 as in the paper (Salmon et al., SC 2011)."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0], second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1], first & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def twin(kind, a, b, seed, name, index):
    stream = 14695981039346656037
    for byte in name.encode():
        stream = ((stream ^ byte) * 1099511628211) & ((1 << 64) - 1)
    low = 0xFFFFFFFF
    words = philox([index & low, index >> 32, stream & low, stream >> 32], [seed & low, seed >> 32])
    unit = [(word + 0.5) / 2.0**32 for word in words]
    if kind == "uniform":
        return a + (b - a) * unit[0]
    return a + b * math.sqrt(-2.0 * math.log(unit[0])) * math.cos(2.0 * math.pi * unit[1])


def test_the_twin_knows_the_published_answer():
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("kind, a, b", [("normal", 0.5, 0.02), ("uniform", -1.0, 3.0)])
def test_values_are_a_function_of_seed_name_and_index(kind, a, b):
    begin, end = (1 << 33) - 3, (1 << 33) + 4  # an index of more than 32 bits
    values = initial_values(kind, a, b, seed=(5 << 40) + 3, name="layers.3.wq", begin=begin, end=end)
    expected = [twin(kind, a, b, (5 << 40) + 3, "layers.3.wq", index) for index in range(begin, end)]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64).float(), rtol=1e-6, atol=0)


def test_a_piece_is_a_slice_of_the_whole():
    whole = initial_values("normal", 0.0, 1.0, 1, "w", 0, 37)
    pieces = [initial_values("normal", 0.0, 1.0, 1, "w", begin, end) for begin, end in ((0, 5), (5, 5), (5, 37))]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(initial_values("normal", 0.0, 1.0, 1, "v", 0, 37), whole)
    assert torch.equal(initial_values("constant", 2.5, 0.0, 1, "w", 3, 6), torch.full((3,), 2.5))


def test_nonsense_is_refused():
    with pytest.raises(InvalidArgument, match="constant, normal or uniform, but got 'cauchy'"):
        initial_values("cauchy", 0.0, 1.0, 1, "w", 0, 1)
    with pytest.raises(InvalidArgument, match="0 <= begin <= end, but got 3 and 2"):
        initial_values("normal", 0.0, 1.0, 1, "w", 3, 2)
