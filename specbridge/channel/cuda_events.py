"""Which of a ring's interprocess events stand for writes that somebody may still wait for.

An event that is recorded anew before all who were told of it have waited stands for later writes, too: they
would wait for longer than they need, never for less. So an event is used again only when every chunk that
names it has been acknowledged; if all are in use, the newest is recorded once more, behind what it stands for
already. Owns that bookkeeping, not the events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from specbridge.channel.base import Mark


class EventPool:
    """Events number 1 to `size`. `mark` is the engine thread's; hold and let_go are anybody's.

    record(number): on the current stream. wait(number): the current stream waits for it.
    """

    def __init__(self, size: int, *, record: Callable[[int], object], wait: Callable[[int], object]) -> None:
        self._record = record
        self._wait = wait
        self._lock = threading.Lock()
        # Least recently used first, so that an old one is rather reached than a new one.
        self._free = deque(range(1, size + 1))
        self._holders = [0] * (size + 1)
        self._newest = 0

    @property
    def held(self) -> int:
        """Events that stand for something."""
        with self._lock:
            return sum(holders > 0 for holders in self._holders)

    def mark(self) -> Mark:
        with self._lock:
            shared = not self._free
            number = self._newest if shared else self._free.popleft()
            self._holders[number] += 1
        try:
            if shared:
                self._wait(number)  # this stream may be another one than the last
            self._record(number)
        except BaseException:
            self.let_go(number)
            raise
        self._newest = number
        return Mark(number, shared)

    def hold(self, number: int) -> None:
        with self._lock:
            assert self._holders[number] > 0
            self._holders[number] += 1

    def let_go(self, number: int) -> None:
        with self._lock:
            assert self._holders[number] > 0
            self._holders[number] -= 1
            if not self._holders[number]:
                self._free.append(number)
