"""copy_rate: how fast this device's memory is, by copying a block of it.

Owns the measurement. What a floor is made of with it is specbridge.explain's matter. Not an op: it is called
once at a service's start, and its tensors are gone afterwards.
"""

from __future__ import annotations

import statistics
import time

import torch

BLOCK_BYTES = {"cpu": 48 << 20, "cuda": 128 << 20}
"""Two of them are more than the caches of most CPUs and GPUs hold, and copied within 0.1 s on a slow CPU."""
_COPIES = {"cpu": 3, "cuda": 20}


def copy_rate(device: torch.device | str, *, block_bytes: int | None = None) -> int:
    """Bytes read plus bytes written a second of a copy within a device's memory, by torch's threads.

    block_bytes: what is copied at a time. The median of a few copies, on a GPU the mean of more; the first,
    which pays for pages that the system hands out, is left out. 0 if there is no room for two such blocks.
    """
    device = torch.device(device)
    size = block_bytes or BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])
    try:
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except (RuntimeError, MemoryError):
        return 0
    target.copy_(source)
    count = _COPIES.get(device.type, 3)
    seconds = _on_gpu(source, target, count) if device.type == "cuda" else _on_host(source, target, count)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()  # pages for K/V have been counted without these blocks
    return int(2 * size / seconds) if seconds > 0 else 0


def _on_host(source: torch.Tensor, target: torch.Tensor, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _on_gpu(source: torch.Tensor, target: torch.Tensor, count: int) -> float:
    """Back to back, by the device's own clock: what launching them costs does not show."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(source.device):
        begin.record()
        for _ in range(count):
            target.copy_(source)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count
