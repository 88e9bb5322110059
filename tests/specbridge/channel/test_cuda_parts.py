"""The parts of cuda_ipc: calling CUDA, the word that writing streams set, tensors over foreign memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from specbridge.channel import cuda_memory, dlpack
from specbridge.channel.base import ChannelLayout
from specbridge.channel.cuda_word import Marks, Word, covers
from specbridge.errors import CapacityError, Unavailable

# ---- the calls ----------------------------------------------------------------------------------


class Runtime:
    """cuda.bindings.runtime as far as RuntimeCalls needs it: a device, a capture mode, calls that answer."""

    cudaError_t = SimpleNamespace(cudaSuccess=0, cudaErrorNotReady=600, cudaErrorMemoryAllocation=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed="relaxed")
    cudaEventDisableTiming, cudaStreamNonBlocking = 2, 1

    def __init__(self) -> None:
        self.device = 0
        self.mode = "global"
        self.made: list[tuple[str, int, str]] = []
        self.told: dict[str, tuple[Any, ...]] = {}
        self.answers: dict[str, tuple[Any, ...]] = {}

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, self.device

    def cudaSetDevice(self, device: int) -> tuple[int]:
        self.device = device
        return (0,)

    def cudaThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.mode, before = mode, self.mode
        return 0, before

    def cudaGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"out of memory"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.made.append((name, self.device, self.mode))
            self.told[name] = args
            return self.answers.get(name, (0,))

        return call


class Driver:
    """cuda.bindings.driver likewise; what it is told shows up with the runtime's calls."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=122)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"invalid argument"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    bindings = SimpleNamespace(runtime=made, driver=Driver(made))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return made


def test_a_call_is_made_on_its_device_and_leaves_the_thread_as_it_was(runtime: Runtime) -> None:
    calls = cuda_memory.RuntimeCalls()
    runtime.answers["cudaEventCreateWithFlags"] = (0, 99)
    assert calls.new_event(1) == 99
    assert calls.reached(99)
    assert runtime.made == [
        ("cudaEventCreateWithFlags", 1, "relaxed"),  # while another thread captures, too
        ("cudaEventQuery", 0, "relaxed"),
    ]
    assert (runtime.device, runtime.mode) == (0, "global")


def test_what_every_hand_off_needs_is_one_call_but_for_another_devices_default_stream(
    runtime: Runtime,
) -> None:
    calls = cuda_memory.RuntimeCalls()
    calls.record(1, 99, 7)
    assert calls.idle(1, 7)
    calls.record(0, 99, 0)
    assert calls.idle(0, 0)
    assert runtime.made == [
        ("cudaEventRecord", 0, "global"),
        ("cudaStreamQuery", 0, "relaxed"),  # another thread may be capturing
        ("cudaEventRecord", 0, "global"),
        ("cudaStreamQuery", 0, "relaxed"),
    ]
    runtime.made.clear()
    calls.record(1, 99, 0)  # 0 names the default stream of the current device
    assert calls.idle(1, 0)
    assert [call[:2] for call in runtime.made] == [("cudaEventRecord", 1), ("cudaStreamQuery", 1)]
    runtime.answers["cudaStreamQuery"] = (600,)
    assert not calls.idle(1, 7) and not calls.idle(1, 0)
    assert (runtime.device, runtime.mode) == (0, "global")
    for call, use in (
        ("cudaEventRecord", lambda: calls.record(1, 99, 7)),
        ("cudaStreamQuery", lambda: calls.idle(1, 7)),
    ):
        runtime.answers[call] = (SimpleNamespace(name="cudaErrorInvalidResourceHandle"),)
        with pytest.raises(Unavailable, match=call):
            use()


