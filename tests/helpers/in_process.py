"""Clients of the real engines in this process: the whole product without sockets.

`InProcessTargetClient(engine)` and `InProcessDraftClient(engine)` implement gateway.clients.Client over
target_service.engine.Engine and draft_service.engine.Engine. The scheduler of the gateway runs on the event
loop, the engines on their own threads, as in the separate processes. `InProcessChannel` joins the engines the
way the hidden-state channel does, with a bounded number of rows that are not acknowledged yet.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbridge import wire
from specbridge.channel.ring import Ring, Span
from specbridge.errors import Unavailable
from specbridge.rounds import DraftInfo, SessionKey


class _InProcessClient:
    """One stream to one engine. `engine` may be replaced by a restarted one (`restart`)."""

    to_wire: Callable[[Any], Any]
    from_wire: Callable[[Any], Any]
    reply_to_wire: Callable[[Any], Any]
    reply_from_wire: Callable[[Any], Any]

    def __init__(self, engine: Any, *, through_wire: bool = True) -> None:
        self.engine = engine
        self._through_wire = through_wire
        self._listener: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reply: Callable[[Any], None] | None = None

    @property
    def connected(self) -> bool:
        return self._reply is not None

    def start(self, listener: Any) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self.connect)

    def connect(self) -> None:
        """Open a stream to the current engine."""
        if self._listener is None or self._reply is not None:
            return

        # Each stream has a reply callable of its own: the engines tell streams apart by it.
        def reply(message: Any) -> None:
            if self._through_wire:
                message = type(self).reply_from_wire(type(self).reply_to_wire(message))
            loop = self._loop
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, reply, message)

        self._reply = reply
        self._listener.on_connected(self._info())

    def _deliver(self, stream: Callable[[Any], None], message: Any) -> None:
        if stream is self._reply and self._listener is not None:
            self._listener.on_reply(message)

    async def info(self, timeout_s: float) -> Any:
        return self._info()

    def _info(self) -> Any:
        return self.engine.info()

    def send(self, request: Any) -> None:
        if self._reply is None:
            raise Unavailable("the in-process stream is closed")
        if self._through_wire:
            request = type(self).from_wire(type(self).to_wire(request))
        self._submit(request, self._reply)

    def _submit(self, request: Any, stream: Callable[[Any], None]) -> None:
        self.engine.submit(request, stream)

    def _drop(self, stream: Callable[[Any], None]) -> None:
        self.engine.drop_stream(stream)

    def disconnect(self, reason: str = "disconnected by the test") -> None:
        """Break the stream; the engine and its sessions live on for their lease."""
        if self._reply is None:
            return
        stream, self._reply = self._reply, None
        self._drop(stream)
        if self._listener is not None:
            self._listener.on_disconnected(reason)

    def reset(self, reason: str) -> None:
        self.disconnect(reason)
        assert self._loop is not None
        self._loop.call_later(0.01, self.connect)

    def restart(self, engine: Any) -> None:
        """Another engine takes the old one's place: how a killed and restarted process looks from here."""
        self.disconnect("the service restarted")
        self.engine = engine
        self.connect()

    async def close(self) -> None:
        self._listener = None
        if self._reply is not None:
            stream, self._reply = self._reply, None
            self._drop(stream)


class InProcessTargetClient(_InProcessClient):
    """Over a target_service.engine.Engine."""

    to_wire = staticmethod(wire.target_request_to_pb)
    from_wire = staticmethod(wire.target_request_from_pb)
    reply_to_wire = staticmethod(wire.target_reply_to_pb)
    reply_from_wire = staticmethod(wire.target_reply_from_pb)


