"""A machine with GPUs that are none, for tests of cuda_ipc: memory is the host's, streams move when told to.

Both "processes" of a test live in this one and share the machine. What real CUDA leaves undefined (freeing
memory that is mapped, destroying an event that is open elsewhere, using either afterwards) is recorded in
`violations`.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass, field

from specbridge.errors import CapacityError, Unavailable

BASE_STREAM = 1


@dataclass
class FakeEvent:
    shared: bool
    stream: int = 0
    point: int = 0
    opened: int = 0
    destroyed: bool = False


@dataclass
class FakeStream:
    """told: pieces of work it was told of; done: of these, how many are over. held: nothing moves.

    behind: events it was told to wait for, with the point of the other stream at that moment.
    """

    told: int = 0
    done: int = 0
    held: bool = False
    behind: list[tuple[int, int, int]] = field(default_factory=list)


class FakeCuda:
    """CudaCalls over host memory. `current` is the stream that torch would name."""

    def __init__(self, gpus: int = 1) -> None:
        self.uuids = [f"GPU-{i}" for i in range(gpus)]
        self.unreachable: set[tuple[int, int]] = set()
        self.interprocess = True
        self.room = 1 << 30
        self.current = BASE_STREAM
        self.captured: set[int] = set()
        self.violations: list[str] = []
        self.calls: list[tuple[str, int, int]] = []
        self.fail: dict[str, str] = {}
        self.events: dict[int, FakeEvent] = {}
        self.streams: dict[int, FakeStream] = {BASE_STREAM: FakeStream()}
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.mapped: dict[int, int] = {}
        self._exported: dict[bytes, int] = {}
        self._opened_events: dict[int, int] = {}
        self._next = 1000

    # ---- what a test sees and does --------------------------------------------------------------

    @property
    def live(self) -> tuple[int, int, int]:
        """Allocations, mappings and events that have not been given back."""
        return (
            len(self.memory),
            sum(self.mapped.values()),
            sum(not event.destroyed for event in self.events.values()),
        )

    def stream(self, *, held: bool = False) -> int:
        number = self._number()
        self.streams[number] = FakeStream(held=held)
        return number

    def hold(self, stream: int) -> None:
        self.streams[stream].held = True

    def go(self, stream: int) -> None:
        self.streams[stream].held = False
        self._move()

    # ---- CudaCalls ------------------------------------------------------------------------------

    def ordinal(self, device: str) -> int:
        return int(device.partition(":")[2] or 0)

    def torch_device(self, ordinal: int) -> str:
        return "cpu"

    def uuid(self, ordinal: int) -> str:
        return self.uuids[ordinal]

    def find(self, uuid: str) -> int | None:
        return self.uuids.index(uuid) if uuid in self.uuids else None

    def reaches(self, ordinal: int, peer: int) -> bool:
        return (ordinal, peer) not in self.unreachable

    def shares_events(self, ordinal: int) -> bool:
        return self.interprocess

    def allocate(self, ordinal: int, size: int) -> int:
        self._may_fail("allocate")
        if size > self.room:
            raise CapacityError("cudaMalloc: out of memory (cudaErrorMemoryAllocation)")
        block = ctypes.create_string_buffer(size)
        pointer = ctypes.addressof(block)
        self.memory[pointer] = block
        return pointer

    def free(self, ordinal: int, pointer: int) -> None:
        if self.mapped.get(pointer):
            self.violations.append("memory freed that a consumer maps")
        del self.memory[pointer]

    def export_memory(self, ordinal: int, pointer: int) -> bytes:
        return self._export(pointer)

    def open_memory(self, ordinal: int, handle: bytes) -> int:
        self._may_fail("open_memory")
        pointer = self._exported.get(handle)
        if pointer is None or pointer not in self.memory:
            raise Unavailable("cudaIpcOpenMemHandle: invalid argument (cudaErrorInvalidValue)")
        self.mapped[pointer] = self.mapped.get(pointer, 0) + 1
        return pointer

    def close_memory(self, ordinal: int, pointer: int) -> None:
        self.mapped[pointer] -= 1

    def write(self, ordinal: int, pointer: int, data: bytes) -> None:
        ctypes.memmove(pointer, data, len(data))

    def read(self, ordinal: int, pointer: int, size: int) -> bytes:
        self._may_fail("read")
        return ctypes.string_at(pointer, size)

    def new_event(self, ordinal: int, *, shared: bool) -> int:
        number = self._number()
        self.events[number] = FakeEvent(shared)
        return number

    def export_event(self, ordinal: int, event: int) -> bytes:
        assert self.events[event].shared
        return self._export(event)

    def open_event(self, ordinal: int, handle: bytes) -> int:
        self._may_fail("open_event")
        event = self._exported[handle]
        self.events[event].opened += 1
        alias = self._number()
        self._opened_events[alias] = event
        return alias

    def destroy_event(self, ordinal: int, event: int) -> None:
        if event in self._opened_events:
            self.events[self._opened_events.pop(event)].opened -= 1
            return
        if self.events[event].opened:
            self.violations.append("event destroyed that a consumer has open")
        self.events[event].destroyed = True

    def current_stream(self, ordinal: int) -> int:
        return self.current

    def new_stream(self, ordinal: int) -> int:
        return self.stream()

    def destroy_stream(self, ordinal: int, stream: int) -> None:
        del self.streams[stream]

    def capturing(self, ordinal: int, stream: int) -> bool:
        return stream in self.captured

    def record(self, ordinal: int, event: int, stream: int) -> None:
        if stream in self.captured:
            self.violations.append("an event recorded into somebody's graph")
        target = self._event(event)
        self.calls.append(("record", self._opened_events.get(event, event), stream))
        self.streams[stream].told += 1
        target.stream, target.point = stream, self.streams[stream].told
        self._move()

    def wait(self, ordinal: int, stream: int, event: int) -> None:
        target = self._event(event)
        self.calls.append(("wait", self._opened_events.get(event, event), stream))
        state = self.streams[stream]
        state.told += 1
        state.behind.append((state.told, self._opened_events.get(event, event), target.point))
        self._move()

    def reached(self, event: int) -> bool:
        self._may_fail("reached")
        target = self._event(event)
        stream = self.streams.get(target.stream)
        return stream is None or target.point <= stream.done

    # ---- how ------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Let every stream get as far as it can."""
        moved = True
        while moved:
            moved = False
            for state in self.streams.values():
                if state.held:
                    continue
                stop = state.told
                for place, event, point in state.behind:
                    if not self._passed(event, point):
                        stop = min(stop, place - 1)
                if stop > state.done:
                    state.done = stop
                    state.behind = [item for item in state.behind if item[0] > stop]
                    moved = True

    def _passed(self, event: int, point: int) -> bool:
        """Whether an event has come to where it stood, or was recorded again since and has come there."""
        target = self.events[event]
        stream = self.streams.get(target.stream)
        return stream is None or min(point, target.point) <= stream.done or target.point <= stream.done

    def _event(self, event: int) -> FakeEvent:
        target = self.events[self._opened_events.get(event, event)]
        if target.destroyed:
            self.violations.append("a destroyed event used")
        return target

    def _export(self, thing: int) -> bytes:
        handle = secrets.token_bytes(64)
        self._exported[handle] = thing
        return handle

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _may_fail(self, call: str) -> None:
        if call in self.fail:
            raise Unavailable(self.fail[call])
