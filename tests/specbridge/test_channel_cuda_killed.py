"""cuda_ipc on real GPUs: a target that dies before it has written what a draft's stream waits for.

All that may hang is in processes of their own, and this file is one of its own: whatever becomes of it, the
tests of test_channel_cuda go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from channel_peers import leftovers
from cuda_processes import Producer, Reader

from specbridge.channel import segment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

DEVICES = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.multi_gpu)]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


@pytest.fixture
def producer(address: str) -> Iterator[Producer]:
    before = set(segment.FOLDER.glob("specbridge-*"))
    made = Producer(address)
    yield made
    made.close()
    assert not leftovers(before)


@pytest.fixture
def reader_on(address: str) -> Iterator[Callable[[str], Reader]]:
    made: list[Reader] = []

    def start(device: str) -> Reader:
        made.append(Reader(address, device))
        return made[-1]

    yield start
    for reader in made:
        reader.close()


async def attached(producer: Producer) -> None:
    end = time.monotonic() + 60.0
    while not (await producer.do("state"))["attached"]:
        assert time.monotonic() < end, "the reader does not attach"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("device", DEVICES)
async def test_a_producer_killed_before_it_has_written_leaves_no_stream_waiting(
    address: str, producer: Producer, reader_on: Callable[[str], Reader], device: str
) -> None:
    await producer.start(dtype="float32")
    reader = reader_on(device)
    await attached(producer)
    assert await producer.do("late", 5, 7.0)
    assert await reader.said() == {"waiting": 5}
    producer.kill()
    outcome = await reader.said()
    assert "passed" in outcome, outcome
    assert outcome["spoilt"] == [
        "the channel ended before the target had written rows that a stream waits for"
    ]
    assert outcome["sum"] != 7.0 * 5 * 33
    # The process and its stream are as good as new.
    Path(address.removeprefix("unix:")).unlink(missing_ok=True)
    producer.close()
    await producer.start(dtype="float32")
    await attached(producer)
    assert await producer.do("fill", 3, 0, 5)
    values = torch.randn(3, 33, generator=torch.Generator().manual_seed(5))
    assert (await reader.said())["rows"] == values.tolist()
