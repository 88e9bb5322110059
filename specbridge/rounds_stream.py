"""RoundsStream: the server's side of one Rounds stream, the same for target and draft.

Owns the replies on their way out, the time since the engine gave them, and the count of results still owed,
so that a client which closes its sending side and waits for the answers, as command-line clients do, gets
them before the stream ends. Does not own messages' meaning (the engines) nor their conversion (the servers).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from specbridge.rounds import SessionKey


class Result(Protocol):
    """What the stream reads of a result."""

    @property
    def session(self) -> SessionKey: ...

    @property
    def kind(self) -> object: ...


class Message(Protocol):
    """What the stream reads of a reply. batch_id 0 without timings: a notice that answers no request."""

    @property
    def batch_id(self) -> int: ...

    @property
    def results(self) -> Sequence[Result]: ...

    @property
    def timings(self) -> object | None: ...


RequestT = TypeVar("RequestT")
MessageT = TypeVar("MessageT", bound=Message)


class RoundsStream(Generic[MessageT]):
    """Made on the event loop. `reply` is for the engine's thread, the rest for the loop's.

    opened: the kind of result after which a further one for the same session comes in a notice (the target's
    first token); None if every message answers a request.
    """

    def __init__(self, *, opened: object | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[MessageT, int] | None] = asyncio.Queue()
        self._put_ns = 0
        self._opened = opened
        self._owed = 0
        # By session number: a re-opened one takes its older incarnation's place, of which nothing more comes.
        self._opening: dict[tuple[bytes, int], SessionKey] = {}
        self._half_closed = False
        # One bound method for the life of the stream: an engine knows the stream by it.
        self.reply: Callable[[MessageT], None] = self._put

    async def answers(
        self, requests: AsyncIterator[RequestT], take: Callable[[RequestT], int]
    ) -> AsyncGenerator[MessageT, None]:
        """Hand each request to `take`, which submits it and returns how many results it will get; yield
        replies until the client has closed its side and nothing is owed.

        Raises what `take` raised, once everything asked before is answered.
        """
        reader = asyncio.create_task(self._read(requests, take))
        try:
            while (message := await self._next()) is not None:
                yield message
            await reader
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[RequestT], take: Callable[[RequestT], int]) -> None:
        try:
            async for request in requests:
                self._owed += take(request)
        finally:
            self._half_closed = True
            self._queue.put_nowait(None)  # wakes a reader to whom nothing is owed

    def _put(self, message: MessageT) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (message, time.perf_counter_ns()))

    def since_reply(self) -> int:
        """Nanoseconds since the engine gave the reply that `answers` has yielded last."""
        return time.perf_counter_ns() - self._put_ns

    async def _next(self) -> MessageT | None:
        """The next reply; None at the end."""
        while not self._half_closed or self._owed or self._opening or not self._queue.empty():
            entry = await self._queue.get()
            if entry is not None:
                message, self._put_ns = entry
                self._settle(message)
                return message
        return None

    def _settle(self, message: MessageT) -> None:
        notice = self._opened is not None and not message.batch_id and message.timings is None
        for result in message.results:
            self._owed -= not notice
            key = result.session
            place = (key.gateway, key.number)
            if self._opened is not None and result.kind is self._opened:
                self._opening[place] = key
            elif self._opening.get(place) == key:
                del self._opening[place]