def test_values_are_the_drivers_matter_on_the_right_device(runtime: Runtime) -> None:
    calls = cuda_memory.RuntimeCalls()
    calls.write_value(1, 7, 4096, 5)
    calls.wait_value(1, 8, 4096, 6)
    assert runtime.made == [("cuStreamWriteValue32", 1, "relaxed"), ("cuStreamWaitValue32", 1, "relaxed")]
    assert runtime.told == {"cuStreamWriteValue32": (7, 4096, 5, 0), "cuStreamWaitValue32": (8, 4096, 6, 0)}
    runtime.answers["cuDeviceGet"], runtime.answers["cuDeviceGetAttribute"] = (0, 11), (0, 1)
    assert calls.waits_for_values(1) and runtime.told["cuDeviceGetAttribute"] == (122, 11)
    runtime.answers["cuDeviceGetAttribute"] = (0, 0)
    assert not calls.waits_for_values(1)
    runtime.answers["cudaStreamCreateWithFlags"] = (0, 70)
    runtime.made.clear()
    calls.set_value(1, 4096, 9)
    assert [call[0] for call in runtime.made] == [
        "cudaStreamCreateWithFlags",
        "cuStreamWriteValue32",
        "cudaStreamDestroy",  # it does not wait: another stream may hold this one up
    ]
    assert runtime.told["cuStreamWriteValue32"] == (70, 4096, 9, 0)
    runtime.answers["cuStreamWaitValue32"] = (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
    with pytest.raises(Unavailable, match=r"cuStreamWaitValue32: invalid argument \(CUDA_ERROR_INVALID_V"):
        calls.wait_value(1, 8, 4096, 6)
    assert (runtime.device, runtime.mode) == (0, "global")


def test_a_failed_call_is_a_typed_error_and_leaves_the_thread_as_it_was(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Status(int):
        name = "cudaErrorMemoryAllocation"

    calls = cuda_memory.RuntimeCalls()
    runtime.answers["cudaMalloc"] = (Status(2), None)
    with pytest.raises(CapacityError, match=r"cudaMalloc: out of memory \(cudaErrorMemoryAllocation\)"):
        calls.allocate(1, 10)
    assert (runtime.device, runtime.mode) == (0, "global")
    runtime.answers["cudaEventQuery"] = (Status(719),)
    with pytest.raises(Unavailable, match="cudaEventQuery"):
        calls.reached(5)
    runtime.answers["cudaEventQuery"] = (600,)
    assert not calls.reached(5) and runtime.mode == "global"
    failed = SimpleNamespace(name="cudaErrorLaunchFailure")
    monkeypatch.setattr(calls, "_exchange", lambda mode: (failed, None))
    with pytest.raises(Unavailable, match="cudaErrorLaunchFailure"):
        calls.reached(5)


# ---- the word -----------------------------------------------------------------------------------


def value_at(cuda: FakeCuda) -> int:
    (pointer,) = cuda.memory
    return int.from_bytes(cuda.read(0, pointer + 256, 4), "little")


def marks_from(cuda: FakeCuda, last: int) -> tuple[Word, Marks, Callable[[], None]]:
    """A word that stands at `last`, its marks, and telling the current stream to work."""
    word = Word(cuda, 0, cuda.allocate(0, 512) + 256)
    word.set(last)
    made = Marks(
        word,
        current=lambda: cuda.current_stream(0),
        idle=lambda stream: cuda.idle(0, stream),
        last=last,
    )
    return word, made, lambda: cuda.work(cuda.current)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_a_value_covers_those_up_to_half_the_circle_before_it(value: int, ahead: int) -> None:
    earlier = (value - ahead) % 2**32
    assert covers(value, earlier)
    assert covers(earlier, value) == (ahead == 0)
    signed = ctypes.c_int32((earlier - value) % 2**32).value  # as CUDA documents the comparison
    assert covers(earlier, value) == (signed >= 0)


@pytest.mark.parametrize("last", [0, 5, 2**31 - 2, 2**32 - 3])
def test_marks_grow_in_the_order_of_writing_past_the_wrap(last: int) -> None:
    cuda = FakeCuda()
    word, marks, work = marks_from(cuda, last)
    cuda.current = writing = cuda.stream(held=True)
    work()
    seen = [marks.mark() for _ in range(5)]
    assert 0 not in seen and len(set(seen)) == 5
    assert not any(covers(value_at(cuda), mark) for mark in seen)
    for earlier, later in zip(seen, seen[1:], strict=False):
        assert covers(later, earlier) and not covers(earlier, later)
    waiting = []
    for mark in seen:
        stream = cuda.stream()
        word.wait_on(stream, mark)
        waiting.append(stream)
    before = last
    for i, mark in enumerate(seen):  # one value after the other
        assert not cuda.finished(waiting[i])
        while value_at(cuda) == before:
            cuda.step(writing)
        assert value_at(cuda) == mark
        assert [cuda.finished(stream) for stream in waiting] == [j <= i for j in range(5)]
        before = mark
    assert not cuda.violations


def test_what_is_written_needs_no_mark() -> None:
    cuda = FakeCuda()
    word, marks, work = marks_from(cuda, 0)
    assert marks.mark() == 0
    work()
    assert marks.mark() == 0 and value_at(cuda) == 0 and not cuda.calls


def test_another_streams_value_comes_behind_the_last_one() -> None:
    cuda = FakeCuda()
    word, marks, work = marks_from(cuda, 0)
    streams = [cuda.stream(held=True) for _ in range(3)]
    made = []
    for stream in streams:
        cuda.current = stream
        work()
        made.append(marks.mark())
    assert made == [1, 2, 3]
    cuda.go(streams[2])
    cuda.go(streams[1])
    assert value_at(cuda) == 0
    cuda.go(streams[0])
    assert value_at(cuda) == 3
    cuda.calls.clear()
    cuda.current = cuda.stream(held=True)
    work()
    assert marks.mark() == 4
    work()
    assert marks.mark() == 5
    assert [call[:2] for call in cuda.calls] == [("wait", 3), ("write", 4), ("write", 5)]


# ---- tensors over foreign memory ----------------------------------------------------------------


def test_a_view_keeps_its_owner_and_nothing_longer() -> None:
    class Owner:
        pass

    owner, gone = Owner(), []
    weakref.finalize(owner, gone.append, True)
    memory = ctypes.create_string_buffer(6 * 4 * 2)
    pointer = ctypes.addressof(memory)
    rows = dlpack.view(pointer, 6, ChannelLayout(4, "bfloat16"), device="cpu", owner=owner)
    del owner
    assert rows.shape == (6, 4) and rows.dtype is torch.bfloat16 and rows.data_ptr() == pointer
    part = rows[2:3]
    part.fill_(2.0)
    del rows
    gc.collect()
    assert not gone and memory.raw[16:24] == b"\x00\x40" * 4
    del part
    gc.collect()
    assert gone == [True] and not dlpack._lent
