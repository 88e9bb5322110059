"""CollectiveClock: how long a rank's forward passes spend in collectives, peers' lateness included.

On a CPU the host waits in each, so every pass is measured. On a GPU they are kernels of the stream and the
host does not wait: every SAMPLED-th pass puts timed events around them, which are read before a later pass,
when they have long come. A pass that is replayed from a graph can't be measured. Owns the clock; parallel has
the collectives, runner says what a pass is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

SAMPLED = 16
"""A pair of events costs some microseconds, a pass has two collectives a layer."""


class CollectiveClock:
    """`seconds` and `steps` only grow, for a scrape on any thread; the rest is for the model's thread.

    A context manager around one collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        """Of the passes that were measured, together."""
        self.steps = 0
        """Passes that were measured."""
        self._cuda = device.type == "cuda"
        self._number = 0
        self._measured = False
        self._began_ns = self._sum_ns = 0
        self._spare: list[Any] = []
        # Events before and after each collective of the pass that is measured, in turn.
        self._events: list[Any] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A pass runs inside. One that fails is not counted."""
        self._sum_ns = 0
        self._measured = True
        if self._cuda:
            self._read()
            self._measured = self._number % SAMPLED == 0 and not self._events
            self._number += 1
        try:
            yield
            if not self._cuda:
                self._add(self._sum_ns / 1e9)
        finally:
            self._measured = False

    def __enter__(self) -> None:
        if not self._measured:
            return
        if self._cuda:
            self._mark()
        else:
            self._began_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if not self._measured:
            return
        if self._cuda:
            self._mark()
        else:
            self._sum_ns += time.perf_counter_ns() - self._began_ns

    def _mark(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def _read(self) -> None:
        events = self._events
        if not events or not events[-1].query():
            return
        pairs = zip(events[::2], events[1::2], strict=True)
        self._add(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
        self._spare += events
        events.clear()

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
