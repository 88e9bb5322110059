"""What work runs on: pools of cores or devices that are shared by whoever runs at a time.

Owns how long a piece of work takes beside others. A pool has a capacity (cores; 1 for a device); a piece
of work asks for so many of them and says how long it takes when it gets them. While the sum of what is asked
fits, all run at full speed; if not, the capacity is divided by weight (as an operating system divides cores
by priority), nobody getting more than asked for, and everybody is slowed down accordingly.

Two kernels on one GPU are a pool of capacity 2 / slowdown, where slowdown is how much longer each was
measured to take while both ran.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_DONE_S = 1e-9


@dataclass(slots=True, eq=False)
class _Work:
    left: float
    demand: float
    weight: float
    done: Callable[[], None]
    rate: float = 0.0


class Pool:
    """See the module. On one event loop; times are the loop's."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.busy_s = 0.0
        """Capacity used so far, in seconds of one core."""
        self._work: list[_Work] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, done: Callable[[], None], *, demand: float, weight: float) -> None:
        """Run `seconds` of work; `done` is called when it is through, never before this returns."""
        self._advance()
        self._work.append(_Work(max(seconds, 0.0), demand, weight, done))
        self._schedule()

    async def run(self, seconds: float, *, demand: float = 1.0, weight: float = 1.0) -> None:
        if seconds <= 0:
            return
        future, done = _waited()
        self.start(seconds, done, demand=demand, weight=weight)
        await future

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        for work in self._work:
            work.left -= passed * work.rate
            self.busy_s += passed * work.rate * work.demand

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._work:
            return
        shares(self._work, self.capacity)
        wait = min(work.left / work.rate for work in self._work)
        self._timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        done = [work for work in self._work if work.left <= _DONE_S]
        self._work = [work for work in self._work if work.left > _DONE_S]
        self._schedule()
        for work in done:
            work.done()


def shares(works: list[_Work], capacity: float) -> None:
    """Set everybody's rate: full speed if all fit, or else by weight, nobody more than asked for."""
    left, waiting = capacity, list(works)
    while waiting:
        total = sum(work.weight * work.demand for work in waiting)
        full = [work for work in waiting if left * work.weight >= total * (1 - 1e-12)]
        if not full:
            for work in waiting:
                work.rate = left * work.weight / total
            return
        for work in full:
            work.rate = 1.0
            left -= work.demand
        waiting = [work for work in waiting if work not in full]


class Thread:
    """One thread of a pool: its pieces of work run one after another, as they came."""

    def __init__(self, pool: Pool, *, demand: float = 1.0, weight: float = 1.0) -> None:
        self.pool = pool
        self._demand = demand
        self._weight = weight
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False

    def post(self, seconds: float, done: Callable[[], None]) -> None:
        """Do `seconds` of work after what is queued, then call `done`."""
        self._queue.append((seconds, done))
        if not self._busy:
            self._next()

    async def work(self, seconds: float) -> None:
        future, done = _waited()
        self.post(seconds, done)
        await future

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if not self._queue:
            return
        seconds, done = self._queue.popleft()

        def finished() -> None:
            done()
            self._next()

        if seconds > 0:
            self.pool.start(seconds, finished, demand=self._demand, weight=self._weight)
        else:
            asyncio.get_running_loop().call_soon(finished)


def _waited() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future, and what ends it."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done() -> None:
        if not future.done():  # whoever waited may have been cancelled
            future.set_result(None)

    return future, done
