"""cuda_ipc without a GPU: everything but CUDA itself, over the fake of tests/helpers/fake_cuda.py."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from channel_peers import KEY, ChannelDraft, ChannelTarget, fill, leftovers, reserve_within, until
from fake_cuda import BASE_STREAM, FakeCuda

from specbridge.channel import consumer, cuda_ipc, cuda_memory, inline, segment, shared_memory, transports
from specbridge.channel.base import ChannelLayout, Identity, ReceivedChunk
from specbridge.channel.handles import CUDA_MEMORY, HANDLES
from specbridge.channel.releases import PAUSE_S, RELEASES
from specbridge.channel.segment import Segment
from specbridge.channel.transports import TRANSPORTS
from specbridge.errors import Unsupported

ROOT = Path(__file__).parents[3]
NOTHING = (0, 0, 0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Target and draft on a fake GPU; the draft says that it is another process."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_memory, "cuda_calls", lambda: fake)
    monkeypatch.setattr(
        transports, "_gpu", lambda device: (fake.ordinal(device), fake.uuid(fake.ordinal(device)))
    )
    own = transports.own_identity
    monkeypatch.setattr(
        consumer, "own_identity", lambda instance, device: replace(own(instance, device), pid=1 << 22)
    )
    for name, ring in ((shared_memory.NAME, shared_memory.SharedRing), (inline.NAME, inline.InlineRing)):
        here = replace(
            TRANSPORTS[name], create=lambda slots, layout, device, ring=ring: ring(slots, layout, "cpu")
        )
        monkeypatch.setitem(TRANSPORTS, name, here)
    return fake


@pytest.fixture
async def nothing_left(cuda: FakeCuda) -> AsyncIterator[None]:
    """Whatever a test did, the GPU gets everything back, and nobody did what CUDA leaves undefined."""
    before = set(segment.FOLDER.glob("specbridge-*"))
    open_before = HANDLES.snapshot()[CUDA_MEMORY]
    yield
    for stream in list(cuda.streams):
        cuda.go(stream)
    gc.collect()
    await until(lambda: cuda.live == NOTHING and not RELEASES.pending)
    assert not cuda.violations
    assert HANDLES.snapshot()[CUDA_MEMORY] <= open_before  # less: a test before this one is done only now
    assert not leftovers(before)


def peers(address: str, **draft: Any) -> tuple[ChannelTarget, ChannelDraft]:
    target = ChannelTarget(
        address, slots=draft.pop("slots", 8), device="cuda:0", layout=draft.pop("layout", None)
    )
    return target, ChannelDraft(address, device="cuda:0", transports=["cuda_ipc"], **draft)


def fill_later(cuda: FakeCuda, target: ChannelTarget, count: int, stream: int, **options: Any) -> None:
    """`fill`, told to a stream that does not come to it."""
    cuda.hold(stream)
    cuda.current = stream
    cuda.work(stream)
    fill(target, count, **options)


# ---- what rules it out --------------------------------------------------------------------------

GPU = Identity("boot", "ns", 10, "GPU-0", b"t")


@pytest.mark.parametrize(
    ("own", "peer", "why"),
    [
        ({"device": "cpu"}, {}, "the target is not on a GPU"),
        ({}, {"device": "cpu"}, "the draft is not on a GPU"),
        ({"boot_id": ""}, {"boot_id": ""}, "the host can't be identified"),
        ({}, {"boot_id": "other"}, "another host"),
        ({}, {"pid_namespace": "other"}, "another PID namespace"),
        ({}, {"pid": 10}, "one process"),
        ({}, {"device": "GPU-1"}, "the draft's GPU (GPU-1) can't read the memory of the target's (GPU-0)"),
        ({}, {"device": "GPU-9"}, None),  # not visible to the target: the draft's try tells
        ({}, {}, None),
    ],
)
def test_what_rules_it_out(
    cuda: FakeCuda, own: dict[str, Any], peer: dict[str, Any], why: str | None
) -> None:
    cuda.uuids.append("GPU-1")
    cuda.unreachable.add((1, 0))
    found = cuda_ipc.why_not(replace(GPU, **own), replace(GPU, **{"pid": 11, **peer}))
    assert found is None if why is None else found is not None and why in found


def test_a_target_without_stream_memory_operations_is_named(cuda: FakeCuda) -> None:
    cuda.without_values.add(0)
    assert (
        cuda_ipc.why_not(GPU, replace(GPU, pid=11)) == "GPU 0 of the target has no stream memory operations"
    )


async def test_a_draft_without_stream_memory_operations_says_so(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    cuda.uuids.append("GPU-1")
    cuda.without_values.add(1)
    async with ChannelTarget(address, device="cuda:0"), ChannelDraft(address, device="cuda:1") as draft:
        info = await draft.until_attached()
        assert info.transport == "shared_memory"
        assert "GPU 1 of the draft has no stream memory operations" in info.reason


def test_without_the_bindings_it_is_declined_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(Unsupported, match="cuda-bindings can't be used"):
        cuda_memory.RuntimeCalls()
    monkeypatch.setattr(cuda_memory, "cuda_calls", cuda_memory.RuntimeCalls)
    assert "install it" in (cuda_ipc.why_not(GPU, replace(GPU, pid=11)) or "")


@pytest.mark.parametrize("call", ["open_memory", "read"])
async def test_a_draft_that_can_not_use_it_gets_the_next_one(
    address: str, cuda: FakeCuda, nothing_left: None, call: str
) -> None:
    cuda.fail[call] = f"{call}: invalid device context"
    async with (
        ChannelTarget(address, device="cuda:0") as target,
        ChannelDraft(address, device="cuda:0") as draft,
    ):
        info = await draft.until_attached()
        assert info.transport == "shared_memory"
        assert info.reason == f"cuda_ipc: the draft can't use it: {call}: invalid device context"
        assert target.events[-1] == ("attached", ("shared_memory", info.reason))
        assert target.channel.stats.snapshot().attaches == {("shared_memory", info.reason): 1}
        sent = fill(target, 2)
        await until(lambda: draft.data == [sent])
        cuda.fail.clear()


async def test_a_gpu_without_room_for_the_ring_falls_back(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    cuda.room = 100
    async with ChannelTarget(address, device="cuda:0"), ChannelDraft(address, device="cuda:0") as draft:
        info = await draft.until_attached()
        assert info.transport == "shared_memory" and "cuda_ipc: cudaMalloc: out of memory" in info.reason


async def test_other_bytes_in_the_memory_are_not_accepted(
    address: str, cuda: FakeCuda, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "read", lambda ordinal, pointer, size: bytes(size))
    async with ChannelTarget(address, device="cuda:0"), ChannelDraft(address, device="cuda:0") as draft:
        info = await draft.until_attached()
        assert info.transport == "shared_memory" and "other bytes than the target wrote" in info.reason


# ---- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
async def test_rows_arrive_bit_for_bit(address: str, cuda: FakeCuda, nothing_left: None, dtype: str) -> None:
    layout = ChannelLayout(33, dtype)
    target, draft = peers(address, layout=layout, slots=16)
    async with target, draft:
        info = await draft.until_attached()
        assert (info.transport, info.reason, info.slots) == ("cuda_ipc", "first choice", 16)
        assert info.layout == layout
        sent = []
        for i in range(20):
            await until(lambda: target.channel.ring_used == 0)
            sent.append(fill(target, 1 + i % 16, first=i, seed=i))
        await until(lambda: len(draft.chunks) == 20)
        assert draft.data == sent
        assert str(draft.chunks[0].rows.dtype) == f"torch.{dtype}"
        assert draft.client.stats.snapshot().bytes_by_transport == {
            "cuda_ipc": sum(len(data or b"") for data in sent)
        }
        assert not [call for call in cuda.calls if call[0] == "wait"]  # all was written when it was announced
        draft.chunks.clear()


async def test_the_reading_stream_waits_for_the_writing_one_and_nobody_else_does(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address)
    writing, reading = cuda.stream(), cuda.stream()
    async with target, draft:
        await draft.until_attached()
        taken: list[ReceivedChunk] = []
        draft.client._on_chunk = taken.append  # type: ignore[assignment]
        for value in (1, 2):
            fill_later(cuda, target, 3, writing)
            await until(lambda: len(taken) == 1)
            cuda.current = reading
            chunk = taken.pop()
            assert chunk.rows.shape == (3, 12)
            values = [call for call in cuda.calls if call[0] != "record"]
            assert values[-2:] == [("write", value, writing), ("wait", value, reading)]
            draft.client.ack([chunk.chunk_id])
            await asyncio.sleep(0.05)
            assert target.channel.ring_used == 3 and draft.client.held == 1
            assert not cuda.finished(reading)
            cuda.go(writing)
            await until(lambda: target.channel.ring_used == 0)
            assert draft.client.held == 0 and draft.client.stats.snapshot().acked == value
            assert cuda.finished(reading)
        del chunk


async def test_rows_that_were_written_when_they_were_published_are_not_waited_for(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address)
    async with target, draft:
        await draft.until_attached()
        cuda.work(cuda.current)
        sent = fill(target, 3)
        await until(lambda: draft.data == [sent])
        assert {call[0] for call in cuda.calls} == {"record"}  # fences, to acknowledge
        draft.chunks.clear()


async def test_a_step_that_was_waited_for_is_marked_without_asking_the_device(
    address: str, cuda: FakeCuda, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = peers(address)
    async with target, draft:
        await draft.until_attached()
        channel = target.channel
        reservation = channel.reserve(3)
        assert reservation is not None
        channel.rows(reservation).fill_(2.0)
        with monkeypatch.context() as patch:
            for name in ("current_stream", "idle"):
                patch.setattr(cuda, name, lambda *args: pytest.fail("the device was asked"))
            channel.mark_written(over=True)
            assert channel.publish(
                reservation, session=KEY, first_position=0, count=3, tokens=[1, 2, 3], anchor=None
            )
        await until(lambda: len(draft.data) == 1)
        assert {call[0] for call in cuda.calls} == {"record"}  # nobody waits for these rows
        draft.chunks.clear()
        del reservation


async def test_slots_come_back_only_when_the_device_has_read_them(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address, slots=4, lease_s=0.4)
    target.channel.lease_s = 0.4
    reading = cuda.stream(held=True)
    async with target, draft:
        await draft.until_attached()
        cuda.current = reading  # the chunk's fence is recorded there
        sent = fill(target, 4)
        await until(lambda: draft.data == [sent])
        await asyncio.sleep(1.0)  # longer than the lease: a device at work is a sign of life
        assert target.channel.attached and target.channel.reserve(1) is None
        cuda.go(reading)
        await until(lambda: target.channel.ring_used == 0)
        draft.chunks.clear()


async def test_one_mark_serves_the_chunks_of_a_step(address: str, cuda: FakeCuda, nothing_left: None) -> None:
    target, draft = peers(address, hold=True)
    writing = cuda.stream(held=True)
    async with target, draft:
        await draft.until_attached()
        channel, ring = target.channel, target.channel.ring
        assert ring is not None and ring.shape == (8, 12)
        taken: list[ReceivedChunk] = []
        draft.client._on_chunk = taken.append  # type: ignore[assignment]
        cuda.current = writing
        cuda.work(writing)

        def marks() -> int:
            return sum(call[0] == "write" for call in cuda.calls)

        def publish(reservation: Any, first: int) -> None:
            assert channel.publish(
                reservation, session=KEY, first_position=first, count=2, tokens=[1, 2], anchor=None
            )

        step = [channel.reserve(2) for _ in range(3)]
        for i, reservation in enumerate(step):
            assert reservation is not None and reservation.ring is ring
            ring[reservation.first_slot : reservation.first_slot + 2] = float(i)
        channel.mark_written()
        assert marks() == 1
        publish(step[0], 0)
        publish(step[1], 2)
        assert marks() == 1
        channel.rows(step[2])  # it may be written again: the mark is not behind that
        publish(step[2], 4)
        assert marks() == 2
        late = channel.reserve(2)
        publish(late, 6)
        assert marks() == 3
        await until(lambda: len(taken) == 4)
        cuda.current = BASE_STREAM
        assert [chunk.rows[0, 0].item() for chunk in taken[:3]] == [0.0, 1.0, 2.0]
        assert [call[1] for call in cuda.calls if call[0] == "wait"] == [1, 1, 2]
        cuda.go(writing)
        draft.client.ack([chunk.chunk_id for chunk in taken])
        await until(lambda: channel.ring_used == 0)
        taken.clear()
        del ring, step, reservation, late


async def test_a_value_is_never_there_before_the_rows_that_it_stands_for(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    """Two streams write; the second comes to its end first."""
    target, draft = peers(address)
    first, second, reading = cuda.stream(), cuda.stream(), cuda.stream()
    async with target, draft:
        await draft.until_attached()
        taken: list[ReceivedChunk] = []
        draft.client._on_chunk = taken.append  # type: ignore[assignment]
        fill_later(cuda, target, 2, first)
        fill_later(cuda, target, 2, second, first=2)
        await until(lambda: len(taken) == 2)
        cuda.current = reading
        assert taken[0].rows.shape == (2, 12)
        cuda.go(second)
        assert not cuda.finished(reading), "let on by rows of another stream"
        cuda.go(first)
        assert cuda.finished(reading) and cuda.finished(second)
        assert taken[1].rows.shape == (2, 12)
        taken.clear()


async def test_a_reused_slot_shows_as_stale(address: str, cuda: FakeCuda, nothing_left: None) -> None:
    target, draft = peers(address, hold=True)
    async with target, draft:
        await draft.until_attached()
        fill(target, 4)
        fill(target, 4, first=4)
        await until(lambda: len(draft.chunks) == 2)
        first, second = draft.chunks
        draft.client.ack([first.chunk_id])
        await until(lambda: target.channel.ring_used == 4)
        assert first.valid()
        assert target.channel.reserve(2) is not None
        assert not first.valid() and second.valid()
        draft.chunks.clear()
        del first, second


async def test_a_target_that_writes_over_what_is_read_is_noticed(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    spoilt: list[str] = []
    target, draft = peers(address, on_spoilt=spoilt.append)
    reading = cuda.stream(held=True)
    async with target, draft:
        await draft.until_attached()
        cuda.current = reading
        fill(target, 4)
        await until(lambda: len(draft.chunks) == 1)  # found valid, and the device reads on
        current = target.channel._current
        assert current is not None
        current.memory.set_generation(0, 1, 77)
        cuda.go(reading)
        await until(lambda: spoilt == ["the target wrote over 1 chunks that were being read"])
        assert draft.client.stats.snapshot().overtaken == 1
        draft.chunks.clear()
        del current


async def test_a_device_that_fails_ends_the_attachment(address: str, cuda: FakeCuda) -> None:
    target, draft = peers(address)
    async with target, draft:
        await draft.until_attached()
        cuda.fail["reached"] = "cudaEventQuery: an illegal memory access was encountered"
        fill(target, 1)
        await until(lambda: len(draft.detached) == 1)
        cuda.fail.clear()
        draft.chunks.clear()


# ---- ends ---------------------------------------------------------------------------------------


async def test_attaching_again_and_again_leaves_nothing(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    async with ChannelTarget(address, device="cuda:0", slots=8) as target:
        for i in range(10):
            draft = ChannelDraft(address, device="cuda:0", transports=["cuda_ipc"], hold=i % 2 == 0)
            async with draft:
                await draft.until_attached()
                sent = fill(target, 8, seed=i)
                await until(lambda draft=draft, sent=sent: draft.data == [sent])
                draft.chunks.clear()
            await until(lambda: not target.channel.attached)
        await until(lambda: cuda.live == NOTHING)


async def test_memory_outlives_whoever_still_looks_at_it(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address, hold=True)
    async with target:
        async with draft:
            await draft.until_attached()
            sent = fill(target, 2)
            await until(lambda: len(draft.chunks) == 1)
            ring = target.channel.ring
        await until(lambda: not target.channel.attached)
        rows = draft.chunks.pop().rows
        await asyncio.sleep(0.1)
        gc.collect()
        assert rows.view(torch.uint8).numpy().tobytes() == sent
        assert cuda.live[:2] == (1, 1)
        del rows
        await until(lambda: cuda.live[:2] == (1, 0))
        assert ring is not None
        ring.fill_(1.0)  # a step that was under way
        del ring
        await until(lambda: cuda.live == NOTHING)


async def test_a_producer_never_frees_what_its_consumer_maps(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address, hold=True)
    async with draft:
        async with target:
            await draft.until_attached()
            fill(target, 2)
            await until(lambda: len(draft.chunks) == 1)
        await until(lambda: len(draft.detached) == 1)
        gc.collect()
        await asyncio.sleep(0.1)
        assert cuda.live[:2] == (1, 1) and not cuda.violations  # the chunk is still held
        draft.chunks.clear()
        await until(lambda: cuda.live == NOTHING)


async def test_memory_goes_only_when_the_work_that_uses_it_is_done(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address)
    reading = cuda.stream(held=True)
    async with target:
        async with draft:
            await draft.until_attached()
            cuda.current = reading
            sent = fill(target, 2)
            await until(lambda: draft.data == [sent])
            draft.chunks.clear()
        await until(lambda: not target.channel.attached)
        gc.collect()
        await asyncio.sleep(0.1)
        assert cuda.live[:2] == (1, 1)
        cuda.go(reading)
        await until(lambda: cuda.live == NOTHING)


async def test_a_stream_whose_work_is_being_captured_is_not_touched(
    address: str, cuda: FakeCuda, nothing_left: None
) -> None:
    target, draft = peers(address)
    async with target:
        async with draft:
            await draft.until_attached()
            fill(target, 2)
            await until(lambda: len(draft.chunks) == 1 and target.channel.ring_used == 0)
            draft.chunks.clear()
            cuda.captured.add(cuda.current)
        await until(lambda: not target.channel.attached)
        gc.collect()
        await asyncio.sleep(0.1)
        assert cuda.live[:2] == (1, 1) and not cuda.violations
        cuda.captured.clear()
        await until(lambda: cuda.live == NOTHING)


@pytest.fixture
def spoilt() -> list[str]:
    return []


async def test_streams_that_wait_for_a_dead_target_are_let_go(
    address: str, cuda: FakeCuda, nothing_left: None, spoilt: list[str]
) -> None:
    target, draft = peers(address, on_spoilt=spoilt.append)
    writing, reading, other = cuda.stream(), cuda.stream(), cuda.stream()
    async with draft:
        async with target:
            await draft.until_attached()
            taken: list[ReceivedChunk] = []
            draft.client._on_chunk = taken.append  # type: ignore[assignment]
            for first in (0, 3):
                fill_later(cuda, target, 3, writing, first=first)
            await until(lambda: len(taken) == 2)
            for stream, chunk in ((reading, taken[1]), (other, taken[0])):  # in whatever order
                cuda.current = stream
                assert chunk.rows.shape == (3, 12)
            cuda.die(writing)
            cuda.clogged = 2
            assert not cuda.finished(reading) and not cuda.finished(other) and not spoilt
        # Its writing stream never moves again.
        await until(lambda: cuda.finished(reading) and cuda.finished(other))
        assert spoilt == ["the channel ended before the target had written rows that a stream waits for"]
        taken.clear()
        cuda.current = BASE_STREAM
        cuda.bury(writing)


async def test_a_target_that_dies_after_the_end_does_not_catch_its_readers_again(
    address: str, cuda: FakeCuda, nothing_left: None, spoilt: list[str]
) -> None:
    """The channel ends while the target lives on: it writes one more value, an older one, and dies."""
    target, draft = peers(address, on_spoilt=spoilt.append)
    writing, reading, dying = cuda.stream(), cuda.stream(), cuda.stream()
    async with draft:
        async with target:
            await draft.until_attached()
            taken: list[ReceivedChunk] = []
            draft.client._on_chunk = taken.append  # type: ignore[assignment]
            fill_later(cuda, target, 3, writing)
            fill_later(cuda, target, 3, dying, first=3)
            await until(lambda: len(taken) == 2)
            cuda.current = reading
            cuda.hold(reading)  # it comes to its wait after all that
            assert taken[1].rows.shape == (3, 12)
            cuda.die(dying)
        await until(lambda: len(spoilt) == 1)
        cuda.go(writing)
        cuda.go(reading)
        await until(lambda: cuda.finished(reading))
        taken.clear()
        cuda.current = BASE_STREAM
        cuda.bury(dying)


async def test_rows_taken_after_the_end_are_not_waited_for(
    address: str, cuda: FakeCuda, nothing_left: None, spoilt: list[str]
) -> None:
    target, draft = peers(address, on_spoilt=spoilt.append)
    writing, reading = cuda.stream(), cuda.stream()
    async with draft:
        async with target:
            await draft.until_attached()
            taken: list[ReceivedChunk] = []
            draft.client._on_chunk = taken.append  # type: ignore[assignment]
            for first in (0, 2, 4):
                fill_later(cuda, target, 2, writing, first=first)
            await until(lambda: len(taken) == 3)
            cuda.current = reading
            assert taken[1].rows.shape == (2, 12)
            cuda.die(writing)
        await until(lambda: len(spoilt) == 1)
        for seen, chunk in enumerate((taken[0], taken[2])):  # what was let go is no proof of writing
            assert chunk.rows.shape == (2, 12)
            assert len(spoilt) == 2 + seen and "may not have written when the channel ended" in spoilt[-1]
        await until(lambda: cuda.finished(reading))
        taken.clear()
        cuda.current = BASE_STREAM
        cuda.bury(writing)


async def test_an_end_in_the_middle_of_a_wait_lets_its_stream_go(
    address: str, cuda: FakeCuda, nothing_left: None, spoilt: list[str]
) -> None:
    """The reader has seen that the channel lives and not told its stream to wait yet: so nothing waits when
    the end looks."""
    target, draft = peers(address)
    writing, reading = cuda.stream(), cuda.stream()
    async with target, draft:
        await draft.until_attached()
        taken: list[ReceivedChunk] = []
        draft.client._on_chunk = taken.append  # type: ignore[assignment]
        fill_later(cuda, target, 3, writing)
        await until(lambda: len(taken) == 1)
        cuda.die(writing)
        memory = draft.client._memory
        assert memory is not None

        def ended_meanwhile(ordinal: int) -> int:
            del cuda.current_stream  # type: ignore[method-assign]
            memory.close(spoilt.append)
            time.sleep(5 * PAUSE_S)  # the thread of releases.py looks
            return reading

        cuda.current_stream = ended_meanwhile  # type: ignore[method-assign]
        assert taken[0].rows.shape == (3, 12)
        await until(lambda: cuda.finished(reading))
        assert len(spoilt) == 1
        taken.clear()
        cuda.bury(writing)


@pytest.mark.parametrize("acked", [True, False])
async def test_what_was_written_before_the_end_is_not_spoilt(
    address: str, cuda: FakeCuda, nothing_left: None, spoilt: list[str], acked: bool
) -> None:
    target, draft = peers(address, on_spoilt=spoilt.append)
    writing, reading = cuda.stream(), cuda.stream()
    async with draft:
        async with target:
            await draft.until_attached()
            taken: list[ReceivedChunk] = []
            draft.client._on_chunk = taken.append  # type: ignore[assignment]
            fill_later(cuda, target, 3, writing)
            await until(lambda: len(taken) == 1)
            cuda.current = reading
            assert taken[0].rows.shape == (3, 12)
            if acked:
                draft.client.ack([taken[0].chunk_id])
            cuda.go(writing)
            await until(lambda: draft.client.held == (0 if acked else 1))
        await until(lambda: len(draft.detached) == 1)
        assert taken[0].rows.shape == (3, 12)
        assert not spoilt
        taken.clear()
        cuda.current = BASE_STREAM


def test_a_killed_consumer_is_seen_in_the_segment() -> None:
    produced = Segment(4, 0, watched=True)
    code = (
        "import sys, time\nfrom specbridge.channel.segment import SegmentView\n"
        "view = SegmentView(sys.argv[1], 4, 0, nonce_length=32, watched=True)\n"
        "print(view.nonce.hex(), flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", code, produced.location]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == produced.nonce.hex()
        produced.settled()
        assert not produced.unused()
        child.kill()
        child.wait()
    assert produced.unused()
    produced.close()


def test_a_withdrawn_segment_is_not_opened() -> None:
    produced = Segment(4, 0, watched=True)
    assert produced.unused()
    with pytest.raises(BlockingIOError):
        segment.SegmentView(produced.location, 4, 0, nonce_length=32, watched=True)
    produced._close_file()
    with pytest.raises(ValueError, match="withdrawn"):
        segment.SegmentView(produced.location, 4, 0, nonce_length=32, watched=True)
    produced.close()


async def test_ten_thousand_hand_offs_leave_nothing(address: str, cuda: FakeCuda, nothing_left: None) -> None:
    target, draft = peers(address, slots=64)
    async with target, draft:
        await draft.until_attached()
        received: list[tuple[int, int, bool]] = []

        def take(chunk: ReceivedChunk) -> None:
            same = bool((chunk.rows == chunk.first_position).all().item())
            received.append((chunk.first_position, chunk.count, same and chunk.valid()))
            draft.client.ack([chunk.chunk_id])

        draft.client._on_chunk = take  # type: ignore[assignment]

        def engine() -> None:
            for i in range(10_000):
                reservation = reserve_within(target.channel, 9, 20.0)
                assert reservation is not None
                count = 1 + i % 9
                target.channel.rows(reservation)[:count].fill_(i)
                target.channel.publish(
                    reservation, session=KEY, first_position=i, count=count, tokens=[0] * count, anchor=None
                )

        events = len(cuda.events)
        await asyncio.to_thread(engine)
        await until(lambda: len(received) == 10_000 and target.channel.ring_used == 0)
        assert received == [(i, 1 + i % 9, True) for i in range(10_000)]
        current = target.channel._current
        assert current is not None and current.outstanding == 0 and not current._unmarked
        assert len(cuda.events) - events < 64  # fences that were under way at once
        assert draft.client.held == 0
        del current
