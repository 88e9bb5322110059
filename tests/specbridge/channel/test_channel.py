"""Both ends of the channel over a real gRPC stream: hand-offs, faults and what they leave behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from channel_peers import INSTANCE, KEY, ChannelDraft, ChannelTarget, fill, leftovers, reserve_within, until

from protos import common_pb2, target_pb2, target_pb2_grpc
from specbridge.channel import consumer, segment, shared_memory, wire
from specbridge.channel.base import ChannelLayout, ReceivedChunk
from specbridge.errors import InvalidRequest

TRANSPORTS = ["shared_memory", "inline"]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    before = set(shared_memory.FOLDER.glob("specbridge-*"))
    yield
    assert not leftovers(before)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_rows_arrive_bit_for_bit(address: str, transport: str, dtype: str) -> None:
    layout = ChannelLayout(10, dtype)
    async with (
        ChannelTarget(address, layout=layout, slots=64) as target,
        ChannelDraft(address, transports=[transport]) as draft,
    ):
        info = await draft.until_attached()
        assert (info.transport, info.reason, info.epoch) == (transport, "first choice", INSTANCE)
        assert info.layout == layout and info.slots == 64
        sent, position = [], 0
        for i, count in enumerate([1, 7, 64, 3]):
            await until(lambda: target.channel.ring_used == 0)
            sent.append(fill(target, count, first=position, seed=i))
            position += count
        await until(lambda: len(draft.chunks) == 4)
        assert draft.data == sent
        chunk = draft.chunks[1]
        assert (chunk.session, chunk.first_position, chunk.count, chunk.anchor) == (KEY, 1, 7, 8)
        assert chunk.tokens == tuple(range(1, 8)) and str(chunk.rows.dtype) == f"torch.{dtype}"
        await until(lambda: target.channel.ring_used == 0)
        moved = target.channel.stats.snapshot()
        assert moved.bytes_by_transport == {transport: 75 * layout.row_bytes}
        assert (moved.chunks, moved.rows, moved.acked) == (4, 75, 4)
        assert draft.client.stats.snapshot().bytes_by_transport == moved.bytes_by_transport


async def test_the_engine_hears_of_everything(address: str) -> None:
    async with ChannelTarget(address) as target:
        async with ChannelDraft(address, target_layer_ids=(2, 5), normed_last_layer=False) as draft:
            await draft.until_attached()
            assert draft.client.recapture(KEY, 11, "gap")
            await until(lambda: len(target.events) == 3)
        await until(lambda: len(target.events) == 4)
    why = "cuda_ipc: the target is not on a GPU"
    assert target.events == [
        ("attach", ((2, 5), False)),
        ("attached", ("shared_memory", why)),
        ("recapture", (KEY, 11, "gap")),
        ("detached", "the draft went away"),
    ]
    assert target.channel.stats.snapshot().attaches == {("shared_memory", why): 1}
    assert draft.detached == ["the draft is shutting down"]
    assert not draft.client.recapture(KEY, 11, "gap")


async def test_unused_slots_go_back(address: str) -> None:
    async with ChannelTarget(address, slots=16) as target, ChannelDraft(address, hold=True) as draft:
        await draft.until_attached()
        assert fill(target, 3, reserve=8) is not None
        assert target.channel.ring_used == 3
        reservation = target.channel.reserve(13)
        assert reservation is not None and target.channel.ring_used == 16
        target.channel.cancel(reservation)
        assert target.channel.ring_used == 3
        empty = target.channel.reserve(4)
        assert empty is not None
        assert target.channel.publish(empty, session=KEY, first_position=3, count=0, tokens=[], anchor=None)
        assert target.channel.ring_used == 3
        wrong = target.channel.reserve(2)
        assert wrong is not None
        with pytest.raises(ValueError, match="1 tokens for 2 rows"):
            target.channel.publish(wrong, session=KEY, first_position=3, count=2, tokens=[1], anchor=None)


async def test_a_full_ring_gives_nothing_and_only_prefill_waits(address: str) -> None:
    async with ChannelTarget(address, slots=8) as target, ChannelDraft(address, hold=True) as draft:
        await draft.until_attached()
        assert fill(target, 8) is not None
        assert target.channel.reserve(1) is None
        assert target.channel.reserve(9) is None
        assert target.channel.stats.snapshot().reservation_failures == 2
        await until(lambda: len(draft.chunks) == 1)
        start = time.monotonic()
        assert await asyncio.to_thread(reserve_within, target.channel, 4, 0.05) is None
        assert time.monotonic() - start >= 0.05
        waiting = asyncio.create_task(asyncio.to_thread(reserve_within, target.channel, 4, 20.0))
        await asyncio.sleep(0.02)
        draft.client.ack([draft.chunks[0].chunk_id])
        assert await waiting is not None


async def test_a_slow_consumer_is_paced_not_lost(address: str) -> None:
    async with ChannelTarget(address, slots=8) as target, ChannelDraft(address, hold=True) as draft:
        await draft.until_attached()
        sent, refused, position = [], 0, 0
        while len(sent) < 12:
            data = fill(target, 4, first=position, seed=len(sent))
            if data is None:
                refused += 1
                await asyncio.sleep(0.01)
                for chunk in draft.chunks:  # now and then it acknowledges all it has read
                    draft.client.ack([chunk.chunk_id])
                await until(lambda: target.channel.ring_used == 0)
            else:
                sent.append(data)
                position += 4
        await until(lambda: len(draft.chunks) == 12)
        assert refused >= 5 and draft.data == sent
        assert [chunk.first_position for chunk in draft.chunks] == list(range(0, 48, 4))


async def test_a_reused_slot_shows_as_stale(address: str) -> None:
    async with ChannelTarget(address, slots=8) as target, ChannelDraft(address, hold=True) as draft:
        await draft.until_attached()
        fill(target, 4)
        fill(target, 4, first=4)
        await until(lambda: len(draft.chunks) == 2)
        first, second = draft.chunks
        assert first.valid() and second.valid()
        draft.client.ack([first.chunk_id])
        await until(lambda: target.channel.ring_used == 4)
        assert first.valid()  # free, and not overwritten yet
        reservation = target.channel.reserve(2)
        assert reservation is not None
        assert not first.valid() and second.valid()


async def test_inline_rows_never_go_stale(address: str) -> None:
    async with (
        ChannelTarget(address, slots=4) as target,
        ChannelDraft(address, transports=["inline"]) as draft,
    ):
        await draft.until_attached()
        sent = fill(target, 4)
        await until(lambda: target.channel.ring_used == 0 and len(draft.chunks) == 1)
        fill(target, 4, seed=5)
        await until(lambda: len(draft.chunks) == 2)
        assert draft.chunks[0].valid() and draft.chunks[0].rows.numpy().tobytes() == sent


async def test_acks_of_nothing_are_counted_and_ignored(address: str) -> None:
    async with ChannelTarget(address, slots=8) as target, ChannelDraft(address, hold=True) as draft:
        await draft.until_attached()
        fill(target, 4)
        await until(lambda: len(draft.chunks) == 1)
        real = draft.chunks[0].chunk_id
        for other in (real + 1, 5):
            draft.client._held[other] = replace(draft.chunks[0], chunk_id=other)
        draft.client.ack([5, real, real, real + 1, 77])
        await until(lambda: target.channel.ring_used == 0)
        await until(lambda: target.channel.stats.snapshot().unknown_acks == 2)


async def test_an_ack_of_an_earlier_attachment_frees_nothing(address: str) -> None:
    async with ChannelTarget(address, slots=8) as target:
        async with ChannelDraft(address, hold=True) as old:
            await old.until_attached()
            fill(target, 4)
            await until(lambda: len(old.chunks) == 1)
        await until(lambda: not target.channel.attached)
        async with ChannelDraft(address, hold=True) as new:
            await new.until_attached()
            fill(target, 8)
            await until(lambda: len(new.chunks) == 1)
            new.client._held[old.chunks[0].chunk_id] = old.chunks[0]
            new.client.ack([old.chunks[0].chunk_id])
            await until(lambda: target.channel.stats.snapshot().unknown_acks == 1)
            assert target.channel.ring_used == 8
            assert old.chunks[0].valid()  # the old memory is nobody's to write


async def test_a_restarted_target_is_attached_again(address: str) -> None:
    async with ChannelDraft(address) as draft:
        async with ChannelTarget(address) as target:
            await draft.until_attached()
            fill(target, 2)
            await until(lambda: len(draft.chunks) == 1)
        await until(lambda: len(draft.detached) == 1)
        assert not draft.client.attached
        async with ChannelTarget(address, layout=ChannelLayout(6, "bfloat16")) as target:
            info = await draft.until_attached(times=2)
            assert info.layout == ChannelLayout(6, "bfloat16")
            sent = fill(target, 3)
            await until(lambda: len(draft.chunks) == 2)
            assert draft.data[1] == sent


async def test_a_newcomer_waits_while_the_draft_lives_and_follows_it(address: str) -> None:
    """It must not even reach the engine: other taps would make the living draft's rows the wrong ones."""
    async with ChannelTarget(address, slots=8) as target, ChannelDraft(address) as old:
        await old.until_attached()
        async with ChannelDraft(address, target_layer_ids=(0,)) as new:
            await until(lambda: "--take-over" in new.client.reason)
            sent = fill(target, 8)
            await until(lambda: len(old.chunks) == 1)
            assert old.data == [sent] and not old.detached and not new.attached
            assert [value for name, value in target.events if name == "attach"] == [((1, 3), True)]
            assert target.channel.stats.snapshot().refused >= 1
            await old.client.close()
            await new.until_attached()


