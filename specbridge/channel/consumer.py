"""The draft's end of the hidden-state channel.

Owns the connection to the target: attach, probe, chunks in, acknowledgements and re-capture requests out,
re-attachment with backoff. Runs on the event loop; `ack` and `recapture` are for any thread. Does not own
what becomes of the rows (draft_service.engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protos import target_pb2, target_pb2_grpc
from specbridge.channel import wire
from specbridge.channel.base import (
    DEFAULT_LEASE_S,
    SUPERSEDED,
    AttachedInfo,
    ChannelStats,
    ConsumerMemory,
    Fence,
    Projection,
    ReceivedChunk,
)
from specbridge.channel.handshake import try_offer
from specbridge.channel.outbox import Outbox
from specbridge.channel.transports import TRANSPORTS, own_identity
from specbridge.errors import SpecBridgeError, Unavailable
from specbridge.rounds import SessionKey
from specbridge.server import channel_options
from specbridge.wire import error_from_pb

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
PATIENCE_S = 30.0
"""A target that has never been there is waited for so long before that is a warning: all start at once."""
SUPERSEDED_BACKOFF_S = 30.0
"""Two drafts at one target would take it from each other for ever; the loser waits this long."""

SENDING_BYTES_S = 20e6
"""Weights of a projection are given a second for as many bytes."""

FENCE_PAUSE_S = 0.0005
"""Between two looks at whether the device has finished reading."""

ACK_PAUSE_S = 0.02
"""Acknowledgements are gathered for so long: each message costs both ends' event loops more than the slots
are worth."""
HURRY = 8
"""They don't wait once they are for a ring's 1/HURRY."""

Message = target_pb2.ChannelRequest | tuple[int, ...]
"""What the writer sends: a message, or chunk ids that it merges into one Ack."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Chunks that have been read, or that a device is still reading."""

    chunks: tuple[ReceivedChunk, ...]
    done: Fence | None


