"""cuda_ipc between two processes on real GPUs: bits, order, ends, and what is left of 10,000 hand-offs."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import channel_peers
import pytest
import torch
from channel_peers import ChannelDraft, ChannelTarget, fill, leftovers, until
from cuda_processes import ENVIRONMENT, Producer
from cuda_producer import NOTHING, Holdings, handles, resident_bytes, used_bytes

from specbridge.channel import segment
from specbridge.channel.base import ChannelLayout, ReceivedChunk
from specbridge.channel.cuda_memory import RuntimeCalls
from specbridge.channel.releases import RELEASES

pytestmark = pytest.mark.gpu

MIB = 1 << 20
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


def draft_on(address: str, device: str = "cuda:0", **options: Any) -> ChannelDraft:
    return ChannelDraft(address, transports=["cuda_ipc"], device=device, **options)


def expected(count: int, seed: int, width: int, dtype: str) -> bytes:
    """The rows that tests/helpers' `fill` writes."""
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return bytes(values.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes())


@pytest.fixture
def holdings(monkeypatch: pytest.MonkeyPatch) -> Holdings:
    """Of this process, from when an earlier test's part is given back."""
    gc.collect()
    end = time.monotonic() + 20.0
    while RELEASES.pending and time.monotonic() < end:
        time.sleep(0.02)
    assert not RELEASES.pending
    monkeypatch.setattr(RuntimeCalls, "_call", RuntimeCalls._call)  # as it is to be afterwards
    return Holdings()


