"""One HiddenStates stream on the target's side: its messages in order, and how it ends.

Owns the handshake's timing, the reading loop and the lease check of one draft. Does not own which draft is
the current one (producer.py); it tells its `Host` what happens. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from protos import target_pb2
from specbridge.channel import wire
from specbridge.channel.attachment import Attachment
from specbridge.channel.base import ChannelLayout, ChannelStats, MemoryOffer, Projection, ProjectionShape
from specbridge.channel.handshake import Agreed, ProbeResult, agree
from specbridge.channel.outbox import Outbox
from specbridge.channel.transports import own_identity
from specbridge.channel.wire import Announcement
from specbridge.errors import CapacityError, InvalidRequest, SpecBridgeError
from specbridge.rounds import SessionKey
from specbridge.wire import key_from_pb

log = logging.getLogger(__name__)

Reply = target_pb2.ChannelReply
Requests = AsyncIterator[target_pb2.ChannelRequest]
GONE = "gone"


class Host(Protocol):
    """What a stream needs of the server it belongs to."""

    stats: ChannelStats
    instance: bytes
    device: str
    lease_s: float
    handshake_s: float

    async def prepare(
        self,
        layer_ids: tuple[int, ...],
        normed_last_layer: bool,
        outbox: Outbox[Announcement],
        projection: Projection | None,
    ) -> ChannelLayout: ...

    def check_projection(self, layer_ids: tuple[int, ...], shape: ProjectionShape) -> None: ...

    def check_place(self, peer: bytes, *, take_over: bool) -> None: ...

    def slots_for(self, wanted: int) -> int: ...

    async def attach(
        self, agreed: Agreed, outbox: Outbox[Announcement], peer: bytes
    ) -> Attachment[Announcement]: ...

    def detach(self, attachment: Attachment[Announcement], cause: str, reason: str) -> None: ...

    def recapture(self, session: SessionKey, first: int, cause: str) -> None: ...


class ServerStream:
    """`replies` yields what goes to the draft; a task of its own reads what comes from it."""

    def __init__(self, host: Host, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._host = host
        self._requests = requests
        self._context = context
        self._outbox: Outbox[Announcement] = Outbox(asyncio.get_running_loop())
        self._peer = b""
        self._attachment: Attachment[Announcement] | None = None

    async def replies(self) -> AsyncIterator[Reply]:
        driver = asyncio.create_task(self._drive())
        # Also for a call that is cancelled while this generator is suspended in a yield: that does not end
        # it.
        self._context.add_done_callback(lambda _: driver.cancel())
        try:
            while (batch := await self._outbox.take()) is not None:
                for reply in wire.messages(batch):
                    yield reply
        finally:
            driver.cancel()
        await asyncio.wait([driver])
        if not driver.cancelled():
            driver.result()
        if self._attachment is not None and self._attachment.end_cause != GONE:
            await self._context.abort(grpc.StatusCode.ABORTED, self._attachment.end_reason)

    async def _drive(self) -> None:
        lease: asyncio.Task[None] | None = None
        try:
            agreed = await self._shake_hands()
            self._attachment = await self._host.attach(agreed, self._outbox, self._peer)
            lease = asyncio.create_task(self._watch(self._attachment))
            async for request in self._requests:
                self._handle(request, self._attachment)
        except SpecBridgeError as error:
            self._host.stats.add("refused")
            # One that waits for another's place asks every other second; it says so itself, once.
            level = logging.DEBUG if isinstance(error, CapacityError) else logging.WARNING
            log.log(level, "a draft was refused: %s", error)
            self._outbox.put(wire.refused_to_pb(error))
        finally:
            if lease is not None:
                lease.cancel()
            if self._attachment is not None:
                self._host.detach(self._attachment, GONE, "the draft went away")
            self._outbox.close()

    async def _shake_hands(self) -> Agreed:
        """Attach in, offers out, probes in. Raises what makes the draft be refused."""
        host = self._host
        attach = (await self._next("attach")).attach
        taps = tuple(attach.target_layer_ids)
        self._peer = attach.identity.instance
        host.check_place(self._peer, take_over=attach.take_over)
        projection = None
        if attach.HasField("projection"):
            projection = await self._read_projection(taps, attach.projection)
            host.check_place(self._peer, take_over=attach.take_over)
        layout = await host.prepare(taps, attach.normed_last_layer, self._outbox, projection)

        async def probe(offer: MemoryOffer) -> ProbeResult:
            self._outbox.put(wire.offer_to_pb(offer))
            return wire.probe_from_pb((await self._next("probe")).probe)

        return await agree(
            attach.transports,
            probe,
            slots=host.slots_for(attach.slots),
            layout=layout,
            device=host.device,
            own=own_identity(host.instance, host.device),
            peer=wire.identity_from_pb(attach.identity),
        )

    async def _read_projection(self, taps: tuple[int, ...], pb: target_pb2.Projection) -> Projection:
        """The weights that follow the Attach; refused before they are read if they can't be used."""
        shape = wire.projection_shape_from_pb(pb)
        self._host.check_projection(taps, shape)
        data = bytearray()
        while len(data) < shape.bytes:
            part = (await self._next("projection_part")).projection_part.data
            if not part or len(data) + len(part) > shape.bytes:
                raise InvalidRequest(
                    f"a projection of {shape.bytes} bytes came as {len(data)} and then {len(part)}"
                )
            data += part
        return wire.projection_from_bytes(shape, data)

    async def _next(self, kind: str) -> target_pb2.ChannelRequest:
        """The next message, a `kind`. Raises InvalidRequest if it is another, late or missing."""
        try:
            async with asyncio.timeout(self._host.handshake_s):
                request = await anext(self._requests)
        except TimeoutError:
            raise InvalidRequest(f"no {kind} within {self._host.handshake_s} s of the handshake") from None
        except StopAsyncIteration:
            raise InvalidRequest(f"the stream ended before its {kind}") from None
        if request.WhichOneof("kind") != kind:
            raise InvalidRequest(f"got {request.WhichOneof('kind')!r} where the handshake needs {kind!r}")
        return request

    def _handle(self, request: target_pb2.ChannelRequest, attachment: Attachment[Announcement]) -> None:
        kind = request.WhichOneof("kind")
        if kind == "ack":
            attachment.acknowledge(request.ack.chunk_ids)
        elif kind == "recapture":
            self._host.stats.add("recaptures")
            pb = request.recapture
            self._host.recapture(key_from_pb(pb.session), pb.first, pb.cause)
        else:
            raise InvalidRequest(f"{kind!r} is not expected after the handshake")

    async def _watch(self, attachment: Attachment[Announcement]) -> None:
        while True:
            await asyncio.sleep(self._host.lease_s / 4)
            why = attachment.expired(time.monotonic())
            if why is not None:
                self._host.stats.add("lease_timeouts")
                log.warning("draft detached: %s", why)
                self._host.detach(attachment, "lease", why)
                return
