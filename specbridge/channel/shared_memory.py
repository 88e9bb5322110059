"""shared_memory: the ring is a file in /dev/shm that both processes map.

Layout: nonce (32 random bytes) at 0, one uint32 generation a slot from byte 64 on, rows from `data_offset`
(page-aligned) on. The file has a random name and loses it as soon as the handshake is over; from then on
the memory lives exactly as long as a process maps it, however the processes end. A producer killed within
those milliseconds leaves a named file that nobody locks: the next producer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from specbridge.channel.base import ChannelLayout, Identity, MemoryOffer, torch_dtype

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NAME = "shared_memory"
FOLDER = Path("/dev/shm")
_PREFIX = "specbridge-"
_NONCE = 32
_GENERATIONS = 64
_ORPHAN_AGE_S = 60.0


def why_not(own: Identity, peer: Identity) -> str | None:
    """Why these two processes can't share host memory; None if they may try."""
    if not own.boot_id or not peer.boot_id:
        return "the host can't be identified"
    if own.boot_id != peer.boot_id:
        return "the draft runs on another host"
    if not FOLDER.is_dir():
        return f"there is no {FOLDER}"
    return None


def _data_offset(slots: int) -> int:
    return -(-(_GENERATIONS + 4 * slots) // mmap.PAGESIZE) * mmap.PAGESIZE


def _view(memory: mmap.mmap, slots: int, layout: ChannelLayout) -> torch.Tensor:
    import torch

    flat = torch.frombuffer(
        memory, dtype=torch_dtype(layout.dtype), count=slots * layout.row_width, offset=_data_offset(slots)
    )
    return flat.view(slots, layout.row_width)


class SharedRing:
    """Producer's half. Raises OSError if /dev/shm has no room."""

    def __init__(self, slots: int, layout: ChannelLayout, device: str) -> None:
        _remove_orphans()
        size = _data_offset(slots) + slots * layout.row_bytes
        self._path: Path | None = FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Without this a full /dev/shm would show as SIGBUS at the first write.
            os.posix_fallocate(self._fd, 0, size)
            memory = mmap.mmap(self._fd, size)
            self.nonce = secrets.token_bytes(_NONCE)
            memory[:_NONCE] = self.nonce
            self._header = memoryview(memory)
            self._rows = _view(memory, slots, layout)
        except BaseException:
            self.settled()
            raise
        self.offer = MemoryOffer(
            NAME,
            slots,
            layout,
            location=str(self._path),
            data_offset=_data_offset(slots),
            nonce_length=_NONCE,
        )

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        start = _GENERATIONS + 4 * first_slot
        self._header[start : start + 4 * count] = generation.to_bytes(4, "little") * count

    def payload(self, first_slot: int, count: int) -> bytes:
        return b""

    def settled(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None
            os.close(self._fd)  # and with it the lock; the mapping stays

    def close(self) -> None:
        # The mapping goes with the last tensor that views it.
        self.settled()


class SharedRingView:
    """Consumer's half. Raises OSError if the file can't be opened here, ValueError if it is not what was
    offered.
    """

    def __init__(self, offer: MemoryOffer) -> None:
        path = Path(offer.location)
        if path.parent != FOLDER or not path.name.startswith(_PREFIX):
            raise ValueError(f"{offer.location!r} is not a segment of a hidden-state channel")
        if offer.data_offset != _data_offset(offer.slots):
            raise ValueError(f"rows start at byte {offer.data_offset}, not {_data_offset(offer.slots)}")
        size = offer.data_offset + offer.slots * offer.layout.row_bytes
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd).st_size
            if found < size:
                raise ValueError(f"the segment has {found} bytes, {size} were offered")
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.nonce = memory[: offer.nonce_length]
        self._header = memoryview(memory)
        self._rows = _view(memory, offer.slots, offer.layout)

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        start = _GENERATIONS + 4 * first_slot
        return self._header[start : start + 4 * count] == generation.to_bytes(4, "little") * count


def _remove_orphans() -> None:
    """Unlink old segments whose producer died before it could: nobody holds their lock."""
    for path in FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if time.time() - path.stat().st_mtime < _ORPHAN_AGE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("removed the orphaned segment %s", path)
            finally:
                os.close(fd)
