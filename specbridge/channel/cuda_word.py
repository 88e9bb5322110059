"""A word of GPU memory that says how far a stream has come, to whoever maps it.

A stream writes growing values into it, each behind what it was told before; another stream, also of another
process or GPU, waits for a value on its device. Unlike an event, anybody can write it: so those who wait for
a process that has died are let go. Owns the values and their comparison; not the memory, nor whose streams
they are (cuda_ipc).
"""

from __future__ import annotations

from collections.abc import Callable

from specbridge.channel.cuda_memory import CudaCalls

_MASK = 2**32 - 1
_HALF = 2**31


def covers(value: int, earlier: int) -> bool:
    """Whether who came to `value` has come to `earlier`: as the device compares, in 32 bits that wrap."""
    return (value - earlier) & _MASK < _HALF


class Word:
    """The word at `pointer`, a multiple of 4, as seen from GPU `ordinal`. It is 0 at first."""

    def __init__(self, calls: CudaCalls, ordinal: int, pointer: int) -> None:
        self._calls = calls
        self._ordinal = ordinal
        self._pointer = pointer

    def set(self, value: int) -> None:
        """In a stream's stead; see CudaCalls.set_value."""
        self._calls.set_value(self._ordinal, self._pointer, value)

    def write_on(self, stream: int, value: int) -> None:
        """Have a stream set it behind all that it was told."""
        self._calls.write_value(self._ordinal, stream, self._pointer, value)

    def wait_on(self, stream: int, value: int) -> None:
        """Have a stream wait until the word covers `value`; the host does not."""
        self._calls.wait_value(self._ordinal, stream, self._pointer, value)


class Marks:
    """The writer's side. `mark` is for one thread.

    current(): its current stream. idle(stream): whether all that a stream was told is done.
    """

    def __init__(
        self, word: Word, *, current: Callable[[], int], idle: Callable[[int], bool], last: int = 0
    ) -> None:
        self._word = word
        self._current = current
        self._idle = idle
        self._last = last
        self._stream = 0

    def mark(self) -> int:
        """The value that stands for all that the current stream was told so far; 0 if that is done, as it
        mostly is where the host has read a result back.
        """
        stream = self._current()
        if self._idle(stream):
            return 0
        last, value = self._last, self._last % _MASK + 1  # 0 is no value
        if last and stream != self._stream:
            self._word.wait_on(stream, last)  # values must come in their order
        self._word.write_on(stream, value)
        self._last, self._stream = value, stream
        return value
