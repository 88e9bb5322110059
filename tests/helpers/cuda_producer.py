"""A channel's target on a GPU, in a process of its own: `cuda_producer.py ADDRESS DEVICE SLOTS WIDTH DTYPE`.

Serves the channel and takes commands from standard input, a line each, answered by a JSON line. The commands
run on a thread of their own, as the engine's would.

Other processes may use the same GPU, so what is there is counted, not read off its free memory: `Holdings`
counts what the channel has of CUDA, torch its own. What the driver keeps besides shows in the free memory
only: `used_bytes`, for differences of which the middle one is taken.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from channel_peers import KEY, ChannelTarget, fill, reserve_within

from specbridge.channel.base import ChannelLayout
from specbridge.channel.cuda_memory import RuntimeCalls
from specbridge.channel.releases import RELEASES

MAKES_AND_ENDS = {
    "allocations": ("cudaMalloc", "cudaFree"),
    "mappings": ("cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"),
    "streams": ("cudaStreamCreateWithFlags", "cudaStreamDestroy"),
    "events": ("cudaEventCreateWithFlags", "cudaEventDestroy"),
}
NOTHING = dict.fromkeys(MAKES_AND_ENDS, 0)


class Holdings:
    """What this process's channels have of CUDA. Make it before the first of them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        call = RuntimeCalls._call

        def counted(calls: RuntimeCalls, name: str, *args: Any) -> Any:
            result = call(calls, name, *args)
            with self._lock:
                self._counts[name] += 1
            return result

        RuntimeCalls._call = counted  # type: ignore[method-assign]

    def now(self) -> dict[str, int]:
        """With nothing attached or left: NOTHING."""
        count = self._counts
        return {name: count[made] - count[ended] for name, (made, ended) in MAKES_AND_ENDS.items()}


def resident_bytes() -> int:
    """Of this process, on the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def used_bytes(device: str) -> int:
    """Of the whole GPU, whoever uses it."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Commands:
    def __init__(self, target: ChannelTarget, device: str, holdings: Holdings) -> None:
        self.target = target
        self.device = device
        self.holdings = holdings
        self.gate = torch.zeros(1, dtype=torch.int32).pin_memory()

    def fill(self, count: str, first: str, seed: str) -> bool:
        return fill(self.target, int(count), first=int(first), seed=int(seed)) is not None

    def reserve(self, count: str) -> bool:
        return self.target.channel.reserve(int(count)) is not None

    def late(self, count: str, value: str) -> bool:
        """Announce rows whose writing waits on the device for `release`, and return at once."""
        from cuda.bindings import driver

        channel = self.target.channel
        reservation = channel.reserve(int(count))
        assert reservation is not None
        rows = channel.rows(reservation)
        # A kernel is loaded at its first launch, which waits for all that the device was told before.
        torch.empty_like(rows).fill_(float(value))
        stream = torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        self.gate.zero_()
        with torch.cuda.stream(stream):
            reached = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
            (status,) = driver.cuStreamWaitValue32(stream.cuda_stream, self.gate.data_ptr(), 1, reached)
            assert status == driver.CUresult.CUDA_SUCCESS, status
            rows.fill_(float(value))
            return channel.publish(
                reservation,
                session=KEY,
                first_position=0,
                count=int(count),
                tokens=[0] * int(count),
                anchor=None,
            )

    def release(self) -> bool:
        self.gate.fill_(1)
        return True

    def many(self, total: str) -> dict[str, Any]:
        """Chunks whose every element is their number. `tenths`: what is there after each tenth of them."""
        channel = self.target.channel
        tenths: list[dict[str, int]] = []
        for i in range(int(total)):
            reservation = reserve_within(channel, 9, 60.0)
            assert reservation is not None
            count = 1 + i % 9
            channel.rows(reservation)[:count].fill_(i)
            channel.publish(
                reservation, session=KEY, first_position=i, count=count, tokens=[0] * count, anchor=None
            )
            if (i + 1) % (int(total) // 10) == 0:
                tenths.append(self._measured())
        end = time.monotonic() + 20.0
        while channel.ring_used and time.monotonic() < end:
            time.sleep(0.01)
        return {"tenths": tenths, "ring_used": channel.ring_used}

    def state(self) -> dict[str, Any]:
        gc.collect()
        return {
            "attached": self.target.channel.attached,
            "ring_used": self.target.channel.ring_used,
            "releases": RELEASES.pending,
            **self._measured(),
        }

    def _measured(self) -> dict[str, int]:
        return {
            "handles": handles(),
            "used": used_bytes(self.device),
            "resident": resident_bytes(),
            "torch": torch.cuda.memory_allocated(self.device),
            **self.holdings.now(),
        }


async def main(address: str, device: str, slots: str, width: str, dtype: str) -> None:
    layout = ChannelLayout(int(width), dtype)
    holdings = Holdings()
    async with ChannelTarget(address, device=device, slots=int(slots), layout=layout) as target:
        commands = Commands(target, device, holdings)
        print(json.dumps("serving"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *args = line.split()
            print(json.dumps(await asyncio.to_thread(getattr(commands, name), *args)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
