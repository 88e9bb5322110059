"""Clients of the target and the draft: one long-lived Rounds stream each, opened again when it breaks.

Owns connecting, back-off, conversion to and from protobuf and the notice of connection changes. Does not
own what is sent, nor matching replies to requests (link.py). Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from protos import common_pb2, draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.errors import SpecBridgeError, Unavailable
from specbridge.rounds import DraftInfo, DraftReply, DraftRequest, TargetInfo, TargetReply, TargetRequest
from specbridge.server import KEEPALIVE_S, channel_options

log = logging.getLogger(__name__)

InfoT = TypeVar("InfoT")
RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
InfoIn = TypeVar("InfoIn", contravariant=True)
ReplyIn = TypeVar("ReplyIn", contravariant=True)
RequestIn = TypeVar("RequestIn", contravariant=True)
InfoOut = TypeVar("InfoOut", covariant=True)
ReplyOut = TypeVar("ReplyOut", covariant=True)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
CLOSE_S = 1.0
PATIENCE_S = 30.0
"""A service that has never been there is waited for so long before that is a warning: all start at once."""


class Listener(Protocol[InfoIn, ReplyIn]):
    """Who hears from a service. All calls come on the event loop; they must not block or raise."""

    def on_connected(self, info: InfoIn) -> None:
        """A stream is up; `info.instance` tells whether it is still the same process."""
        ...

    def on_disconnected(self, reason: str) -> None:
        """The stream is gone; nothing more comes from it. Never called twice without on_connected between."""
        ...

    def on_reply(self, reply: ReplyIn) -> None: ...


class Client(Protocol[InfoOut, RequestIn, ReplyOut]):
    """One service as the scheduler sees it."""

    @property
    def connected(self) -> bool: ...

    def start(self, listener: Any) -> None:
        """Begin connecting, and go on doing so until close(). Call once, on the event loop."""
        ...

    async def info(self, timeout_s: float) -> InfoOut:
        """Ask anew. Raises Unavailable."""
        ...

    def send(self, request: RequestIn) -> None:
        """Queue one batch on the stream. Raises Unavailable while there is none."""
        ...

    def reset(self, reason: str) -> None:
        """Drop the stream and open a new one: the service does not answer."""
        ...

    async def close(self) -> None: ...


TargetClient = Client[TargetInfo, TargetRequest, TargetReply]
DraftClient = Client[DraftInfo, DraftRequest, DraftReply]


class _GrpcClient(Generic[InfoT, RequestT, ReplyT]):
    """The stream handling both clients share. Subclasses name the stub and the conversions."""

    service: str
    _stub_class: Callable[[grpc.aio.Channel], Any]
    _info_from_pb: Callable[[Any], InfoT]
    _to_pb: Callable[[RequestT], Any]
    _from_pb: Callable[[Any], ReplyT]

    def __init__(
        self,
        address: str,
        *,
        keepalive_s: float = KEEPALIVE_S,
        connect_timeout_s: float = 5.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._outgoing: asyncio.Queue[RequestT | None] | None = None
        self._call: Any = None
        self._reset_reason = ""
        self._writer: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._outgoing is not None

    def start(self, listener: Listener[InfoT, ReplyT]) -> None:
        if self._task is not None:
            raise RuntimeError(f"the {self.service} client is started already")
        self._task = asyncio.get_running_loop().create_task(
            self._run(listener), name=f"{self.service}-client"
        )

    async def info(self, timeout_s: float) -> InfoT:
        try:
            reply = await self._stub().GetInfo(common_pb2.InfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{self.service} at {self.address!r}: {_describe(error)}") from error
        return self._info_from_pb(reply)

    def send(self, request: RequestT) -> None:
        if self._outgoing is None:
            raise Unavailable(f"there is no stream to the {self.service} at {self.address!r}")
        self._outgoing.put_nowait(request)

    def reset(self, reason: str) -> None:
        if self._call is not None:
            self._reset_reason = reason
            self._call.cancel()

    async def close(self) -> None:
        if self._outgoing is not None and self._writer is not None:
            # What was sent last (releases) should still arrive; a service that does not read can't hold us.
            self._outgoing.put_nowait(None)
            await asyncio.wait({self._writer}, timeout=CLOSE_S)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _stub(self) -> Any:
        if self._channel is None:
            options = channel_options(self._keepalive_s)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=options)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, options=options)
        return self._stub_class(self._channel)

    async def _run(self, listener: Listener[InfoT, ReplyT]) -> None:
        """Connect, pump, back off, for ever. A stream that ended by itself resets the back-off."""
        backoff = BACKOFF_FIRST_S
        reported: tuple[int, str] | None = None
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            reason = ""
            try:
                info = await self.info(self._connect_timeout_s)
                patient_until = 0.0
                reason = await self._pump(info, listener)
                backoff, reported = BACKOFF_FIRST_S, None
            except SpecBridgeError as error:
                reason = str(error)
            except Exception as error:  # a defect in a listener or a conversion must not end the client
                reason = _unexpected(error)
                if reported is None or reason != reported[1]:
                    log.exception("the stream to the %s failed", self.service)
            # Jitter keeps many gateways from knocking at a restarted service in step.
            delay = backoff * random.uniform(0.5, 1.5)
            level = logging.INFO if time.monotonic() < patient_until else logging.WARNING
            if (level, reason) != reported:
                log.log(level, "%s not connected: %s; next try in %.2f s", self.service, reason, delay)
                reported = level, reason
            await asyncio.sleep(delay)
            backoff = min(backoff * 2, BACKOFF_MAX_S)

    async def _pump(self, info: InfoT, listener: Listener[InfoT, ReplyT]) -> str:
        """Run one stream to its end; returns why it ended."""
        outgoing: asyncio.Queue[RequestT | None] = asyncio.Queue()
        call = self._stub().Rounds()
        writer = asyncio.create_task(self._write(call, outgoing), name=f"{self.service}-writer")
        self._outgoing, self._call, self._writer, self._reset_reason = outgoing, call, writer, ""
        reason = "the gateway closed the stream"
        log.info("connected to the %s at %s", self.service, self.address)
        try:
            listener.on_connected(info)
            from_pb = self._from_pb
            async for pb in call:
                listener.on_reply(from_pb(pb))
            reason = "the service ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = _describe(error)
        except asyncio.CancelledError:
            # Our own call.cancel() arrives here too; only a cancelled task may pass it on.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            reason = self._reset_reason or "the call was cancelled"
        except Exception as error:
            reason = _unexpected(error)
            raise
        finally:
            self._outgoing = self._call = self._writer = None
            writer.cancel()
            call.cancel()
            listener.on_disconnected(reason)
        return self._reset_reason or reason

    async def _write(self, call: Any, outgoing: asyncio.Queue[RequestT | None]) -> None:
        to_pb = self._to_pb
        # A failed write means that the stream is over, which the reading side sees and reports.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (request := await outgoing.get()) is not None:
                try:
                    pb = to_pb(request)
                except Exception as error:
                    # Nothing can follow a request that is lost: whoever waits for it learns of it this way.
                    log.exception("a request to the %s can't be converted", self.service)
                    if call is self._call:
                        self.reset(_unexpected(error))
                    return
                await call.write(pb)


def _unexpected(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


class GrpcTargetClient(_GrpcClient[TargetInfo, TargetRequest, TargetReply]):
    """The target over gRPC. address: "unix:/path" or "host:port"."""

    service = "target"
    _stub_class = target_pb2_grpc.TargetStub
    _info_from_pb = staticmethod(wire.target_info_from_pb)
    _to_pb = staticmethod(wire.target_request_to_pb)
    _from_pb = staticmethod(wire.target_reply_from_pb)


class GrpcDraftClient(_GrpcClient[DraftInfo, DraftRequest, DraftReply]):
    """The draft over gRPC. address: "unix:/path" or "host:port"."""

    service = "draft"
    _stub_class = draft_pb2_grpc.DraftStub
    _info_from_pb = staticmethod(wire.draft_info_from_pb)
    _to_pb = staticmethod(wire.draft_request_to_pb)
    _from_pb = staticmethod(wire.draft_reply_from_pb)
