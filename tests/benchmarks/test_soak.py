"""The soak run's own arithmetic: growth is what a line through the second half would say, outliers or not."""

from __future__ import annotations

import random

import pytest

from benchmarks.soak import Samples, slope


def test_growth_is_that_of_the_second_half_and_outliers_do_not_count() -> None:
    rng = random.Random(1)
    at = [5.0 * i for i in range(60)]
    # Caches fill in the first half; then 0.01 a second, with noise and now and then a spike.
    values = [100 + 3 * i if i < 30 else 190 + 0.01 * (t - 150) for i, t in enumerate(at)]
    values = [v + rng.uniform(-0.05, 0.05) + (40 if i % 11 == 0 else 0) for i, v in enumerate(values)]
    assert slope(at, values) == pytest.approx(36.0, rel=0.15)
    assert slope(at, [7.0] * 60) == 0.0
    assert slope([], []) == 0.0


def test_samples_keep_one_row_a_name() -> None:
    samples = Samples()
    samples.add(0.0, {"a": 1.0, "b": 2.0})
    samples.add(5.0, {"a": 3.0, "b": 2.0})
    assert samples.at == [0.0, 5.0] and samples.values == {"a": [1.0, 3.0], "b": [2.0, 2.0]}
