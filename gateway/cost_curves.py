"""Cost curves: seconds of a piece of a round by its size and context, from a measurement at start, then from
the rounds themselves.

Owns how observed rounds move what was measured (cost_grid). Costs are stair-shaped (blocks of
a matrix product, captured graph sizes): nothing here assumes that they are convex, and every size has a
running median of its own once it has been seen. Tables of sizes are made class by class, not size by size:
they are renewed every few rounds between two passes of the target. Pure: no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from gateway.cost_grid import MeasuredGrid, Point

FINE_SIZES = 64
"""Sizes up to this are told apart one by one, larger ones in classes about 6% wide."""
_FULL_AT = 3
"""From so many observations on a size goes by its own."""
_WINDOW, _OVERALL_WINDOW = 15, 63
"""Observations that a size's median is over, and that of all sizes together."""
_SHIFT = 0.03
"""A median that moved by less than this leaves the tables made with it as they are."""
_TABLES = 64
"""Tables, each of one context, that are kept."""


_NOTHING = (0.0, 0.0)


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


@dataclass(slots=True)
class _Seen:
    """Observed over measured seconds of one class of sizes in one octave of contexts."""

    ratios: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    count: int = 0
    median: float = 1.0
    log: float = 0.0

    def add(self, ratio: float) -> None:
        self.ratios.add(ratio)
        self.count, self.median = len(self.ratios), self.ratios.median
        self.log = math.log(self.median)

    @property
    def weight(self) -> int:
        return self.count if self.count < _FULL_AT else _FULL_AT