async def test_the_same_process_takes_its_own_place_back(address: str) -> None:
    """Its old stream is dead, though the target can't tell yet."""
    instance = b"draft-instance-1"
    async with (
        ChannelTarget(address, slots=8) as target,
        ChannelDraft(address, hold=True, instance=instance, superseded_backoff_s=60.0) as old,
    ):
        await old.until_attached()
        async with ChannelDraft(address, instance=instance) as new:
            await new.until_attached()
            await until(lambda: len(old.detached) == 1)
        assert target.channel.stats.snapshot().refused == 0


async def test_a_draft_that_takes_over_does_and_the_loser_stays_away(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8) as target,
        ChannelDraft(address, hold=True, superseded_backoff_s=60.0) as old,
    ):
        await old.until_attached()
        reservation = target.channel.reserve(4)
        assert reservation is not None
        async with ChannelDraft(address, take_over=True) as new:
            await new.until_attached()
            await until(lambda: old.detached == ["superseded by another draft"])
            # The engine was in the middle of a chunk for the old one: nobody gets it, nothing breaks.
            target.channel.rows(reservation).fill_(1.0)
            sent = target.channel.publish(
                reservation, session=KEY, first_position=0, count=4, tokens=[1, 2, 3, 4], anchor=5
            )
            assert not sent and target.channel.stats.snapshot().stale_publishes == 1
            assert target.channel.ring_used == 0
            assert fill(target, 8) is not None
            await until(lambda: len(new.chunks) == 1)
            await asyncio.sleep(0.3)
            assert len(old.attached) == 1 and not old.chunks
        events = [event for event in target.events if event[0] != "attach"]
        assert [name for name, _ in events][:3] == ["attached", "detached", "attached"]
        assert events[1][1] == "superseded by another draft"


