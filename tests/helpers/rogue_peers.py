"""Peers that break the rules of the Rounds and HiddenStates streams, over real sockets.

Every function ends by itself, and fails the test if the service leaves its call without an end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from protos import common_pb2, draft_pb2, target_pb2, target_pb2_grpc
from specbridge.channel.transports import own_identity
from specbridge.channel.wire import identity_to_pb

PATIENCE_S = 60.0
NAN, INF = float("nan"), float("inf")
_numbers = itertools.count(1)


def session(gateway: bytes | None = None, number: int = 0, incarnation: int = 0) -> common_pb2.SessionKey:
    return common_pb2.SessionKey(
        gateway=os.urandom(16) if gateway is None else gateway,
        number=number or next(_numbers),
        incarnation=incarnation,
    )


def tree(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> common_pb2.DraftTree:
    return common_pb2.DraftTree(tokens=tokens, parents=parents, scores=scores)


def draft_open(key: common_pb2.SessionKey, tokens: Sequence[int] = (1, 2, 3), **sampling: Any) -> Any:
    return draft_pb2.DraftOpen(
        session=key,
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=common_pb2.SamplingParams(**sampling),
    )


def target_open(
    key: common_pb2.SessionKey,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    stop: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    return target_pb2.TargetOpen(
        session=key,
        tokens=tokens,
        sampling=common_pb2.SamplingParams(**(sampling or {})),
        stop=common_pb2.StopParams(**{"max_tokens": 40, **(stop or {})}),
        **{"prompt_length": len(tokens), "speculate": True, **fields},
    )


async def ask(stub: Any, *requests: Any) -> list[Any]:
    """All results that these requests get on one stream, whose client closes its side at once."""
    call = stub.Rounds()

    async def talk() -> list[Any]:
        for request in requests:
            await call.write(request)
        await call.done_writing()
        results = []
        while (reply := await call.read()) is not grpc.aio.EOF:
            results += reply.results
        return results

    results = await asyncio.wait_for(talk(), PATIENCE_S)
    assert await call.code() is grpc.StatusCode.OK
    return results


async def verify(stub: Any, make: Callable[[common_pb2.SessionKey, int], Iterable[Any]]) -> list[Any]:
    """Open a session, wait for its first token, send what `make(key, kv_length)` gives: its results."""
    call, key = stub.Rounds(), session()

    async def talk() -> list[Any]:
        await call.write(target_pb2.TargetRequest(batch_id=1, open=[target_open(key)]))
        first = None
        while first is None:
            results = (await call.read()).results
            first = next((r for r in results if r.kind == target_pb2.TARGET_RESULT_KIND_FIRST), None)
        wrong = list(make(key, first.kv_length))
        await call.write(target_pb2.TargetRequest(batch_id=2, verify=wrong))
        await call.done_writing()
        results = []
        while (reply := await call.read()) is not grpc.aio.EOF:
            results += reply.results
        assert len(results) == len(wrong)
        return results

    results = await asyncio.wait_for(talk(), PATIENCE_S)
    await ask(stub, target_pb2.TargetRequest(batch_id=3, release=[target_pb2.Release(session=key)]))
    return results


async def raw(channel: grpc.aio.Channel, method: str, payload: bytes) -> grpc.aio.AioRpcError:
    """The error that bytes which are no message get."""
    call = channel.stream_stream(
        f"/specbridge.v1.{method}", request_serializer=bytes, response_deserializer=bytes
    )()
    with suppress(grpc.aio.AioRpcError):
        await call.write(payload)
        await call.done_writing()
        assert await asyncio.wait_for(call.read(), PATIENCE_S) is grpc.aio.EOF
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


async def storm(stub: Any, make: Callable[[int], Any], count: int) -> None:
    """`count` streams that are dropped: at once, after an answer, or half-closed."""

    async def drop(i: int) -> None:
        call = stub.Rounds()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(make(i))
            if i % 3 == 0:
                await asyncio.wait_for(call.read(), PATIENCE_S)
            elif i % 3 == 1:
                await call.done_writing()
        call.cancel()

    await asyncio.gather(*(drop(i) for i in range(count)))


def attach(**fields: Any) -> Any:
    given = {
        "identity": identity_to_pb(own_identity(os.urandom(16), "cpu")),
        "target_layer_ids": (0, 2),
        "transports": ["inline"],
        "take_over": True,
        **fields,
    }
    return target_pb2.ChannelRequest(attach=target_pb2.Attach(**given))


PROBE = target_pb2.ChannelRequest(probe=target_pb2.Probe(opened=True))


async def consume(channel: grpc.aio.Channel, *script: Any) -> Any:
    """Play a draft on HiddenStates: messages to send, or "read". Returns the last reply, None if the stream
    ended before it.
    """
    call = target_pb2_grpc.TargetStub(channel).HiddenStates()
    last: Any = None
    try:
        for step in script:
            if isinstance(step, str):
                last = await asyncio.wait_for(call.read(), PATIENCE_S)
            else:
                await call.write(step)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        last = None
    finally:
        call.cancel()
    return None if last is grpc.aio.EOF else last
