"""How many prompt rows the next pass may take beside running streams.

Owns the estimate of a pass's time (the warm-up's curves, corrected by what passes really took) and the choice
of a chunk under the goal for inter-token latency. No device, no clock. Does not own whose prompt runs
(target_service.planner) nor the measuring (target_service.warmup).

The goal is for the time from a verify's arrival to its answer: what it has waited counts, and so does the
pass it runs in. A pass without verifies may last only as long as the goal leaves once the verifies that
arrive during it have run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from specbridge.rounds import CostPoint

AUTO_GOAL = 2.0
"""Without a goal of the user's: a pass with a chunk may take this many times as long as without."""
FOLLOW = 0.1
"""Weight of the latest pass in the corrections."""
LEAST, MOST = 0.2, 5.0
"""Bounds of a correction: one pass that the machine held up says nothing of the next."""
STEPS = 16
"""A chunk is a multiple of the largest one's so-manieth part, and at least one such part."""


class Curve:
    """Time of a pass by its rows: straight lines between points, the last one's slope beyond them."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """points: (rows, seconds), by rows. A longer pass never counts as cheaper."""
        assert points
        self._rows = [rows for rows, _ in points]
        self._seconds = [seconds for _, seconds in points]
        for i in range(1, len(points)):
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    def __call__(self, rows: int) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        i = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        x0, x1 = self._rows[i - 1], self._rows[i]
        y0, y1 = self._seconds[i - 1], self._seconds[i]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.0)


class PassTimes:
    """What a pass takes, in seconds.

    verify: points of verify passes, choices at every row. prefill: points of prompt chunks. Of each the
    shortest context counts; how much a longer one costs a prompt row comes from the longest chunk's points.
    """

    def __init__(self, verify: Sequence[CostPoint], prefill: Sequence[CostPoint]) -> None:
        self._verify = Curve(_shortest(verify))
        self._chunk = Curve([(1, self._verify(1)), *_shortest(prefill)])
        self._context_s = _slope(prefill)
        self._plain = 1.0
        self._ratios: dict[int, float] = {}

    def plain(self, verify_rows: int) -> float:
        """Of a pass without prompt rows."""
        return self._verify(verify_rows) * self._plain

    def mixed(self, verify_rows: int, rows: int, context: int) -> float:
        """Of a pass with `rows` prompt rows that end `context` tokens into their prompt."""
        return self._raw(verify_rows, rows, context) * self._ratio(rows)

    def observe(self, verify_rows: int, rows: int, context: int, seconds: float) -> None:
        """A pass ran; the corrections follow it."""
        if not rows:
            self._plain = _follow(self._plain, seconds, self._verify(verify_rows))
        else:
            size = rows.bit_length()
            self._ratios[size] = _follow(
                self._ratio(rows), seconds, self._raw(verify_rows, rows, context), first=not self._ratios
            )

    def _raw(self, verify_rows: int, rows: int, context: int) -> float:
        choices = max(self._verify(verify_rows) - self._chunk(verify_rows), 0.0) if verify_rows else 0.0
        return self._chunk(verify_rows + rows) + choices + rows * context * self._context_s

    def _ratio(self, rows: int) -> float:
        """Of the sizes seen, the nearest one's."""
        if not self._ratios:
            return 1.0
        size = rows.bit_length()
        return self._ratios[min(self._ratios, key=lambda seen: (abs(seen - size), seen))]


class ChunkPolicy:
    """Chooses chunks. most: rows of the largest. goal_s: 0 for AUTO_GOAL times a pass without a chunk.

    Without `times` (nothing was measured) every chunk is the largest.
    """

    def __init__(self, *, most: int, smallest: int, goal_s: float) -> None:
        self._most = most
        self._unit = min(most, max(smallest, most // STEPS))
        self._goal_s = goal_s
        self._typical = 1
        self._held_back = False
        self.times: PassTimes | None = None

    def goal_s(self, verify_rows: int) -> float:
        """For the answer to verifies of so many rows. Infinite while nothing is known."""
        if self._goal_s:
            return self._goal_s
        return AUTO_GOAL * self.times.plain(verify_rows) if self.times is not None else float("inf")

    def rows(self, *, verify_rows: int, waited_s: float, running: bool, context: int) -> int:
        """Most prompt rows of the next pass.

        verify_rows: of the pass, 0 if no verify is there; then the usual number counts as about to arrive.
        waited_s: how long the oldest of them has waited. running: there are streams to hold up.
        """
        times = self.times
        if times is None or not running:
            return self._most
        usual = verify_rows or self._typical
        room = self.goal_s(usual) - (waited_s if verify_rows else times.plain(usual))
        fitting = [
            rows
            for rows in range(self._unit, self._most + 1, self._unit)
            if times.mixed(verify_rows, rows, context) <= room
        ]
        if fitting:
            return fitting[-1]
        # Prompts must go on, however tight the goal: with every second pass of the streams at the latest.
        return self._unit if verify_rows and self._held_back else 0

    def observe(
        self, *, verify_rows: int, rows: int, context: int, seconds: float | None, waiting: bool
    ) -> None:
        """A pass of these rows took so long; None: longer than such passes take. waiting: prompts or rows to
        run again waited for room in it.
        """
        self._held_back = waiting and not rows
        if verify_rows:
            self._typical = verify_rows
        if self.times is not None and seconds is not None:
            self.times.observe(verify_rows, rows, context, seconds)


def _follow(ratio: float, seconds: float, expected: float, *, first: bool = False) -> float:
    if expected <= 0.0:
        return ratio
    seen = min(max(seconds / expected, LEAST), MOST)
    return seen if first else ratio + FOLLOW * (seen - ratio)


def _shortest(points: Sequence[CostPoint]) -> list[tuple[int, float]]:
    context = min((point.context for point in points), default=0)
    return sorted((p.rows, p.time_ns / 1e9) for p in points if p.context == context)


def _slope(points: Sequence[CostPoint]) -> float:
    """Seconds that a prompt row costs more for each token of context before it."""
    rows = max((point.rows for point in points), default=0)
    at = sorted((p.context, p.time_ns / 1e9) for p in points if p.rows == rows)
    slopes = [(t1 - t0) / ((c1 - c0) * rows) for (c0, t0), (c1, t1) in pairwise(at)]
    return max([0.0, *slopes])
