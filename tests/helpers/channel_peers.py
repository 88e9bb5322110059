"""Both ends of a hidden-state channel for tests: in this process, or as a process of their own.

As a script: `channel_peers.py consumer ADDRESS TRANSPORT FILE [hold] [cuda:N]` attaches, writes one JSON line
for each chunk to FILE and acknowledges it, unless told to hold. `channel_peers.py producer ADDRESS` serves,
and prints a line once it has offered memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from protos import target_pb2, target_pb2_grpc
from specbridge.channel import shared_memory
from specbridge.channel.attachment import Reservation
from specbridge.channel.base import AttachedInfo, ChannelLayout, ReceivedChunk
from specbridge.channel.consumer import HiddenStateClient
from specbridge.channel.producer import HiddenStateServer
from specbridge.rounds import SessionKey
from specbridge.server import server_options

INSTANCE = b"target-instance!"
KEY = SessionKey(b"gateway-instance", 7, 1)


class ChannelTarget(target_pb2_grpc.TargetServicer):
    """A gRPC server with nothing but the channel. `events` collects what the engine would be told."""

    def __init__(self, address: str, *, layout: ChannelLayout | None = None, **options: Any) -> None:
        self.address = address
        self.layout = layout or ChannelLayout(12, "float32")
        self.events: list[tuple[str, Any]] = []
        self.channel = HiddenStateServer(
            INSTANCE,
            on_attach=options.pop("on_attach", self._on_attach),
            on_attached=lambda transport, reason: self.events.append(("attached", (transport, reason))),
            on_detached=lambda reason: self.events.append(("detached", reason)),
            on_recapture=lambda *args: self.events.append(("recapture", args)),
            **options,
        )
        self._server: grpc.aio.Server | None = None

    def _on_attach(self, layer_ids: tuple[int, ...], normed_last_layer: bool) -> ChannelLayout:
        self.events.append(("attach", (layer_ids, normed_last_layer)))
        return self.layout

    async def HiddenStates(
        self, request_iterator: AsyncIterator[target_pb2.ChannelRequest], context: Any
    ) -> AsyncIterator[target_pb2.ChannelReply]:
        async for reply in self.channel.serve(request_iterator, context):
            yield reply

    async def __aenter__(self) -> ChannelTarget:
        self._server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        await until(condition, timeout)


class ChannelDraft:
    """A client that records. `hold`: leave chunks unacknowledged."""

    def __init__(self, address: str, *, hold: bool = False, **options: Any) -> None:
        self.chunks: list[ReceivedChunk] = []
        self.data: list[bytes] = []
        self.attached: list[AttachedInfo] = []
        self.detached: list[str] = []
        self.hold = hold
        self.client = HiddenStateClient(
            address,
            target_layer_ids=options.pop("target_layer_ids", (1, 3)),
            normed_last_layer=options.pop("normed_last_layer", True),
            on_attached=self.attached.append,
            on_chunk=self._on_chunk,
            on_detached=self.detached.append,
            **options,
        )

    def _on_chunk(self, chunk: ReceivedChunk) -> None:
        import torch

        self.chunks.append(chunk)
        self.data.append(chunk.rows.cpu().view(torch.uint8).numpy().tobytes())
        if not self.hold:
            assert chunk.valid()
            self.client.ack([chunk.chunk_id])

    async def __aenter__(self) -> ChannelDraft:
        self.client.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def until_attached(self, times: int = 1) -> AttachedInfo:
        await until(lambda: len(self.attached) >= times)
        return self.attached[-1]


def reserve_within(channel: HiddenStateServer, rows: int, seconds: float) -> Reservation | None:
    """As an engine's thread that polls: until there is room, the draft is gone or the time is over."""
    end = time.monotonic() + seconds
    while True:
        reservation = channel.reserve(rows)
        if reservation is not None or not channel.attached or time.monotonic() >= end:
            return reservation
        time.sleep(0.001)


async def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for a condition, which must come true."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the awaited state was not reached"
        await asyncio.sleep(0.005)


def fill(
    target: ChannelTarget, count: int, *, first: int = 0, reserve: int | None = None, seed: int = 0
) -> bytes | None:
    """What the engine's thread does for one chunk; returns the bytes of its rows, None without slots."""
    import torch

    reservation = target.channel.reserve(reserve or count)
    if reservation is None:
        return None
    rows = target.channel.rows(reservation)
    values = torch.randn(count, rows.shape[1], generator=torch.Generator().manual_seed(seed))
    rows[:count].copy_(values)
    data = rows[:count].cpu().view(torch.uint8).numpy().tobytes()
    assert target.channel.publish(
        reservation,
        session=KEY,
        first_position=first,
        count=count,
        tokens=list(range(first, first + count)),
        anchor=first + count,
    )
    return data


async def consume(address: str, transport: str, path: str, *, hold: bool, device: str) -> None:
    async with ChannelDraft(address, transports=[transport], hold=hold, device=device) as draft:
        with Path(path).open("a") as out:
            for seen in itertools.count():
                await until(lambda seen=seen: len(draft.chunks) > seen, timeout=60.0)
                chunk = draft.chunks[seen]
                out.write(
                    json.dumps(
                        {
                            "first": chunk.first_position,
                            "tokens": chunk.tokens,
                            "anchor": chunk.anchor,
                            "session": [
                                chunk.session.gateway.hex(),
                                chunk.session.number,
                                chunk.session.incarnation,
                            ],
                            "dtype": str(chunk.rows.dtype),
                            "shape": list(chunk.rows.shape),
                            "data": draft.data[seen].hex(),
                            "transport": draft.attached[-1].transport,
                        }
                    )
                    + "\n"
                )
                out.flush()


async def produce(address: str) -> None:
    async with ChannelTarget(address) as target:
        print("serving", flush=True)
        await target.until(lambda: bool(target.events), timeout=60.0)
        print("offered", flush=True)
        await asyncio.sleep(60.0)


if __name__ == "__main__":
    if sys.argv[1] == "consumer":
        gpus = [word for word in sys.argv[5:] if word.startswith("cuda")]
        asyncio.run(consume(*sys.argv[2:5], hold="hold" in sys.argv[5:], device=[*gpus, "cpu"][0]))
    else:
        asyncio.run(produce(sys.argv[2]))


def leftovers(before: set[Path], patience_s: float = 15.0) -> list[Path]:
    """Ring files that came since `before` and stay. Tests beside this one attach too: theirs are there for
    the
    length of a handshake only.
    """
    left = set(shared_memory.FOLDER.glob("specbridge-*")) - before
    end = time.monotonic() + patience_s
    while any(path.exists() for path in left) and time.monotonic() < end:
        time.sleep(0.02)
    return [path for path in left if path.exists()]
