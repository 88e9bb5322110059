"""Cost curves: measured points, what rounds make of them, and tables of many sizes at once. All pure."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cost_curves import CostCurve, RunningMedian, _coarse, size_class
from gateway.cost_grid import Point
from gateway.steering import load_class


def curve(*points: tuple[int, int, float]) -> CostCurve:
    return CostCurve([Point(*point) for point in points])


def test_the_measured_grid_is_interpolated() -> None:
    found = curve((1, 100, 1.0), (3, 100, 2.0), (1, 300, 2.0), (3, 300, 4.0))
    assert found.seconds(2, 100) == pytest.approx(1.5)
    assert found.seconds(2, 200) == pytest.approx(2.25)
    assert found.seconds(5, 100) == pytest.approx(3.0)  # the last slope goes on
    assert found.seconds(1, 500) == pytest.approx(3.0)  # and so does the rise with context
    assert found.seconds(1, 10) == pytest.approx(1.0)
    assert found.seconds(0, 10) == 0.0
    assert curve((4, 50, 1.0)).seconds(9, 999) == pytest.approx(1.0)
    assert found.table(1, 3, 100)[:3] == pytest.approx([found.seconds(n, 100) for n in (1, 2, 3)], rel=0.2)


_GRIDS = (
    ((1, 0, 1.0), (4, 0, 1.2), (8, 0, 2.0), (64, 0, 5.0), (256, 0, 21.0)),
    ((2, 128, 1.0), (30, 128, 2.0), (2, 4096, 2.0), (30, 4096, 3.0), (200, 4096, 9.0)),
    ((5, 0, 0.3),),
)


@given(
    st.sampled_from(_GRIDS),
    st.lists(
        st.tuples(
            st.one_of(st.integers(1, 12), st.integers(1, 700)),
            st.sampled_from((40, 1000, 2100, 9000)),
            st.floats(0.5, 2.0),
            st.integers(1, 20),
        ),
        max_size=25,
    ),
    st.sampled_from((40, 1000, 2500)),
)
def test_a_table_is_the_curve_at_each_of_its_sizes(
    points: tuple[tuple[int, int, float], ...], seen: list[tuple[int, int, float, int]], context: int
) -> None:
    """Made class by class with sums from both ends; `seconds` looks at every class for every size."""
    made, plain = curve(*points), curve(*points)
    for size, where, ratio, times in seen:
        for found in (made, plain):
            for _ in range(times):
                found.observe(size, where, ratio * found.measured(size, where))
        made.table(1, size, context)  # which may still stand at the next
    coarse = _coarse(context)
    made._tables.clear()
    made._factors.clear()
    plain._factors.clear()
    sizes = [*range(3, 140), *range(140, 501, 19)]
    table = made.table(3, 500, context)
    assert [table[n - 3] for n in sizes] == pytest.approx([plain.seconds(n, coarse) for n in sizes], rel=1e-9)


def test_a_table_lasts_until_the_curve_moves() -> None:
    found = curve(*_GRIDS[0])
    before = found.table(1, 100, 0)
    found.observe(5, 0, 2 * before[4])
    after = found.table(1, 100, 0)
    assert after[4] > 1.5 * before[4]
    found.observe(5, 0, after[4])
    assert found.table(1, 200, 0)[:3] == after[:3]


def test_a_measurement_that_falls_with_size_is_noise() -> None:
    found = curve((1, 0, 2.0), (2, 0, 1.0), (3, 0, 3.0))
    assert [found.seconds(n, 0) for n in (1, 2, 3)] == pytest.approx([2.0, 2.0, 3.0])


def test_no_points_no_curve() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        CostCurve([])


def test_observed_stairs_replace_the_slope() -> None:
    """The grid knows 4 and 8 rows; the machine works in blocks of 6."""
    found = curve((1, 0, 1.0), (4, 0, 1.2), (8, 0, 2.0))

    def real(rows: int) -> float:
        return 1.2 if rows <= 6 else 2.0

    rng = random.Random(0)
    for _ in range(20):
        for rows in (4, 5, 6, 7):
            found.observe(rows, 0, real(rows) * math.exp(rng.gauss(0, 0.05)))
    for rows in (4, 5, 6, 7):
        assert found.seconds(rows, 0) == pytest.approx(real(rows), rel=0.05)
    assert found.observed(6, 0) == 15 and found.observed(9, 0) == 0


def test_a_slower_machine_is_slower_everywhere_until_seen_otherwise() -> None:
    found = curve((1, 0, 1.0), (64, 0, 2.0))
    for _ in range(9):
        found.observe(8, 0, 3.0 * curve((1, 0, 1.0), (64, 0, 2.0)).seconds(8, 0))
    assert found.seconds(9, 0) == pytest.approx(3.0 * (1 + 8 / 63), rel=0.01)
    for _ in range(9):
        found.observe(40, 0, 1.0 + 39 / 63)
    assert found.seconds(40, 0) == pytest.approx(1.0 + 39 / 63)
    assert found.seconds(38, 0) < 1.3 * found.seconds(40, 0)  # the nearer say counts more


def test_a_size_seldom_seen_stays_between_those_seen_often() -> None:
    """One row costs no more than ten: three slow rounds of one are bad luck."""
    found = curve((1, 0, 1.0), (10, 0, 1.5), (20, 0, 2.0))
    for _ in range(10):
        found.observe(10, 0, 1.5)
    for _ in range(3):
        found.observe(1, 0, 3.0)
        found.observe(20, 0, 0.7)
    assert found.seconds(1, 0) == pytest.approx(1.5) == found.seconds(20, 0)
    for _ in range(12):  # by now it is known better than the other
        found.observe(1, 0, 3.0)
    assert found.seconds(1, 0) == pytest.approx(3.0)


def test_outliers_and_nonsense_move_nothing() -> None:
    found = curve((4, 0, 1.0))
    for seconds in (1.0, 50.0, 1.0, 1.0, 0.0, -1.0, math.inf, 1.0):
        found.observe(4, 0, seconds)
    assert found.seconds(4, 0) == pytest.approx(1.0)
    assert found.observed(4, 0) == 5


def test_curves_follow_a_change() -> None:
    found = curve((4, 0, 1.0))
    for seconds in [1.0] * 30 + [2.0] * 9:
        found.observe(4, 0, seconds)
    assert found.seconds(4, 0) == pytest.approx(2.0)
    assert found.table(4, 4, 0)[0] == pytest.approx(2.0)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.integers(1, 9))
def test_running_median(values: list[float], window: int) -> None:
    median = RunningMedian(window)
    for value in values:
        median.add(value)
    last = sorted(values[-window:])
    assert len(median) == len(last)
    middle = len(last) // 2
    assert median.median == pytest.approx(
        last[middle] if len(last) % 2 else sum(last[middle - 1 : middle + 1]) / 2
    )


def test_classes() -> None:
    assert [size_class(n) for n in (1, 6, 7, 64)] == [1, 6, 7, 64]
    sizes = [size_class(n) for n in range(1, 3000)]
    assert sizes == sorted(sizes) and size_class(2000) == size_class(2010)
    assert [load_class(n) for n in (1, 7, 8, 9, 10, 16, 17, 128)] == [1, 7, 8, 8, 10, 16, 16, 128]
    assert all(load_class(load_class(n)) == load_class(n) <= n for n in range(1, 600))