class InProcessDraftClient(_InProcessClient):
    """Over a draft_service.engine.Engine."""

    to_wire = staticmethod(wire.draft_request_to_pb)
    from_wire = staticmethod(wire.draft_request_from_pb)
    reply_to_wire = staticmethod(wire.draft_reply_to_pb)
    reply_from_wire = staticmethod(wire.draft_reply_from_pb)

    def __init__(self, loaded: Any, *, through_wire: bool = True) -> None:
        super().__init__(loaded.engine, through_wire=through_wire)
        self._loaded = loaded
        self._instance = secrets.token_bytes(16)

    def _submit(self, request: Any, stream: Callable[[Any], None]) -> None:
        self.engine.submit(request, stream, stream=stream)

    def _drop(self, stream: Callable[[Any], None]) -> None:
        self.engine.stream_closed(stream)

    def restart(self, engine: Any) -> None:
        """`engine` is a Loaded here too."""
        self._loaded = engine
        self._instance = secrets.token_bytes(16)
        super().restart(engine.engine)

    def _info(self) -> DraftInfo:
        config, channel = self._loaded.config, self.engine.channel_state
        return DraftInfo(
            drafter_id="tiny",
            fingerprint=self._loaded.fingerprint,
            block_size=config.horizon + 1,
            mask_token_id=config.mask_token_id,
            target_layer_ids=config.target_layer_ids,
            max_nodes=self._loaded.max_nodes,
            vocab_size=config.vocab_size,
            instance=self._instance,
            channel_transport=channel.transport,
            attached=channel.attached,
            dummy_weights=self._loaded.dummy_weights,
            simulated_acceptance=self._loaded.simulated_acceptance,
        )


@dataclass(frozen=True)
class _Chunk:
    chunk_id: int
    session: SessionKey
    first_position: int
    count: int
    tokens: Sequence[int]
    anchor: int | None
    rows: Any

    def valid(self) -> bool:
        return True


@dataclass
class _Reservation:
    ring: Any
    spans: Ring
    span: Span

    @property
    def first_slot(self) -> int:
        return self.span.first


@dataclass(frozen=True)
class _Attached:
    transport: str
    reason: str
    slots: int


class InProcessChannel:
    """Both ends of the hidden-state channel: a HiddenStateSink for the target, a Channel for the draft.

    slots bounds the rows reserved or not yet acknowledged: a small number shows a full ring. Connect it
    to the target before it starts: `target.connect_channel(channel)`; then `attach(target, loaded)`.
    """

    def __init__(self, *, slots: int = 4096) -> None:
        self.slots = slots
        self._spans = Ring(slots)
        self.ring: Any = None
        self._lock = threading.Lock()
        self._outstanding: dict[int, tuple[Ring, Span]] = {}
        self._next = 1
        self._target: Any = None
        self._draft: Any = None
        self._layout: Any = None
        self._attached = False

    def attach(self, target: Any, loaded: Any) -> None:
        config = loaded.config
        self._target, self._draft = target, loaded.engine
        self._layout = target.prepare_taps(config.target_layer_ids, config.normed_last_layer)
        import torch

        with self._lock:
            self._spans = Ring(self.slots)
            dtype = getattr(torch, self._layout.dtype)
            self.ring = torch.empty(self.slots, self._layout.row_width, dtype=dtype)
            self._attached = True
            self._outstanding.clear()
        target.channel_attached("in_process", "a test")
        self._draft.connect(self)
        self._draft.on_attached(_Attached("in_process", "a test", self.slots))

    def detach(self, reason: str = "detached by the test") -> None:
        self._attached = False
        self._target.channel_detached(reason)
        self._draft.on_detached(reason)

    # HiddenStateSink, on the target's thread
    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def ring_slots(self) -> int:
        return self.slots

    @property
    def ring_used(self) -> int:
        return self._spans.used

    def reserve(self, rows: int) -> _Reservation | None:
        if not self._attached:
            return None
        span = self._spans.reserve(rows)
        return None if span is None else _Reservation(self.ring, self._spans, span)

    def mark_written(self, *, over: bool = False) -> None:
        """Nothing here runs ahead of the host."""

    def publish(
        self,
        reservation: _Reservation,
        *,
        session: SessionKey,
        first_position: int,
        count: int,
        tokens: Sequence[int],
        anchor: int | None,
    ) -> None:
        span = reservation.spans.trim(reservation.span, count)
        with self._lock:
            chunk_id, self._next = self._next, self._next + 1
            self._outstanding[chunk_id] = (reservation.spans, span)
        rows = reservation.ring[span.first : span.first + count].clone()
        self._draft.on_chunk(_Chunk(chunk_id, session, first_position, count, tuple(tokens), anchor, rows))

    def cancel(self, reservation: _Reservation) -> None:
        reservation.spans.free(reservation.span)

    # Channel, on the draft's thread
    def ack(self, chunk_ids: Sequence[int]) -> None:
        with self._lock:
            for chunk_id in chunk_ids:
                if chunk_id in self._outstanding:
                    spans, span = self._outstanding.pop(chunk_id)
                    spans.free(span)

    def recapture(self, session: SessionKey, first: int, cause: str) -> None:
        self._target.request_recapture(session, first, cause)

    @property
    def in_use(self) -> int:
        """Rows reserved or not acknowledged."""
        return self._spans.used


