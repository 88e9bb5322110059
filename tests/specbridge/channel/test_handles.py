"""Open handles: counted while anything can use the memory, not as long as its owner was told to keep it."""

from __future__ import annotations

import gc

import pytest

from specbridge.channel import shared_memory
from specbridge.channel.base import ChannelLayout
from specbridge.channel.handles import CUDA_MEMORY, HANDLES, SEGMENT, OpenHandles


def segments() -> int:
    gc.collect()
    return HANDLES.snapshot()[SEGMENT]


def test_both_ends_of_a_shared_ring_are_open_until_their_last_tensor_goes() -> None:
    before = segments()
    ring = shared_memory.SharedRing(4, ChannelLayout(8, "float32"), "cpu")
    assert segments() == before + 1
    view = shared_memory.SharedRingView(ring.offer)
    assert segments() == before + 2
    rows = view.rows(0, 2, b"")
    view.close(lambda why: None)
    del view
    assert segments() == before + 2, "a tensor over it is still there"
    del rows
    assert segments() == before + 1
    ring.close()
    del ring
    assert segments() == before


def test_a_view_of_what_was_not_offered_stays_not_open() -> None:
    ring = shared_memory.SharedRing(4, ChannelLayout(8, "float32"), "cpu")
    before = segments()
    offer = ring.offer
    ring.settled()
    with pytest.raises(OSError, match="No such file"):
        shared_memory.SharedRingView(offer)
    assert segments() == before
    ring.close()


def test_numbers_by_kind() -> None:
    handles = OpenHandles()
    for kind in (SEGMENT, SEGMENT, CUDA_MEMORY):
        handles.opened(kind)
    handles.closed(SEGMENT)
    assert handles.snapshot() == {SEGMENT: 1, CUDA_MEMORY: 1}
    handles.closed(SEGMENT)
    assert handles.snapshot()[SEGMENT] == 0
