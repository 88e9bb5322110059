"""The parts of cuda_ipc: calling CUDA, which event stands for which writes, tensors over foreign memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbridge.channel import cuda_memory, dlpack
from specbridge.channel.base import ChannelLayout
from specbridge.channel.cuda_events import EventPool
from specbridge.errors import CapacityError, Unavailable

# ---- the calls ----------------------------------------------------------------------------------


class Runtime:
    """cuda.bindings.runtime as far as RuntimeCalls needs it: a device, a capture mode, calls that answer."""

    cudaError_t = SimpleNamespace(cudaSuccess=0, cudaErrorNotReady=600, cudaErrorMemoryAllocation=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed="relaxed")
    cudaEventDisableTiming, cudaEventInterprocess = 2, 4

    def __init__(self) -> None:
        self.device = 0
        self.mode = "global"
        self.made: list[tuple[str, int, str]] = []
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
            return self.answers.get(name, (0,))

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    bindings = SimpleNamespace(runtime=made)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return made


def test_a_call_is_made_on_its_device_and_leaves_the_thread_as_it_was(runtime: Runtime) -> None:
    calls = cuda_memory.RuntimeCalls()
    runtime.answers["cudaEventCreateWithFlags"] = (0, 99)
    assert calls.new_event(1, shared=True) == 99
    assert calls.reached(99)
    assert runtime.made == [
        ("cudaEventCreateWithFlags", 1, "relaxed"),  # while another thread captures, too
        ("cudaEventQuery", 0, "relaxed"),
    ]
    assert (runtime.device, runtime.mode) == (0, "global")


def test_queueing_on_a_stream_is_one_call_but_for_another_devices_default_stream(runtime: Runtime) -> None:
    calls = cuda_memory.RuntimeCalls()
    calls.record(1, 99, 7)
    calls.wait(1, 7, 99)
    calls.record(0, 99, 0)
    calls.wait(0, 0, 99)
    assert [call[:2] for call in runtime.made] == [
        ("cudaEventRecord", 0),
        ("cudaStreamWaitEvent", 0),
        ("cudaEventRecord", 0),
        ("cudaStreamWaitEvent", 0),
    ]
    runtime.made.clear()
    calls.record(1, 99, 0)  # 0 names the default stream of the current device
    calls.wait(1, 0, 99)
    assert [call[:2] for call in runtime.made] == [("cudaEventRecord", 1), ("cudaStreamWaitEvent", 1)]
    assert (runtime.device, runtime.mode) == (0, "global")
    for call, use in (
        ("cudaEventRecord", lambda: calls.record(1, 99, 7)),
        ("cudaStreamWaitEvent", lambda: calls.wait(1, 7, 99)),
    ):
        runtime.answers[call] = (SimpleNamespace(name="cudaErrorInvalidResourceHandle"),)
        with pytest.raises(Unavailable, match=call):
            use()


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


# ---- the pool of events -------------------------------------------------------------------------


def test_an_event_is_used_again_when_its_last_holder_has_let_go() -> None:
    recorded: list[int] = []
    pool = EventPool(2, record=recorded.append, wait=lambda number: pytest.fail("nothing is shared"))
    first = pool.mark()
    pool.hold(first.event)
    pool.let_go(first.event)
    second = pool.mark()
    assert {first.event, second.event} == {1, 2} and pool.held == 2
    pool.let_go(first.event)
    assert pool.held == 1 and pool.mark().event == first.event
    assert recorded == [1, 2, 1]


def test_without_a_free_event_the_newest_stands_for_more() -> None:
    done: list[tuple[str, int]] = []
    pool = EventPool(2, record=lambda n: done.append(("record", n)), wait=lambda n: done.append(("wait", n)))
    marks = [pool.mark() for _ in range(4)]
    assert [(mark.event, mark.shared) for mark in marks] == [(1, False), (2, False), (2, True), (2, True)]
    # Behind what it stood for, whichever stream that was on.
    assert done == [("record", 1), ("record", 2), ("wait", 2), ("record", 2), ("wait", 2), ("record", 2)]
    for _ in range(3):
        assert pool.held == 2
        pool.let_go(2)
    assert pool.held == 1 and pool.mark() == marks[1]


def test_a_record_that_fails_holds_nothing() -> None:
    def broken(number: int) -> None:
        raise RuntimeError("no device")

    pool = EventPool(1, record=broken, wait=broken)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            pool.mark()
    assert pool.held == 0


def test_holders_on_two_threads_add_up() -> None:
    pool = EventPool(4, record=lambda number: None, wait=lambda number: None)
    published: list[int] = []
    done = threading.Event()

    def acknowledge() -> None:
        while not (done.is_set() and not published):
            if published:
                pool.let_go(published.pop())

    other = threading.Thread(target=acknowledge)
    other.start()
    for _ in range(5000):
        published.append(pool.mark().event)
    done.set()
    other.join()
    assert pool.held == 0


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