async def test_a_silent_consumer_loses_its_lease(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8, lease_s=0.4) as target,
        # It holds chunks and, with its own idea of the lease, sends no sign of life in time.
        ChannelDraft(address, hold=True, lease_s=60.0) as draft,
    ):
        await draft.until_attached()
        await asyncio.sleep(0.6)
        assert target.channel.attached  # idle is not silent
        fill(target, 2)
        await until(lambda: len(draft.detached) == 1)
        assert "no sign of life" in draft.detached[0]
        snapshot = target.channel.stats.snapshot()
        assert snapshot.lease_timeouts == 1 and snapshot.detaches == {"lease": 1}
        await draft.until_attached(times=2)  # it was alive after all
        assert target.channel.ring_used == 0


async def test_a_consumer_that_holds_chunks_stays_while_it_lives(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8, lease_s=0.4) as target,
        ChannelDraft(address, hold=True, lease_s=0.4) as draft,
    ):
        await draft.until_attached()
        fill(target, 2)
        await asyncio.sleep(1.2)
        assert target.channel.attached and target.channel.ring_used == 2


async def test_a_stuck_consumer_with_a_full_ring_is_detached(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8, lease_s=0.4) as target,
        ChannelDraft(address, hold=True, lease_s=0.4) as draft,
    ):
        await draft.until_attached()
        fill(target, 8)
        assert target.channel.reserve(1) is None
        await until(lambda: len(draft.detached) == 1)
        assert "acknowledged nothing" in draft.detached[0]


