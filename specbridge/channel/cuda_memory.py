"""Raw CUDA: the few calls that sharing GPU memory and events between processes needs.

Owns how they are called: through cuda-bindings' runtime API, on the right device, without disturbing a graph
capture of another thread, failures as typed errors. Pointers, events and streams are plain integers here.
Does not own what they are for (cuda_ipc). `CudaCalls` is what it offers; tests put another one in its place.

What every hand-off needs (`current_stream`, `record`, `wait`) is one call each: these only queue work on a
stream, which needs neither its device current nor leave from a thread that captures.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from specbridge.errors import CapacityError, SpecBridgeError, Unavailable, Unsupported


class CudaCalls(Protocol):
    """All raise Unavailable (CapacityError for want of memory) with the name of the call that failed.

    device: a torch device name. ordinal: a GPU's number in this process. Events have no times.
    """

    def ordinal(self, device: str) -> int: ...

    def torch_device(self, ordinal: int) -> str:
        """Where torch finds memory of this GPU."""

    def uuid(self, ordinal: int) -> str: ...

    def find(self, uuid: str) -> int | None:
        """The ordinal of a GPU, None if this process does not see it."""

    def reaches(self, ordinal: int, peer: int) -> bool:
        """Whether one GPU can read another's memory."""

    def shares_events(self, ordinal: int) -> bool: ...

    def allocate(self, ordinal: int, size: int) -> int:
        """Zeroed memory of its own allocation."""

    def free(self, ordinal: int, pointer: int) -> None: ...

    def export_memory(self, ordinal: int, pointer: int) -> bytes: ...

    def open_memory(self, ordinal: int, handle: bytes) -> int:
        """Another process's memory, as seen from GPU `ordinal`."""

    def close_memory(self, ordinal: int, pointer: int) -> None: ...

    def write(self, ordinal: int, pointer: int, data: bytes) -> None:
        """Returns when it is there."""

    def read(self, ordinal: int, pointer: int, size: int) -> bytes: ...

    def new_event(self, ordinal: int, *, shared: bool) -> int: ...

    def export_event(self, ordinal: int, event: int) -> bytes: ...

    def open_event(self, ordinal: int, handle: bytes) -> int: ...

    def destroy_event(self, ordinal: int, event: int) -> None: ...

    def current_stream(self, ordinal: int) -> int:
        """torch's, of this thread."""

    def new_stream(self, ordinal: int) -> int: ...

    def destroy_stream(self, ordinal: int, stream: int) -> None:
        """What it was told is still done."""

    def capturing(self, ordinal: int, stream: int) -> bool:
        """Whether a graph is being captured from a stream: nothing may be added to it then."""

    def record(self, ordinal: int, event: int, stream: int) -> None: ...

    def wait(self, ordinal: int, stream: int, event: int) -> None: ...

    def reached(self, event: int) -> bool:
        """Whether what was recorded last has come. Never blocks."""


@functools.cache
def _runtime_calls() -> RuntimeCalls:
    return RuntimeCalls()


def cuda_calls() -> CudaCalls:
    """Raises Unsupported if cuda-bindings is not installed."""
    return _runtime_calls()


