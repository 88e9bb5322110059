"""Attachment: one consumer's ring on the producer's side, from handshake to detachment.

Owns the ring, its memory, and which published chunks await acknowledgement; decides whether the consumer is
still alive. A new attachment gets a new ring, so nothing of an older one can be overwritten or confused. Does
not own messages (producer.py).
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specbridge.channel.base import ChannelStats, ProducerMemory
from specbridge.channel.outbox import Outbox
from specbridge.channel.ring import Ring, Span

if TYPE_CHECKING:
    import torch

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Contiguous slots for up to `count` rows of one chunk, until published or cancelled."""

    owner: Attachment[Any]
    span: Span

    @property
    def count(self) -> int:
        return self.span.count

    @property
    def first_slot(self) -> int:
        """Where in the ring the rows belong."""
        return self.span.first

    @property
    def row_width(self) -> int:
        return self.owner.memory.offer.layout.row_width

    @property
    def ring(self) -> torch.Tensor:
        """The whole ring, [slots, row_width]; the same object for all reservations of an attachment."""
        return self.owner.ring_rows


@dataclass(frozen=True, slots=True)
class Published:
    """A chunk on its way: its id, its slots, the mark behind its rows' writing (0: written) and, for inline,
    its bytes.
    """

    chunk_id: int
    span: Span
    mark: int
    payload: bytes


class Attachment(Generic[Message]):
    """The engine's thread reserves and publishes, the event loop's thread acknowledges and closes.

    outbox: messages for the consumer. peer: the consumer's instance id. end_cause: label of why it ended,
    once it has; end_reason: in words.
    """

    def __init__(
        self,
        memory: ProducerMemory,
        outbox: Outbox[Message],
        *,
        chunk_ids: Iterator[int],
        stats: ChannelStats,
        lease_s: float,
        peer: bytes = b"",
    ) -> None:
        self.peer = peer
        self.memory = memory
        self.outbox = outbox
        self.end_cause = ""
        self.end_reason = ""
        self.ring = Ring(memory.offer.slots)
        self.ring_rows = memory.rows(0, memory.offer.slots)
        self.transport = memory.offer.transport
        self._row_bytes = memory.offer.layout.row_bytes
        self._ids = chunk_ids
        self._stats = stats
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._closed = False
        self._outstanding: dict[int, Span] = {}
        # First slots of what may be written from now on, and the mark behind all that has been.
        self._unmarked: set[int] = set()
        self._marked = 0
        self._last_sign = time.monotonic()
        self._full_since: float | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def outstanding(self) -> int:
        """Published chunks not yet acknowledged."""
        return len(self._outstanding)

    # ---- the engine's thread --------------------------------------------------------------------

    def reserve(self, rows: int) -> Reservation | None:
        span = None if self._closed else self.ring.reserve(rows)
        if span is None:
            self._stats.add("reservation_failures")
            if self._full_since is None and rows <= self.ring.slots:
                self._full_since = time.monotonic()
            return None
        self._full_since = None
        self._unmarked.add(span.first)
        self.memory.set_generation(span.first, span.count, span.generation)
        return Reservation(self, span)

    def rows(self, reservation: Reservation) -> torch.Tensor:
        self._unmarked.add(reservation.span.first)
        return self.memory.rows(reservation.span.first, reservation.span.count)

    def mark_written(self, *, over: bool = False) -> None:
        """All reservations made so far have been written, or (unless `over`) will be by what the current
        stream was told.
        """
        self._marked = 0 if over else self.memory.mark()
        self._unmarked.clear()

    def publish(self, reservation: Reservation, count: int) -> Published | None:
        """Trim to `count` rows and book the chunk as outstanding; None if the consumer is gone."""
        span = self.ring.trim(reservation.span, count)
        if self.closed:
            self._drop(span)
            return None
        payload = self.memory.payload(span.first, span.count)
        mark = self._mark_of(span)
        with self._lock:
            if self._closed:
                self._drop(span)
                return None
            chunk_id = next(self._ids)
            if not self._outstanding:
                # An idle consumer owes no sign of life; the lease runs from its first chunk on.
                self._last_sign = time.monotonic()
            self._outstanding[chunk_id] = span
        self._stats.moved(self.transport, count, count * self._row_bytes)
        return Published(chunk_id, span, mark, payload)

    def cancel(self, reservation: Reservation) -> None:
        self._unmarked.discard(reservation.span.first)
        self.ring.free(reservation.span)

    def _mark_of(self, span: Span) -> int:
        """The mark behind the writing of a span: the latest, if it was made after the rows were written; or
        one of its own.
        """
        if span.first not in self._unmarked:
            return self._marked
        self._unmarked.discard(span.first)
        return self.memory.mark()

    def _drop(self, span: Span) -> None:
        self._unmarked.discard(span.first)
        self._stats.add("stale_publishes")
        self.ring.free(span)

    # ---- the event loop's thread ----------------------------------------------------------------

    def acknowledge(self, chunk_ids: Iterable[int]) -> None:
        """Free these chunks' slots. Ids of other epochs, and repeated ones, are counted and ignored.

        No ids at all is a sign of life of a consumer that holds on to its chunks.
        """
        self._last_sign = time.monotonic()
        acked = unknown = 0
        for chunk_id in chunk_ids:
            with self._lock:
                span = self._outstanding.pop(chunk_id, None)
            if span is None:
                unknown += 1
                continue
            self.ring.free(span)
            acked += 1
        if acked:
            self._full_since = None
            self._stats.add("acked", acked)
        if unknown:
            self._stats.add("unknown_acks", unknown)

    def expired(self, now: float) -> str | None:
        """Why the consumer counts as dead, or None.

        Dead is: chunks are outstanding, and it gave no sign of life for a lease; or the ring has been full
        for a lease without one acknowledgement.
        """
        if not self._outstanding:
            return None
        if now - self._last_sign > self._lease_s:
            return f"the draft gave no sign of life for {now - self._last_sign:.1f} s"
        full = self._full_since
        if full is not None and now - full > self._lease_s:
            return f"the draft has acknowledged nothing for {now - full:.1f} s with a full ring"
        return None

    def close(self, cause: str, reason: str) -> bool:
        """No further reservation or publication. False if it was closed already."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self.end_cause, self.end_reason = cause, reason
            self._outstanding.clear()
        self.ring.close()
        self.outbox.close()
        self.memory.close()
        return True


def new_chunk_ids() -> Iterator[int]:
    """Ids for all chunks of this process, over all attachments, from a random start.

    So a late acknowledgement, of an earlier attachment or of the process before a restart, names no chunk of
    now.
    """
    return itertools.count(secrets.randbits(62))
