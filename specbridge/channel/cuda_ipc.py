"""cuda_ipc: the ring is GPU memory that both processes map; what orders reading behind writing is events.

The memory is one plain device allocation, exported by one handle: nonce at 0, rows from `data_offset` on. A
pool of interprocess events is exported with it. A chunk names the event recorded behind the writing of its
rows; the consumer's stream waits for it on the device, and the host for nothing. Generations stand in a small
host segment (segment.py), so that setting and checking them costs no device work; its lock tells the producer
whether its consumer still has the memory.

Who gives back what, when: each side holds its part in one object (`_Lease`) that every tensor over the memory
keeps alive. When the last of them is gone, the thread of releases.py waits for the work that used it; then
the consumer closes its mapping and lets the segment's lock go (or the kernel does, with the process). Only
then does the producer free the memory: CUDA does not say what becomes of a mapping of freed memory, or of a
wait for a destroyed event. Owns that. Does not own the CUDA calls (cuda_memory) or the choice of events
(cuda_events).
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specbridge.channel import cuda_memory, dlpack
from specbridge.channel.base import ChannelLayout, Fence, Identity, Mark, MemoryOffer
from specbridge.channel.cuda_events import EventPool
from specbridge.channel.cuda_memory import CudaCalls
from specbridge.channel.handles import CUDA_MEMORY, HANDLES
from specbridge.channel.releases import RELEASES
from specbridge.channel.segment import FOLDER, NONCE_LENGTH, Segment, SegmentView
from specbridge.errors import SpecBridgeError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NAME = "cuda_ipc"
EVENTS = 128
"""More than the chunks a draft holds back (it appends at 64 rows); chunks of one step may share one."""
DATA_OFFSET = 512
RESCUE_S = 2.0
"""A stream that waits for an event of a target that has gone is helped on after so long."""


def why_not(own: Identity, peer: Identity) -> str | None:
    """Why these two processes can't share GPU memory; None if they may try. `own` is the target."""
    for who, side in (("target", own), ("draft", peer)):
        if side.device in ("", "cpu"):
            return f"the {who} is not on a GPU"
    if not own.boot_id or not peer.boot_id:
        return "the host can't be identified"
    if own.boot_id != peer.boot_id:
        return "the draft runs on another host"
    if own.pid_namespace != peer.pid_namespace:
        return "the draft runs in another PID namespace; start the containers with a shared one"
    if own.pid == peer.pid:
        return "target and draft are one process, which can't open its own handles"
    if not FOLDER.is_dir():
        return f"there is no {FOLDER}"
    try:
        return _why_not_here(cuda_memory.cuda_calls(), own, peer)
    except SpecBridgeError as error:
        return str(error)


def _why_not_here(calls: CudaCalls, own: Identity, peer: Identity) -> str | None:
    if not calls.shares_events(own.ordinal):
        return f"GPU {own.ordinal} of the target has no interprocess events"
    if own.device == peer.device:
        return None
    # A GPU that this process does not see may still map the memory: the draft's try tells.
    other = calls.find(peer.device)
    if other is not None and not calls.reaches(other, own.ordinal):
        return f"the draft's GPU ({peer.device}) can't read the memory of the target's ({own.device})"
    return None


@dataclass(frozen=True, slots=True)
class _Wait:
    """A stream was told to wait for an event."""

    event: int
    stream: int


@dataclass(eq=False)
class _Lease:
    """One process's part of a ring: what it must give back when nothing uses it any more.

    streams: those that were told to use the memory.
    """

    calls: CudaCalls
    ordinal: int
    segment: Segment | SegmentView
    pointer: int = 0
    events: list[int] = field(default_factory=list)
    local_events: list[int] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)

    def release(self) -> Callable[[], bool]:
        """A job for releases.py that gives everything back; outlives this object."""
        calls, ordinal, segment, pointer = self.calls, self.ordinal, self.segment, self.pointer
        events, streams = (self.events, self.local_events), self.streams
        fences: dict[int, int] = {}

        def job() -> bool:
            for stream in streams - fences.keys():
                if calls.capturing(ordinal, stream):
                    return False
                events[1].append(event := calls.new_event(ordinal, shared=False))
                calls.record(ordinal, event, stream)
                fences[stream] = event
            if not all(calls.reached(event) for event in fences.values()):
                return False
            if isinstance(segment, Segment):
                if not segment.unused():
                    return False
                if pointer:
                    calls.free(ordinal, pointer)
            elif pointer:
                calls.close_memory(ordinal, pointer)
            if pointer:
                HANDLES.closed(CUDA_MEMORY)
            for event in (*events[0], *events[1]):
                calls.destroy_event(ordinal, event)
            segment.close()
            return True

        return job

    def watch(self) -> None:
        """From now on: when this object goes, its part is given back."""
        finalizer = weakref.finalize(self, RELEASES.add, self.release())
        finalizer.atexit = False  # with the process, the driver takes it all

    def record_here(self, event: int) -> int:
        """Record on this thread's current stream, which is returned; so does wait_here."""
        stream = self.calls.current_stream(self.ordinal)
        self.streams.add(stream)
        self.calls.record(self.ordinal, event, stream)
        return stream

    def wait_here(self, event: int) -> int:
        stream = self.calls.current_stream(self.ordinal)
        self.streams.add(stream)
        self.calls.wait(self.ordinal, stream, event)
        return stream


