"""A machine with GPUs that are none, for tests of cuda_ipc: memory is the host's, streams move when told to.

Both "processes" of a test live in this one and share the machine. A stream is a list of things to do in their
order: work, writing a value to memory, waiting for one. What real CUDA leaves undefined (freeing memory that
is mapped or that a stream has to do with, using an event that was destroyed) is recorded in `violations`.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from specbridge.errors import CapacityError, Unavailable

BASE_STREAM = 1


@dataclass
class FakeEvent:
    stream: int = 0
    point: int = 0
    destroyed: bool = False


@dataclass
class FakeStream:
    """told: things it was told to do; done: of these, how many are over. held: nothing moves; dead: nor ever
    will.

    values: those of them that write or wait, as (place in the order, "write" or "wait", address, value).
    """

    told: int = 0
    done: int = 0
    held: bool = False
    dead: bool = False
    values: deque[tuple[int, str, int, int]] = field(default_factory=deque)


class FakeCuda:
    """CudaCalls over host memory. `current` is the stream that torch would name."""

    def __init__(self, gpus: int = 1) -> None:
        self.uuids = [f"GPU-{i}" for i in range(gpus)]
        self.unreachable: set[tuple[int, int]] = set()
        self.without_values: set[int] = set()
        self.room = 1 << 30
        self.current = BASE_STREAM
        self.captured: set[int] = set()
        self.clogged = 0  # so many values set come to nothing
        self.violations: list[str] = []
        self.calls: list[tuple[str, int, int]] = []
        self.fail: dict[str, str] = {}
        self.events: dict[int, FakeEvent] = {}
        self.streams: dict[int, FakeStream] = {BASE_STREAM: FakeStream()}
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.mapped: dict[int, int] = {}
        self._exported: dict[bytes, int] = {}
        self._next = 1000
        self._moving = threading.RLock()

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

    def step(self, stream: int) -> None:
        """Let a held stream do what comes up to its next value, and that one."""
        state = self.streams[stream]
        state.held = False
        self._step(state)
        state.held = True

    def work(self, stream: int) -> None:
        """Tell a stream to do something."""
        self.streams[stream].told += 1
        self._move()

    def die(self, stream: int) -> None:
        """Its process is killed: what it was told and has not done is never done."""
        self.streams[stream].dead = True

    def bury(self, stream: int) -> None:
        """What a dead process had of the driver is gone: nobody waits for its stream any more."""
        state = self.streams[stream]
        state.values.clear()
        state.done = state.told
        state.held = state.dead = False

    def finished(self, stream: int) -> bool:
        self._move()
        return self.streams[stream].done == self.streams[stream].told

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

    def waits_for_values(self, ordinal: int) -> bool:
        return ordinal not in self.without_values

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
        self._unused(pointer)
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
        self._unused(pointer, "wait")

    def write(self, ordinal: int, pointer: int, data: bytes) -> None:
        ctypes.memmove(pointer, data, len(data))

    def read(self, ordinal: int, pointer: int, size: int) -> bytes:
        self._may_fail("read")
        return ctypes.string_at(pointer, size)

    def new_event(self, ordinal: int) -> int:
        number = self._number()
        self.events[number] = FakeEvent()
        return number

    def destroy_event(self, ordinal: int, event: int) -> None:
        self._event(event).destroyed = True

    def current_stream(self, ordinal: int) -> int:
        return self.current

    def capturing(self, ordinal: int, stream: int) -> bool:
        return stream in self.captured

    def record(self, ordinal: int, event: int, stream: int) -> None:
        if stream in self.captured:
            self.violations.append("an event recorded into somebody's graph")
        target = self._event(event)
        self.calls.append(("record", event, stream))
        self.streams[stream].told += 1
        target.stream, target.point = stream, self.streams[stream].told
        self._move()

    def reached(self, event: int) -> bool:
        self._may_fail("reached")
        self._move()
        target = self._event(event)
        return target.point <= self.streams[target.stream].done if target.stream else True

    def idle(self, ordinal: int, stream: int) -> bool:
        self._may_fail("idle")
        if stream in self.captured:
            self.violations.append("a stream asked that is being captured")
        return self.finished(stream)

    def write_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        self._value("write", stream, pointer, value)

    def wait_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        self._value("wait", stream, pointer, value)

    def set_value(self, ordinal: int, pointer: int, value: int) -> None:
        if self.clogged:
            self.clogged -= 1
            return
        ctypes.c_uint32.from_address(pointer).value = value
        self._move()

    # ---- how ------------------------------------------------------------------------------------

    def _unused(self, start: int, *kinds: str) -> None:
        """Noted if a stream still has to write or wait for a value in this memory."""
        end = start + len(self.memory[start])
        for state in self.streams.values():
            if any(start <= at < end and kind in (kinds or (kind,)) for _, kind, at, _ in state.values):
                self.violations.append("memory given back that a stream still writes to or waits for")

    def _value(self, kind: str, stream: int, pointer: int, value: int) -> None:
        if stream in self.captured:
            self.violations.append("a value in somebody's graph")
        if not any(start <= pointer < start + len(block) for start, block in self.memory.items()):
            self.violations.append("a value in memory that is none")
            return
        self.calls.append((kind, value, stream))
        state = self.streams[stream]
        state.told += 1
        state.values.append((state.told, kind, pointer, value))
        self._move()

    def _move(self) -> None:
        """Let every stream get as far as it can."""
        with self._moving:
            while any([self._step(state) for state in self.streams.values()]):
                pass

    def _step(self, state: FakeStream) -> bool:
        """Up to its next value, and past it if it may; whether it moved."""
        if state.held or state.dead or state.done == state.told:
            return False
        before = state.done
        if not state.values:
            state.done = state.told
            return True
        place, kind, pointer, value = state.values[0]
        state.done = place - 1
        word = ctypes.c_uint32.from_address(pointer)
        if kind == "wait" and ctypes.c_int32((word.value - value) & 0xFFFFFFFF).value < 0:
            return state.done > before
        if kind == "write":
            word.value = value
        state.done = place
        state.values.popleft()
        return True

    def _event(self, event: int) -> FakeEvent:
        target = self.events[event]
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
