"""Slot bookkeeping of the ring: contiguous reservations, generations, acknowledgements in any order.

Owns which slots are free. Does not own the memory behind them, nor time. Pure Python, thread-safe: the
engine's thread reserves, the event loop's thread acknowledges.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

MAX_GENERATION = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Slots [first, first + count), reserved under `generation`, which no other live span has."""

    first: int
    count: int
    generation: int


class Ring:
    """`slots` slots of which contiguous spans are reserved, trimmed and freed.

    Free space is a sorted list of maximal intervals and reservations are first-fit, so that a chunk that a
    slow session holds on to blocks its own slots only, not those after it.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a ring of {slots} slots holds nothing: give it at least 1")
        self.slots = slots
        self._lock = threading.Lock()
        self._starts = [0]
        self._ends = [slots]
        self._live: dict[int, Span] = {}
        self._used = 0
        self._generation = 0
        self._closed = False

    @property
    def used(self) -> int:
        """Slots in live spans."""
        return self._used

    @property
    def live(self) -> int:
        """Number of live spans."""
        return len(self._live)

    def reserve(self, count: int) -> Span | None:
        """`count` contiguous slots, or None if they are not free or the ring is closed."""
        if count < 1:
            raise ValueError(f"{count} slots were asked for: ask for at least 1")
        if count > self.slots:
            return None
        with self._lock:
            place = None if self._closed else self._fit(count)
            if place is None:
                return None
            first = self._starts[place]
            if self._ends[place] - first == count:
                del self._starts[place], self._ends[place]
            else:
                self._starts[place] = first + count
            # 0 is what fresh memory holds, so it is no generation.
            self._generation = self._generation % MAX_GENERATION + 1
            span = Span(first, count, self._generation)
            self._live[first] = span
            self._used += count
            return span

    def trim(self, span: Span, count: int) -> Span:
        """Give back all but the first `count` >= 1 slots of a live span. Returns what is left of it."""
        if not 1 <= count <= span.count:
            raise ValueError(f"a span of {span.count} slots can't be trimmed to {count}")
        with self._lock:
            self._check(span)
            if count == span.count:
                return span
            self._used -= span.count - count
            rest = Span(span.first, count, span.generation)
            self._live[span.first] = rest
            self._add_free(span.first + count, span.first + span.count)
            return rest

    def free(self, span: Span) -> None:
        """Give a live span back."""
        with self._lock:
            self._check(span)
            del self._live[span.first]
            self._used -= span.count
            self._add_free(span.first, span.first + span.count)

    def close(self) -> None:
        """Reserve nothing any more."""
        with self._lock:
            self._closed = True

    def _check(self, span: Span) -> None:
        live = self._live.get(span.first)
        if live is not span and live != span:
            raise ValueError(f"{span} is not live: freed twice, or trimmed since")

    def _fit(self, count: int) -> int | None:
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= count:
                return i
        return None

    def _add_free(self, start: int, end: int) -> None:
        at = bisect_left(self._starts, start)
        joins_next = at < len(self._starts) and self._starts[at] == end
        joins_previous = at > 0 and self._ends[at - 1] == start
        if joins_previous and joins_next:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_previous:
            self._ends[at - 1] = end
        elif joins_next:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
