"""The command line's gRPC clients, against a scripted gateway over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from specbridge import errors
from specbridge.clients import (
    Ask,
    GenerationClient,
    Message,
    Model,
    Piece,
    Summary,
    is_serving,
    wait_attached,
)
from specbridge.server import Server, typed_errors
from specbridge.watch import until_serving

FINAL = gateway_pb2.Final(
    finish_reason=common_pb2.FINISH_REASON_LENGTH,
    prompt_tokens=3,
    completion_tokens=2,
    cached_tokens=1,
    seed=9,
    speculation=gateway_pb2.SpeculativeStats(
        mean_acceptance_length=2.5, num_rounds=4, num_draft_tokens=30, num_accepted_draft_tokens=6
    ),
)


class Gateway(gateway_pb2_grpc.GenerationServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: Exception | None = None
        self.endless = False
        self.ended = asyncio.Event()

    async def GetModel(self, request: Any, context: Any) -> Any:
        return gateway_pb2.ModelInfo(model_id="m", drafter_id="d", block_size=8, tree_budget=16)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        try:
            async with typed_errors(context):
                if self.error:
                    raise self.error
                yield gateway_pb2.GenerateReply(delta=gateway_pb2.Delta(text="Hel", token_ids=[1]))
                while self.endless:
                    yield gateway_pb2.GenerateReply(delta=gateway_pb2.Delta(text="x", token_ids=[2]))
                    await asyncio.sleep(0.01)
                yield gateway_pb2.GenerateReply(delta=gateway_pb2.Delta(text="lo", token_ids=[2]))
                yield gateway_pb2.GenerateReply(final=FINAL)
        finally:
            self.ended.set()


class Draft(draft_pb2_grpc.DraftServicer):
    attached = False

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return draft_pb2.DraftInfo(attached=self.attached)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, gateway: Gateway, draft: Draft | None = None) -> AsyncIterator[Server]:
    def add(server: Any) -> None:
        gateway_pb2_grpc.add_GenerationServicer_to_server(gateway, server)
        if draft:
            draft_pb2_grpc.add_DraftServicer_to_server(draft, server)

    server = Server(f"unix:{tmp_path}/g.sock", ["specbridge.v1.Generation"], add=add)
    await server.start()
    yield server
    await server.stop(0)


async def test_an_answer_is_pieces_then_a_summary(tmp_path: Path) -> None:
    gateway = Gateway()
    async with running(tmp_path, gateway) as server, GenerationClient(server.bound) as client:
        assert await client.model() == Model("m", "d", 8, 16)
        ask = Ask(
            [Message("system", "s"), Message("user", "hi")], max_tokens=7, temperature=0.0, speculate=False
        )
        got = [part async for part in client.generate(ask)]
        await anext(client.generate(Ask([Message("user", "hi")])))
    assert got == [
        Piece("Hel", (1,)),
        Piece("lo", (2,)),
        Summary("length", 3, 2, 1, 9, 2.5, rounds=4, drafted=30, accepted=6),
    ]
    first, second = gateway.requests
    assert [(m.role, m.content) for m in first.chat.messages] == [("system", "s"), ("user", "hi")]
    assert (first.max_tokens, first.HasField("temperature"), first.no_speculation) == (7, True, True)
    assert not first.HasField("seed") and not second.HasField("temperature") and not second.no_speculation


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (errors.InvalidRequest("bad"), errors.InvalidRequest),
        (errors.Unsupported("not yet"), errors.InvalidRequest),
        (errors.CapacityError("full"), errors.CapacityError),
        (errors.Unavailable("down"), errors.Unavailable),
    ],
)
async def test_status_codes_become_typed_errors(tmp_path: Path, raised: Exception, expected: type) -> None:
    gateway = Gateway()
    gateway.error = raised
    async with running(tmp_path, gateway) as server, GenerationClient(server.bound) as client:
        with pytest.raises(expected, match=str(raised)):
            async for _ in client.generate(Ask([Message("user", "hi")])):
                pass


async def test_stopping_early_ends_the_call_at_the_gateway(tmp_path: Path) -> None:
    gateway = Gateway()
    gateway.endless = True
    async with running(tmp_path, gateway) as server, GenerationClient(server.bound) as client:
        async with contextlib.aclosing(client.generate(Ask([Message("user", "hi")]))) as parts:
            async for _ in parts:
                break
        async with asyncio.timeout(30):
            await gateway.ended.wait()


async def test_health_is_asked_until_it_serves(tmp_path: Path) -> None:
    assert not await is_serving(f"unix:{tmp_path}/nobody.sock")
    async with running(tmp_path, Gateway()) as server:
        assert not await is_serving(server.bound)
        assert await until_serving(server.bound, timeout_s=0.2) == "did not become ready within 0 s"
        waiting = asyncio.create_task(until_serving(server.bound, timeout_s=30.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await server.set_serving()
        async with asyncio.timeout(30):
            assert await waiting == ""


async def test_waiting_for_a_draft_to_attach_is_bounded(tmp_path: Path) -> None:
    draft = Draft()
    async with running(tmp_path, Gateway(), draft) as server:
        assert not await wait_attached(server.bound, limit_s=0.3)
        waiting = asyncio.create_task(wait_attached(server.bound, limit_s=30.0))
        await asyncio.sleep(0.05)
        draft.attached = True
        async with asyncio.timeout(30):
            assert await waiting
    assert not await wait_attached(f"unix:{tmp_path}/nobody.sock", limit_s=0.2)
