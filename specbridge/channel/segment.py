"""Segment: a file in /dev/shm that two processes of one host map, with a random name for a moment.

Layout: nonce (32 random bytes) at 0, one byte "withdrawn" at 32, one uint32 generation a slot from byte 64
on, and whatever its owner puts from `data_offset` (page-aligned) on. The file loses its name as soon as the
handshake is over; from then on it lives exactly as long as a process maps it, however the processes end. A
producer killed within those milliseconds leaves a named file that nobody locks: the next producer removes it.

A lock on the file is also how the producer learns that its consumer is gone: the kernel drops it with the
process that held it. Owns the file and the marks in it. Does not own rows (shared_memory, cuda_ipc).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import time
import weakref
from pathlib import Path

from specbridge.channel.handles import HANDLES, SEGMENT

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PREFIX = "specbridge-"
NONCE_LENGTH = 32
_WITHDRAWN = 32
_GENERATIONS = 64
_ORPHAN_AGE_S = 60.0


def data_offset(slots: int) -> int:
    return -(-(_GENERATIONS + 4 * slots) // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment:
    """Producer's half, with `data_bytes` of room behind the generations.

    watched: keep the file open after the handshake, so that `unused` can tell.
    Raises OSError if /dev/shm has no room.
    """

    def __init__(self, slots: int, data_bytes: int, *, watched: bool = False) -> None:
        _remove_orphans()
        size = data_offset(slots) + data_bytes
        self._watched = watched
        self._path: Path | None = FOLDER / f"{PREFIX}{secrets.token_hex(16)}"
        self.location = str(self._path)
        self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            # Without this a full /dev/shm would show as SIGBUS at the first write.
            os.posix_fallocate(self._fd, 0, size)
            self.memory = _mapped(self._fd, size)
            self.nonce = secrets.token_bytes(NONCE_LENGTH)
            self.memory[:NONCE_LENGTH] = self.nonce
            self._header = memoryview(self.memory)
        except BaseException:
            self.close()
            raise

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        start = _GENERATIONS + 4 * first_slot
        self._header[start : start + 4 * count] = generation.to_bytes(4, "little") * count

    def settled(self) -> None:
        """Drop the name; without `watched` also the lock. The mapping stays."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None
            if not self._watched:
                self._close_file()

    def unused(self) -> bool:
        """Whether no consumer has it, and none can take it any more; for a watched segment."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._header[_WITHDRAWN] = 1
        return True

    def close(self) -> None:
        """The mapping goes with the last that views it. Idempotent."""
        self.settled()
        self._close_file()

    def _close_file(self) -> None:
        self._fd = _let_go(self._fd)


class SegmentView:
    """Consumer's half.

    watched: hold the file locked until `close`, which tells the producer that it is in use.
    Raises OSError if it can't be opened here, ValueError if it is not what was offered.
    """

    def __init__(
        self, location: str, slots: int, data_bytes: int, *, nonce_length: int, watched: bool = False
    ) -> None:
        path = Path(location)
        if path.parent != FOLDER or not path.name.startswith(PREFIX):
            raise ValueError(f"{location!r} is not a segment of a hidden-state channel")
        size = data_offset(slots) + data_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(self._fd).st_size
            if found < size:
                raise ValueError(f"the segment has {found} bytes, {size} were offered")
            self.memory = _mapped(self._fd, size)
            if watched:
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if self.memory[_WITHDRAWN]:
                    raise ValueError("the segment has been withdrawn")
        except BaseException:
            self.close()
            raise
        if not watched:
            self.close()
        self.nonce = self.memory[:nonce_length]
        self._header = memoryview(self.memory)

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        start = _GENERATIONS + 4 * first_slot
        return self._header[start : start + 4 * count] == generation.to_bytes(4, "little") * count

    def close(self) -> None:
        """Let the lock go; the mapping goes with the last that views it. Idempotent."""
        self._fd = _let_go(self._fd)


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The file's memory, counted for as long as it stays mapped."""
    memory = mmap.mmap(fd, size)
    HANDLES.opened(SEGMENT)
    weakref.finalize(memory, HANDLES.closed, SEGMENT).atexit = False
    return memory


def _let_go(fd: int) -> int:
    """Unlock and close. Closing alone keeps the lock: the mapping has a duplicate of the descriptor."""
    if fd >= 0:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    return -1


def _remove_orphans() -> None:
    """Unlink old segments whose producer died before it could: nobody holds their lock."""
    for path in FOLDER.glob(f"{PREFIX}*"):
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
