"""The table of transports, and what a process can prove about where it runs.

Owns the order of preference and the mapping from a transport's name to its two halves. Does not own the
handshake's messages (producer.py, consumer.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specbridge.channel import cuda_ipc, inline, shared_memory
from specbridge.channel.base import ChannelLayout, ConsumerMemory, Identity, MemoryOffer, ProducerMemory


@dataclass(frozen=True, slots=True)
class Transport:
    """One way for rows to travel. why_not(own, peer) is None if the two processes may try it."""

    why_not: Callable[[Identity, Identity], str | None]
    create: Callable[[int, ChannelLayout, str], ProducerMemory]
    open: Callable[[MemoryOffer], ConsumerMemory]


TRANSPORTS: dict[str, Transport] = {
    cuda_ipc.NAME: Transport(cuda_ipc.why_not, cuda_ipc.create, cuda_ipc.open_ring),
    shared_memory.NAME: Transport(
        shared_memory.why_not, shared_memory.SharedRing, shared_memory.SharedRingView
    ),
    inline.NAME: Transport(inline.why_not, inline.InlineRing, inline.InlineRows),
}
"""Best first."""


def own_identity(instance: bytes, device: str) -> Identity:
    """This process. `device`: "cpu", or a torch device name, which becomes the GPU's UUID."""
    return Identity(
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        device=device if device == "cpu" else _gpu_uuid(device),
        instance=instance,
    )


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or hidden by a sandbox: unknown
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