class HiddenStateClient:
    """`start` it on the event loop, `close` it there.

    projection: have the target apply it; rows then are as wide as it says. take_over: the first time,
    displace a draft that is attached already; otherwise this one waits until that one is gone.

    The callbacks run on the event loop and must not block: on_attached(info), then on_chunk(chunk) in the
    order of publication, then on_detached(reason). Every chunk must be acknowledged once its rows have been
    read, wanted or not: its slots are the target's to reuse then. While detached, `reason` says why.
    on_spoilt(reason), on any thread: rows that were read and found valid may have been wrong all the same,
    which only a target that breaks the rules, or dies at the wrong moment, can bring about.
    """

    def __init__(
        self,
        target_address: str,
        *,
        target_layer_ids: Sequence[int],
        normed_last_layer: bool,
        projection: Projection | None = None,
        transports: Sequence[str] = tuple(TRANSPORTS),
        slots: int = 0,
        device: str = "cpu",
        on_attached: Callable[[AttachedInfo], object] = lambda info: None,
        on_chunk: Callable[[ReceivedChunk], object] = lambda chunk: None,
        on_detached: Callable[[str], object] = lambda reason: None,
        on_spoilt: Callable[[str], object] = lambda reason: None,
        instance: bytes | None = None,
        take_over: bool = False,
        lease_s: float = DEFAULT_LEASE_S,
        handshake_s: float = 10.0,
        superseded_backoff_s: float = SUPERSEDED_BACKOFF_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.stats = ChannelStats()
        self.info: AttachedInfo | None = None
        self.reason = "not attached yet"
        self._address = target_address
        self._layer_ids = tuple(target_layer_ids)
        self._normed_last_layer = normed_last_layer
        self._projection = projection
        self._transports = tuple(transports)
        self._slots = slots
        self._device = device
        self._on_attached = on_attached
        self._on_chunk = on_chunk
        self._on_detached = on_detached
        self._on_spoilt = on_spoilt
        self._instance = instance or secrets.token_bytes(16)
        self._take_over = take_over
        self._lease_s = lease_s
        self._handshake_s = handshake_s
        self._superseded_backoff_s = superseded_backoff_s
        self._credentials = credentials
        self._outbox: Outbox[Message] | None = None
        self._reading: Outbox[_Reading] | None = None
        self._memory: ConsumerMemory | None = None
        self._held: dict[int, ReceivedChunk] = {}
        self._being_read: set[int] = set()
        # Only a hint when to hurry, so without a lock: a count that the loop's reset swallows, or misses, has
        # acknowledgements wait ACK_PAUSE_S after all, or not at all; the chunks themselves are in `_reading`.
        self._gathered_rows = 0
        self._task: asyncio.Task[None] | None = None

    # ---- any thread -----------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self.info is not None

    @property
    def held(self) -> int:
        """Chunks received in this attachment and not yet acknowledged."""
        return len(self._held) + len(self._being_read)

    def ack(self, chunk_ids: Iterable[int]) -> None:
        """These chunks' rows have been read, or will be by what this thread's current stream was told so far:
        the target learns of it when the device has come there. Ids of an earlier attachment, and repeated
        ones, are ignored.
        """
        memory, reading, held, info = self._memory, self._reading, self._held, self.info
        # Popping leaves nothing for an id that is named twice.
        mine = tuple([chunk for i in chunk_ids if (chunk := held.pop(i, None)) is not None])
        if memory is None or reading is None or info is None or not mine:
            return
        done = memory.fence()
        if done is not None:
            self._being_read.update([chunk.chunk_id for chunk in mine])
        reading.put(_Reading(mine, done))
        self._gathered_rows += sum([chunk.count for chunk in mine])
        if self._gathered_rows * HURRY >= info.slots:
            reading.hurry()

    def recapture(self, session: SessionKey, first: int, cause: str) -> bool:
        """Ask the target for a session's rows from `first` on. False while detached: nobody to ask."""
        outbox = self._outbox
        if outbox is None or self.info is None:
            return False
        self.stats.add("recaptures")
        outbox.put(wire.recapture_to_pb(session, first, cause))
        return True

    def _acknowledge(self, outbox: Outbox[Message], chunks: Sequence[ReceivedChunk]) -> None:
        self.stats.add("acked", len(chunks))
        outbox.put(tuple(chunk.chunk_id for chunk in chunks))

    # ---- the event loop -------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, and attach again whenever the channel breaks, until `close`."""
        assert self._task is None
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        said: tuple[int, str] | None = None
        patient_until = time.monotonic() + PATIENCE_S
        async with self._connect() as channel:
            while True:
                starting = time.monotonic() < patient_until
                try:
                    stub = target_pb2_grpc.TargetStub(channel)
                    await self._attachment(stub.HiddenStates())
                    reason = "the target closed the channel"
                except asyncio.CancelledError:
                    self._end("the draft is shutting down", level=logging.INFO)
                    raise
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                except TimeoutError:
                    reason = f"the target did not answer within {self._handshake_s} s"
                except SpecBridgeError as error:
                    reason = str(error)
                    starting = starting and isinstance(error, Unavailable)
                except Exception as error:  # a defect in a callback must not end the channel for good
                    log.exception("the hidden-state channel failed")
                    reason = f"{type(error).__name__}: {error}"
                if self._end(reason):
                    backoff, said, patient_until = FIRST_BACKOFF_S, (logging.WARNING, reason), 0.0
                else:
                    level = logging.INFO if starting else logging.WARNING
                    if (level, reason) != said:
                        log.log(level, "can't attach to the target at %s: %s", self._address, reason)
                        said = level, reason
                wait = self._superseded_backoff_s if reason == SUPERSEDED else backoff
                await asyncio.sleep(wait * random.uniform(0.75, 1.25))
                backoff = min(2 * backoff, LAST_BACKOFF_S)

    def _connect(self) -> grpc.aio.Channel:
        options = channel_options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=options)

    def _end(self, reason: str, level: int = logging.WARNING) -> bool:
        """Forget the attachment; whether there was one."""
        was_attached = self.info is not None
        self.info, self.reason = None, reason
        self._outbox = self._reading = None
        self._held.clear()
        self._being_read.clear()
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory.close(self._on_spoilt)
            except SpecBridgeError as error:
                log.error("the ring could not be let go: %s", error)
        if was_attached:
            self.stats.detached("closed")
            log.log(level, "detached from the target at %s: %s", self._address, reason)
            self._on_detached(reason)
        return was_attached

    async def _attachment(self, call: Any) -> None:
        """One stream, from Attach to its end. Raises what ended it."""
        helpers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._handshake_s + self._sending_s()):
                memory = await self._shake_hands(call)
            self._memory = memory
            reading = self._reading = Outbox(asyncio.get_running_loop())
            outbox = self._outbox = Outbox(asyncio.get_running_loop())
            assert self.info is not None
            self._on_attached(self.info)
            helpers = [
                asyncio.create_task(self._write(call, outbox)),
                asyncio.create_task(self._live(outbox)),
                asyncio.create_task(self._finish_reading(call, reading, outbox)),
            ]
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.WhichOneof("kind") != "chunks":
                    raise Unavailable(
                        f"the target sent {reply.WhichOneof('kind')!r} where chunks are expected"
                    )
                for chunk in reply.chunks.chunks:
                    self._receive(chunk, memory)
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise Unavailable(await call.details() or code.name)
        finally:
            for task in helpers:
                task.cancel()
            call.cancel()

    def _sending_s(self) -> float:
        """Time for the projection's weights, on a slow network."""
        return 0.0 if self._projection is None else self._projection.matrix.nbytes / SENDING_BYTES_S

    async def _shake_hands(self, call: Any) -> ConsumerMemory:
        identity = wire.identity_to_pb(own_identity(self._instance, self._device))
        attach = target_pb2.Attach(
            identity=identity,
            target_layer_ids=self._layer_ids,
            normed_last_layer=self._normed_last_layer,
            transports=self._transports,
            slots=self._slots,
            take_over=self._take_over,
        )
        if self._projection is not None:
            attach.projection.CopyFrom(wire.projection_to_pb(self._projection))
        await _say(call, target_pb2.ChannelRequest(attach=attach))
        # Asked for before the weights go out: a write that meets the call's end makes gRPC forget what it has
        # not been asked for yet, a refusal and its reason among it.
        answer = asyncio.ensure_future(call.read())
        try:
            for part in wire.projection_parts(self._projection) if self._projection is not None else ():
                if answer.done():
                    break
                await _say(call, part)
            reply = await answer
        finally:
            answer.cancel()
        memory: ConsumerMemory | None = None
        while reply is not grpc.aio.EOF:
            kind = reply.WhichOneof("kind")
            if kind == "offer":
                tried = try_offer(wire.offer_from_pb(reply.offer), self._device)
                memory = tried.memory
                await _say(call, wire.probe_to_pb(tried.probe))
                reply = await call.read()
            elif kind == "refused":
                raise error_from_pb(reply.refused.error)
            elif kind == "attached" and memory is not None:
                self.info = info = wire.attached_from_pb(reply.attached)
                self._take_over = False  # two that did so again and again would serve nobody
                self.reason = info.reason
                self.stats.attached(info.transport, info.reason)
                log.info("attached to the target over %s (%s)", info.transport, info.reason)
                return memory
            else:
                raise Unavailable(f"the target sent {kind!r} in the handshake")
        raise Unavailable(await call.details() or "the target ended the handshake")

    def _receive(self, pb: target_pb2.Chunk, memory: ConsumerMemory) -> None:
        info = self.info
        assert info is not None
        try:
            chunk = wire.chunk_from_pb(pb, memory, slots=info.slots)
        except ValueError as error:
            raise Unavailable(f"the target sent chunk {pb.chunk_id} of {error}") from error
        self._held[chunk.chunk_id] = chunk
        self.stats.moved(info.transport, chunk.count, chunk.count * info.layout.row_bytes)
        self._on_chunk(chunk)

    async def _write(self, call: Any, outbox: Outbox[Message]) -> None:
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # the reader learns of it, too
            while (batch := await outbox.take()) is not None:
                acked = [i for item in batch if isinstance(item, tuple) for i in item]
                if acked or any(item == () for item in batch):
                    await call.write(wire.ack_to_pb(acked))
                for item in batch:
                    if not isinstance(item, tuple):
                        await call.write(item)

    async def _live(self, outbox: Outbox[Message]) -> None:
        """Empty acknowledgements while chunks are held: the target takes silence for death."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if self.held:
                outbox.put(())

    async def _finish_reading(self, call: Any, reading: Outbox[_Reading], outbox: Outbox[Message]) -> None:
        """Acknowledge what the device has read. Fences come in order, so only the first is asked."""
        try:
            while (batch := await reading.take(gather_s=ACK_PAUSE_S)) is not None:
                self._gathered_rows = 0
                for item in batch:
                    if item.done is not None:
                        await self._read_by_device(item.chunks, item.done)
                    self._acknowledge(outbox, item.chunks)
        except SpecBridgeError as error:  # the device fails, and with it all that is read from here on
            log.error("can't tell what the device has read, detaching: %s", error)
            call.cancel()

    async def _read_by_device(self, chunks: Sequence[ReceivedChunk], done: Fence) -> None:
        while not done():
            await asyncio.sleep(FENCE_PAUSE_S)
        overtaken = [chunk for chunk in chunks if not chunk.valid()]
        if overtaken:
            self.stats.add("overtaken", len(overtaken))
            why = f"the target wrote over {len(overtaken)} chunks that were being read"
            log.error("%s", why)
            self._on_spoilt(why)
        self._being_read.difference_update([chunk.chunk_id for chunk in chunks])


async def _say(call: Any, message: target_pb2.ChannelRequest) -> None:
    """Write, unless the call has ended meanwhile: reading then tells why, writing does not."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(message)
