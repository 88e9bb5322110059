"""The channel between two real processes, and what is left when one of them is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import channel_peers
import pytest
from channel_peers import KEY, ChannelDraft, ChannelTarget, fill, leftovers, reserve_within, until

from specbridge.channel import segment, shared_memory
from specbridge.channel.base import ChannelLayout

ROOT = Path(__file__).parents[3]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def spawn(*args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, channel_peers.__file__, *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("transport", "dtype"), [("shared_memory", "bfloat16"), ("inline", "float32")])
async def test_bits_are_equal_across_processes(
    address: str, tmp_path: Path, children: list[subprocess.Popen[str]], transport: str, dtype: str
) -> None:
    out = tmp_path / "chunks"
    async with ChannelTarget(address, layout=ChannelLayout(33, dtype), slots=64) as target:
        children.append(spawn("consumer", address, transport, str(out)))
        await until(lambda: target.channel.attached, timeout=60.0)
        sent, position = [], 0
        for i in range(40):  # many times the ring, so that slots are reused
            count = 1 + i % 13
            while (data := fill(target, count, first=position, reserve=13, seed=i)) is None:
                await asyncio.sleep(0.002)
            sent.append(data)
            position += count
        await until(lambda: len(lines(out)) == 40)
        await until(lambda: target.channel.ring_used == 0)
    received = [json.loads(line) for line in lines(out)]
    assert [bytes.fromhex(r["data"]) for r in received] == sent
    assert {r["transport"] for r in received} == {transport}
    assert {r["dtype"] for r in received} == {f"torch.{dtype}"}
    position = 0
    for r in received:
        count = r["shape"][0]
        assert r["first"] == position and r["shape"] == [count, 33]
        assert r["tokens"] == list(range(position, position + count)) and r["anchor"] == position + count
        assert r["session"] == [KEY.gateway.hex(), KEY.number, KEY.incarnation]
        position += count


async def test_a_killed_consumer_frees_the_ring_and_leaves_no_file(
    address: str, tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    before = set(shared_memory.FOLDER.glob("specbridge-*"))
    out = tmp_path / "chunks"
    async with ChannelTarget(address, slots=16, lease_s=60.0) as target:
        children.append(spawn("consumer", address, "shared_memory", str(out), "hold"))
        await until(lambda: target.channel.attached, timeout=60.0)
        assert not leftovers(before)  # unlinked as soon as both hold it
        fill(target, 16)
        await until(lambda: len(lines(out)) == 1)
        assert target.channel.reserve(1) is None
        waiting = asyncio.create_task(asyncio.to_thread(reserve_within, target.channel, 4, 30.0))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        children[0].send_signal(signal.SIGKILL)
        assert await waiting is None  # the engine's thread is let go
        await until(lambda: not target.channel.attached)
        assert time.monotonic() - start < 10.0  # by the broken stream, long before the lease
        assert target.events[-1] == ("detached", "the draft went away")
        # The next one starts with an empty ring.
        async with ChannelDraft(address) as draft:
            await draft.until_attached()
            sent = fill(target, 16)
            await until(lambda: draft.data == [sent])
    assert not leftovers(before)


async def test_a_producer_killed_in_the_handshake_leaves_a_file_for_the_next_to_remove(
    address: str, tmp_path: Path, children: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import grpc

    from protos import target_pb2, target_pb2_grpc

    child = spawn("producer", address)
    children.append(child)
    assert child.stdout is not None
    assert await asyncio.to_thread(child.stdout.readline) == "serving\n"
    async with grpc.aio.insecure_channel(address) as channel:
        call = target_pb2_grpc.TargetStub(channel).HiddenStates()
        identity = target_pb2.PeerIdentity(
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        )
        attach = target_pb2.Attach(identity=identity, transports=["shared_memory"])
        await call.write(target_pb2.ChannelRequest(attach=attach))
        location = Path((await call.read()).offer.location)
        assert location.exists()
        layout = ChannelLayout(2, "float32")
        monkeypatch.setattr(segment, "_ORPHAN_AGE_S", 0.0)
        shared_memory.SharedRing(4, layout, "cpu").close()
        assert location.exists()  # its producer lives and holds the lock
        child.send_signal(signal.SIGKILL)
        await asyncio.to_thread(child.wait)
        shared_memory.SharedRing(4, layout, "cpu").close()
        assert not location.exists()
        call.cancel()


async def test_a_killed_producer_is_noticed_and_leaves_no_file(
    address: str, children: list[subprocess.Popen[str]]
) -> None:
    before = set(shared_memory.FOLDER.glob("specbridge-*"))
    child = spawn("producer", address)
    children.append(child)
    async with ChannelDraft(address) as draft:
        await until(lambda: len(draft.attached) == 1, timeout=60.0)
        assert draft.attached[0].transport == "shared_memory"
        child.send_signal(signal.SIGKILL)
        await until(lambda: len(draft.detached) == 1)
        assert not leftovers(before)
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)
        async with ChannelTarget(address) as target:
            await draft.until_attached(times=2)
            sent = fill(target, 2)
            await until(lambda: draft.data == [sent])
