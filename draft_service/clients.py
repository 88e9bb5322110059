"""The draft service as a client of its target: who it is, and rounds of its own for the self-check.

Owns the gRPC calls and their conversion to and from protobuf. Does not own the hidden-state channel
(specbridge.channel) nor what the rounds are for (startup_check).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos import common_pb2, target_pb2_grpc
from specbridge import wire
from specbridge.errors import Unavailable
from specbridge.rounds import TargetInfo, TargetReply, TargetRequest
from specbridge.server import channel_options

INFO_TIMEOUT_S = 5.0


async def target_info(address: str) -> TargetInfo:
    """Target.GetInfo. Raises Unavailable."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            pb = await target_pb2_grpc.TargetStub(channel).GetInfo(
                common_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"target at {address!r}: {_describe(error)}") from error
    return wire.target_info_from_pb(pb)


class TargetRounds:
    """One Rounds stream to the target; see `target_rounds`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._replies: asyncio.Queue[TargetReply | Unavailable] = asyncio.Queue()
        # A read that is cancelled cancels the call, so the reading is done by a task that nobody cancels.
        self._reader = asyncio.create_task(self._read())

    async def send(self, request: TargetRequest) -> None:
        """Raises Unavailable once the stream has broken."""
        try:
            await self._call.write(wire.target_request_to_pb(request))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream to the target has broken") from error

    async def receive(self) -> TargetReply:
        """The next reply. Raises Unavailable at the stream's end."""
        reply = await self._replies.get()
        if isinstance(reply, Unavailable):
            raise reply
        return reply

    async def _read(self) -> None:
        reason = "the target ended the stream"
        try:
            async for pb in self._call:
                self._replies.put_nowait(wire.target_reply_from_pb(pb))
        except grpc.aio.AioRpcError as error:
            reason = _describe(error)
        except asyncio.CancelledError:
            reason = "the stream has been closed"
        self._replies.put_nowait(Unavailable(reason))

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@asynccontextmanager
async def target_rounds(address: str) -> AsyncIterator[TargetRounds]:
    """A Rounds stream to the target at `address`, closed on exit. Sessions are the caller's to release."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        rounds = TargetRounds(target_pb2_grpc.TargetStub(channel).Rounds())
        try:
            yield rounds
        finally:
            await rounds.close()


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
