"""cuda_ipc: the ring is GPU memory exported once by handle. Its place in the interface; declined so far.

`why_not` already names what would rule it out for two processes, and, where nothing does, that the transport
itself is not built. The handshake then goes on with the next transport and reports that reason.
"""

from __future__ import annotations

from typing import NoReturn

from specbridge.channel.base import ChannelLayout, Identity, MemoryOffer
from specbridge.errors import Unsupported

NAME = "cuda_ipc"
_NOT_BUILT = "GPU memory sharing is not built into this version"


def why_not(own: Identity, peer: Identity) -> str:
    """Why these two processes can't share GPU memory."""
    for who, side in (("target", own), ("draft", peer)):
        if side.device in ("", "cpu"):
            return f"the {who} is not on a GPU"
    if own.boot_id != peer.boot_id:
        return "the draft runs on another host"
    if own.pid_namespace != peer.pid_namespace:
        return "the draft runs in another PID namespace; start the containers with a shared one"
    return _NOT_BUILT


def create(slots: int, layout: ChannelLayout, device: str) -> NoReturn:
    raise Unsupported(_NOT_BUILT)


def open_ring(offer: MemoryOffer) -> NoReturn:
    raise Unsupported(_NOT_BUILT)
