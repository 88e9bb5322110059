"""Raw CUDA: the few calls that sharing GPU memory and its order of use between processes needs.

Owns how they are called: through cuda-bindings, on the right device, without disturbing a graph capture of
another thread, failures as typed errors. Pointers, events and streams are plain integers here. Does not own
what they are for (cuda_ipc). `CudaCalls` is what it offers; tests put another one in its place.

What every hand-off needs (`current_stream`, `idle`, `record`) is as few calls as can be.
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

    device: a torch device name. ordinal: a GPU's number in this process. Events have no times and stay in the
    process.
    """

    def ordinal(self, device: str) -> int: ...

    def torch_device(self, ordinal: int) -> str:
        """Where torch finds memory of this GPU."""

    def uuid(self, ordinal: int) -> str: ...

    def find(self, uuid: str) -> int | None:
        """The ordinal of a GPU, None if this process does not see it."""

    def reaches(self, ordinal: int, peer: int) -> bool:
        """Whether one GPU can read another's memory."""

    def waits_for_values(self, ordinal: int) -> bool:
        """Whether a stream there can write a value to memory, or wait for one, in its order."""

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

    def new_event(self, ordinal: int) -> int: ...

    def destroy_event(self, ordinal: int, event: int) -> None: ...

    def current_stream(self, ordinal: int) -> int:
        """torch's, of this thread."""

    def capturing(self, ordinal: int, stream: int) -> bool:
        """Whether a graph is being captured from a stream: nothing may be added to it then."""

    def idle(self, ordinal: int, stream: int) -> bool:
        """Whether all that a stream was told is done, and seen by whoever looks from now on."""

    def write_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        """Have the stream write 32 bits, behind all that it was told: whoever sees them sees that, too."""

    def wait_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        """Have the stream wait until 32 bits there, less `value`, are no negative number."""

    def set_value(self, ordinal: int, pointer: int, value: int) -> None:
        """Write 32 bits on a stream of its own, without waiting for it. Streams share the device's queues, so
        that one that is stuck may hold this one up: try again, which takes another.
        """

    def record(self, ordinal: int, event: int, stream: int) -> None: ...

    def reached(self, event: int) -> bool:
        """Whether what was recorded last has come. Never blocks."""


@functools.cache
def _runtime_calls() -> RuntimeCalls:
    return RuntimeCalls()


def cuda_calls() -> CudaCalls:
    """Raises Unsupported if cuda-bindings is not installed."""
    return _runtime_calls()


class RuntimeCalls:
    """CudaCalls by cuda.bindings. Handles of torch's streams are the same there: all sit on the device's
    primary context.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise Unsupported(f"the package cuda-bindings can't be used here ({error}); install it") from None
        self._cuda: Any = runtime
        self._driver: Any = driver
        self._driver_fine = driver.CUresult.CUDA_SUCCESS
        self._fine = runtime.cudaError_t.cudaSuccess
        self._not_ready = runtime.cudaError_t.cudaErrorNotReady
        self._no_memory = runtime.cudaError_t.cudaErrorMemoryAllocation
        self._relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._device = runtime.cudaGetDevice
        self._exchange = runtime.cudaThreadExchangeStreamCaptureMode
        self._record = runtime.cudaEventRecord
        self._query = runtime.cudaEventQuery
        self._query_stream = runtime.cudaStreamQuery
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

    def waits_for_values(self, ordinal: int) -> bool:
        # Of 64 bits, since it is the one that can be asked for; whoever has them has 32 bits, too.
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        with self._on(ordinal):
            device = self._drive("cuDeviceGet", ordinal)
            return bool(self._drive("cuDeviceGetAttribute", attribute, device))

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

    def new_event(self, ordinal: int) -> int:
        with self._on(ordinal):
            return int(self._call("cudaEventCreateWithFlags", int(self._cuda.cudaEventDisableTiming)))

    def destroy_event(self, ordinal: int, event: int) -> None:
        with self._on(ordinal):
            self._call("cudaEventDestroy", event)

    def current_stream(self, ordinal: int) -> int:
        return self._raw_stream(ordinal)

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

    def reached(self, event: int) -> bool:
        return self._over("cudaEventQuery", self._query, event)

    def idle(self, ordinal: int, stream: int) -> bool:
        if self._means(ordinal, stream):
            return self._over("cudaStreamQuery", self._query_stream, stream)
        with self._on(ordinal):
            return self._over("cudaStreamQuery", self._query_stream, stream)

    def write_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        flags = int(self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        with self._bound_to(ordinal):
            self._drive("cuStreamWriteValue32", stream, pointer, value, flags)

    def wait_value(self, ordinal: int, stream: int, pointer: int, value: int) -> None:
        flags = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        with self._bound_to(ordinal):
            self._drive("cuStreamWaitValue32", stream, pointer, value, flags)

    def set_value(self, ordinal: int, pointer: int, value: int) -> None:
        with self._on(ordinal):
            stream = int(self._call("cudaStreamCreateWithFlags", int(self._cuda.cudaStreamNonBlocking)))
            try:
                self.write_value(ordinal, stream, pointer, value)
            finally:
                self._call("cudaStreamDestroy", stream)  # what it was told is still done

    # ---- how ------------------------------------------------------------------------------------

    def _means(self, ordinal: int, stream: int) -> bool:
        """Whether this handle names a stream of GPU `ordinal` as things are: the default stream's, 0, is that
        of the thread's current device.
        """
        return stream != 0 or bool(self._device()[1] == ordinal)

    def _over(self, name: str, query: Callable[[int], tuple[Any, ...]], thing: int) -> bool:
        """What a query says, asked as in _unnoticed but without its overhead."""
        status, before = self._exchange(self._relaxed)
        if status != self._fine:  # a device that has failed says so to every call
            raise self._failure("cudaThreadExchangeStreamCaptureMode", status)
        try:
            status = query(thing)[0]
        finally:
            self._exchange(before)
        if status not in (self._fine, self._not_ready):
            raise self._failure(name, status)
        return bool(status == self._fine)

    @contextlib.contextmanager
    def _bound_to(self, ordinal: int) -> Iterator[None]:
        """`_on`, for the driver's calls: they need a thread that has its GPU's context already, which the
        runtime's calls see to by themselves.
        """
        with self._on(ordinal):
            self._call("cudaSetDevice", ordinal)
            yield

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

    def _drive(self, name: str, *args: Any) -> Any:
        """`_call` of the driver's API."""
        status, *results = getattr(self._driver, name)(*args)
        if status != self._driver_fine:
            said = self._driver.cuGetErrorString(status)[1]
            raise Unavailable(f"{name}: {said.decode()} ({status.name})")
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
