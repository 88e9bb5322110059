"""Types of the hidden-state channel: what its two ends and its transports agree on.

A transport is a way for the rows of a ring to get from the target (producer) to the draft (consumer). It is
made of two halves, `ProducerMemory` and `ConsumerMemory`; specbridge.channel.transports picks them. Owns no
behaviour besides the counters. Protobuf stays in producer.py and consumer.py; torch is imported in functions
only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from specbridge.errors import InvalidRequest
from specbridge.rounds import SessionKey

if TYPE_CHECKING:
    import torch

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes an element, of the dtypes that rows may have."""

DEFAULT_LEASE_S = 10.0
"""A consumer that gives no sign of life for this long is taken for dead."""

SUPERSEDED = "superseded by another draft"
"""Why a channel ended whose target took another draft; travels as the status message."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in ITEM_SIZES. Raises InvalidRequest for any other."""
    import torch

    if name not in ITEM_SIZES:
        raise InvalidRequest(
            f"dtype {name!r} can't cross the hidden-state channel; use one of {', '.join(ITEM_SIZES)}"
        )
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """What a row is: `row_width` elements of `dtype` (a name in ITEM_SIZES); taps x hidden size, or what the
    draft's projection makes of them.
    """

    row_width: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.row_width * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """What a draft has the target apply to the taps: row = norm * rms_normalised(matrix @ taps).

    matrix [width, taps x hidden size], norm [width]: on the CPU, of one dtype, a name in ITEM_SIZES.
    """

    matrix: torch.Tensor
    norm: torch.Tensor
    eps: float

    @property
    def dtype(self) -> str:
        return str(self.matrix.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """A projection whose weights are still to come."""

    width: int
    columns: int
    dtype: str
    eps: float

    @property
    def bytes(self) -> int:
        """Of matrix and norm together."""
        return self.width * (self.columns + 1) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process can prove about where it runs. Fields as in target.proto; empty: unknown."""

    boot_id: str
    pid_namespace: str
    pid: int
    device: str
    instance: bytes
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """A ring that the producer proposes to share. data_offset: bytes before the first row."""

    transport: str
    slots: int
    layout: ChannelLayout
    location: str = ""
    handle: bytes = b""
    data_offset: int = 0
    nonce_length: int = 0


class ProducerMemory(Protocol):
    """The producer's half of a transport: a ring of rows [slots, row_width] and how it is announced."""

    offer: MemoryOffer
    nonce: bytes

    def rows(self, first_slot: int, count: int) -> torch.Tensor:
        """The rows of these slots, [count, row_width], to be written in place."""

    def set_generation(self, first_slot: int, count: int, generation: int) -> None:
        """Mark slots as reserved anew: whoever still reads their older content can tell."""

    def payload(self, first_slot: int, count: int) -> bytes:
        """What travels in the descriptor itself: the rows' bytes for inline, nothing otherwise."""

    def mark(self) -> int:
        """A mark behind all that this thread's current stream was told to write so far: what the consumer is
        to `wait` for. 0: it has been written. For the engine's thread.
        """

    def settled(self) -> None:
        """The handshake is over, one way or the other: drop what other processes could still find."""

    def close(self) -> None:
        """Give the memory back (the consumer's mapping lives on). Idempotent."""


class ConsumerMemory(Protocol):
    """The consumer's half of a transport."""

    nonce: bytes

    def rows(self, first_slot: int, count: int, payload: bytes) -> torch.Tensor:
        """The rows of these slots, [count, row_width], without a copy where the memory is shared."""

    def generation_is(self, first_slot: int, count: int, generation: int) -> bool:
        """Whether these slots still hold what was published under `generation`."""

    def wait(self, mark: int) -> None:
        """What this thread's current stream is told from now on comes after a producer's `mark`. The host
        does not wait.
        """

    def fence(self) -> Fence | None:
        """A fence behind all that this thread's current stream was told so far; None where reading is over
        when the call that reads returns.
        """

    def close(self, on_spoilt: Callable[[str], object]) -> None:
        """The attachment is over. The memory goes with the last tensor that views it. on_spoilt(why), from
        any thread, if rows that were read before may have been wrong.
        """


Fence = Callable[[], bool]
"""Whether the device has got there. Never blocks; not to be asked again once it was True."""


class HostMemory:
    """What both halves of the transports in host memory share: nothing there runs ahead of the host."""

    def mark(self) -> int:
        return 0

    def wait(self, mark: int) -> None: ...

    def fence(self) -> Fence | None:
        return None


@dataclass(frozen=True, slots=True)
class AttachedInfo:
    """The outcome of a handshake. epoch: instance id of the target process; `reason`: why this transport."""

    transport: str
    reason: str
    epoch: bytes
    slots: int
    layout: ChannelLayout


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """Hidden states of committed rows [first_position, first_position + count) of one session.

    rows: [count, row_width] in the channel's dtype, on the CPU or, over cuda_ipc, on the consumer's GPU; a
    view of shared memory for as long as the chunk is not acknowledged. tokens: ids of these rows. anchor: the
    session's anchor after them; None while the prefill goes on.
    """

    chunk_id: int
    session: SessionKey
    first_position: int
    count: int
    tokens: tuple[int, ...]
    anchor: int | None
    view: torch.Tensor = field(repr=False, compare=False)
    await_writing: Callable[[], None] = field(repr=False, compare=False)
    still_valid: Callable[[], bool] = field(repr=False, compare=False)

    @property
    def rows(self) -> torch.Tensor:
        """Take it on the thread, and with the stream current, that reads: the stream then waits on the device
        for the rows to be written, the host for nothing.
        """
        self.await_writing()
        return self.view

    def valid(self) -> bool:
        """Whether `rows` still hold this chunk. Check it *after* the rows were read: False means they were
        reused. (What a GPU reads later is checked again before it is acknowledged.)
        """
        return self.still_valid()


@dataclass(frozen=True, slots=True)
class ChannelSnapshot:
    """Counters of one end since its start, for metrics. Keys: bytes by transport; attaches by (transport,
    reason); detaches by cause."""

    bytes_by_transport: dict[str, int]
    attaches: dict[tuple[str, str], int]
    detaches: dict[str, int]
    chunks: int = 0
    rows: int = 0
    acked: int = 0
    unknown_acks: int = 0
    stale_publishes: int = 0
    reservation_failures: int = 0
    lease_timeouts: int = 0
    recaptures: int = 0
    refused: int = 0
    overtaken: int = 0


class ChannelStats:
    """Counters that both threads of an end add to. Names are the fields of ChannelSnapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._attaches: Counter[tuple[str, str]] = Counter()
        self._detaches: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def moved(self, transport: str, rows: int, num_bytes: int) -> None:
        """One chunk of `rows` rows went over `transport`."""
        with self._lock:
            self._counts["chunks"] += 1
            self._counts["rows"] += rows
            self._bytes[transport] += num_bytes

    def attached(self, transport: str, reason: str) -> None:
        with self._lock:
            self._attaches[transport, reason] += 1

    def detached(self, cause: str) -> None:
        with self._lock:
            self._detaches[cause] += 1

    def snapshot(self) -> ChannelSnapshot:
        with self._lock:
            return ChannelSnapshot(
                dict(self._bytes), dict(self._attaches), dict(self._detaches), **self._counts
            )


def written() -> None:
    """Nothing to wait for: rows are written before they are announced."""


def check_tokens(count: int, tokens: Sequence[int]) -> None:
    """Raises ValueError unless there is one token a row."""
    if len(tokens) != count:
        raise ValueError(f"{len(tokens)} tokens for {count} rows: each row needs its own")
