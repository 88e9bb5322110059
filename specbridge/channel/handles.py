"""What of the hidden-state channel's shared memory this process has open, counted so that a leak shows.

Owns the numbers. Who opens and closes is segment's and cuda_ipc's matter; what is counted is open for as long
as anything in this process can still use it, which may be longer than the attachment it was made for.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping

SEGMENT = "segment"
"""A mapped file in /dev/shm."""
CUDA_MEMORY = "cuda_memory"
"""GPU memory that is exported to, or opened from, another process."""
KINDS = (SEGMENT, CUDA_MEMORY)


class OpenHandles:
    """For any thread; `closed` also for finalizers, which may run in the middle of anything: no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._closed: deque[str] = deque()

    def opened(self, kind: str) -> None:
        with self._lock:
            self._open[kind] += 1

    def closed(self, kind: str) -> None:
        self._closed.append(kind)

    def snapshot(self) -> Mapping[str, int]:
        """Number open, by each of KINDS."""
        with self._lock:
            while self._closed:
                self._open[self._closed.popleft()] -= 1
            return {kind: self._open[kind] for kind in KINDS}


HANDLES = OpenHandles()
"""Of this process."""
