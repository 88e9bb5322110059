"""Giving GPU memory back when nobody can be using it any more, without anybody waiting for that moment.

One daemon thread a process asks each job, every few milliseconds, whether it is done. Jobs come from
finalizers, which may run on any thread at any time, so handing one over takes no lock. Owns the thread, not
what the jobs do (cuda_ipc).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_S = 0.02

Job = Callable[[], bool]
"""Does what it can, without blocking for long. True: finished."""


class Releases:
    """`start` before the first `add`."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self._new: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Jobs not finished."""
        return self._new.qsize() + len(self._jobs)

    def start(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cuda-ipc-releases", daemon=True)
                self._thread.start()

    def add(self, job: Job) -> None:
        """From any thread, also from within a finalizer."""
        self._new.put(job)

    def _run(self) -> None:
        while True:
            if not self._jobs:
                self._jobs.append(self._new.get())
            while not self._new.empty():
                self._jobs.append(self._new.get())
            self._jobs = [job for job in self._jobs if not _finished(job)]
            if self._jobs:
                time.sleep(self._pause_s)


def _finished(job: Job) -> bool:
    try:
        return job()
    except Exception:  # what it holds stays; the others go on
        log.exception("GPU memory of a hidden-state channel could not be given back")
        return True


RELEASES = Releases()
