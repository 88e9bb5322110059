"""The noise of the commit rule: published vectors, golden values, the law, and every way of cutting it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.philox import Columns, _gumbel_torch, _to_gumbel, gumbel_noise, gumbel_noise_of, philox4x32_10

# Random123's known-answer file (kat_vectors), philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

# Written down once from the integer formula below (`exact`), rounded to fp32.
GOLDEN_TOKENS = [0, 1, 2, 3, 4, 5, 1001, 49151]
GOLDEN = [
    [0.67484039, -0.75358742, -0.28571922, 0.07247372, -1.27653623, 0.79948634, -0.01477643, -1.04833841],
    [2.50437331, 0.47556487, 1.52250123, -0.61691159, -0.49104750, 0.38185704, 2.12852836, -0.71371269],
    [3.31517577, 1.98086154, -0.13506745, 0.76868540, 0.64037275, 2.79818726, 1.22809303, -0.59656835],
]
GOLDEN_ARGMAX = [20349, 19251, 31976]


def words(seed: int, position: int, choice: int, token: int) -> int:
    """The 32-bit word of one token by plain Python integers, written from the paper's description."""
    counter = [token // 4, position, choice, 0]
    key = [seed % 2**32, (seed % 2**64) >> 32]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[token % 4]


def exact(seed: int, position: int, choice: int, token: int) -> float:
    """The word is rounded to fp32, as the rule says: near w = 1 nothing is left of its last digits."""
    word = np.float32(words(seed, position, choice, token)) + np.float32(0.5)
    return -math.log(-math.log1p(-min(float(word) / 2**32, 1 - 2**-24)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    got = philox4x32_10(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert got.tolist() == expected


@settings(max_examples=60)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 2**32 - 1),
    first=st.integers(0, 200_000),
    count=st.integers(1, 41),
)
def test_equals_the_formula_in_exact_integers(
    seed: int, position: int, choice: int, first: int, count: int
) -> None:
    got = gumbel_noise([seed], [position], [choice], count, first_token=first)
    assert got.shape == (1, count) and got.dtype == torch.float32
    for i in range(count):
        assert got[0, i].item() == pytest.approx(exact(seed, position, choice, first + i), rel=2e-6, abs=2e-6)


def test_golden_values() -> None:
    got = gumbel_noise([0, 42, -1], [0, 1000, 7], [0, 3, 1], 49152)
    want = torch.tensor(GOLDEN)
    torch.testing.assert_close(got[:, GOLDEN_TOKENS], want, rtol=1e-6, atol=1e-6)
    assert got.argmax(dim=1).tolist() == GOLDEN_ARGMAX


def test_golden_values_are_the_formula() -> None:
    for row, (seed, position, choice) in zip(GOLDEN, [(0, 0, 0), (42, 1000, 3), (-1, 7, 1)], strict=True):
        for token, value in zip(GOLDEN_TOKENS, row, strict=True):
            assert value == pytest.approx(exact(seed, position, choice, token), abs=2e-6)


def test_the_extreme_words_stay_finite() -> None:
    low, high = _to_gumbel(torch.tensor([0.0, 2.0**32])).tolist()
    assert low == pytest.approx(-math.log(-math.log1p(-(2.0**-33)))) and high == pytest.approx(
        -math.log(24 * math.log(2))
    )


def test_a_negative_seed_is_taken_mod_2_64() -> None:
    same = gumbel_noise([-3, 2**64 - 3], [5, 5], [0, 0], 64)
    assert torch.equal(same[0], same[1])
    as_tensor = gumbel_noise(torch.tensor([-3]), torch.tensor([5]), torch.tensor([0]), 64)
    assert torch.equal(as_tensor[0], same[0])


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
def test_vocabulary_shards_are_cuts_of_the_whole(parts: int) -> None:
    vocab = 1003
    whole = gumbel_noise([9, 10], [3, 4], [0, 1], vocab)
    bounds = [vocab * i // parts for i in range(parts + 1)]
    cut = [gumbel_noise([9, 10], [3, 4], [0, 1], b - a, first_token=a) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(cut, dim=1), whole)


@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 999), min_size=1, max_size=200))
def test_some_tokens_have_the_noise_they_have_among_all(ids: list[int]) -> None:
    """In any order, repeated ones too."""
    drawn = [7, -3], [5, 2**31], [0, 2]
    wanted = torch.tensor(ids)
    got = gumbel_noise_of(Columns(wanted), *drawn)
    assert torch.equal(got, gumbel_noise(*drawn, 1000).index_select(1, wanted))


def test_rows_do_not_depend_on_the_batch() -> None:
    batch = gumbel_noise([7] * 8, list(range(8)), [0] * 8, 4099)
    for p in range(8):
        assert torch.equal(gumbel_noise([7], [p], [0], 4099)[0], batch[p])


def test_torch_path_equals_numpy_path() -> None:
    seeds, positions, choices = [1, 2**63, 2**64 - 1], [0, 77, 131071], [0, 1, 5]
    for first in (0, 1, 2, 3, 4, 49_150):
        fast = gumbel_noise(seeds, positions, choices, 517, first_token=first)
        slow = _gumbel_torch(seeds, positions, choices, 517, first, torch.device("cpu"))
        assert torch.equal(fast, slow)


@pytest.mark.gpu
def test_cuda_words_give_the_cpu_noise() -> None:
    args = ([1, 2**64 - 1], [0, 77], [0, 1], 49_152)
    # The words are equal; the two logarithms may differ in their last bit.
    torch.testing.assert_close(
        gumbel_noise(*args, device="cuda").cpu(), gumbel_noise(*args), rtol=1e-6, atol=1e-6
    )


def test_law_is_gumbel_and_independent() -> None:
    noise = gumbel_noise([123] * 40, list(range(40)), [0] * 40, 8192).double()
    assert noise.isfinite().all()
    # Kolmogorov-Smirnov against exp(-exp(-g)): 1.95 / sqrt(n) is the 0.1 % point.
    ordered = noise.flatten().sort().values
    cdf = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert (cdf - steps).abs().max().item() < 1.95 / len(ordered) ** 0.5
    uniform = torch.exp(-torch.exp(-noise)) - 0.5
    for a, b in (
        (uniform[:, 1:], uniform[:, :-1]),
        (uniform[1:], uniform[:-1]),
        (uniform[:, 4:], uniform[:, :-4]),
    ):
        correlation = (a * b).mean() * 12
        assert abs(correlation.item()) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize("field", range(3))
def test_seed_position_and_choice_each_change_the_noise(field: int) -> None:
    base, other = [[3], [4], [5]], [[3], [4], [5]]
    other[field] = [other[field][0] + 1]
    assert not torch.equal(gumbel_noise(*base, 64), gumbel_noise(*other, 64))


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 seeds, 1 positions, 1 choices"):
        gumbel_noise_of(Columns(torch.tensor([1])), [1, 2], [1], [0])
    with pytest.raises(ValueError, match="2 seeds, 1 positions, 1 choices"):
        gumbel_noise([1, 2], [0], [0], 8)
