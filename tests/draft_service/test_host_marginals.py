"""The best tokens of a row, without its other scores: those that sorting all of them gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draft_service.host_marginals import best_tokens
from draft_service.tree import noisy_log_probs
from kernels.philox import gumbel_noise
from kernels.topk import top_entries

K = 32
SIZES = (1, 31, 32, 33, 64, 2047, 2048, 2112, 2113, 14_336)
"""Fewer columns than are wanted; about as many groups; with columns left over and without."""


def sorted_all(scores: np.ndarray, k: int) -> list[int]:
    order = sorted((column for column in range(len(scores)) if scores[column] > -math.inf),
                   key=lambda column: (-scores[column], column))  # fmt: skip
    return order[:k]


def row(size: int, kind: str) -> np.ndarray:
    generator = np.random.default_rng(size)
    values = (generator.standard_normal(size) * 4).astype(np.float32)
    if kind == "few values":
        return np.round(values / 4)
    if kind == "all equal":
        return np.full(size, 1.5, np.float32)
    if kind == "few possible":
        values[generator.random(size) < 0.98] = -math.inf
    if kind == "one sure":
        values[size // 2] = 300.0
    if kind == "at the end":
        values[-min(size, 40) :] += 100.0
    return values


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kind", ["normal", "few values", "all equal", "few possible", "one sure", "at the end"]
)
def test_greedy_order_is_that_of_the_logits(size: int, kind: str) -> None:
    logits = row(size, kind)
    best = best_tokens(logits, K)
    assert best.columns.tolist() == sorted_all(logits, K)
    assert np.array_equal(best.beliefs, logits[best.columns])
    assert np.array_equal(best.scores, best.beliefs - best.beliefs[:1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "few values", "all equal", "few possible", "one sure"])
@pytest.mark.parametrize("heat", [1e-5, 0.01, 0.7, 1.0, 1.3, 100.0])
def test_sampled_order_is_that_of_noisy_scores(size: int, kind: str, heat: float) -> None:
    logits, noise = row(size, kind), gumbel_noise([size], [5], [0], size)[0].numpy()
    best = best_tokens(logits, K, heat=heat, noise=noise)
    scores = logits if heat == 1.0 else logits * np.float32(1 / heat)
    assert best.columns.tolist() == sorted_all(scores + noise, K)
    np.testing.assert_allclose(best.beliefs, logits[best.columns] / np.float32(heat), rtol=1e-6)
    noisy = best.beliefs + noise[best.columns]
    np.testing.assert_array_equal(best.scores, noisy - noisy[:1])


@pytest.mark.parametrize("heat", [0.3, 1.0, 2.5])
def test_scores_differ_from_normalised_ones_by_a_constant(heat: float) -> None:
    logits, noise = torch.randn(14_336) * 4, gumbel_noise([1], [9], [2], 14_336)[0]
    values, columns = top_entries(noisy_log_probs(logits, heat, noise), K, nonpositive=True)
    best = best_tokens(logits.numpy(), K, heat=heat, noise=noise.numpy())
    assert best.columns.tolist() == columns.tolist()
    shift = torch.from_numpy(best.scores) - values
    assert float(shift.max() - shift.min()) < 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1000, -1])
@pytest.mark.parametrize("size", [100, 14_337])
def test_a_row_without_a_distribution_has_no_best(bad: float, place: int, size: int) -> None:
    logits = row(size, "normal")
    logits[place % size] = bad
    noise = gumbel_noise([3], [1], [0], size)[0].numpy()
    with np.errstate(invalid="ignore"):
        assert len(best_tokens(logits, K).columns) == 0
        assert len(best_tokens(logits, K, heat=0.5, noise=noise).columns) == 0
    nothing = np.full(size, -math.inf, np.float32)
    assert len(best_tokens(nothing, K).columns) == 0
    assert len(best_tokens(nothing, K, heat=0.5, noise=noise).columns) == 0
