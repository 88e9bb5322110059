"""Measured costs: seconds of a piece of a round at the sizes and contexts that a service tried at its start.

Owns the points and interpolation between them. Does not own what rounds say later (cost_curves). Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A measured cost. size: rows, or sessions; context: committed tokens that are read, of all sessions of a
    verify pass, of each session of a draft.
    """

    size: int
    context: int
    seconds: float


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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Measured at the shortest context."""
        return tuple(self._sizes[0])

    def seconds(self, size: int, context: int) -> float:
        contexts = self._contexts
        if len(contexts) == 1:
            return self._along(0, size)
        place = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        low, high = contexts[place - 1], contexts[place]
        share = max(0.0, (context - low) / (high - low))
        first, second = self._along(place - 1, size), self._along(place, size)
        return max(first + share * (second - first), 0.25 * first)

    def line(self, size: int, context: int) -> list[float]:
        """seconds(n, context) of n = 0 .. size - 1, with 0 for n = 0."""
        contexts = self._contexts
        if len(contexts) == 1:
            found = self._line(0, size)
        else:
            place = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
            low, high = contexts[place - 1], contexts[place]
            share = max(0.0, (context - low) / (high - low))
            both = zip(self._line(place - 1, size), self._line(place, size), strict=True)
            found = [max(first + share * (second - first), 0.25 * first) for first, second in both]
        found[0] = 0.0
        return found

    def _line(self, line: int, size: int) -> list[float]:
        sizes, seconds = self._sizes[line], self._seconds[line]
        found = [seconds[0]] * (size if len(sizes) == 1 else min(size, sizes[0] + 1))
        for place in range(1, len(sizes)):
            low, high = sizes[place - 1], sizes[place]
            start, slope = seconds[place - 1], (seconds[place] - seconds[place - 1]) / (high - low)
            # The last slope goes on.
            last = min(size, high + 1) if place < len(sizes) - 1 else size
            found += [start + (n - low) * slope for n in range(low + 1, last)]
        return found

    def _along(self, line: int, size: int) -> float:
        sizes, seconds = self._sizes[line], self._seconds[line]
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        place = min(bisect_left(sizes, size), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        slope = (seconds[place] - seconds[place - 1]) / (high - low)
        return seconds[place - 1] + (size - low) * slope
