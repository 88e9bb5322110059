"""Forecast: what trees will be worth before they are drafted.

Owns the values of the latest trees, and how each session does against what was expected of it. Trees differ
much, and a pooled cut lives on taking more of the good ones, so a forecast is made with whole trees and not
with their mean. Does not own the values themselves (calibration) nor costs. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from gateway.calibration import Mode

KEPT = 128
"""Trees of one mode that are remembered."""
_TAIL = 0.8
"""Beyond what was asked for: the next node's value, relative to the last one's."""
_WEIGHT = 6.0
_FADE = 0.97
_KEEP = 4096


def _with_tail(values: list[float]) -> tuple[float, ...]:
    """What was asked for need not be all that pays; a few more show whether more would."""
    tail = accumulate([values[-1]] + [_TAIL] * (len(values) // 2 + 1), mul)
    return (*values[:-1], *tail)


_UNKNOWN = _with_tail([0.6 * 0.8**i for i in range(16)])
"""A tree before any was seen."""


@dataclass(slots=True)
class _Track:
    """One session: nodes accepted and expected to be, fading; rounds drafted for in a row."""

    accepted: float = 0.0
    expected: float = 0.0
    stint: int = 0


class Forecast:
    """See the module."""

    STINT = 64
    """Rounds after which a session that was preferred makes room for others of equal promise."""

    def __init__(self) -> None:
        self._trees: dict[Mode, deque[tuple[float, ...]]] = {mode: deque(maxlen=KEPT) for mode in Mode}
        self._next = 0
        self._tracks: dict[int, _Track] = {}

    def known(self, mode: Mode) -> int:
        """How many trees of this mode are remembered."""
        return len(self._trees[mode])

    def tree(self, mode: Mode, count: int, factor: float = 1.0) -> list[float]:
        """Values of up to `count` nodes of a remembered tree, falling; the next call takes the next tree."""
        trees = self._trees[mode]
        self._next += 1
        found = (trees[self._next % len(trees)] if trees else _UNKNOWN)[:count]
        if factor == 1.0:
            return list(found)
        if factor < 1.0:
            return [value * factor for value in found]
        return [value if (value := one * factor) < 1.0 else 1.0 for one in found]

    def drafted(self, mode: Mode, values: Sequence[float], factor: float = 1.0) -> None:
        """A tree's values in its order, all of what was asked for, and the session's factor in them."""
        if values:
            self._trees[mode].append(_with_tail([value / factor for value in values]))

    def factor(self, number: int) -> float:
        """A session's accepted over expected nodes, shrunk to 1."""
        track = self._tracks.get(number)
        if track is None:
            return 1.0
        return min(1.6, max(0.3, (track.accepted + _WEIGHT) / (track.expected + _WEIGHT)))

    def verified(self, number: int, expected: float, accepted: int) -> None:
        """A verified tree of a session: the sum of its values, its accepted nodes."""
        track = self._track(number)
        track.accepted = _FADE * track.accepted + accepted
        track.expected = _FADE * track.expected + expected

    def order(self, numbers: Sequence[int]) -> list[int]:
        """Places in `numbers`, most promising first. Who was preferred stays so for a while, then makes
        room."""

        def promise(place: int) -> float:
            track = self._tracks.get(numbers[place])
            if track is None or not track.stint:
                return self.factor(numbers[place])
            return self.factor(numbers[place]) * (1.15 if track.stint < self.STINT else 0.87)

        return sorted(range(len(numbers)), key=promise, reverse=True)

    def preferred(self, chosen: Iterable[int], others: Iterable[int]) -> None:
        """Who is drafted for this round, while `others` could have been."""
        for number in chosen:
            self._track(number).stint += 1
        for number in others:
            track = self._tracks.get(number)
            if track is not None:
                track.stint = 0

    def _track(self, number: int) -> _Track:
        track = self._tracks.get(number)
        if track is None:
            if len(self._tracks) >= _KEEP:
                del self._tracks[next(iter(self._tracks))]
            track = self._tracks[number] = _Track()
        return track
