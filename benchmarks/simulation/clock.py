"""An asyncio event loop in virtual time: when nothing is ready, its clock jumps to the next timer.

Owns time. Real asyncio code (the gateway's scheduler, whole) runs on it unchanged: `loop.time()`,
call_later, asyncio.timeout and sleep all go by the virtual clock, and an hour of waiting takes no time. A
framework of its own for discrete events, such as simpy, has generators for processes and could only run a
model of the scheduler, written a second time.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")
KEPT = 4096


class Stuck(RuntimeError):
    """Everybody waits, and no timer will ever end that: a defect of what is simulated."""


class _Selector(selectors.BaseSelector):
    """Looks at files without waiting; a wait moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        ready = self._files.select(0)
        if ready:
            return ready
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set: the simulation can't go on")
        self.now += timeout
        return []

    def close(self) -> None:
        self._files.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Time begins at 0. Timers fire by their times, equal ones as they were set."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._taken: set[float] = set()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        # asyncio's heap does not keep the order of equal times: each gets one of its own, an ulp later.
        while when in self._taken:
            when = math.nextafter(when, math.inf)
        self._taken.add(when)
        if len(self._taken) > KEPT:
            self._taken = {at for at in self._taken if at >= self._virtual.now}
        return super().call_at(when, callback, *args, context=context)


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time. Raises Stuck where a real loop would wait for ever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
