"""Garbage, faults and storms against the services of a running stack: typed answers, nobody else's text
changes, nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from rogue_peers import (
    INF,
    NAN,
    PROBE,
    ask,
    attach,
    consume,
    draft_open,
    raw,
    session,
    storm,
    target_open,
    tree,
    verify,
)
from running_stack import RunningStack, wait_for

from protos import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc, target_pb2
from protos.target_pb2_grpc import TargetStub
from specbridge.server import channel_options

pytestmark = pytest.mark.slow

STALE, INVALID = common_pb2.ERROR_CODE_STALE, common_pb2.ERROR_CODE_INVALID_ARGUMENT
BODY = {
    "model": "target",
    "prompt": "a text that nobody may change",
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
}


async def healthy_text(stack: RunningStack) -> str:
    async with httpx.AsyncClient(base_url=stack.url, timeout=240) as client:
        reply = await client.post("/v1/completions", json=BODY)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@asynccontextmanager
async def under_watch(stack: RunningStack, service: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `service` for mischief. Meanwhile healthy streams run one after the other; afterwards
    their text was what it had been before, and no session and no slot is left.
    """
    before = await healthy_text(stack)
    texts: list[str] = []
    over = False

    async def others() -> None:
        while not over:
            texts.append(await healthy_text(stack))

    running = asyncio.create_task(others())
    address = stack.grpc if service == "gateway" else stack.socket(service)
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield channel
    finally:
        over = True
        await running
    assert texts == [before] * len(texts) and texts

    def all_gone() -> bool:
        counts = [stack.total(name, f"specbridge_{name}_sessions") for name in ("target", "draft")]
        counts.append(stack.total("gateway", "specbridge_gateway_requests_running"))
        counts.append(stack.total("target", "specbridge_target_channel_ring_used"))
        return not any(counts)

    await asyncio.to_thread(wait_for, all_gone, 40, "zero sessions and slots")
    for name in ("target", "draft"):
        assert stack.total(name, f"specbridge_{name}_defects_total") == 0


async def test_draft_rounds(stack: RunningStack) -> None:
    Request, Propose = draft_pb2.DraftRequest, draft_pb2.Propose
    async with under_watch(stack, "draft") as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        wrong: list[tuple[Any, str]] = [
            (draft_open(session(gateway=b"")), "gateway id has 0 bytes"),
            (draft_open(session(gateway=b"g" * 5_000_000)), "gateway id has 5000000 bytes"),
            (draft_open(session(), ()), "tokens is empty"),
            (draft_open(session(), (1, 2**32 - 1)), "token id 4294967295"),
            (draft_open(session(), [1] * 2_000_000), "2000000 tokens"),
            (draft_open(session(), temperature=NAN), "temperature is nan"),
            (draft_open(session(), temperature=-1), "temperature is -1"),
            (draft_open(session(), top_p=INF), "top_p is inf"),
            (draft_open(session(), min_p=NAN), "min_p is nan"),
        ]
        results = await ask(stub, Request(batch_id=1, open=[item for item, _ in wrong]))
        for (_, says), result in zip(wrong, results, strict=True):
            assert result.error.code == INVALID and says in result.error.message

        key = session(incarnation=3)
        older, newer, unknown = (session(key.gateway, key.number, i) for i in (2, 4, 9))
        proposals = [
            Propose(session=key, base=0, anchor=5, max_nodes=2**32 - 1, max_depth=2**32 - 1),
            Propose(session=key, base=0, anchor=5, max_nodes=2, max_depth=2),
            Propose(session=key, base=2**32 - 1, anchor=5, max_nodes=4, max_depth=4),
            Propose(session=key, base=0, anchor=2**32 - 1, max_nodes=4, max_depth=4),
            *(Propose(session=k, anchor=5, max_nodes=4, max_depth=4) for k in (older, newer, unknown)),
        ]
        answers = await ask(
            stub,
            # The same session several times in one batch, and its older incarnations after it.
            Request(batch_id=1, open=[draft_open(key), draft_open(key), draft_open(older)]),
            Request(batch_id=2, propose=proposals),
        )
        releases = [draft_pb2.DraftRelease(session=k) for k in (older, key, key)]
        assert len(await ask(stub, Request(batch_id=3, release=releases))) == 3
        errors = [r.error for r in answers if r.HasField("error")]
        assert [e.code for e in errors].count(STALE) == 4 and [e.code for e in errors].count(INVALID) == 2
        grown = [len(r.tree.tokens) for r in answers if r.kind == draft_pb2.DRAFT_RESULT_KIND_PROPOSED]
        assert sorted(grown) == [2, 64]  # 64: the service's own cap

        # A giant batch of proposals for sessions of nobody is one answer, and leaves no lease behind.
        many = [Propose(session=session(), anchor=1) for _ in range(20_000)]
        results = await ask(stub, Request(batch_id=1, propose=many))
        assert len(results) == len(many) and {r.error.code for r in results} == {STALE}
        # More opens than there are places; all are given back by the stream's end and the lease.
        results = await ask(stub, Request(batch_id=1, open=[draft_open(session()) for _ in range(3000)]))
        refused = [r.error.code for r in results if r.HasField("error")]
        assert set(refused) == {common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED} and len(refused) > 2000

        error = await raw(channel, "Draft/Rounds", b"\xff" * 40)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "DraftRequest" in (error.details() or "")
        await storm(stub, lambda i: Request(batch_id=1, open=[draft_open(session())]), 300)


