"""Times on a device, the rates they are compared with, and time that is left.

Owns how work is timed: on a GPU by events, behind a wait that hides the launching, so that a time is the
device's own; on a CPU (where tests run the parts) by the clock. Does not own what is timed.

A floor is bytes that must be read once, divided by the copy rate; the copy rate counts bytes read and bytes
written, of a copy much larger than the second-level cache.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 30
WARM = 3
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_PRODUCT = {"cuda": 8192, "cpu": 256}
_CYCLES_PER_MS = 2_000_000
"""Of torch.cuda._sleep; a faster clock only makes the wait shorter than meant."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at its best, measured in this run. bytes_per_s: read and written; flop_per_s: of a
    large bfloat16 product."""

    bytes_per_s: float
    flop_per_s: float

    def read_ms(self, num_bytes: float) -> float:
        """The floor of reading so many bytes once."""
        return num_bytes / self.bytes_per_s * 1e3


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians in ms: of the device's own time, and of the host's until it has the answer."""

    device_ms: float
    host_ms: float


class Budget:
    """Seconds that a run may take; what does not fit is left out and said."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def fits(self, seconds: float = 0.0) -> bool:
        """Whether something of about so many seconds can still begin."""
        return self.left_s > seconds


def wait(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hold(device: torch.device, ms: float) -> None:
    """Keep the current stream busy for about `ms`, so that what follows is queued before it begins."""
    if device.type == "cuda":
        torch.cuda._sleep(int(ms * _CYCLES_PER_MS))


def device_ms(
    run: Callable[[], object],
    device: torch.device | str = "cuda",
    *,
    repeats: int = REPEATS,
    launching_ms: float = 0.5,
) -> float:
    """Median ms that the device takes for `run`, which must not wait for it. launching_ms: what the host
    takes at most for the launches."""
    device = torch.device(device)
    times = []
    for _ in range(repeats + WARM):
        if device.type != "cuda":
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        hold(device, launching_ms)
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[WARM:])


def host_ms(run: Callable[[], object], device: torch.device | str, *, repeats: int = REPEATS) -> float:
    """Median ms from the call of `run` until the device is done with it."""
    device = torch.device(device)
    times = []
    for _ in range(repeats + WARM):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[WARM:])


def captured(run: Callable[[], object], device: torch.device | str = "cuda") -> Callable[[], object]:
    """A replay of `run` by a CUDA graph; on a CPU `run` itself."""
    device = torch.device(device)
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_rate(device: torch.device | str = "cuda") -> float:
    """Bytes read plus bytes written a second, of a large copy on the device.

    Not captured: in a CUDA graph the copy goes to a copy engine, which reaches two thirds of this.
    """
    device = torch.device(device)
    # Random: a memory that compresses what it holds would copy zeros faster.
    source = torch.randint(0, 256, (_COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_ms(lambda: target.copy_(source), device) * 1e3


def matmul_rate(device: torch.device | str = "cuda") -> float:
    """FLOP a second of a large bfloat16 product of random numbers."""
    device = torch.device(device)
    n = _PRODUCT[device.type]
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / device_ms(captured(lambda: torch.mm(a, b, out=out), device), device) * 1e3


def measure_rates(device: torch.device | str) -> Rates:
    rates = Rates(copy_rate(device), matmul_rate(device))
    release(torch.device(device))
    return rates


def release(device: torch.device) -> None:
    """Give memory that nothing uses back: the next part, or another process, needs it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def gpu_facts(device: torch.device) -> dict[str, object]:
    """What of the device belongs to the figures' provenance."""
    if device.type != "cuda":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def _driver() -> str:
    """Version of the driver; empty where no tool tells it."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip().split("\n")[0]
