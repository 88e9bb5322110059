"""GenerationStream: the reader's handle on a request (generation.Generation).

Owns that a request ends when its reader does, however that happens. Does not own the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from gateway.generation import SpecStats, TokenEvent
from gateway.session import Session
from specbridge.rounds import FinishReason


class GenerationStream:
    """The reader's handle (generation.Generation). Dropping it unread ends the request too."""

    def __init__(self, session: Session, retire: Callable[[Session], None]) -> None:
        self._session = session
        self._retire = retire
        self._loop = asyncio.get_running_loop()
        self.seed = session.seed
        self.request_id = session.request.request_id

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> TokenEvent:
        try:
            event = await self._session.next_event()
        except BaseException:  # the request's error, or the reader was cancelled: release either way
            self._end()
            raise
        if event is None:
            self._end()
            raise StopAsyncIteration
        return event

    def deliver(self, output_tokens: int) -> None:
        self._session.deliver(output_tokens)

    def stop(self, *, output_tokens: int, finish_reason: FinishReason = FinishReason.STOP) -> SpecStats:
        stats = self._session.close(output_tokens=output_tokens, finish_reason=finish_reason)
        self._retire(self._session)
        return stats

    def _end(self) -> None:
        self._session.close()
        self._retire(self._session)
        self._session.wake()

    async def aclose(self) -> None:
        self._end()

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        session = self._session
        if session.reported or self._loop.is_closed():
            return
        retire = self._retire

        def end() -> None:
            session.close()
            retire(session)

        # The last reference may go on any thread, in a garbage collection.
        self._loop.call_soon_threadsafe(end)
