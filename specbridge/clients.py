"""Client side of the gateway's gRPC service and of readiness checks, for the command line and the supervisor.

Owns the conversion between protobuf and the dataclasses below. Does not own printing or retrying.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from specbridge.errors import CapacityError, InvalidRequest, SpecBridgeError, Unavailable
from specbridge.server import channel_options

CHECK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate. None: the gateway's default."""

    messages: Sequence[Message]
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    speculate: bool = True
    max_tree_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the stream: new text, and the ids that came with it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer. acceptance_length: tokens per round, bonus included (0 without rounds)."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    acceptance_length: float
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Model:
    """What the gateway serves. drafter_id empty: no draft configured."""

    model_id: str
    drafter_id: str
    block_size: int
    tree_budget: int


class GenerationClient:
    """Talks to one gateway: `async with GenerationClient("host:port") as client`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self._stub: Any = gateway_pb2_grpc.GenerationStub(self._channel)

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def model(self, timeout_s: float = 10.0) -> Model:
        """Raises Unavailable if nothing answers."""
        try:
            info = await self._stub.GetModel(common_pb2.InfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, self.address) from error
        return Model(info.model_id, info.drafter_id, info.block_size, info.tree_budget)

    async def generate(self, ask: Ask) -> AsyncIterator[Piece | Summary]:
        """Pieces as they come, then one Summary. Raises InvalidRequest, CapacityError or Unavailable."""
        request = gateway_pb2.GenerateRequest(
            chat=gateway_pb2.ChatMessages(
                messages=[gateway_pb2.ChatMessage(role=m.role, content=m.content) for m in ask.messages]
            ),
            no_speculation=not ask.speculate,
        )
        for name in ("max_tokens", "temperature", "seed", "max_tree_nodes"):
            if (value := getattr(ask, name)) is not None:
                setattr(request, name, value)
        call = self._stub.Generate(request)
        try:
            async for reply in call:
                if reply.WhichOneof("kind") == "final":
                    yield _summary(reply.final)
                else:
                    yield Piece(reply.delta.text, tuple(reply.delta.token_ids))
        except grpc.aio.AioRpcError as error:
            raise _typed(error, self.address) from error
        finally:
            call.cancel()  # no-op at the stream's end; frees the sessions if the caller stops early


class Health(enum.Enum):
    """What a process says of itself when asked."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    SILENT = "silent"  # no answer: not started, gone, or hung


class HealthClient:
    """Asks one process again and again: `async with HealthClient(address) as health`."""

    def __init__(self, address: str) -> None:
        # A service that starts is to be noticed soon: no growing pauses between attempts to connect.
        options = {**dict(channel_options()), "grpc.max_reconnect_backoff_ms": 100}
        self._channel = grpc.aio.insecure_channel(address, options=list(options.items()))
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> HealthClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def check(self, timeout_s: float = CHECK_TIMEOUT_S) -> Health:
        try:
            reply = await self._stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return Health.SILENT
        serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        return Health.SERVING if serving else Health.NOT_SERVING


async def is_serving(address: str, *, timeout_s: float = CHECK_TIMEOUT_S) -> bool:
    """Whether the process at `address` answers its health check with SERVING."""
    async with HealthClient(address) as health:
        return await health.check(timeout_s) is Health.SERVING


Joined = Callable[[str, float], Awaitable[bool]]
"""(address, limit_s): waits until the service at `address` works with another; false after `limit_s` s."""


async def wait_attached(address: str, limit_s: float) -> bool:
    """Joined, of a draft: it receives the target's hidden states."""

    async def attached(channel: grpc.aio.Channel) -> bool:
        stub: Any = draft_pb2_grpc.DraftStub(channel)
        return bool((await stub.GetInfo(common_pb2.InfoRequest(), timeout=CHECK_TIMEOUT_S)).attached)

    return await _wait_until(attached, address, limit_s)


async def wait_drafting(address: str, limit_s: float) -> bool:
    """Joined, of a gateway: it has met its draft, and requests are drafted for."""

    async def met(channel: grpc.aio.Channel) -> bool:
        stub: Any = gateway_pb2_grpc.GenerationStub(channel)
        return bool((await stub.GetModel(common_pb2.InfoRequest(), timeout=CHECK_TIMEOUT_S)).drafter_id)

    return await _wait_until(met, address, limit_s)


async def _wait_until(
    asked: Callable[[grpc.aio.Channel], Awaitable[bool]],
    address: str,
    limit_s: float,
    interval_s: float = 0.1,
) -> bool:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        if await asked(channel):
                            return True
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return False


def _summary(final: Any) -> Summary:
    spec = final.speculation
    return Summary(
        finish_reason=common_pb2.FinishReason.Name(final.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
        prompt_tokens=final.prompt_tokens,
        completion_tokens=final.completion_tokens,
        cached_tokens=final.cached_tokens,
        seed=final.seed,
        acceptance_length=spec.mean_acceptance_length,
        rounds=spec.num_rounds,
        drafted=spec.num_draft_tokens,
        accepted=spec.num_accepted_draft_tokens,
    )


def _typed(error: grpc.aio.AioRpcError, address: str) -> SpecBridgeError:
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return InvalidRequest(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(details)
    return Unavailable(f"the gateway at {address!r} answered {code.name}: {details}")
