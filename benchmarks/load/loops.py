"""One turn of an arm under load: closed loop (so many streams, always busy) or open loop (arrivals on time).

Owns who sends when, and the turn's own account (its length, the client's share of a core). Does not own
requests (request.py), their plan (work.py) or the order of turns (arms.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.load.request import Outcome
from benchmarks.load.work import Ask

Send = Callable[[Ask, float], Awaitable[Outcome]]
"""(ask, when it is due by time.perf_counter()) → its outcome; raises only if cancelled."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load point: `streams` at a time, or `rate` requests a second. One of them is 0."""

    streams: int = 0
    rate: float = 0.0

    @property
    def value(self) -> float:
        return self.streams or self.rate

    def __str__(self) -> str:
        if self.streams:
            return f"{self.streams} stream{'s' if self.streams > 1 else ''}"
        return f"{self.rate:g} requests/s"


@dataclass(slots=True)
class Turn:
    """What one arm did with one plan. repeat 0 and below: warm-up.

    seconds: from the start to the last reply. cpu: this process's seconds of CPU over `seconds`. late: the
    most seconds that a request was sent after it was due. complete: all of the plan was asked and answered.
    """

    arm: str
    load: Load
    repeat: int
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    late: float = 0.0
    complete: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the requests that ended well, over the whole turn."""
        tokens = sum(o.completion_tokens for o in self.outcomes if o.ok)
        return tokens / self.seconds if self.seconds else 0.0


async def run_turn(turn: Turn, asks: Sequence[Ask], send: Send, due: Sequence[float] = ()) -> None:
    """Fill `turn`. due: with a rate, seconds from the start for each ask.

    If it is cancelled, `turn` holds the requests that had ended until then, and is not complete.
    """
    began, spent = time.perf_counter(), time.process_time()
    try:
        if turn.load.streams:
            await _closed(turn, asks, send)
        else:
            await _open(turn, asks, send, [began + seconds for seconds in due])
        turn.complete = True
    finally:
        ended = max((o.ended for o in turn.outcomes), default=began)
        turn.seconds = ended - began
        turn.cpu = (time.process_time() - spent) / max(time.perf_counter() - began, 1e-9)
        turn.late = max((o.sent - o.due for o in turn.outcomes), default=0.0)
        turn.outcomes.sort(key=lambda o: o.index)


async def _closed(turn: Turn, asks: Sequence[Ask], send: Send) -> None:
    waiting = iter(asks)

    async def stream() -> None:
        for ask in waiting:
            turn.outcomes.append(await send(ask, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(turn.load.streams, len(asks))):
            group.create_task(stream())


async def _open(turn: Turn, asks: Sequence[Ask], send: Send, due: Sequence[float]) -> None:
    async def one(ask: Ask, at: float) -> None:
        turn.outcomes.append(await send(ask, at))

    async with asyncio.TaskGroup() as group:
        for ask, at in zip(asks, due, strict=True):
            # However late this process is, a request counts from when it was to arrive.
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            group.create_task(one(ask, at))
