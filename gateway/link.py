"""Link: one service's client, with replies matched to the requests that wait for them.

Owns exchanges (a batch whose results are awaited with a time-out), the batching of opens and releases that
happen in one turn of the event loop, and releases that could not be sent. Does not own sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from gateway.clients import Client
from specbridge.errors import Unavailable
from specbridge.rounds import (
    DraftInfo,
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    DraftTimings,
    Propose,
    SessionKey,
    TargetInfo,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    TargetTimings,
    Verify,
)

log = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 4096


class _Result(Protocol):
    @property
    def session(self) -> SessionKey: ...


class _Info(Protocol):
    @property
    def instance(self) -> bytes: ...


class _Reply(Protocol):
    @property
    def batch_id(self) -> int: ...


InfoT = TypeVar("InfoT", bound=_Info)
RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", bound=_Reply)
ResultT = TypeVar("ResultT", bound=_Result)
OpenT = TypeVar("OpenT", bound=_Result)
TimingsT = TypeVar("TimingsT")
ItemT = TypeVar("ItemT")


class Exchange(Generic[ResultT, TimingsT]):
    """One batch under way: results by session, and what is still missing."""

    __slots__ = ("batch_id", "failure", "future", "missing", "results", "sent_at", "timings")

    def __init__(self, batch_id: int, keys: Iterable[SessionKey], sent_at: float) -> None:
        self.batch_id = batch_id
        self.missing = set(keys)
        self.results: dict[SessionKey, ResultT] = {}
        self.timings: TimingsT | None = None
        self.failure = ""
        self.sent_at = sent_at
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Link(ABC, Generic[InfoT, RequestT, ReplyT, ResultT, OpenT, TimingsT, ItemT]):
    """See the module. Callbacks, all on the event loop:

    on_result(result)              a result that no exchange waits for
    on_up(info, same_instance)     a stream is up
    on_down(reason)                the stream is gone; exchanges under way have failed already
    """

    def __init__(
        self,
        client: Client[InfoT, RequestT, ReplyT],
        *,
        on_result: Callable[[ResultT], None],
        on_up: Callable[[InfoT, bool], None],
        on_down: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self._clock = clock
        self.info: InfoT | None = None
        self.up = False
        self._on_result = on_result
        self._on_up = on_up
        self._on_down = on_down
        self._next_batch = 1
        self._exchanges: dict[int, Exchange[ResultT, TimingsT]] = {}
        self._opens: list[OpenT] = []
        self._releases: list[SessionKey] = []
        self._unacknowledged: dict[SessionKey, None] = {}
        self._flush_handle: asyncio.Handle | None = None

    # What differs between the services.
    @abstractmethod
    def _request(
        self,
        batch_id: int,
        opens: tuple[OpenT, ...],
        items: tuple[ItemT, ...],
        releases: tuple[SessionKey, ...],
    ) -> RequestT:
        """The service's request message for one batch."""

    @abstractmethod
    def _results(self, reply: ReplyT) -> tuple[ResultT, ...]:
        """A reply's results."""

    @abstractmethod
    def _timings(self, reply: ReplyT) -> TimingsT | None:
        """A reply's timings, if it has any."""

    @abstractmethod
    def _is_released(self, result: ResultT) -> bool:
        """Whether a result acknowledges a release."""

    # ---- sending ----------------------------------------------------------------------------

    def open(self, item: OpenT) -> None:
        """Open a session with the batch of this turn. Raises Unavailable while there is no stream."""
        if not self.up:
            raise Unavailable("the stream is down")
        self._opens.append(item)
        self._schedule_flush()

    def release(self, key: SessionKey) -> None:
        """Release a session; kept for the next stream if there is none now."""
        # In one batch releases are carried out before opens: this session's open must go out first.
        if any(item.session == key for item in self._opens):
            self.flush()
        self._releases.append(key)
        for exchange in list(self._exchanges.values()):
            # The owner has gone: nobody waits for this session's result any more.
            if key in exchange.missing:
                exchange.missing.discard(key)
                if not exchange.missing:
                    exchange.wake()
        if self.up:
            self._schedule_flush()

    def send(self, items: tuple[ItemT, ...], keys: Iterable[SessionKey]) -> Exchange[ResultT, TimingsT]:
        """Send a batch that `wait` will wait for. A dead stream gives an exchange that has failed already."""
        self.flush()
        exchange: Exchange[ResultT, TimingsT] = Exchange(self._take_batch_id(), keys, self._clock())
        try:
            self.client.send(self._request(exchange.batch_id, (), items, ()))
        except Unavailable as error:
            exchange.failure = str(error)
            exchange.wake()
        else:
            self._exchanges[exchange.batch_id] = exchange
        return exchange

    async def wait(self, exchange: Exchange[ResultT, TimingsT], timeout_s: float) -> bool:
        """Wait for all results; False if they are incomplete (time-out, broken stream: see `failure`).

        After a time-out the exchange stays registered, so that `busy` holds until it is answered.
        """
        if not exchange.future.done():
            handle = asyncio.get_running_loop().call_later(timeout_s, exchange.wake)
            try:
                await exchange.future
            finally:
                handle.cancel()
        return not exchange.missing and not exchange.failure

    def forget(self, exchange: Exchange[ResultT, TimingsT]) -> None:
        """Nobody waits for it any more, and its answer may never come."""
        self._exchanges.pop(exchange.batch_id, None)

    def pending(self, exchange: Exchange[ResultT, TimingsT]) -> bool:
        """Whether the service still owes results of this batch."""
        return exchange.batch_id in self._exchanges

    def flush(self) -> None:
        """Send the opens and releases of this turn."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self.up or not (self._opens or self._releases):
            return
        request = self._request(self._take_batch_id(), tuple(self._opens), (), tuple(self._releases))
        try:
            self.client.send(request)
        except Unavailable:
            return  # on_down follows; releases are kept for the next stream
        # A release on a stream that breaks may be lost: it is sent again unless it is known to have arrived.
        self._unacknowledged.update(dict.fromkeys(self._releases))
        while len(self._unacknowledged) > MAX_UNACKNOWLEDGED:
            del self._unacknowledged[next(iter(self._unacknowledged))]
        self._opens.clear()
        self._releases.clear()

    def _schedule_flush(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self.flush)

    def _take_batch_id(self) -> int:
        self._next_batch += 1
        return self._next_batch - 1

    # ---- Listener ---------------------------------------------------------------------------

    def on_connected(self, info: InfoT) -> None:
        same = self.info is not None and self.info.instance == info.instance
        if same:
            self._releases = [*dict.fromkeys([*self._unacknowledged, *self._releases])]
        else:
            self._releases.clear()  # those sessions died with the old process
        self._unacknowledged.clear()
        self.info = info
        self.up = True
        self._on_up(info, same)
        self.flush()

    def on_disconnected(self, reason: str) -> None:
        self.up = False
        self._opens.clear()
        exchanges, self._exchanges = list(self._exchanges.values()), {}
        for exchange in exchanges:
            exchange.failure = reason or "the stream broke"
            exchange.wake()
        self._on_down(reason)

    def on_reply(self, reply: ReplyT) -> None:
        exchange = self._exchanges.get(reply.batch_id) if reply.batch_id else None
        results = self._results(reply)
        if exchange is not None and (timings := self._timings(reply)) is not None:
            exchange.timings = timings
        for result in results:
            if self._is_released(result):
                self._unacknowledged.pop(result.session, None)
                continue
            owner = exchange if exchange is not None and result.session in exchange.missing else None
            if owner is None and self._exchanges and not reply.batch_id:
                # A preemption or an error of its own ends the wait for that session just as well.
                owner = next((e for e in self._exchanges.values() if result.session in e.missing), None)
            if owner is None:
                self._on_result(result)
                continue
            owner.missing.discard(result.session)
            owner.results[result.session] = result
            if not owner.missing:
                self._exchanges.pop(owner.batch_id, None)
                owner.wake()
        if exchange is not None and not exchange.missing:
            self._exchanges.pop(exchange.batch_id, None)
            exchange.wake()


class TargetLink(
    Link[TargetInfo, TargetRequest, TargetReply, TargetResult, TargetOpen, TargetTimings, Verify]
):
    """The link to the target; `send` carries Verify items.

    available_pages: KV pages that no session held when the target last spoke; all, before it has.
    on_pages() is called when they have become more, after the results that came with the news.
    """

    available_pages = 0
    on_pages: Callable[[], None] | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the target's KV pages that sessions held when it last spoke."""
        total = self.info.total_pages if self.info is not None else 0
        return 1.0 - self.available_pages / total if total else 0.0

    def on_connected(self, info: TargetInfo) -> None:
        self.available_pages = info.total_pages
        super().on_connected(info)

    def on_reply(self, reply: TargetReply) -> None:
        before = self.available_pages
        if reply.available_pages is not None:
            self.available_pages = reply.available_pages
        super().on_reply(reply)
        if self.available_pages > before and self.on_pages is not None:
            self.on_pages()

    def _request(
        self,
        batch_id: int,
        opens: tuple[TargetOpen, ...],
        items: tuple[Verify, ...],
        releases: tuple[SessionKey, ...],
    ) -> TargetRequest:
        return TargetRequest(batch_id, opens, items, releases)

    def _results(self, reply: TargetReply) -> tuple[TargetResult, ...]:
        return reply.results

    def _timings(self, reply: TargetReply) -> TargetTimings | None:
        return reply.timings

    def _is_released(self, result: TargetResult) -> bool:
        return result.kind is TargetResultKind.RELEASED


class DraftLink(Link[DraftInfo, DraftRequest, DraftReply, DraftResult, DraftOpen, DraftTimings, Propose]):
    """The link to the draft; `send` carries Propose items."""

    def _request(
        self,
        batch_id: int,
        opens: tuple[DraftOpen, ...],
        items: tuple[Propose, ...],
        releases: tuple[SessionKey, ...],
    ) -> DraftRequest:
        return DraftRequest(batch_id, opens, items, releases)

    def _results(self, reply: DraftReply) -> tuple[DraftResult, ...]:
        return reply.results

    def _timings(self, reply: DraftReply) -> DraftTimings | None:
        return reply.timings

    def _is_released(self, result: DraftResult) -> bool:
        return result.kind is DraftResultKind.RELEASED
