"""A lean HTTP/1.1 client for event streams, so that the measuring process keeps up with hundreds of them.

Owns connections (kept alive, reused), HTTP parsing (by httptools), the framing of server-sent events and the
time stamps: each event is stamped in the socket's own callback, not when some task gets its turn, and no task
wakes up for it. Does not own what events mean (request.py).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from specbridge.errors import ConfigError, SpecBridgeError

CONNECT_TIMEOUT_S = 10.0
_MAX_KEPT = 64 * 1024
"""Bytes kept of a reply that is no event stream; an error's text is in its beginning."""

OnEvent = Callable[[bytes, float], None]
"""(data of an event, time.perf_counter() of its arrival)"""


class ConnectionLost(SpecBridgeError):
    """Refused, reset, or closed before the reply was complete."""


class Hung(SpecBridgeError):
    """No event for longer than allowed."""


class BadReply(SpecBridgeError):
    """What came is no HTTP, or no such events as this client reads."""


class EventParser:
    """Bytes → the data of server-sent events. Lines end in LF or CR LF, as HTTP servers write them."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are passed over."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                events += self._complete()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events

    def end(self) -> list[bytes]:
        """What a stream that ends without its last blank line still holds."""
        return self.feed(b"\n\n")

    def _complete(self) -> list[bytes]:
        data, self._data = self._data, []
        return [b"\n".join(data)] if data else []


@dataclass(slots=True)
class Reply:
    """headers: names in lower case. body: of replies that are no event stream, else empty."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Exchange:
    """One request's reply while it comes; the parser calls the on_… methods."""

    def __init__(self, on_event: OnEvent) -> None:
        self.reply = Reply()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.now = self.progress = time.perf_counter()  # of the latest bytes, of the latest event
        self.begun = self.headed = False
        self.parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self._events: EventParser | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.headed = True
        self.progress = self.now
        self.reply.status = self.parser.get_status_code()
        if self.reply.headers.get("content-type", "").startswith("text/event-stream"):
            self._events = EventParser()

    def on_body(self, body: bytes) -> None:
        if self._events is None:
            self.progress = self.now
            self.reply.body = (self.reply.body + body)[:_MAX_KEPT]
        else:
            self._pass_on(self._events.feed(body))

    def on_message_complete(self) -> None:
        if 100 <= self.reply.status < 200:  # "continue" and the like: the reply itself follows
            self.reply, self.headed = Reply(), False
            return
        if self._events is not None:
            self._pass_on(self._events.end())
        self.finish(None)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the reply is as long as the connection: it has neither a length nor chunks."""
        return self.headed and not {"content-length", "transfer-encoding"} & self.reply.headers.keys()

    def finish(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _pass_on(self, events: list[bytes]) -> None:
        for event in events:
            self.progress = self.now
            try:
                self._on_event(event, self.now)
            except Exception as error:  # the parser would wrap it
                self.finish(error)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.exchange: _Exchange | None = None
        self.closed = False
        self.gone = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None or exchange.done.done():  # nobody asked
            self.abort()
            return
        exchange.now = time.perf_counter()
        exchange.begun = True
        try:
            exchange.parser.feed_data(data)
        except httptools.HttpParserError as error:
            exchange.finish(BadReply(f"the server's reply is no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.gone.set()
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            return
        if error is None and exchange.ends_with_connection:
            exchange.on_message_complete()
        else:
            what = f"lost: {error}" if error else "closed before the reply was complete"
            exchange.finish(ConnectionLost(f"the connection was {what}"))

    def send(self, exchange: _Exchange, data: bytes) -> None:
        assert self._transport is not None
        self.exchange = exchange
        self._transport.write(data)

    def abort(self) -> None:
        """Close at once; nobody waits for what the exchange would have become."""
        self.closed = True
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()


class StreamClient:
    """Posts JSON to one server and reads event streams: `async with StreamClient(url) as client`.

    url: http(s)://host[:port][/path]; paths of requests are appended. As many connections as requests at a
    time. Raises ConfigError for a URL that is none.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is no server's address; give http://host:port or https://host")
        self._host, self._base = parts.hostname, parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        lines = {
            "host": parts.netloc.rpartition("@")[2],
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            **(headers or {}),
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._idle.clear()
        for connection in self._open:
            connection.abort()
        for connection in self._open:
            await connection.gone.wait()

    async def post(self, path: str, body: bytes, on_event: OnEvent, *, timeout_s: float) -> Reply:
        """The reply, once it is complete; its events go to `on_event` as they come.

        timeout_s: seconds that may pass without an event (or, of other replies, without a byte). Raises
        ConnectionLost, Hung, BadReply, and whatever `on_event` raises.
        """
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        while True:
            connection, fresh = await self._connection()
            exchange = _Exchange(on_event)
            try:
                connection.send(exchange, data)
                await _finished(exchange, timeout_s)
            except ConnectionLost:
                # The server may have closed an idle connection while this request was on its way to it.
                if fresh or exchange.begun:
                    raise
                continue
            except BaseException:
                connection.abort()
                raise
            connection.exchange = None
            if exchange.parser.should_keep_alive() and not connection.closed:
                self._idle.append(connection)
            else:
                connection.abort()
            return exchange.reply

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise ConnectionLost(
                f"{self._host}:{self._port} took no connection within {CONNECT_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            raise ConnectionLost(f"no connection to {self._host}:{self._port}: {error}") from error
        self._open = {each for each in self._open if not each.gone.is_set()} | {made}
        return made, True


async def _finished(exchange: _Exchange, timeout_s: float) -> None:
    """Waits for the reply's end, looking at its progress only as often as the limit can have passed."""
    while not exchange.done.done():
        left = exchange.progress + timeout_s - time.perf_counter()
        if left <= 0:
            raise Hung(f"no event for {timeout_s:g} s")
        await asyncio.wait({exchange.done}, timeout=left)
    exchange.done.result()
