"""Cost curves: seconds of a piece of a round by its size and context, from a measurement at start, then from
the rounds themselves.

Owns interpolation of the measured points and how observed rounds move them. Costs are stair-shaped (blocks of
a matrix product, captured graph sizes): nothing here assumes that they are convex, and every size has a
running median of its own once it has been seen. Pure: no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FINE_SIZES = 64
"""Sizes up to this are told apart one by one, larger ones in classes about 6% wide."""
_FULL_AT = 3
"""From so many observations on a size goes by its own."""
_WINDOW, _OVERALL_WINDOW = 15, 63
"""Observations that a size's median is over, and that of all sizes together."""
_SHIFT = 0.03
"""A median that moved by less than this leaves the tables made with it as they are."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured cost. size: rows, or sessions; context: committed tokens that are read, of all sessions of a
    verify pass, of each session of a draft.
    """

    size: int
    context: int
    seconds: float


class RunningMedian:
    """Of the last `window` values."""

    __slots__ = ("_order", "_sorted")

    def __init__(self, window: int) -> None:
        self._order: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        if len(self._order) == self._order.maxlen:
            old = self._order[0]
            del self._sorted[bisect_left(self._sorted, old)]
        self._order.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """Raises IndexError without any value."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return 0.5 * (self._sorted[middle - 1] + self._sorted[middle])


def size_class(size: int) -> int:
    """The class whose observations are pooled: exact up to FINE_SIZES, then 12 classes an octave."""
    if size <= FINE_SIZES:
        return size
    return FINE_SIZES + 1 + int(12 * math.log2(size / FINE_SIZES))


class MeasuredGrid:
    """Interpolation of measured points, linear in size and in context, never falling with size.

    Beyond the largest size the last slope goes on; below the smallest and outside of the contexts the nearest
    holds, except that cost goes on rising linearly with context beyond the longest one.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        by_context: dict[int, list[Point]] = {}
        for point in points:
            by_context.setdefault(point.context, []).append(point)
        self._contexts = sorted(by_context)
        self._sizes: list[list[int]] = []
        self._seconds: list[list[float]] = []
        for context in self._contexts:
            line = sorted(by_context[context], key=lambda p: p.size)
            seconds: list[float] = []
            for point in line:
                seconds.append(max(point.seconds, seconds[-1] if seconds else 1e-9))
            self._sizes.append([p.size for p in line])
            self._seconds.append(seconds)

    def seconds(self, size: int, context: int) -> float:
        contexts = self._contexts
        if len(contexts) == 1:
            return self._along(0, size)
        place = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        low, high = contexts[place - 1], contexts[place]
        share = max(0.0, (context - low) / (high - low))
        first, second = self._along(place - 1, size), self._along(place, size)
        return max(first + share * (second - first), 0.25 * first)

    def _along(self, line: int, size: int) -> float:
        sizes, seconds = self._sizes[line], self._seconds[line]
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        place = min(bisect_left(sizes, size), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        slope = (seconds[place] - seconds[place - 1]) / (high - low)
        return seconds[place - 1] + (size - low) * slope


class CostCurve:
    """Seconds by size and context: the grid, times what observation says about it.

    A size that has been observed goes by its own median of observed / grid; one that has not, by those of the
    nearest sizes that have (weights fall to a sixteenth with each doubling of the size between them). Costs
    do not fall with size: what has been seen more often bounds what has been seen less.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        """Raises ValueError without any point."""
        if not points:
            raise ValueError("a cost curve needs at least one point")
        self._grid = MeasuredGrid(points)
        self._seen: dict[tuple[int, int], RunningMedian] = {}
        self._overall = RunningMedian(_OVERALL_WINDOW)
        self._factors: dict[tuple[int, int], float] = {}
        self._tables: dict[tuple[int, int], list[float]] = {}

    def observe(self, size: int, context: int, seconds: float) -> None:
        """What a round took. A measurement that can't be is left out."""
        if not 0.0 < seconds < math.inf or size <= 0:
            return
        ratio = min(max(seconds / self._grid.seconds(size, context), 0.02), 50.0)
        key = (size_class(size), _octave(context))
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = RunningMedian(_WINDOW)
        seen.add(ratio)
        self._overall.add(ratio)
        before = self._factors.get(key)
        if before is None or abs(math.log(self._own(key) / before)) > _SHIFT:
            self._factors.clear()
            self._tables.clear()

    def observed(self, size: int, context: int) -> int:
        """Observations of this size that count at the moment."""
        seen = self._seen.get((size_class(size), _octave(context)))
        return len(seen) if seen is not None else 0

    def seconds(self, size: int, context: int) -> float:
        """Expected cost; 0 for size 0."""
        if size <= 0:
            return 0.0
        return self._in_order(size, context, self._grid.seconds(size, context) * self._factor(size, context))

    def measured(self, size: int, context: int) -> float:
        """What was measured at start, whatever rounds have shown since."""
        return self._grid.seconds(size, context)

    def table(self, first: int, last: int, context: int) -> list[float]:
        """seconds(size, context) of sizes first .. last; kept until an observation moves the curve."""
        # Contexts of one table differ by less than 1/8: a round's cost is not known better than that.
        coarse = _coarse(context)
        table = self._tables.get((first, coarse))
        if table is None or len(table) <= last - first:
            room = max(last - first + 1, 2 * len(table) if table is not None else 0)
            table = [self.seconds(size, coarse) for size in range(first, first + room)]
            if len(self._tables) > 256:
                self._tables.clear()
            self._tables[first, coarse] = table
        return table

    def points(self, sizes: Iterable[int], context: int) -> list[Point]:
        """The curve as it stands, for people."""
        return [Point(size, context, self.seconds(size, context)) for size in sizes]

    @property
    def measured_sizes(self) -> tuple[int, ...]:
        """Of the shortest context."""
        return tuple(self._grid._sizes[0])

    def _own(self, key: tuple[int, int]) -> float:
        """Median of a class, with what its neighbours say while it has few observations."""
        seen = self._seen.get(key)
        count = len(seen) if seen is not None else 0
        if seen is not None and count >= _FULL_AT:
            return seen.median
        around = self._around(key)
        if seen is None:
            return around
        share = count / (count + 1)
        return math.exp(share * math.log(seen.median) + (1 - share) * math.log(around))

    def _in_order(self, size: int, context: int, seconds: float) -> float:
        """No more than what a larger size takes, no less than a smaller one, if that is the better known.

        A plain round among drafting ones is seen now and then, and a few slow ones make a gain of nothing.
        """
        low, high = 0.0, math.inf
        count, octave = self.observed(size, context), _octave(context)
        for (place, where), seen in self._seen.items():
            if where != octave or len(seen) < _FULL_AT or len(seen) <= count:
                continue
            other = round(_class_size(place))
            if other > size:
                high = min(high, seen.median * self._grid.seconds(other, context))
            elif other < size:
                low = max(low, seen.median * self._grid.seconds(other, context))
        # Where the better known ones contradict each other they decide nothing.
        return min(max(seconds, low), high) if low <= high else seconds

    def _around(self, key: tuple[int, int]) -> float:
        if not len(self._overall):
            return 1.0
        weights, total = 1e-3, 1e-3 * math.log(self._overall.median)
        place = _class_size(key[0])
        for (other, octave), seen in self._seen.items():
            if (other, octave) == key:
                continue
            distance = abs(math.log2(_class_size(other) / place)) + abs(octave - key[1])
            weight = min(len(seen), _FULL_AT) * 2.0 ** (-4 * distance)
            weights += weight
            total += weight * math.log(seen.median)
        return math.exp(total / weights)

    def _factor(self, size: int, context: int) -> float:
        key = (size_class(size), _octave(context))
        factor = self._factors.get(key)
        if factor is None:
            factor = self._factors[key] = self._own(key)
        return factor


def _octave(context: int) -> int:
    """Contexts below 1k are one class, then each doubling is one."""
    return (context >> 10).bit_length()


def _coarse(context: int) -> int:
    if context < 64:
        return 32
    step = 1 << (context.bit_length() - 4)
    return context // step * step + step // 2


def _class_size(place: int) -> float:
    return float(place) if place <= FINE_SIZES else FINE_SIZES * 2.0 ** ((place - FINE_SIZES - 0.5) / 12)
