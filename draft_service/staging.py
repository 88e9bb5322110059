"""Small integers on their way from the host to the device, without the host waiting for the device.

Owns a ring of pinned buffers: one is written again only when the copy out of it is over. Does not own what
the integers mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BUFFERS = 8
_FIRST_SIZE = 1024


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    copied: torch.cuda.Event | None = None


class Staging:
    """For one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0

    def send(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """values, integers of any shape on the CPU, as int32 on the device (in `out`, if given); the current
        stream copies them.
        """
        if out is None:
            out = torch.empty(values.shape, dtype=torch.int32, device=self._device)
        if self._device.type == "cpu":
            return out.copy_(values)
        buffer = self._buffer(values.numel())
        staged = buffer.memory[: values.numel()].view(values.shape)
        staged.copy_(values)
        out.copy_(staged, non_blocking=True)
        assert buffer.copied is not None
        buffer.copied.record()
        return out

    def _buffer(self, size: int) -> _Buffer:
        """One whose last copy is over, of at least `size` elements."""
        if not self._buffers:
            self._buffers = [_Buffer(_pinned(_FIRST_SIZE)) for _ in range(_BUFFERS)]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _BUFFERS
        if buffer.copied is None:
            buffer.copied = torch.cuda.Event()
        else:
            # Eight appends ago: it has nearly always passed.
            buffer.copied.synchronize()
        if buffer.memory.numel() < size:
            buffer.memory = _pinned(1 << (size - 1).bit_length())
        return buffer


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)