BAD_TREES = {
    "cycle": (tree([1, 2], [-1, 1], [-0.1, -0.2]), "parent 1 at node 1"),
    "forward parent": (tree([1, 2], [1, -1], [-0.1, -0.2]), "parent 1 at node 0"),
    "parent below -1": (tree([1], [-2], [-0.1]), "parent -2"),
    "order": (tree([1, 2], [-1, -1], [-0.3, -0.2]), "non-increasing"),
    "duplicate child": (tree([1, 1], [-1, -1], [-0.3, -0.3]), "repeats token 1"),
    "positive score": (tree([1], [-1], [0.5]), "score 0.5"),
    "NaN score": (tree([1], [-1], [NAN]), "score nan"),
    "uneven": (tree([1], [], [-0.3]), "differ in length"),
    "vocabulary": (tree([2**32 - 1], [-1], [-0.3]), "4294967295"),
    "too deep": (tree([1] * 50, range(-1, 49), [-0.1] * 50), "depth"),
    "too many": (tree([1] * 500_000, range(-1, 499_999), [-0.1] * 500_000), "500000 nodes"),
}


async def test_target_rounds(stack: RunningStack) -> None:
    Request, Verify = target_pb2.TargetRequest, target_pb2.Verify
    async with under_watch(stack, "target") as channel:
        stub = TargetStub(channel)
        for bad, says in BAD_TREES.values():
            [result] = await verify(stub, lambda key, kv, bad=bad: [Verify(session=key, base=kv, tree=bad)])
            assert result.error.code == INVALID and says in result.error.message
        for off in (-1, 1):
            [result] = await verify(stub, lambda key, kv, off=off: [Verify(session=key, base=kv + off)])
            assert result.error.code == STALE
        twice = await verify(stub, lambda key, kv: [Verify(session=key, base=kv)] * 2)
        assert [r.kind for r in twice] == [
            target_pb2.TARGET_RESULT_KIND_VERIFIED,
            target_pb2.TARGET_RESULT_KIND_ERROR,
        ]

        wrong: list[tuple[Any, str]] = [
            (target_open(session(gateway=b"")), "gateway id has 0 bytes"),
            (target_open(session(), [1] * 512), "512 tokens"),
            (target_open(session(), (2**32 - 1,)), "token id 4294967295"),
            (target_open(session(), prompt_length=9), "prompt_length is 9"),
            (target_open(session(), draft_prefix=9), "draft_prefix is 9"),
            (target_open(session(), want_logprobs=500), "want_logprobs is 500"),
            (target_open(session(), stop={"max_tokens": 0}), "max_tokens is 0"),
            (target_open(session(), stop={"min_tokens": 41}), "min_tokens is 41"),
            (target_open(session(), stop={"stop_token_ids": [320]}), "stop_token_ids holds token id 320"),
            (target_open(session(), stop={"stop_token_ids": [1] * 257}), "257 stop_token_ids"),
            (target_open(session(), sampling={"temperature": NAN}), "temperature is nan"),
            (target_open(session(), sampling={"top_p": NAN}), "top_p is nan"),
        ]
        results = await ask(stub, Request(batch_id=1, open=[item for item, _ in wrong]))
        for (_, says), result in zip(wrong, results, strict=True):
            assert result.error.code == INVALID and says in result.error.message

        keys = [session() for _ in range(2000)]
        results = await ask(
            stub,
            Request(batch_id=1, open=[target_open(key) for key in keys]),
            Request(batch_id=2, release=[target_pb2.Release(session=key) for key in keys]),
        )
        codes = {r.error.code for r in results if r.HasField("error")}
        assert codes <= {common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED}
        results = await ask(stub, Request(batch_id=1, verify=[Verify(session=session())] * 20_000))
        assert len(results) == 20_000 and {r.error.code for r in results} == {STALE}
        error = await raw(channel, "Target/Rounds", b"\xff" * 40)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        await storm(stub, lambda i: Request(batch_id=1, open=[target_open(session())]), 300)


