"""RoundsStream: a half-closed stream ends when, and only when, everything owed has been sent."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import pytest

from specbridge.errors import InvalidRequest
from specbridge.rounds import SessionKey, TargetReply, TargetResult, TargetResultKind, TargetTimings
from specbridge.rounds_stream import RoundsStream

Kind = TargetResultKind
Ask = tuple[int, list[TargetReply]]
"""What a request is owed, and the replies that its engine gives at once."""


def key(number: int, incarnation: int = 0) -> SessionKey:
    return SessionKey(bytes(16), number, incarnation)


def reply(batch_id: int, *results: tuple[SessionKey, Kind], timed: bool = False) -> TargetReply:
    return TargetReply(
        batch_id, tuple(TargetResult(k, kind) for k, kind in results), TargetTimings() if timed else None
    )


class Talk:
    """A client that sends requests and closes its side, and the stream that answers it."""

    def __init__(self, *asks: Ask, opened: Kind | None = Kind.OPENED) -> None:
        self.stream: RoundsStream[TargetReply] = RoundsStream(opened=opened)
        self._asks = asks

    async def _requests(self) -> AsyncIterator[Ask]:
        for ask in self._asks:
            yield ask

    def _take(self, ask: Ask) -> int:
        for each in ask[1]:
            self.stream.reply(each)
        return ask[0]

    async def read(self, count: int) -> list[TargetReply]:
        """`count` replies; the stream must not be over then."""
        self._answers = self.stream.answers(self._requests(), self._take)
        return [await asyncio.wait_for(anext(self._answers), 30) for _ in range(count)]

    async def rest(self, *more: TargetReply) -> list[TargetReply]:
        """What comes until the end, once the engine has given `more`."""
        waiting = asyncio.ensure_future(self._collect())
        await asyncio.sleep(0.01)
        assert not waiting.done() or not more
        for each in more:
            self.stream.reply(each)
        return await asyncio.wait_for(waiting, 30)

    async def _collect(self) -> list[TargetReply]:
        return [message async for message in self._answers]


async def test_the_time_a_reply_waits_for_the_loop_is_known() -> None:
    talk = Talk((1, [reply(1, (key(1), Kind.VERIFIED), timed=True)]))
    begin = time.perf_counter_ns()
    await talk.read(1)
    time.sleep(0.02)
    assert 20_000_000 <= talk.stream.since_reply() <= time.perf_counter_ns() - begin


async def test_a_stream_without_requests_ends_at_once() -> None:
    talk = Talk()
    await talk.read(0)
    assert await talk.rest() == []


async def test_acknowledgements_and_rounds_are_owed_one_each() -> None:
    ack, round_ = reply(1, (key(1), Kind.RELEASED)), reply(2, (key(2), Kind.VERIFIED), timed=True)
    talk = Talk((1, [ack]), (1, []))
    assert await talk.read(1) == [ack]
    assert await talk.rest(round_) == [round_]


async def test_an_open_is_owed_its_first_token_too() -> None:
    ack, first = reply(1, (key(1), Kind.OPENED)), reply(0, (key(1), Kind.FIRST))
    talk = Talk((1, [ack]))
    assert await talk.read(1) == [ack]
    assert await talk.rest(first) == [first]


async def test_a_refused_open_is_owed_nothing_more() -> None:
    talk = Talk((1, [reply(1, (key(1), Kind.ERROR))]))
    assert len(await talk.read(1)) == 1
    assert await talk.rest() == []


async def test_a_reopened_session_leaves_no_older_incarnation_behind() -> None:
    """The older one was in its prefill: its first token never comes."""
    acks = [reply(1, (key(1, 0), Kind.OPENED)), reply(2, (key(1, 3), Kind.OPENED))]
    talk = Talk((1, [acks[0]]), (1, [acks[1]]))
    assert await talk.read(2) == acks
    first = reply(0, (key(1, 3), Kind.FIRST))
    assert await talk.rest(first) == [first]
    assert not talk.stream._opening


async def test_a_refused_reopen_leaves_the_older_incarnation_s_first_token_owed() -> None:
    talk = Talk((1, [reply(1, (key(1, 5), Kind.OPENED))]), (1, [reply(2, (key(1, 4), Kind.ERROR))]))
    await talk.read(2)
    first = reply(0, (key(1, 5), Kind.FIRST))
    assert await talk.rest(first) == [first]


async def test_a_release_in_the_prefill_ends_the_wait() -> None:
    talk = Talk((1, [reply(1, (key(1), Kind.OPENED))]), (1, [reply(2, (key(1), Kind.RELEASED))]))
    await talk.read(2)
    assert await talk.rest() == []


async def test_a_notice_nobody_asked_for_is_delivered_and_settles_nothing() -> None:
    notice, round_ = reply(0, (key(9), Kind.PREEMPTED)), reply(7, (key(1), Kind.VERIFIED), timed=True)
    talk = Talk((1, [notice]))
    assert await talk.read(1) == [notice]
    assert await talk.rest(round_) == [round_]


async def test_without_notices_every_message_counts() -> None:
    answer = reply(0, (key(1), Kind.OPENED), (key(2), Kind.OPENED))
    talk = Talk((2, [answer]), opened=None)
    assert await talk.read(1) == [answer]
    assert await talk.rest() == []


async def test_a_request_that_can_not_be_read_is_an_error_after_what_was_owed_before() -> None:
    answer = reply(1, (key(1), Kind.RELEASED))
    stream: RoundsStream[TargetReply] = RoundsStream(opened=Kind.OPENED)

    async def requests() -> AsyncIterator[int]:
        yield 1
        yield 2

    def take(number: int) -> int:
        if number == 2:
            raise InvalidRequest("a key of 3 bytes")
        stream.reply(answer)
        return 1

    got: list[TargetReply] = []
    with pytest.raises(InvalidRequest, match="3 bytes"):
        async for message in stream.answers(requests(), take):
            got.append(message)
    assert got == [answer]


async def test_a_cancelled_call_stops_the_reader() -> None:
    stream: RoundsStream[TargetReply] = RoundsStream(opened=Kind.OPENED)
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        try:
            await asyncio.sleep(60)
            yield 1
        finally:
            ended.set()

    async def call() -> None:
        async for _ in stream.answers(requests(), lambda _: 1):
            pass

    task = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 30)
    gc.collect()  # an exception nobody fetched would be reported here