class CudaRing:
    """Producer's half, on the GPU `device`. Raises a typed error or OSError if it can't be had."""

    def __init__(self, slots: int, layout: ChannelLayout, device: str) -> None:
        calls = cuda_memory.cuda_calls()
        ordinal = calls.ordinal(device)
        RELEASES.start()
        self._segment = Segment(slots, 0, watched=True)
        lease = _Lease(calls, ordinal, self._segment)
        try:
            lease.pointer = calls.allocate(ordinal, DATA_OFFSET + slots * layout.row_bytes)
            HANDLES.opened(CUDA_MEMORY)
            nonce = secrets.token_bytes(NONCE_LENGTH)
            calls.write(ordinal, lease.pointer, nonce)
            handles = []
            for _ in range(EVENTS):
                lease.events.append(event := calls.new_event(ordinal, shared=True))
                handles.append(calls.export_event(ordinal, event))
            handle = calls.export_memory(ordinal, lease.pointer)
            self._rows = dlpack.view(
                lease.pointer + DATA_OFFSET, slots, layout, device=calls.torch_device(ordinal), owner=lease
            )
        except BaseException:
            self._segment.settled()
            lease.watch()
            raise
        lease.watch()
        self.nonce = self._segment.nonce + nonce
        self.offer = MemoryOffer(
            NAME,
            slots,
            layout,
            location=self._segment.location,
            handle=handle,
            data_offset=DATA_OFFSET,
            nonce_length=NONCE_LENGTH,
            events=tuple(handles),
        )
        self._pool = EventPool(
            EVENTS,
            record=lambda number: lease.record_here(lease.events[number - 1]),
            wait=lambda number: lease.wait_here(lease.events[number - 1]),
        )

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        self._segment.set_generation(first_slot, count, generation)

    def payload(self, first_slot: int, count: int) -> bytes:
        return b""

    def mark(self) -> Mark:
        return self._pool.mark()

    def hold(self, event: int) -> None:
        self._pool.hold(event)

    def let_go(self, event: int) -> None:
        self._pool.let_go(event)

    def settled(self) -> None:
        self._segment.settled()

    def close(self) -> None:
        # The engine's thread may be in the middle of a chunk: the memory goes with the last that views it.
        self._segment.settled()


class CudaRingView:
    """Consumer's half, as seen from the GPU `device`.

    Raises OSError, ValueError or a typed error if the ring can't be used from here.
    """

    def __init__(self, offer: MemoryOffer, device: str) -> None:
        if offer.data_offset != DATA_OFFSET or not offer.events:
            raise ValueError(f"rows start at byte {offer.data_offset}, behind {len(offer.events)} events")
        calls = cuda_memory.cuda_calls()
        ordinal = calls.ordinal(device)
        RELEASES.start()
        self._segment = SegmentView(
            offer.location, offer.slots, 0, nonce_length=offer.nonce_length, watched=True
        )
        lease = _Lease(calls, ordinal, self._segment)
        try:
            lease.pointer = calls.open_memory(ordinal, offer.handle)
            HANDLES.opened(CUDA_MEMORY)
            nonce = calls.read(ordinal, lease.pointer, offer.nonce_length)
            for handle in offer.events:
                lease.events.append(calls.open_event(ordinal, handle))
            calls.reached(lease.events[0])  # raises if events can't be asked for from here
            self._rows = dlpack.view(
                lease.pointer + DATA_OFFSET,
                offer.slots,
                offer.layout,
                device=calls.torch_device(ordinal),
                owner=lease,
            )
        finally:
            lease.watch()
        self.nonce = self._segment.nonce + nonce
        self.events = len(lease.events)
        self._calls = calls
        self._lease = lease
        # By number, in their order; those that are not known to be over.
        self._waits: dict[int, _Wait] = {}
        self._last_wait = 0
        self._fences: deque[int] = deque()

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        return self._segment.generation_is(first_slot, count, generation)

    def wait(self, event: int) -> None:
        handle = self._lease.events[event - 1]
        # Mostly it has been reached: then nothing hangs on the other process any more.
        if not self._calls.reached(handle):
            stream = self._lease.wait_here(handle)
            self._last_wait += 1
            self._waits[self._last_wait] = _Wait(handle, stream)

    def fence(self) -> Fence:
        """All fences of a consumer are asked by one thread."""
        fences, calls = self._fences, self._calls
        if fences:
            event = fences.popleft()
        else:
            event = calls.new_event(self._lease.ordinal, shared=False)
            self._lease.local_events.append(event)
        stream, last, waits = self._lease.record_here(event), self._last_wait, self._waits

        def reached() -> bool:
            if not calls.reached(event):
                return False
            fences.append(event)
            if waits:
                for number in [n for n in list(waits) if n <= last and waits[n].stream == stream]:
                    del waits[number]
            return True

        return reached

    def close(self, on_spoilt: Callable[[str], object]) -> None:
        """A target that died before its stream came to an event leaves those who wait for it waiting; then
        this side records the event itself, on a stream of its own. Or the driver takes a dead process's
        event for reached, and it looks like one that was: so all that waited counts as spoilt.
        """
        waiting = {wait.event for wait in self._waits.values()}
        if not waiting:
            return
        stuck = [event for event in waiting if not self._calls.reached(event)]
        if stuck:
            RELEASES.add(_rescue(self._lease, stuck))
        on_spoilt(f"the channel ended before {len(waiting)} of its events, which rows were read behind")


def _rescue(lease: _Lease, stuck: list[int]) -> Callable[[], bool]:
    calls, ordinal = lease.calls, lease.ordinal
    since = time.monotonic()

    def job() -> bool:
        waiting = [event for event in stuck if not calls.reached(event)]
        if not waiting:
            return True
        if time.monotonic() - since < RESCUE_S:
            return False
        stream = calls.new_stream(ordinal)
        for event in waiting:
            calls.record(ordinal, event, stream)
        calls.destroy_stream(ordinal, stream)
        log.warning(
            "the target ended before it had written rows that %d events stand for; whoever waits is let go",
            len(waiting),
        )
        return True

    return job
