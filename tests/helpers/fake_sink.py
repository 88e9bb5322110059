"""The producer end of the hidden-state channel with nobody at the other end, for tests of the target's
capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbridge.channel.ring import Ring, Span
from specbridge.rounds import SessionKey


@dataclass(eq=False)
class SinkReservation:
    ring: torch.Tensor
    span: Span

    @property
    def first_slot(self) -> int:
        return self.span.first

    @property
    def count(self) -> int:
        return self.span.count


@dataclass(frozen=True)
class SinkChunk:
    session: SessionKey
    first_position: int
    tokens: tuple[int, ...]
    anchor: int | None
    rows: torch.Tensor


class FakeSink:
    """The producer end of the channel without a consumer: slots are counted, chunks are kept until `ack`."""

    def __init__(self, slots: int = 256, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.attached = True
        self.ring_slots = slots
        self.width = width
        self.dtype = dtype
        self.ring: torch.Tensor | None = torch.full((slots, width), float("nan"), dtype=dtype)
        self.hold = False
        self._slots = Ring(slots)
        self._published: list[Span] = []
        self.open: set[SinkReservation] = set()
        self.chunks: list[SinkChunk] = []
        self.marks = 0
        self.read_back: list[bool] = []
        """Of each mark: whether the device was known to be done."""

    @property
    def used(self) -> int:
        return self._slots.used

    ring_used = used

    def reserve(self, rows: int) -> SinkReservation | None:
        span = None if not self.attached or self.hold else self._slots.reserve(rows)
        if span is None:
            return None
        assert self.ring is not None
        self.ring[span.first : span.first + rows] = float("nan")
        reservation = SinkReservation(self.ring, span)
        self.open.add(reservation)
        return reservation

    def mark_written(self, *, over: bool = False) -> None:
        self.marks += 1
        self.read_back.append(over)

    def publish(
        self,
        reservation: SinkReservation,
        *,
        session: SessionKey,
        first_position: int,
        count: int,
        tokens: Sequence[int],
        anchor: int | None,
    ) -> bool:
        self.open.remove(reservation)
        assert count == len(tokens) <= reservation.count
        span = self._slots.trim(reservation.span, count)
        self._published.append(span)
        rows = reservation.ring[span.first : span.first + count].clone()
        self.chunks.append(SinkChunk(session, first_position, tuple(tokens), anchor, rows))
        return True

    def cancel(self, reservation: SinkReservation) -> None:
        self.open.remove(reservation)
        self._slots.free(reservation.span)

    def ack(self) -> None:
        """Everything published has been read."""
        while self._published:
            self._slots.free(self._published.pop())

    def context_of(self, key: SessionKey, start: int = 0) -> list[int]:
        """Tokens the draft's context holds from `start` on; asserts that chunks follow each other without a
        gap.
        """
        context: list[int] = []
        for chunk in self.chunks:
            if chunk.session == key:
                assert chunk.first_position == start + len(context), (
                    "a chunk must start where the context ends"
                )
                context += chunk.tokens
        return context