def size_class(size: int) -> int:
    """The class whose observations are pooled: exact up to FINE_SIZES, then 12 classes an octave."""
    if size <= FINE_SIZES:
        return size
    return FINE_SIZES + 1 + int(12 * math.log2(size / FINE_SIZES))


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
        # By octave of contexts, then by class of sizes.
        self._seen: dict[int, dict[int, _Seen]] = {}
        self._overall = RunningMedian(_OVERALL_WINDOW)
        self._factors: dict[tuple[int, int], float] = {}
        self._tables: dict[int, list[float]] = {}
        self._lines: dict[int, list[float]] = {}
        """By context: `_grid` at sizes 0 .. , which no observation changes."""

    def observe(self, size: int, context: int, seconds: float) -> None:
        """What a round took. A measurement that can't be is left out."""
        if not 0.0 < seconds < math.inf or size <= 0:
            return
        ratio = min(max(seconds / self._grid.seconds(size, context), 0.02), 50.0)
        place, octave = size_class(size), _octave(context)
        self._seen.setdefault(octave, {}).setdefault(place, _Seen()).add(ratio)
        self._overall.add(ratio)
        before = self._factors.get((place, octave))
        if before is None or abs(math.log(self._own(place, octave) / before)) > _SHIFT:
            self._factors.clear()
            self._tables.clear()

    def observed(self, size: int, context: int) -> int:
        """Observations of this size that count at the moment."""
        seen = self._seen.get(_octave(context), {}).get(size_class(size))
        return seen.count if seen is not None else 0

    def seconds(self, size: int, context: int) -> float:
        """Expected cost; 0 for size 0."""
        if size <= 0:
            return 0.0
        return self._in_order(size, context, self._grid.seconds(size, context) * self._factor(size, context))

    def measured(self, size: int, context: int) -> float:
        """What was measured at start, whatever rounds have shown since."""
        return self._grid.seconds(size, context)

    def table(self, first: int, last: int, context: int) -> list[float]:
        """seconds(size, context) of sizes first .. last, as they were when an observation last moved the
        curve."""
        # Contexts of one table differ by less than 1/8: a round's cost is not known better than that.
        coarse = _coarse(context)
        table = self._tables.get(coarse)
        if table is None or len(table) <= last:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            step = 1 << max(5, last.bit_length() - 2)
            table = self._tables[coarse] = self._table((last // step + 1) * step, coarse)
        return table[first : last + 1]

    def points(self, sizes: Iterable[int], context: int) -> list[Point]:
        """The curve as it stands, for people."""
        return [Point(size, context, self.seconds(size, context)) for size in sizes]

    @property
    def measured_sizes(self) -> tuple[int, ...]:
        """Of the shortest context."""
        return self._grid.sizes

    def _table(self, size: int, context: int) -> list[float]:
        """seconds(n, context) of n = 0 .. size - 1: all that a class of sizes has in common is found once."""
        octave = _octave(context)
        line = self._lines.get(context)
        if line is None or len(line) < size:
            if len(self._lines) >= _TABLES:
                self._lines.clear()
            line = self._lines[context] = self._grid.line(size, context)
        runs = _runs(size)
        places = [place for place, _, _ in runs]
        factors = self._class_factors(places, octave)
        bounds = self._class_bounds(places, octave, context)
        table = [0.0]
        for place, start, stop in runs:
            factor = factors[place]
            part = [seconds * factor for seconds in line[start:stop]]
            low, high = bounds.get(place, (0.0, math.inf))
            if low <= high and (min(part) < low or max(part) > high):
                part = [min(max(seconds, low), high) for seconds in part]
            table += part
        return table

    def _own(self, place: int, octave: int) -> float:
        """Median of a class, with what its neighbours say while it has few observations."""
        seen = self._seen.get(octave, {}).get(place)
        if seen is not None and seen.count >= _FULL_AT:
            return seen.median
        return _mixed(seen, self._around(place, octave))

    def _in_order(self, size: int, context: int, seconds: float) -> float:
        """No more than what a larger size takes, no less than a smaller one, if that is the better known.

        A plain round among drafting ones is seen now and then, and a few slow ones make a gain of nothing.
        """
        low, high = 0.0, math.inf
        count = self.observed(size, context)
        if count >= _WINDOW:
            return seconds
        for place, seen in self._seen.get(_octave(context), {}).items():
            if seen.count < _FULL_AT or seen.count <= count:
                continue
            other = round(_class_size(place))
            if other > size:
                high = min(high, seen.median * self._grid.seconds(other, context))
            elif other < size:
                low = max(low, seen.median * self._grid.seconds(other, context))
        # Where the better known ones contradict each other they decide nothing.
        return min(max(seconds, low), high) if low <= high else seconds

    def _class_bounds(
        self, places: Sequence[int], octave: int, context: int
    ) -> dict[int, tuple[float, float]]:
        """`_in_order`'s bounds of each class that has any."""
        classes = self._seen.get(octave, {})
        known = [
            (place, seen.count, seen.median * self._measured_class(place, context))
            for place, seen in sorted(classes.items())
            if seen.count >= _FULL_AT
        ]
        by_count: dict[int, list[int]] = {}
        for place in places:
            count = classes[place].count if place in classes else 0
            by_count.setdefault(max(count, _FULL_AT - 1), []).append(place)
        bounds: dict[int, tuple[float, float]] = {}
        for count, members in by_count.items():
            better = [(place, seconds) for place, times, seconds in known if times > count]
            if not better:
                continue
            spots = [place for place, _ in better]
            lows = [0.0, *accumulate((seconds for _, seconds in better), max)]
            highs = [math.inf, *accumulate((seconds for _, seconds in reversed(better)), min)][::-1]
            for place in members:
                spot = bisect_left(spots, place)
                bounds[place] = (lows[spot], highs[spot])
        return bounds

    def _measured_class(self, place: int, context: int) -> float:
        size, line = round(_class_size(place)), self._lines[context]
        return line[size] if size < len(line) else self._grid.seconds(size, context)

    def _around(self, place: int, octave: int) -> float:
        if not len(self._overall):
            return 1.0
        weights, total = 1e-3, 1e-3 * math.log(self._overall.median)
        here = _class_size(place)
        for where, classes in self._seen.items():
            for other, seen in classes.items():
                if other == place and where == octave:
                    continue
                distance = abs(math.log2(_class_size(other) / here)) + abs(where - octave)
                weight = seen.weight * 2.0 ** (-4 * distance)
                weights += weight
                total += weight * seen.log
        return math.exp(total / weights)

    def _class_arounds(self, places: Iterable[int], octave: int) -> dict[int, float]:
        """`_around` of each of `places`: 2 ** (-4 * distance) is the fourth power of the smaller over the
        larger size, so sums from both ends do for all of them.
        """
        if not len(self._overall):
            return dict.fromkeys(places, 1.0)
        everywhere: dict[int, list[float]] = {}
        elsewhere: dict[int, list[float]] = {}
        for where, classes in self._seen.items():
            fade = 2.0 ** (-4 * abs(where - octave))
            for place, seen in classes.items():
                weight = seen.weight * fade
                for sums in (everywhere,) if where == octave else (everywhere, elsewhere):
                    found = sums.setdefault(place, [0.0, 0.0])
                    found[0] += weight
                    found[1] += weight * seen.log
        spots = sorted(everywhere)
        powers = [_fourth_power(place) for place in spots]
        sides = [everywhere[place] for place in spots]
        below = [
            list(accumulate((s[i] * x for s, x in zip(sides, powers, strict=True)), initial=0.0))
            for i in (0, 1)
        ]
        sides.reverse()
        powers.reverse()
        above = [
            list(accumulate((s[i] / x for s, x in zip(sides, powers, strict=True)), initial=0.0))
            for i in (0, 1)
        ]
        overall = math.log(self._overall.median)
        arounds = {}
        for place in places:
            power = _fourth_power(place)
            low = bisect_left(spots, place)
            high = len(spots) - low - (place in everywhere)
            weight, total = elsewhere.get(place, _NOTHING)
            weight += 1e-3 + below[0][low] / power + above[0][high] * power
            total += 1e-3 * overall + below[1][low] / power + above[1][high] * power
            arounds[place] = math.exp(total / weight)
        return arounds

    def _factor(self, size: int, context: int) -> float:
        place, octave = size_class(size), _octave(context)
        factor = self._factors.get((place, octave))
        if factor is None:
            factor = self._factors[place, octave] = self._own(place, octave)
        return factor

    def _class_factors(self, places: Sequence[int], octave: int) -> dict[int, float]:
        """`_factor` of each class."""
        factors = self._factors
        missing = [place for place in places if (place, octave) not in factors]
        classes = self._seen.get(octave, {})
        few = [place for place in missing if place not in classes or classes[place].count < _FULL_AT]
        arounds = self._class_arounds(few, octave) if few else {}
        for place in missing:
            seen = classes.get(place)
            around = arounds.get(place)
            factors[place, octave] = seen.median if around is None and seen else _mixed(seen, around or 1.0)
        return {place: factors[place, octave] for place in places}


def _mixed(seen: _Seen | None, around: float) -> float:
    """Of a class with few observations, or none."""
    if seen is None:
        return around
    share = seen.count / (seen.count + 1)
    return math.exp(share * seen.log + (1 - share) * math.log(around))


@lru_cache(maxsize=64)
def _runs(size: int) -> list[tuple[int, int, int]]:
    """(class, its first size, the one after its last) of sizes 1 .. size - 1."""
    runs: list[tuple[int, int, int]] = []
    for n in range(1, size):
        place = size_class(n)
        start = runs.pop()[1] if runs and runs[-1][0] == place else n
        runs.append((place, start, n + 1))
    return runs


def _octave(context: int) -> int:
    """Contexts below 1k are one class, then each doubling is one."""
    return (context >> 10).bit_length()


def _coarse(context: int) -> int:
    if context < 64:
        return 32
    step = 1 << (context.bit_length() - 4)
    return context // step * step + step // 2


@lru_cache(maxsize=1024)
def _fourth_power(place: int) -> float:
    return _class_size(place) ** 4


@lru_cache(maxsize=1024)
def _class_size(place: int) -> float:
    return float(place) if place <= FINE_SIZES else FINE_SIZES * 2.0 ** ((place - FINE_SIZES - 0.5) / 12)
