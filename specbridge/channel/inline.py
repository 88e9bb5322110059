"""inline: rows travel as bytes in the descriptor, between any two hosts.

The producer still writes them into a ring of its own: reservations, acknowledgements and so the bound on what
is in flight are those of every transport. Each chunk is the consumer's own copy and never goes stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specbridge.channel.base import ChannelLayout, HostMemory, Identity, MemoryOffer, torch_dtype

if TYPE_CHECKING:
    import torch

NAME = "inline"


def why_not(own: Identity, peer: Identity) -> str | None:
    """Bytes in a stream work everywhere."""
    return None


class InlineRing(HostMemory):
    """Producer's half: rows on `device`, the engine's own, so that writing them does not wait for it."""

    nonce = b""

    def __init__(self, slots: int, layout: ChannelLayout, device: str) -> None:
        import torch

        self._rows = torch.zeros(slots, layout.row_width, dtype=torch_dtype(layout.dtype), device=device)
        self._staging: torch.Tensor | None = None
        self.offer = MemoryOffer(NAME, slots, layout)

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        """Nothing to mark: the consumer never reads this memory."""

    def payload(self, first_slot: int, count: int) -> bytes:
        """From a GPU the host waits here for the rows, which come through pinned memory: twice as fast."""
        import torch

        rows = self.rows(first_slot, count)
        if rows.is_cuda:
            if self._staging is None or len(self._staging) < count:
                size = min(len(self._rows), max(64, 2 * count))
                self._staging = torch.empty(size, rows.shape[1], dtype=rows.dtype, pin_memory=True)
            rows = self._staging[:count].copy_(rows)
        data: bytes = rows.view(torch.uint8).numpy().tobytes()
        return data

    def settled(self) -> None:
        """Nothing that others could find."""

    def close(self) -> None:
        """The memory goes with its last reference."""


class InlineRows(HostMemory):
    """Consumer's half."""

    nonce = b""

    def __init__(self, offer: MemoryOffer) -> None:
        self._layout = offer.layout

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        """Raises ValueError if the payload is not `count` rows long."""
        import torch

        if len(payload) != count * self._layout.row_bytes:
            raise ValueError(
                f"{len(payload)} bytes of rows, {count} rows take {count * self._layout.row_bytes}"
            )
        # A tensor may be written to, so torch wants memory of its own rather than immutable bytes.
        flat = torch.frombuffer(bytearray(payload), dtype=torch_dtype(self._layout.dtype))
        return flat.view(count, self._layout.row_width)

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        return True

    def close(self, on_spoilt: Callable[[str], object]) -> None:
        """Nothing is shared."""
