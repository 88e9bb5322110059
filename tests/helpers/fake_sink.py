"""The producer end of the hidden-state channel with nobody at the other end, for tests of the target's
capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbridge.rounds import SessionKey


@dataclass(eq=False)
class SinkReservation:
    buffer: torch.Tensor


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
        self.used = 0
        self.hold = False
        self.open: set[SinkReservation] = set()
        self.chunks: list[SinkChunk] = []

    @property
    def ring_used(self) -> int:
        return self.used

    def reserve(self, rows: int) -> SinkReservation | None:
        if not self.attached or self.hold or self.used + rows > self.ring_slots:
            return None
        self.used += rows
        reservation = SinkReservation(torch.full((rows, self.width), float("nan"), dtype=self.dtype))
        self.open.add(reservation)
        return reservation

    def rows(self, reservation: SinkReservation) -> torch.Tensor:
        return reservation.buffer

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
        assert count == len(tokens) <= len(reservation.buffer)
        self.used -= len(reservation.buffer) - count
        self.chunks.append(
            SinkChunk(session, first_position, tuple(tokens), anchor, reservation.buffer[:count].clone())
        )
        return True

    def cancel(self, reservation: SinkReservation) -> None:
        self.open.remove(reservation)
        self.used -= len(reservation.buffer)

    def ack(self) -> None:
        """Everything published has been read."""
        self.used = sum(len(r.buffer) for r in self.open)

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