async def test_two_gateways_with_the_same_session_numbers(stack: RunningStack) -> None:
    """Numbers are each gateway's own; one's releases and broken streams are nothing to the other."""
    async with under_watch(stack, "target") as channel:
        stub = TargetStub(channel)
        here, there = os.urandom(16), os.urandom(16)
        sampling = {"temperature": 1.0, "seed": 7}

        async def first(gateway: bytes, number: int, prompt: tuple[int, ...]) -> int:
            opened = target_open(session(gateway, number), prompt, sampling=sampling)
            results = await ask(stub, target_pb2.TargetRequest(batch_id=1, open=[opened]))
            [found] = [r for r in results if r.kind == target_pb2.TARGET_RESULT_KIND_FIRST]
            return int(found.tokens[0])

        alone = [await first(os.urandom(16), 1, (i, 2, 3)) for i in range(6)]
        mixed = await asyncio.gather(
            *(first(gateway, i + 1, (i, 2, 3)) for i in range(6) for gateway in (here, there))
        )
        assert mixed == [token for token in alone for _ in range(2)]


async def test_hidden_state_consumers(stack: RunningStack) -> None:
    Request = target_pb2.ChannelRequest
    async with under_watch(stack, "target") as channel:
        # The real draft is attached: nobody who only says Attach gets it out of its place.
        for bare in ({}, {"target_layer_ids": (1,)}, {"target_layer_ids": range(1_000_000)}):
            reply = await consume(channel, attach(**bare, take_over=False), "read")
            assert reply.refused.error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
        assert stack.total("draft", "specbridge_draft_channel_attached") == 1
        refusals = {
            "needs 'attach'": (Request(),),
            "not empty": (attach(target_layer_ids=()),),
            "outside [0, 4)": (attach(target_layer_ids=range(1_000_000)),),
            "unknown here": (attach(transports=["pigeon"] * 100_000),),
            "none was wanted": (attach(transports=()),),
            "other bytes": (
                attach(transports=["shared_memory"]),
                "read",
                Request(probe=target_pb2.Probe(opened=True, nonce=b"?")),
            ),
        }
        for says, script in refusals.items():
            reply = await consume(channel, *script, "read")
            assert says in reply.refused.error.message and len(reply.refused.error.message) < 1100
        hello = (attach(), "read", PROBE, "read")
        assert (await consume(channel, *hello)).WhichOneof("kind") == "attached"
        noise = (
            Request(ack=target_pb2.Ack(chunk_ids=range(50_000))),
            Request(recapture=target_pb2.Recapture(session=session(), first=2**32 - 1, cause="?" * 100_000)),
            attach(),
        )
        reply = await consume(channel, *hello, *noise, "read", "read", "read")
        assert reply is None or reply.WhichOneof("kind") in ("refused", "chunks")
        # One that takes chunks and never acknowledges them, while others come and go.
        holder = asyncio.create_task(consume(channel, *hello, *["read"] * 50))
        await asyncio.gather(*(consume(channel, attach(), "read") for _ in range(20)))
        await asyncio.gather(*(consume(channel, *hello) for _ in range(20)))
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        error = await raw(channel, "Target/HiddenStates", b"\xff" * 40)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_gateway_generation(stack: RunningStack) -> None:
    Request = gateway_pb2.GenerateRequest

    async def generate(timeout: float = 60, **fields: Any) -> grpc.StatusCode:
        call = stub.Generate(Request(**{"text": "hi", "max_tokens": 5, **fields}), timeout=timeout)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            assert "Exception" not in (error.details() or ""), error.details()
        return await call.code()

    async with under_watch(stack, "gateway") as channel:
        stub = gateway_pb2_grpc.GenerationStub(channel)
        for fields in (
            {"text": ""},
            {"token_ids": gateway_pb2.TokenIds(ids=[2**32 - 1])},
            {"temperature": NAN},
            {"top_p": 0.0},
            {"min_p": 1.0},
            {"top_k": 2**32 - 1},
            {"max_tokens": 2**32 - 1},
            {"min_tokens": 6},
            {"stop": [""]},
            {"stop": ["a"] * 40},
            {"stop_token_ids": [1] * 300},
            {"text": "too long " * 3_000_000},
            {"chat": gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="r" * 100_000)])},
        ):
            assert await generate(**fields) is grpc.StatusCode.INVALID_ARGUMENT, list(fields)
        for fields in (
            {"seed": -(2**63), "temperature": 1.0},
            {"max_tree_nodes": 2**32 - 1},
            {"request_id": "i\n" * 1000},
            {"stop": ["\0", "\ufffd", "\U0010ffff"]},
        ):
            assert await generate(**fields) is grpc.StatusCode.OK, list(fields)
        for seconds in (0.0, 0.0005, 0.02):
            status = await generate(timeout=seconds, max_tokens=400, ignore_eos=True)
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        text = channel.unary_stream("/specbridge.v1.Generation/Generate", request_serializer=bytes)
        for payload in (b"\xff" * 30, b"\x0a\x03\xed\xa0\x80"):  # no message; half a surrogate pair as text
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in text(payload, timeout=60):
                    pass
            # A unary request is read, and refused, by the library.
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
            assert "GenerateRequest" in (caught.value.details() or "")

        async def leave(i: int) -> None:
            call = stub.Generate(Request(text=f"storm {i}", max_tokens=300, ignore_eos=True))
            if i % 4 == 1:
                await asyncio.sleep(0.01 * (i % 7))
            elif i % 4 == 2:
                await call.read()
            call.cancel()

        await asyncio.gather(*(leave(i) for i in range(200)))


async def test_speculation_is_back_after_all_that(stack: RunningStack) -> None:
    """A draft that was superseded waits half a minute before it takes the target back."""
    await asyncio.to_thread(
        wait_for,
        lambda: stack.total("draft", "specbridge_draft_channel_attached") == 1,
        60,
        "the draft attached",
    )
    before = stack.total("target", "specbridge_target_captured_rows_total")
    await healthy_text(stack)
    assert stack.total("target", "specbridge_target_captured_rows_total") > before
