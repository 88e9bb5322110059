"""The hidden-state channel: rows of the target's hidden states on their way to the draft.

`HiddenStateServer` is the target's end, `HiddenStateClient` the draft's; transports are cuda_ipc,
shared_memory and inline.
"""

from specbridge.channel.attachment import Reservation
from specbridge.channel.base import (
    AttachedInfo,
    ChannelLayout,
    ChannelSnapshot,
    ChannelStats,
    ReceivedChunk,
)
from specbridge.channel.consumer import HiddenStateClient
from specbridge.channel.producer import HiddenStateServer

__all__ = [
    "AttachedInfo",
    "ChannelLayout",
    "ChannelSnapshot",
    "ChannelStats",
    "HiddenStateClient",
    "HiddenStateServer",
    "ReceivedChunk",
    "Reservation",
]
