"""shared_memory: the ring's rows lie in a file in /dev/shm that both processes map (segment.py).

A target on a GPU writes into a ring on its GPU, and a chunk's rows are copied from there into the file when
they are published: its engine gathers rows on the device, and waits for that copy.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from specbridge.channel.base import ChannelLayout, HostMemory, Identity, MemoryOffer, torch_dtype
from specbridge.channel.segment import FOLDER, NONCE_LENGTH, Segment, SegmentView, data_offset

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

NAME = "shared_memory"


def why_not(own: Identity, peer: Identity) -> str | None:
    """Why these two processes can't share host memory; None if they may try."""
    if not own.boot_id or not peer.boot_id:
        return "the host can't be identified"
    if own.boot_id != peer.boot_id:
        return "the draft runs on another host"
    if not FOLDER.is_dir():
        return f"there is no {FOLDER}"
    return None


def _view(memory: mmap.mmap, slots: int, layout: ChannelLayout) -> torch.Tensor:
    import torch

    flat = torch.frombuffer(
        memory, dtype=torch_dtype(layout.dtype), count=slots * layout.row_width, offset=data_offset(slots)
    )
    return flat.view(slots, layout.row_width)


class SharedRing(HostMemory):
    """Producer's half, of an engine on `device`. Raises OSError if /dev/shm has no room."""

    def __init__(self, slots: int, layout: ChannelLayout, device: str) -> None:
        import torch

        self._segment = Segment(slots, slots * layout.row_bytes)
        try:
            self._shared = _view(self._segment.memory, slots, layout)
            self._rows = self._shared
            if torch.device(device).type != "cpu":
                self._rows = torch.zeros_like(self._shared, device=device)
        except BaseException:
            self._segment.close()
            raise
        self.nonce = self._segment.nonce
        self.offer = MemoryOffer(
            NAME,
            slots,
            layout,
            location=self._segment.location,
            data_offset=data_offset(slots),
            nonce_length=NONCE_LENGTH,
        )

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        self._segment.set_generation(first_slot, count, generation)

    def payload(self, first_slot: int, count: int) -> bytes:
        if self._rows is not self._shared:
            self._shared[first_slot : first_slot + count].copy_(self.rows(first_slot, count))
        return b""

    def settled(self) -> None:
        self._segment.settled()

    def close(self) -> None:
        # The mapping goes with the last tensor that views it.
        self._segment.close()


class SharedRingView(HostMemory):
    """Consumer's half. Raises OSError if the file can't be opened here, ValueError if it is not what was
    offered.
    """

    def __init__(self, offer: MemoryOffer) -> None:
        if offer.data_offset != data_offset(offer.slots):
            raise ValueError(f"rows start at byte {offer.data_offset}, not {data_offset(offer.slots)}")
        size = offer.slots * offer.layout.row_bytes
        self._segment = SegmentView(offer.location, offer.slots, size, nonce_length=offer.nonce_length)
        self.nonce = self._segment.nonce
        self._rows = _view(self._segment.memory, offer.slots, offer.layout)

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        return self._segment.generation_is(first_slot, count, generation)

    def close(self, on_spoilt: Callable[[str], object]) -> None:
        self._segment.close()
