"""Outbox: messages from any thread to one task of an event loop, with one wake-up for many messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Unbounded; what bounds it is the ring (a message stands for slots) or the number of sessions."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[T] = deque()
        self._event = asyncio.Event()
        self._hurry = asyncio.Event()
        self._awake = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: T) -> None:
        """Thread-safe, never blocks. After `close` the item is dropped."""
        if not self._closed:
            self._items.append(item)
            self._wake()

    def hurry(self) -> None:
        """Thread-safe. `take` gathers no longer."""
        self._call(self._hurry.set)

    def close(self) -> None:
        """Thread-safe. `take` returns what is left, then None."""
        self._closed = True
        self._wake()
        self.hurry()

    async def take(self, gather_s: float = 0.0) -> list[T] | None:
        """All items there are, at least one; None once closed and empty. For one task only.

        gather_s: give items that long to come together, unless somebody is in a hurry.
        """
        while True:
            self._awake = False
            self._event.clear()
            if self._items:
                if gather_s and not self._closed:
                    self._awake = True  # what is put meanwhile need not wake anybody
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(gather_s):
                            await self._hurry.wait()
                    self._hurry.clear()
                # popleft is atomic, so items put meanwhile are either taken now or wake us again.
                return [self._items.popleft() for _ in range(len(self._items))]
            if self._closed:
                return None
            await self._event.wait()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._call(self._event.set)

    def _call(self, work: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop is gone, and with it whoever waited
            self._closed = True
