"""Outbox: from any thread to one task, in order, with few wake-ups; and what the channel gathers in one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from channel_peers import ChannelDraft, ChannelTarget, fill, until

from specbridge.channel import consumer
from specbridge.channel.outbox import Outbox


async def test_items_of_another_thread_come_in_order_and_none_is_lost() -> None:
    box: Outbox[int] = Outbox(asyncio.get_running_loop())

    def put() -> None:
        for i in range(20_000):
            box.put(i)
        box.close()

    thread = threading.Thread(target=put)
    thread.start()
    taken: list[int] = []
    while (batch := await box.take(gather_s=0.001)) is not None:
        taken += batch
    thread.join()
    assert taken == list(range(20_000))
    box.put(1)
    assert await box.take() is None


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_taker_ends_though_somebody_is_in_a_hurry_just_then(turns: int) -> None:
    """asyncio.wait_for of Python 3.11 keeps a cancellation for itself that meets its own end."""
    box: Outbox[int] = Outbox(asyncio.get_running_loop())

    async def take() -> None:
        while await box.take(gather_s=60.0) is not None:
            pass

    taking = asyncio.create_task(take())
    box.put(1)
    await asyncio.sleep(0.01)
    box.hurry()
    for _ in range(turns):
        await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking], timeout=30.0)
    assert taking.cancelled()


@pytest.mark.parametrize("end", ["hurry", "close"])
async def test_what_is_gathered_leaves_together_when_somebody_is_in_a_hurry(end: str) -> None:
    box: Outbox[int] = Outbox(asyncio.get_running_loop())
    taking = asyncio.create_task(box.take(gather_s=60.0))
    for i in range(3):
        box.put(i)
        await asyncio.sleep(0.01)
        assert not taking.done()
    getattr(box, end)()
    assert await asyncio.wait_for(taking, 30) == [0, 1, 2]


async def test_gathering_comes_to_an_end_by_itself() -> None:
    box: Outbox[int] = Outbox(asyncio.get_running_loop())
    box.put(1)
    assert await asyncio.wait_for(box.take(gather_s=0.01), 10.0) == [1]


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
async def test_acknowledgements_are_gathered_until_they_are_for_an_eighth_of_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(consumer, "ACK_PAUSE_S", 60.0)
    address = f"unix:{tmp_path}/target.sock"
    async with (
        ChannelTarget(address, slots=64) as target,
        ChannelDraft(address, transports=[transport]) as draft,
    ):
        await draft.until_attached()
        for i in range(7):
            assert fill(target, 1, first=i) is not None
        await until(lambda: len(draft.chunks) == 7 and draft.client.held == 0)
        await asyncio.sleep(0.2)
        assert target.channel.ring_used == 7
        assert fill(target, 1, first=7) is not None
        await until(lambda: target.channel.ring_used == 0)
        assert target.channel.stats.snapshot().acked == 8