class RuntimeCalls:
    """CudaCalls by cuda.bindings.runtime. Handles of torch's streams are the same there: both sit on the
    device's primary context.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise Unsupported(f"the package cuda-bindings can't be used here ({error}); install it") from None
        self._cuda: Any = runtime
        self._fine = runtime.cudaError_t.cudaSuccess
        self._not_ready = runtime.cudaError_t.cudaErrorNotReady
        self._no_memory = runtime.cudaError_t.cudaErrorMemoryAllocation
        self._relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._device = runtime.cudaGetDevice
        self._exchange = runtime.cudaThreadExchangeStreamCaptureMode
        self._record = runtime.cudaEventRecord
        self._wait = runtime.cudaStreamWaitEvent
        self._query = runtime.cudaEventQuery
        self._raw_stream = _raw_stream()

    # ---- devices --------------------------------------------------------------------------------

    def ordinal(self, device: str) -> int:
        import torch

        index = torch.device(device).index
        return torch.cuda.current_device() if index is None else index

    def torch_device(self, ordinal: int) -> str:
        return f"cuda:{ordinal}"

    def uuid(self, ordinal: int) -> str:
        import torch

        return str(torch.cuda.get_device_properties(ordinal).uuid)

    def find(self, uuid: str) -> int | None:
        import torch

        return next((i for i in range(torch.cuda.device_count()) if self.uuid(i) == uuid), None)

    def reaches(self, ordinal: int, peer: int) -> bool:
        return bool(self._call("cudaDeviceCanAccessPeer", ordinal, peer))

    def shares_events(self, ordinal: int) -> bool:
        attribute = self._cuda.cudaDeviceAttr.cudaDevAttrIpcEventSupport
        return bool(self._call("cudaDeviceGetAttribute", attribute, ordinal))

    # ---- memory ---------------------------------------------------------------------------------

    def allocate(self, ordinal: int, size: int) -> int:
        with self._on(ordinal):
            pointer = int(self._call("cudaMalloc", size))
            with self._private_stream() as stream:
                self._call("cudaMemsetAsync", pointer, 0, size, stream)
            return pointer

    def free(self, ordinal: int, pointer: int) -> None:
        with self._on(ordinal):
            self._call("cudaFree", pointer)

    def export_memory(self, ordinal: int, pointer: int) -> bytes:
        with self._on(ordinal):
            return bytes(self._call("cudaIpcGetMemHandle", pointer).reserved)

    def open_memory(self, ordinal: int, handle: bytes) -> int:
        memory = self._cuda.cudaIpcMemHandle_t()
        memory.reserved = _sized(handle, len(memory.reserved))
        with self._on(ordinal):
            return int(
                self._call("cudaIpcOpenMemHandle", memory, int(self._cuda.cudaIpcMemLazyEnablePeerAccess))
            )

    def close_memory(self, ordinal: int, pointer: int) -> None:
        with self._on(ordinal):
            self._call("cudaIpcCloseMemHandle", pointer)

    def write(self, ordinal: int, pointer: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        with self._on(ordinal), self._private_stream() as stream:
            self._call("cudaMemcpyAsync", pointer, ctypes.addressof(source), len(data), kind, stream)

    def read(self, ordinal: int, pointer: int, size: int) -> bytes:
        into = ctypes.create_string_buffer(size)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        with self._on(ordinal), self._private_stream() as stream:
            self._call("cudaMemcpyAsync", ctypes.addressof(into), pointer, size, kind, stream)
        return into.raw

    # ---- events and streams ---------------------------------------------------------------------

    def new_event(self, ordinal: int, *, shared: bool) -> int:
        flags = self._cuda.cudaEventDisableTiming | (self._cuda.cudaEventInterprocess if shared else 0)
        with self._on(ordinal):
            return int(self._call("cudaEventCreateWithFlags", int(flags)))

    def export_event(self, ordinal: int, event: int) -> bytes:
        with self._on(ordinal):
            return bytes(self._call("cudaIpcGetEventHandle", event).reserved)

    def open_event(self, ordinal: int, handle: bytes) -> int:
        event = self._cuda.cudaIpcEventHandle_t()
        event.reserved = _sized(handle, len(event.reserved))
        with self._on(ordinal):
            return int(self._call("cudaIpcOpenEventHandle", event))

    def destroy_event(self, ordinal: int, event: int) -> None:
        with self._on(ordinal):
            self._call("cudaEventDestroy", event)

    def current_stream(self, ordinal: int) -> int:
        return self._raw_stream(ordinal)

    def new_stream(self, ordinal: int) -> int:
        with self._on(ordinal):
            # Not the legacy default stream's kind: that one makes others wait, or a capture fail.
            return int(self._call("cudaStreamCreateWithFlags", int(self._cuda.cudaStreamNonBlocking)))

    def destroy_stream(self, ordinal: int, stream: int) -> None:
        with self._on(ordinal):
            self._call("cudaStreamDestroy", stream)

    def capturing(self, ordinal: int, stream: int) -> bool:
        with self._on(ordinal):
            status = self._call("cudaStreamIsCapturing", stream)
        return bool(status != self._cuda.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone)

    def record(self, ordinal: int, event: int, stream: int) -> None:
        if self._means(ordinal, stream):
            status = self._record(event, stream)[0]
            if status != self._fine:
                raise self._failure("cudaEventRecord", status)
            return
        with self._on(ordinal):
            self._call("cudaEventRecord", event, stream)

    def wait(self, ordinal: int, stream: int, event: int) -> None:
        if self._means(ordinal, stream):
            status = self._wait(stream, event, 0)[0]
            if status != self._fine:
                raise self._failure("cudaStreamWaitEvent", status)
            return
        with self._on(ordinal):
            self._call("cudaStreamWaitEvent", stream, event, 0)

    def reached(self, event: int) -> bool:
        status, before = self._exchange(self._relaxed)
        if status != self._fine:  # a device that has failed says so to every call
            raise self._failure("cudaThreadExchangeStreamCaptureMode", status)
        try:
            status = self._query(event)[0]
        finally:
            self._exchange(before)
        if status not in (self._fine, self._not_ready):
            raise self._failure("cudaEventQuery", status)
        return bool(status == self._fine)

    # ---- how ------------------------------------------------------------------------------------

    def _means(self, ordinal: int, stream: int) -> bool:
        """Whether this handle names a stream of GPU `ordinal` as things are: the default stream's, 0, is that
        of the thread's current device.
        """
        return stream != 0 or bool(self._device()[1] == ordinal)

    @contextlib.contextmanager
    def _on(self, ordinal: int) -> Iterator[None]:
        """With GPU `ordinal` current; the thread's own choice comes back afterwards."""
        before = self._call("cudaGetDevice")
        if before != ordinal:
            self._call("cudaSetDevice", ordinal)
        try:
            with self._unnoticed():
                yield
        finally:
            if before != ordinal:
                self._call("cudaSetDevice", before)

    @contextlib.contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """While any thread captures a graph, CUDA by default forbids every other one most of these calls, and
        the capture fails with them. They concern no stream that is captured.
        """
        before = self._call("cudaThreadExchangeStreamCaptureMode", self._relaxed)
        try:
            yield
        finally:
            self._call("cudaThreadExchangeStreamCaptureMode", before)

    @contextlib.contextmanager
    def _private_stream(self) -> Iterator[int]:
        """A stream that is done with all it was told at the end of the block."""
        stream = int(self._call("cudaStreamCreateWithFlags", int(self._cuda.cudaStreamNonBlocking)))
        try:
            yield stream
            self._call("cudaStreamSynchronize", stream)
        finally:
            self._call("cudaStreamDestroy", stream)

    def _call(self, name: str, *args: Any) -> Any:
        """The call's result, None if it has none."""
        status, *results = getattr(self._cuda, name)(*args)
        if status != self._fine:
            raise self._failure(name, status)
        return results[0] if results else None

    def _failure(self, name: str, status: Any) -> SpecBridgeError:
        said = self._cuda.cudaGetErrorString(status)[1]
        kind = CapacityError if status == self._no_memory else Unavailable
        return kind(f"{name}: {said.decode()} ({status.name})")


def _raw_stream() -> Callable[[int], int]:
    """Handle of the thread's current stream on a GPU; without an object around it where torch has that."""
    import torch

    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def _sized(handle: bytes, size: int) -> bytes:
    if len(handle) != size:
        raise Unavailable(f"a CUDA handle of {len(handle)} bytes, {size} are needed")
    return handle
