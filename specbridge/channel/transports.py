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
    """One way for rows to travel. why_not(own, peer) is None if the two processes may try it; create(slots,
    layout, device) and open(offer, device) take the device of the process that calls.
    """

    why_not: Callable[[Identity, Identity], str | None]
    create: Callable[[int, ChannelLayout, str], ProducerMemory]
    open: Callable[[MemoryOffer, str], ConsumerMemory]


TRANSPORTS: dict[str, Transport] = {
    cuda_ipc.NAME: Transport(cuda_ipc.why_not, cuda_ipc.CudaRing, cuda_ipc.CudaRingView),
    shared_memory.NAME: Transport(
        shared_memory.why_not,
        shared_memory.SharedRing,
        lambda offer, device: shared_memory.SharedRingView(offer),
    ),
    inline.NAME: Transport(inline.why_not, inline.InlineRing, lambda offer, device: inline.InlineRows(offer)),
}
"""Best first."""


def own_identity(instance: bytes, device: str) -> Identity:
    """This process. `device`: "cpu", or a torch device name, which becomes the GPU's UUID."""
    ordinal, uuid = (0, device) if device == "cpu" else _gpu(device)
    return Identity(
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        device=uuid,
        instance=instance,
        ordinal=ordinal,
    )


def _gpu(device: str) -> tuple[int, str]:
    """Ordinal and UUID of a torch device."""
    import torch

    index = torch.device(device).index
    ordinal = torch.cuda.current_device() if index is None else index
    return ordinal, str(torch.cuda.get_device_properties(ordinal).uuid)


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
