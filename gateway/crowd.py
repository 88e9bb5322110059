"""The company sessions keep: how many run at once over a session's life, and how many a new one will meet.

Requests come in bursts. The first of a burst finds nobody, yet most of its text is written beside all the
others; what it is given on arrival (a draft session, and with it the target's work of computing again what
the draft lacks) should fit that, not the empty machine of its first millisecond. What the latest sessions met
is the best guess at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

WEIGHT = 0.5
"""Of the session that ended last among those before it: a lone user after a crowd is seen as one by his third
request."""
FORGET_S = 60.0
"""After so long with nobody the past says nothing."""


class Crowd:
    """See the module. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._area = 0.0
        self._entered: dict[int, tuple[float, float]] = {}
        self._met = 0.0

    @property
    def size(self) -> int:
        return len(self._entered)

    @property
    def expected(self) -> int:
        """How many, itself among them, a session that comes now or has just come will mostly run beside."""
        self._forget_after_silence(self._clock())
        # Crowds are whole: one that mostly met three and at last two was among three.
        return max(self.size, math.ceil(self._met - 1e-9))

    def enter(self, number: int) -> None:
        self._advance()
        self._entered[number] = (self._at, self._area)

    def leave(self, number: int) -> None:
        self._advance()
        since, area = self._entered.pop(number)
        life = self._at - since
        met = (self._area - area) / life if life > 0 else self.size + 1
        self._met += WEIGHT * (met - self._met) if self._met else met

    def _advance(self) -> None:
        now = self._clock()
        self._forget_after_silence(now)
        self._area += (now - self._at) * len(self._entered)
        self._at = now

    def _forget_after_silence(self, now: float) -> None:
        if not self._entered and now - self._at > FORGET_S:
            self._met = 0.0
