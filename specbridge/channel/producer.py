"""The target's end of the hidden-state channel.

Owns the HiddenStates stream: handshake, descriptors out, acknowledgements and re-capture requests in, leases.
The engine's thread reserves slots, writes rows and publishes; everything else runs on the event loop. One
draft is attached at a time. A newcomer is refused while that one lives, unless it says that it takes over or
is the same process come back. Does not own what is captured when
(target_service.capture).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from specbridge.channel import wire
from specbridge.channel.attachment import Attachment, Reservation, new_chunk_ids
from specbridge.channel.base import (
    DEFAULT_LEASE_S,
    SUPERSEDED,
    AttachedInfo,
    ChannelLayout,
    ChannelStats,
    Projection,
    ProjectionShape,
    check_tokens,
    torch_dtype,
)
from specbridge.channel.handshake import Agreed
from specbridge.channel.outbox import Outbox
from specbridge.channel.stream import GONE, Reply, Requests, ServerStream
from specbridge.channel.wire import Announcement
from specbridge.errors import CapacityError, InvalidRequest, Unavailable
from specbridge.rounds import SessionKey

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Attached = Attachment[Announcement]


class RowLayout(Protocol):
    """What `on_attach` answers with: a ChannelLayout, or anything that looks like one."""

    @property
    def row_width(self) -> int: ...

    @property
    def dtype(self) -> str: ...


class HiddenStateServer:
    """`serve` is the RPC's body; reserve, rows, publish and cancel are for the engine's thread.

    The callbacks run on the event loop and must not block. on_attach(layer_ids, normed_last_layer) checks
    what a draft asks for, prepares the engine for it and returns the row layout, or raises a typed error that
    the draft is refused with; on_attach_projected is the same for a draft that sends a projection, whose
    columns are taps x hidden_size. on_attached(transport, reason) may return an awaitable: rows are accepted
    once it is done. on_detached(reason) follows each on_attached. on_recapture(session, first, cause): the
    draft lacks rows.
    """

    def __init__(
        self,
        instance: bytes,
        on_attach: Callable[[tuple[int, ...], bool], RowLayout | Awaitable[RowLayout]],
        *,
        on_attach_projected: Callable[[tuple[int, ...], bool, Projection], RowLayout] | None = None,
        hidden_size: int = 0,
        on_attached: Callable[[str, str], object] = lambda transport, reason: None,
        on_detached: Callable[[str], object] = lambda reason: None,
        on_recapture: Callable[[SessionKey, int, str], object] = lambda session, first, cause: None,
        slots: int = 4096,
        max_slots: int = 65536,
        device: str = "cpu",
        lease_s: float = DEFAULT_LEASE_S,
        handshake_s: float = 10.0,
    ) -> None:
        self.stats = ChannelStats()
        self.instance = instance
        self._on_attach = on_attach
        self._on_attach_projected = on_attach_projected
        self._hidden_size = hidden_size
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._on_recapture = on_recapture
        self._slots = slots
        self._max_slots = max(slots, max_slots)
        self.device = device
        self.lease_s = lease_s
        self.handshake_s = handshake_s
        self._ids = new_chunk_ids()
        self._current: Attached | None = None
        self._open = False
        self._prepared: Outbox[Announcement] | None = None

    # ---- the engine's thread --------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self._usable() is not None

    @property
    def ring_slots(self) -> int:
        """Slots of the ring in use; 0 while detached."""
        current = self._current
        return 0 if current is None else current.ring.slots

    @property
    def ring(self) -> torch.Tensor | None:
        """The whole ring, [slots, row_width], to be written into where a reservation says; None while
        detached.
        """
        current = self._current
        return None if current is None else current.ring_rows

    @property
    def ring_used(self) -> int:
        """Slots reserved or not yet acknowledged."""
        current = self._current
        return 0 if current is None else current.ring.used

    def reserve(self, rows: int) -> Reservation | None:
        """`rows` contiguous slots, or None if no draft is attached or the ring is full (counted). Never
        blocks.
        """
        current = self._usable()
        return None if current is None else current.reserve(rows)

    def rows(self, reservation: Reservation) -> torch.Tensor:
        """Where the reservation's rows are to be written: [count, row_width] in the channel's dtype."""
        return reservation.owner.rows(reservation)

    def mark_written(self, *, over: bool = False) -> None:
        """The rows of all reservations made so far have been written, or will be by what this thread's
        current stream was told so far. over: the caller has waited for that since, so that the device need
        not be asked (several calls, in the middle of a round). One mark for many chunks is cheaper than the
        one that `publish` otherwise makes for each; who makes it must do so after every step that writes.
        `rows` takes it back for its reservation.
        """
        current = self._usable()
        if current is not None:
            current.mark_written(over=over)

    def publish(
        self,
        reservation: Reservation,
        *,
        session: SessionKey,
        first_position: int,
        count: int,
        tokens: Sequence[int],
        anchor: int | None,
    ) -> bool:
        """Announce the first `count` rows, which must have been written, or will be by what this thread's
        current stream was told so far; the other slots are given back.

        Ends the reservation. False if its draft is gone: then nothing was sent.
        Raises ValueError unless 0 <= count <= reserved and there is one token a row.
        """
        check_tokens(count, tokens)
        if count == 0:
            self.cancel(reservation)
            return True
        owner = reservation.owner
        published = owner.publish(reservation, count)
        if published is None:
            return False
        owner.outbox.put(
            wire.chunk_fields(
                published, session=session, first_position=first_position, tokens=tokens, anchor=anchor
            )
        )
        return True

    def cancel(self, reservation: Reservation) -> None:
        """Give all slots of a reservation back; nothing is announced."""
        reservation.owner.cancel(reservation)

    # ---- the event loop -------------------------------------------------------------------------

    def close(self) -> None:
        """Detach the draft because the target ends."""
        if self._current is not None:
            self.detach(self._current, "closing", "the target is shutting down")

    def serve(self, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Reply]:
        """Body of Target.HiddenStates for one draft, from its Attach until one side ends it."""
        return ServerStream(self, requests, context).replies()

    # What follows is for this server's streams.

    def check_projection(self, layer_ids: tuple[int, ...], shape: ProjectionShape) -> None:
        """Raises InvalidRequest for one that does not fit the taps, or is too large to be one."""
        columns = len(layer_ids) * self._hidden_size
        if self._on_attach_projected is None:
            raise InvalidRequest("this target can't project hidden states; drop --project-on-target")
        if shape.columns != columns or not 0 < shape.width <= columns:
            raise InvalidRequest(
                f"a projection [{shape.width}, {shape.columns}] does not fit {len(layer_ids)} taps of "
                f"{self._hidden_size}: give target and draft the same --target"
            )

    def check_place(self, peer: bytes, *, take_over: bool) -> None:
        """Raises CapacityError if a draft other than `peer` (an instance id) is attached and gives signs of
        life.
        """
        current = self._current
        if current is None or take_over or (peer and peer == current.peer):
            return
        if current.expired(time.monotonic()) is None:
            raise CapacityError(
                "another draft is attached to this target and alive; end it first, or start this one with "
                "--take-over",
                retry_after=self.lease_s,
            )

    async def prepare(
        self,
        layer_ids: tuple[int, ...],
        normed_last_layer: bool,
        outbox: Outbox[Announcement],
        projection: Projection | None = None,
    ) -> ChannelLayout:
        """Ask the engine for these taps, for the stream of `outbox`; from here on the rows of an older draft
        would be the wrong ones.
        """
        answer: RowLayout | Awaitable[RowLayout]
        if projection is not None:
            assert self._on_attach_projected is not None
            answer = self._on_attach_projected(layer_ids, normed_last_layer, projection)
        else:
            answer = self._on_attach(layer_ids, normed_last_layer)
        self._prepared = outbox
        layout = await answer if inspect.isawaitable(answer) else answer
        torch_dtype(layout.dtype)
        if self._current is not None:
            self.detach(self._current, "superseded", SUPERSEDED)
        return ChannelLayout(layout.row_width, layout.dtype)

    def slots_for(self, wanted: int) -> int:
        return min(wanted or self._slots, self._max_slots)

    async def attach(self, agreed: Agreed, outbox: Outbox[Announcement], peer: bytes) -> Attached:
        """Make it the current one: tell the engine, then the draft.

        Raises Unavailable if another draft's handshake began during this one: the taps are that one's now.
        """
        if self._prepared is not outbox:
            agreed.memory.close()
            raise Unavailable("another draft began to attach during the handshake; attach again")
        offer = agreed.memory.offer
        attachment = Attachment(
            agreed.memory,
            outbox,
            chunk_ids=self._ids,
            stats=self.stats,
            lease_s=self.lease_s,
            peer=peer,
        )
        self._current, self._open = attachment, False
        try:
            waiting = self._on_attached(offer.transport, agreed.reason)
            if inspect.isawaitable(waiting):
                await waiting
        except BaseException:
            self.detach(attachment, GONE, "the attachment failed")
            raise
        if self._current is attachment:
            outbox.put(
                wire.attached_to_pb(
                    AttachedInfo(offer.transport, agreed.reason, self.instance, offer.slots, offer.layout)
                )
            )
            self._open = True
            self.stats.attached(offer.transport, agreed.reason)
            log.info("draft attached over %s, %d slots (%s)", offer.transport, offer.slots, agreed.reason)
        return attachment

    def detach(self, attachment: Attached, cause: str, reason: str) -> None:
        """End an attachment; its stream ends too. Idempotent."""
        if not attachment.close(cause, reason):
            return
        self.stats.detached(cause)
        if self._current is attachment:
            self._current, self._open = None, False
        self._on_detached(reason)

    def recapture(self, session: SessionKey, first: int, cause: str) -> None:
        self._on_recapture(session, first, cause)

    def _usable(self) -> Attached | None:
        """The current attachment once the engine knows of it."""
        return self._current if self._open else None