class Product:
    """Target, draft and channel of two model folders, started, with clients for a scheduler. Close it."""

    def __init__(
        self,
        target_folder: Path,
        draft_folder: Path | None,
        *,
        slots: int = 4096,
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
    ) -> None:
        self._folders = target_folder, draft_folder
        self._slots = slots
        self._target_settings = {"device": "cpu", "warmup_repeats": 0, **(target or {})}
        self._draft_settings = {"device": "cpu", "propose_wait": 0.5, "selfcheck_rounds": 0, **(draft or {})}
        self.channel = InProcessChannel(slots=slots)
        self.target_engine = self._new_target()
        self.target = InProcessTargetClient(self.target_engine)
        self.loaded: Any = None
        self.draft: InProcessDraftClient | None = None
        if draft_folder is not None:
            self.loaded = self._new_draft()
            self.draft = InProcessDraftClient(self.loaded)
            self.channel.attach(self.target_engine, self.loaded)

    def _new_target(self) -> Any:
        from prometheus_client import CollectorRegistry

        from target_service.config import TargetSettings
        from target_service.loading import load_engine
        from target_service.metrics import TargetMetrics

        settings = TargetSettings(target=str(self._folders[0]), **self._target_settings)
        self.target_metrics = TargetMetrics(CollectorRegistry())
        engine = load_engine(settings, self.target_metrics, lambda _error: None)
        engine.connect_channel(self.channel)
        engine.start()
        return engine

    def _new_draft(self) -> Any:
        from prometheus_client import CollectorRegistry

        from draft_service.config import DraftSettings
        from draft_service.loading import load_engine
        from draft_service.metrics import DraftMetrics

        target, draft = self._folders
        assert draft is not None
        settings = DraftSettings(draft=str(draft), target=str(target), **self._draft_settings)
        self.draft_metrics = DraftMetrics(CollectorRegistry())
        loaded = load_engine(settings, draft, target, self.draft_metrics)
        loaded.engine.start()
        return loaded

    def restart_draft(self) -> None:
        """The draft is killed and another one takes its place; it attaches anew."""
        assert self.draft is not None
        self.draft.disconnect("killed")
        self.channel.detach("killed")
        self.loaded.engine.close()
        self.loaded = self._new_draft()
        self.channel.attach(self.target_engine, self.loaded)
        self.draft.restart(self.loaded)

    def restart_target(self) -> None:
        self.target.disconnect("killed")
        if self.loaded is not None:
            self.channel.detach("killed")
        self.target_engine.close()
        self.channel = InProcessChannel(slots=self._slots)
        self.target_engine = self._new_target()
        if self.loaded is not None:
            self.channel.attach(self.target_engine, self.loaded)
        self.target.restart(self.target_engine)

    def close(self) -> None:
        self.target_engine.close()
        if self.loaded is not None:
            self.loaded.engine.close()
