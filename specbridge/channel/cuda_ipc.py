"""cuda_ipc: the ring is GPU memory that both processes map; what orders reading behind writing is a word.

The memory is one plain device allocation, exported by one handle: nonce at 0, the word (cuda_word.py) that
the writing streams count up, rows from `data_offset` on. A chunk names the value that stands for the writing
of its rows, none if they were written when it was published; the consumer's stream waits for it on the
device, and the host for nothing. A consumer whose target has gone sets the word itself. Generations stand in
a small host segment (segment.py), so that setting and checking them costs no device work; its lock tells the
producer whether its consumer still has the memory.

Who gives back what, when: each side holds its part in one object (`_Lease`) that every tensor over the memory
keeps alive. When the last of them is gone, the thread of releases.py waits for the work that used it; then
the consumer closes its mapping and lets the segment's lock go (or the kernel does, with the process). Only
then does the producer free the memory: CUDA does not say what becomes of a mapping of freed memory. Owns
that. Does not own the CUDA calls (cuda_memory) or the values of the word (cuda_word).
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specbridge.channel import cuda_memory, dlpack
from specbridge.channel.base import ChannelLayout, Fence, Identity, MemoryOffer
from specbridge.channel.cuda_memory import CudaCalls
from specbridge.channel.cuda_word import Marks, Word, covers
from specbridge.channel.handles import CUDA_MEMORY, HANDLES
from specbridge.channel.releases import RELEASES
from specbridge.channel.segment import FOLDER, NONCE_LENGTH, Segment, SegmentView
from specbridge.errors import SpecBridgeError, Unsupported

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NAME = "cuda_ipc"
WORD_OFFSET = 256
DATA_OFFSET = 512


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
    if not calls.waits_for_values(own.ordinal):
        return f"GPU {own.ordinal} of the target has no stream memory operations"
    if own.device == peer.device:
        return None
    # A GPU that this process does not see may still map the memory: the draft's try tells.
    other = calls.find(peer.device)
    if other is not None and not calls.reaches(other, own.ordinal):
        return f"the draft's GPU ({peer.device}) can't read the memory of the target's ({own.device})"
    return None


def _passed(calls: CudaCalls, ordinal: int, streams: set[int], events: list[int]) -> Callable[[], bool]:
    """Whether `streams` are done with what they had been told when it was asked first; its events go to the
    list. Never blocks.
    """
    fences: dict[int, int] = {}

    def passed() -> bool:
        for stream in streams - fences.keys():
            if calls.capturing(ordinal, stream):
                return False
            events.append(event := calls.new_event(ordinal))
            calls.record(ordinal, event, stream)
            fences[stream] = event
        return all(calls.reached(event) for event in fences.values())

    return passed


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
    streams: set[int] = field(default_factory=set)

    def release(self) -> Callable[[], bool]:
        """A job for releases.py that gives everything back; outlives this object."""
        calls, ordinal, segment = self.calls, self.ordinal, self.segment
        pointer, events = self.pointer, self.events
        passed = _passed(calls, ordinal, self.streams, events)

        def job() -> bool:
            if not passed():
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
            for event in events:
                calls.destroy_event(ordinal, event)
            segment.close()
            return True

        return job

    def watch(self) -> None:
        """From now on: when this object goes, its part is given back."""
        finalizer = weakref.finalize(self, RELEASES.add, self.release())
        finalizer.atexit = False  # with the process, the driver takes it all

    @property
    def word(self) -> Word:
        return Word(self.calls, self.ordinal, self.pointer + WORD_OFFSET)

    def stream(self) -> int:
        """This thread's current stream, which from now on is one of those that use the memory."""
        stream = self.calls.current_stream(self.ordinal)
        self.streams.add(stream)
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
        )
        self._marks = Marks(lease.word, current=lease.stream, idle=lambda stream: calls.idle(ordinal, stream))

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        self._segment.set_generation(first_slot, count, generation)

    def payload(self, first_slot: int, count: int) -> bytes:
        return b""

    def mark(self) -> int:
        return self._marks.mark()

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
        if offer.data_offset != DATA_OFFSET:
            raise ValueError(f"rows start at byte {offer.data_offset}, not {DATA_OFFSET}")
        calls = cuda_memory.cuda_calls()
        ordinal = calls.ordinal(device)
        if not calls.waits_for_values(ordinal):
            raise Unsupported(f"GPU {ordinal} of the draft has no stream memory operations")
        RELEASES.start()
        self._segment = SegmentView(
            offer.location, offer.slots, 0, nonce_length=offer.nonce_length, watched=True
        )
        lease = _Lease(calls, ordinal, self._segment)
        try:
            lease.pointer = calls.open_memory(ordinal, offer.handle)
            HANDLES.opened(CUDA_MEMORY)
            nonce = calls.read(ordinal, lease.pointer, offer.nonce_length)
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
        self._calls = calls
        self._lease = lease
        self._word = lease.word
        # The latest value that a stream was told to wait for, and the event behind that; telling: a stream
        # is about to be told.
        self._awaited = 0
        self._telling = False
        self._behind_wait = 0
        # After the end: the latest value that was certainly reached.
        self._reached = 0
        self._on_spoilt: Callable[[str], object] | None = None
        self._fences: deque[int] = deque()

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        return self._rows[first_slot : first_slot + count]

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        return self._segment.generation_is(first_slot, count, generation)

    def wait(self, mark: int) -> None:
        calls, lease = self._calls, self._lease
        latest = not self._awaited or covers(mark, self._awaited)
        self._telling = True
        if latest:
            self._awaited = mark
        # Behind that: `close`, on another thread, sees it, or is seen here.
        if self._on_spoilt is not None:
            if not self._reached or not covers(self._reached, mark):
                self._on_spoilt("rows were read that the target may not have written when the channel ended")
            self._telling = False
            return
        stream = lease.stream()
        self._word.wait_on(stream, mark)
        if latest:
            if not self._behind_wait:
                self._behind_wait = calls.new_event(lease.ordinal)
                lease.events.append(self._behind_wait)
            calls.record(lease.ordinal, self._behind_wait, stream)
        self._telling = False

    def fence(self) -> Fence:
        """All fences of a consumer are asked by one thread."""
        fences, calls, lease = self._fences, self._calls, self._lease
        if fences:
            event = fences.popleft()
        else:
            event = calls.new_event(lease.ordinal)
            lease.events.append(event)
        calls.record(lease.ordinal, event, lease.stream())

        def reached() -> bool:
            if not calls.reached(event):
                return False
            fences.append(event)
            return True

        return reached

    def close(self, on_spoilt: Callable[[str], object]) -> None:
        """A target that died before its stream came to a mark leaves those who wait for it waiting: this side
        sets the word for it. What was read behind a wait that is not known to be over counts as spoilt.
        """
        self._on_spoilt = on_spoilt
        awaited = self._awaited
        if not awaited:
            return
        if not self._telling and self._calls.reached(self._behind_wait):
            self._reached = awaited
            return
        why = "the channel ended before the target had written rows that a stream waits for"
        log.warning("%s; it is let go", why)
        on_spoilt(why)
        RELEASES.add(_let_go(self._lease, awaited, lambda: self._telling))


def _let_go(lease: _Lease, awaited: int, telling: Callable[[], bool]) -> Callable[[], bool]:
    """Set the word until all who wait have passed: once may not do, since a stream that is stuck may hold up
    the setting, and a target that lives after all may set an older value, and then die. While `telling`, a
    stream may yet be told to wait.
    """
    word = lease.word
    passed: Callable[[], bool] | None = None

    def job(held: _Lease = lease) -> bool:  # so that nothing is given back meanwhile
        nonlocal passed
        if passed is None and not telling():
            passed = _passed(held.calls, held.ordinal, set(held.streams), held.events)
        if passed is not None and passed():
            return True
        word.set(awaited)
        return False

    return job