async def test_a_ring_that_was_full_once_is_forgiven(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8, lease_s=0.4) as target,
        ChannelDraft(address, hold=True, lease_s=0.4) as draft,
    ):
        await draft.until_attached()
        fill(target, 4)
        fill(target, 4, first=4)
        assert target.channel.reserve(1) is None
        await until(lambda: len(draft.chunks) == 2)
        draft.client.ack([draft.chunks[0].chunk_id])
        await asyncio.sleep(1.0)  # it holds the other one, and nobody asks for slots
        assert target.channel.attached


async def test_a_failed_probe_falls_back_and_says_why(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(offer: Any) -> Any:
        raise FileNotFoundError(f"no such file: {offer.location}")

    monkeypatch.setattr(shared_memory.SharedRingView, "__init__", lambda self, offer: broken(offer))
    async with ChannelTarget(address) as target, ChannelDraft(address) as draft:
        info = await draft.until_attached()
        assert info.transport == "inline"
        assert "cuda_ipc: the target is not on a GPU" in info.reason
        assert "shared_memory: the draft can't use it: no such file" in info.reason
        assert ("inline", info.reason) in target.channel.stats.snapshot().attaches
        sent = fill(target, 2)
        await until(lambda: draft.data == [sent])


async def test_other_bytes_at_the_same_name_are_not_accepted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another container may have a file of that name: only the random bytes prove that it is ours."""
    honest = shared_memory.SharedRingView.__init__

    def misled(self: Any, offer: Any) -> None:
        honest(self, offer)
        self.nonce = bytes(len(self.nonce))

    monkeypatch.setattr(shared_memory.SharedRingView, "__init__", misled)
    async with ChannelTarget(address), ChannelDraft(address) as draft:
        info = await draft.until_attached()
        assert info.transport == "inline" and "other bytes than the target wrote" in info.reason


async def test_a_full_dev_shm_falls_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    async with ChannelTarget(address), ChannelDraft(address) as draft:
        info = await draft.until_attached()
        assert info.transport == "inline" and "No space left on device" in info.reason


async def test_another_host_gets_inline(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbridge.channel import consumer
    from specbridge.channel.base import Identity

    monkeypatch.setattr(
        consumer, "own_identity", lambda instance, device: Identity("other boot", "", 1, "cpu", b"")
    )
    async with ChannelTarget(address), ChannelDraft(address) as draft:
        info = await draft.until_attached()
        assert info.transport == "inline" and "shared_memory: the draft runs on another host" in info.reason


async def test_a_refusal_carries_the_engines_words(address: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(layer_ids: tuple[int, ...], normed: bool) -> ChannelLayout:
        raise InvalidRequest(f"target_layer_ids {list(layer_ids)} are outside [0, 2)")

    async with ChannelTarget(address, on_attach=refuse) as target, ChannelDraft(address) as draft:
        await until(lambda: "outside [0, 2)" in draft.client.reason)
        await asyncio.sleep(0.5)  # it tries again, and says so once
    assert not draft.attached and not draft.detached
    assert target.channel.stats.snapshot().refused >= 2
    said = [record for record in caplog.records if "can't attach" in record.getMessage()]
    assert len([record for record in said if "outside [0, 2)" in record.getMessage()]) == 1


async def test_a_target_that_is_still_starting_is_no_warning(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specbridge.channel.consumer")
    monkeypatch.setattr(consumer, "PATIENCE_S", 0.5)

    def said() -> list[int]:
        return [r.levelno for r in caplog.records if "can't attach" in r.getMessage()]

    async with ChannelDraft(address):
        await until(said)
        assert set(said()) == {logging.INFO}
        await until(lambda: logging.WARNING in said())
        assert said().count(logging.WARNING) == 1


async def test_no_common_transport_is_refused_with_reasons(address: str) -> None:
    async with (
        ChannelTarget(address),
        ChannelDraft(address, transports=["cuda_ipc", "carrier_pigeon"]) as draft,
    ):
        await until(lambda: "no transport works" in draft.client.reason)
        assert "carrier_pigeon: unknown here" in draft.client.reason
        assert "cuda_ipc: the target is not on a GPU" in draft.client.reason


async def test_rows_flow_only_once_the_engine_is_ready(address: str) -> None:
    ready = asyncio.Event()
    async with ChannelTarget(address) as target, ChannelDraft(address) as draft:
        target.channel._on_attached = lambda transport, reason: ready.wait()  # type: ignore[assignment]
        await until(lambda: bool(target.events))
        await asyncio.sleep(0.1)
        assert not target.channel.attached and target.channel.reserve(1) is None and not draft.attached
        ready.set()
        await draft.until_attached()
        assert target.channel.attached


async def test_the_targets_end_is_told(address: str) -> None:
    async with ChannelTarget(address) as target, ChannelDraft(address) as draft:
        await draft.until_attached()
        target.channel.close()
        await until(lambda: len(draft.detached) == 1)
        assert draft.detached == ["the target is shutting down"]


async def test_five_thousand_hand_offs_from_a_thread_leave_nothing(address: str) -> None:
    async with ChannelTarget(address, slots=64) as target, ChannelDraft(address) as draft:
        await draft.until_attached()
        received: list[tuple[int, int, bool]] = []

        def take(chunk: ReceivedChunk) -> None:
            # Every element of the chunk carries its number, so a slot written too early shows.
            same = bool((chunk.rows == chunk.first_position).all().item())
            received.append((chunk.first_position, chunk.count, same and chunk.valid()))
            draft.client.ack([chunk.chunk_id])

        draft.client._on_chunk = take  # type: ignore[assignment]

        def engine() -> None:
            for i in range(5000):
                reservation = reserve_within(target.channel, 9, 20.0)
                assert reservation is not None
                count = 1 + i % 9
                target.channel.rows(reservation)[:count].fill_(i)
                target.channel.publish(
                    reservation, session=KEY, first_position=i, count=count, tokens=[0] * count, anchor=None
                )

        await asyncio.to_thread(engine)
        await until(lambda: len(received) == 5000 and target.channel.ring_used == 0)
        assert received == [(i, 1 + i % 9, True) for i in range(5000)]
        current = target.channel._current
        assert current is not None and current.outstanding == 0 and current.ring.live == 0
        assert current.ring._starts == [0] and current.ring._ends == [64]
        assert draft.client.held == 0


@pytest.mark.parametrize("first", ["ack", "nothing"])
async def test_a_peer_that_breaks_the_handshake_is_refused(address: str, first: str) -> None:
    async with (
        ChannelTarget(address, handshake_s=0.2) as target,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = target_pb2_grpc.TargetStub(channel).HiddenStates()
        if first == "ack":
            await call.write(target_pb2.ChannelRequest(ack=target_pb2.Ack(chunk_ids=[1])))
        reply = await call.read()
        assert reply.WhichOneof("kind") == "refused"
        assert ("no attach within" if first == "nothing" else "needs 'attach'") in reply.refused.error.message
        assert not target.channel.attached


async def test_a_peer_that_never_answers_the_offer_leaves_no_memory(address: str) -> None:
    async with (
        ChannelTarget(address, handshake_s=0.2) as target,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = target_pb2_grpc.TargetStub(channel).HiddenStates()
        identity = target_pb2.PeerIdentity(
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        )
        attach = target_pb2.Attach(identity=identity, transports=["shared_memory"])
        await call.write(target_pb2.ChannelRequest(attach=attach))
        offer = (await call.read()).offer
        assert offer.transport == "shared_memory" and Path(offer.location).exists()
        assert (await call.read()).WhichOneof("kind") == "refused"
        assert not Path(offer.location).exists() and not target.channel.attached


async def _half_attached(channel: grpc.aio.Channel, layer_ids: tuple[int, ...], **fields: Any) -> Any:
    """A HiddenStates call that has been made an inline offer and has not answered it."""
    call = target_pb2_grpc.TargetStub(channel).HiddenStates()
    attach = target_pb2.Attach(target_layer_ids=layer_ids, **{"transports": ["inline"], **fields})
    await call.write(target_pb2.ChannelRequest(attach=attach))
    assert (await call.read()).WhichOneof("kind") == "offer"
    return call


async def test_of_two_handshakes_at_once_only_the_taps_of_the_later_are_attached(address: str) -> None:
    probe = target_pb2.ChannelRequest(probe=target_pb2.Probe(opened=True))
    async with ChannelTarget(address) as target, grpc.aio.insecure_channel(address) as channel:
        first = await _half_attached(channel, (1, 3))
        second = await _half_attached(channel, (2, 4))
        await first.write(probe)  # the engine captures layers 2 and 4 by now
        error = (await first.read()).refused.error
        assert "another draft began to attach" in error.message
        assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE and not target.channel.attached
        await second.write(probe)
        assert (await second.read()).WhichOneof("kind") == "attached"
        assert target.channel.attached
        second.cancel()
        await until(lambda: not target.channel.attached)


async def test_what_a_peer_says_is_kept_short(address: str, caplog: pytest.LogCaptureFixture) -> None:
    identity = target_pb2.PeerIdentity(boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    wanted = [f"carrier-pigeon-{i}" for i in range(50_000)] + ["shared_memory"] * 50
    async with ChannelTarget(address), grpc.aio.insecure_channel(address) as channel:
        call = await _half_attached(channel, (1,), identity=identity, transports=wanted)
        refusal = target_pb2.Probe(opened=False, reason="no " * 100_000)
        await call.write(target_pb2.ChannelRequest(probe=refusal))
        error = (await call.read()).refused.error
    assert "carrier-pigeon-0: unknown here" in error.message and "no no" in error.message
    assert len(error.message) < 1000 and len(caplog.text) < 10_000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", 0, "0 rows"),
        ("first_slot", 5, "slot 5 on, in a ring of 8"),
        ("tokens", [1], "1 tokens for 4 rows"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_nonsense_descriptor_ends_the_attachment(
    address: str, transport: str, field: str, value: Any, message: str
) -> None:
    async with (
        ChannelTarget(address, slots=8) as target,
        ChannelDraft(address, transports=[transport], hold=True) as draft,
    ):
        await draft.until_attached()
        changed = {"first_slot": 0, "count": 4, "tokens": [1, 2, 3, 4], field: value}
        chunk = target_pb2.Chunk(chunk_id=1, data=bytes(4 * 48), **changed)
        current = target.channel._current
        assert current is not None
        current.outbox.put(target_pb2.ChannelReply(chunks=target_pb2.Chunks(chunks=[chunk])))
        await until(lambda: len(draft.detached) == 1)
        assert message in draft.detached[0] and not draft.chunks
        await draft.until_attached(times=2)


async def test_inline_rows_of_another_length_end_the_attachment(address: str) -> None:
    async with (
        ChannelTarget(address, slots=8) as target,
        ChannelDraft(address, transports=["inline"]) as draft,
    ):
        await draft.until_attached()
        current = target.channel._current
        assert current is not None
        chunk = target_pb2.Chunk(chunk_id=1, count=2, tokens=[1, 2], data=bytes(95))
        current.outbox.put(target_pb2.ChannelReply(chunks=target_pb2.Chunks(chunks=[chunk])))
        await until(lambda: len(draft.detached) == 1)
        assert "95 bytes of rows, 2 rows take 96" in draft.detached[0]


async def test_a_location_outside_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    from specbridge.channel.base import MemoryOffer
    from specbridge.channel.handshake import try_offer

    other = tmp_path / "specbridge-secret"
    other.write_bytes(bytes(8192))
    offer = MemoryOffer(
        "shared_memory",
        4,
        ChannelLayout(2, "float32"),
        location=str(other),
        data_offset=4096,
        nonce_length=32,
    )
    opened = try_offer(offer)
    assert opened.memory is None and "is not a segment" in opened.probe.reason


def test_descriptors_that_wait_together_travel_together_and_in_order() -> None:
    def chunk(chunk_id: int, data: bytes = b"") -> wire.ChunkFields:
        return {"chunk_id": chunk_id, "data": data}

    attached = target_pb2.ChannelReply(attached=target_pb2.Attached(slots=8))
    sent = list(wire.messages([attached, chunk(1), chunk(2), chunk(3, b"rows"), chunk(4), chunk(5)]))
    assert [[chunk.chunk_id for chunk in message.chunks.chunks] for message in sent] == [
        [],
        [1, 2],
        [3],
        [4, 5],
    ]
    assert sent[0].HasField("attached")