def growth(measured: Sequence[dict[str, Any]], name: str) -> int:
    """The middle one of the differences: what other processes take meanwhile comes and goes."""
    values = [one[name] for one in measured]
    return int(statistics.median(b - a for a, b in zip(values, values[1:], strict=False)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
async def test_bits_are_equal_across_processes(
    address: str, producer: Producer, device: str, dtype: str
) -> None:
    await producer.start(slots=32, dtype=dtype)
    async with draft_on(address, device) as draft:
        info = await draft.until_attached()
        assert (info.transport, info.reason) == ("cuda_ipc", "first choice")
        sent, first = [], 0
        for i in range(40):  # many times the ring
            count = 1 + i % 13
            while not await producer.do("fill", count, first, i):
                await asyncio.sleep(0.001)
            sent.append(expected(count, i, 33, dtype))
            first += count
        await until(lambda: len(draft.chunks) == 40)
        assert draft.data == sent
        assert draft.chunks[0].rows.device == torch.device(device)
        await until(lambda: draft.client.held == 0)
        end = time.monotonic() + 20.0  # acknowledgements are gathered, and have a process to cross
        while used := (await producer.do("state"))["ring_used"]:
            assert time.monotonic() < end, f"{used} slots are not given back"
            await asyncio.sleep(0.005)
        draft.chunks.clear()


@pytest.mark.parametrize("device", DEVICES)
async def test_reading_comes_behind_writing_on_the_device(
    address: str, producer: Producer, device: str
) -> None:
    """Rows are announced long before they are written: the reader neither waits nor reads too early."""
    await producer.start(dtype="float32")
    async with draft_on(address, device) as draft:
        await draft.until_attached()
        early, reading = torch.cuda.Stream(device), torch.cuda.Stream(device)
        seen: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

        def take(chunk: ReceivedChunk) -> None:
            with torch.cuda.stream(early):
                too_early = chunk.view.cpu()  # without waiting: what lies there now
            with torch.cuda.stream(reading):
                copy = chunk.rows.clone()
                draft.client.ack([chunk.chunk_id])
                seen.append((too_early, copy, reading.query()))

        with torch.cuda.stream(reading):
            torch.zeros(1, device=device).clone()  # so that nothing is loaded or allocated later
        draft.client._on_chunk = take  # type: ignore[assignment]
        for value in (7.0, 8.0):
            assert await producer.do("late", 5, value)
            await until(lambda: len(seen) == 1)
            too_early, copy, finished = seen.pop()
            assert not finished, "the reader did not wait for the writer"
            assert bool((too_early != value).all()), "the writer was not late: the test shows nothing"
            await asyncio.sleep(0.2)
            assert not reading.query() and draft.client.held == 1
            assert (await producer.do("state"))["ring_used"] == 5, "acknowledged before it was read"
            await producer.do("release")
            await until(reading.query)
            assert bool((copy == value).all())
            await until(lambda: draft.client.held == 0)


async def test_a_reused_slot_shows_as_stale(address: str, producer: Producer) -> None:
    await producer.start(slots=8)
    async with draft_on(address, hold=True) as draft:
        await draft.until_attached()
        await producer.do("fill", 4, 0, 0)
        await producer.do("fill", 4, 4, 1)
        await until(lambda: len(draft.chunks) == 2)
        first, second = draft.chunks
        assert not await producer.do("reserve", 1)
        draft.client.ack([first.chunk_id])
        await until(lambda: draft.client.held == 1)
        while not await producer.do("reserve", 2):
            await asyncio.sleep(0.01)
        assert not first.valid() and second.valid()
        draft.chunks.clear()


async def test_attaching_again_leaves_no_memory_and_no_handle(
    address: str, producer: Producer, holdings: Holdings
) -> None:
    width = 64 * MIB // 4 // 64
    await producer.start(slots=64, width=width, dtype="float32")  # rings of 64 MiB
    states = []
    for i in range(8):
        async with draft_on(address, hold=i % 2 == 0) as draft:
            await draft.until_attached()
            await producer.do("fill", 2, 0, i)
            await until(lambda draft=draft: len(draft.chunks) == 1)
            assert draft.data == [expected(2, i, width, "float32")]
            draft.chunks.clear()
        gc.collect()
        await until(lambda: not RELEASES.pending and holdings.now() == NOTHING)
        end = time.monotonic() + 20.0
        while (state := await producer.do("state"))["attached"] or not state.items() >= NOTHING.items():
            assert time.monotonic() < end, f"not given back: {state}"
            await asyncio.sleep(0.02)
        states.append(state)
    assert growth(states[1:], "used") < 32 * MIB
    assert states[-1]["torch"] - states[1]["torch"] < MIB
    assert states[-1]["handles"] - states[1]["handles"] < 8


async def test_a_killed_consumer_is_noticed_and_its_ring_freed(
    address: str, tmp_path: Path, holdings: Holdings
) -> None:
    width = 64 * MIB // 4 // 64
    async with ChannelTarget(
        address, device="cuda:0", slots=64, layout=ChannelLayout(width, "float32"), lease_s=60.0
    ) as target:
        command = [sys.executable, channel_peers.__file__, "consumer", address, "cuda_ipc"]
        with subprocess.Popen(
            [*command, str(tmp_path / "chunks"), "hold", "cuda:0"],
            env=ENVIRONMENT,
        ) as child:
            await until(lambda: target.channel.attached, timeout=60.0)
            sent = fill(target, 64)
            await until(lambda: (tmp_path / "chunks").exists() and (tmp_path / "chunks").read_text() != "")
            line = json.loads((tmp_path / "chunks").read_text().splitlines()[0])
            assert line["transport"] == "cuda_ipc" and bytes.fromhex(line["data"]) == sent
            assert target.channel.reserve(1) is None
            assert holdings.now()["allocations"] == 1
            child.kill()
            child.wait()
            await until(lambda: not target.channel.attached)
        gc.collect()
        await until(lambda: not RELEASES.pending and holdings.now() == NOTHING)


async def test_a_killed_producer_is_noticed_and_the_next_is_attached(
    address: str, producer: Producer
) -> None:
    await producer.start()
    async with draft_on(address, hold=True) as draft:
        await draft.until_attached()
        await producer.do("fill", 4, 0, 0)
        await until(lambda: len(draft.chunks) == 1)
        producer.kill()
        await until(lambda: len(draft.detached) == 1)
        # What was mapped can still be read.
        assert draft.chunks[0].rows.cpu().view(torch.uint8).numpy().tobytes() == draft.data[0]
        draft.chunks.clear()
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)
        producer.close()
        await producer.start()
        await draft.until_attached(times=2)
        await producer.do("fill", 3, 0, 5)
        await until(lambda: len(draft.chunks) == 1)
        assert draft.data[1] == expected(3, 5, 33, "bfloat16")
        draft.chunks.clear()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
async def test_ten_thousand_hand_offs_grow_nothing(
    address: str, producer: Producer, holdings: Holdings, device: str
) -> None:
    await producer.start(width=64, dtype="float32")
    async with draft_on(address, device) as draft:
        await draft.until_attached()
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        seen: list[int] = []
        tenths: list[dict[str, int]] = []

        def take(chunk: ReceivedChunk) -> None:
            wrong.add_((chunk.rows != chunk.first_position).sum())
            seen.append(chunk.first_position)
            draft.client.ack([chunk.chunk_id])
            if len(seen) % 1000 == 0:
                measured = {"used": used_bytes(device), "resident": resident_bytes()}
                tenths.append({"handles": handles(), **measured, **holdings.now()})

        draft.client._on_chunk = take  # type: ignore[assignment]
        result = await producer.do("many", 10_000)
        await until(lambda: draft.client.held == 0)
        assert seen == list(range(10_000)) and int(wrong) == 0
        assert result["ring_used"] == 0
        for end in (result["tenths"], tenths):
            first, last = end[0], end[-1]
            assert len(end) == 10 and first["handles"] == last["handles"]
            assert all(first[name] == last[name] for name in ("allocations", "mappings", "streams"))
            assert growth(end, "used") < MIB
            assert last["resident"] - first["resident"] < 16 * MIB
        assert result["tenths"][0]["events"] == result["tenths"][-1]["events"]
        view = draft.client._memory
        assert view is not None and len(view._fences) < 256  # type: ignore[attr-defined]


async def test_a_graph_being_captured_on_another_thread_is_not_disturbed(
    address: str, producer: Producer
) -> None:
    """In CUDA's default capture mode a careless call on any thread makes the capture fail."""
    await producer.start(width=64, dtype="float32")
    stop = threading.Event()
    captures: list[int] = []
    errors: list[Exception] = []

    def capture() -> None:
        x = torch.ones(64, device="cuda:0")
        while not stop.is_set():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    for _ in range(200):
                        x.mul_(1.0)
                captures.append(1)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        for _ in range(3):
            async with draft_on(address) as draft:
                received: list[int] = []

                def take(chunk: ReceivedChunk, received: list[int] = received, draft: Any = draft) -> None:
                    assert chunk.rows.shape[1] == 64
                    received.append(chunk.first_position)
                    draft.client.ack([chunk.chunk_id])

                draft.client._on_chunk = take
                await draft.until_attached()
                await producer.do("many", 300)
                await until(lambda received=received: len(received) == 300)
            gc.collect()
            await until(lambda: not RELEASES.pending)
    finally:
        stop.set()
        thread.join()
    assert not errors and len(captures) > 10


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
async def test_a_gpu_target_serves_a_draft_on_the_cpu(address: str, transport: str) -> None:
    layout = ChannelLayout(33, "bfloat16")
    async with (
        ChannelTarget(address, device="cuda:0", layout=layout, slots=16) as target,
        ChannelDraft(address, transports=["cuda_ipc", transport]) as draft,
    ):
        info = await draft.until_attached()
        assert (info.transport, info.reason) == (transport, "cuda_ipc: the draft is not on a GPU")
        ring = target.channel.ring
        assert ring is not None and ring.device == torch.device("cuda:0")
        sent = []
        for i in range(20):
            await until(lambda: target.channel.ring_used == 0)
            sent.append(fill(target, 1 + i % 16, first=i, seed=i))
        await until(lambda: len(draft.chunks) == 20)
        assert draft.data == sent and draft.chunks[0].rows.device.type == "cpu"


async def test_one_process_can_not_share_with_itself(address: str) -> None:
    async with ChannelTarget(address, device="cuda:0"), ChannelDraft(address, device="cuda:0") as draft:
        info = await draft.until_attached()
        assert info.transport == "shared_memory" and "one process" in info.reason
