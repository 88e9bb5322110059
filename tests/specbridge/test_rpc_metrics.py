"""Every gRPC call of a server is counted once, by method and code, and is in flight until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos import common_pb2, draft_pb2, draft_pb2_grpc
from specbridge.errors import NotReady
from specbridge.rpc_metrics import CountCalls, RpcMetrics
from specbridge.server import Server, channel_options, typed_errors

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name


class Draft(draft_pb2_grpc.DraftServicer):
    """GetInfo answers, fails, breaks or hangs as told; Rounds echoes until its client is gone."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.ended = 0

    async def GetInfo(
        self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.DraftInfo:
        if isinstance(self.error, ZeroDivisionError):
            raise self.error
        if isinstance(self.error, TimeoutError):
            await asyncio.Event().wait()
        async with typed_errors(context):
            if self.error is not None:
                raise self.error
        return draft_pb2.DraftInfo()

    async def Rounds(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.DraftReply]:
        try:
            async for request in request_iterator:
                yield draft_pb2.DraftReply(batch_id=request.batch_id)
        finally:
            self.ended += 1


class Counted:
    """A served Draft, a channel to it and what has been counted."""

    def __init__(self, channel: grpc.aio.Channel, draft: Draft, registry: CollectorRegistry) -> None:
        self.channel, self.draft, self._registry = channel, draft, registry
        self.stub = draft_pb2_grpc.DraftStub(channel)

    def calls(self) -> dict[tuple[str, str], float]:
        samples = [s for family in self._registry.collect() for s in family.samples]
        return {
            (s.labels["method"], s.labels["code"]): s.value
            for s in samples
            if s.name == "test_grpc_requests_total"
        }

    def in_flight(self, method: str) -> float:
        return self._registry.get_sample_value("test_grpc_requests_in_flight", {"method": method}) or 0.0

    async def until(self, method: str, code: str, count: int = 1) -> None:
        """The client may have its answer before the handler is at its end."""
        async with asyncio.timeout(30):
            while self.calls().get((method, code), 0) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
async def counted() -> AsyncIterator[Counted]:
    registry, draft = CollectorRegistry(), Draft()
    server = Server(
        "127.0.0.1:0",
        [SERVICE],
        add=lambda s: draft_pb2_grpc.add_DraftServicer_to_server(draft, s),
        interceptors=[CountCalls(RpcMetrics(registry, "test_"))],
    )
    await server.start()
    await server.set_serving()
    async with grpc.aio.insecure_channel(server.bound, options=channel_options()) as channel:
        yield Counted(channel, draft, registry)
    await server.stop(0)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, "OK"), (NotReady("not yet"), "UNAVAILABLE"), (ZeroDivisionError(), "UNKNOWN")],
)
async def test_calls_count_by_how_they_end(counted: Counted, error: BaseException | None, code: str) -> None:
    counted.draft.error = error
    for _ in range(2):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await counted.stub.GetInfo(common_pb2.InfoRequest(), timeout=10)
    await counted.until("GetInfo", code, 2)
    assert counted.calls() == {("GetInfo", code): 2} and counted.in_flight("GetInfo") == 0


async def test_a_stream_is_in_flight_until_its_client_is_done(counted: Counted) -> None:
    call = counted.stub.Rounds()
    for batch in (1, 2):
        await call.write(draft_pb2.DraftRequest(batch_id=batch))
        assert (await call.read()).batch_id == batch
    assert counted.in_flight("Rounds") == 1 and counted.calls() == {}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await counted.until("Rounds", "OK")
    assert counted.in_flight("Rounds") == 0 and counted.draft.ended == 1


async def test_a_client_that_cancels_a_stream_leaves_nothing_in_flight(counted: Counted) -> None:
    """Its handler sees the end of the requests, as if the client were done: the code is OK or CANCELLED."""
    call = counted.stub.Rounds()
    await call.write(draft_pb2.DraftRequest(batch_id=1))
    await call.read()
    call.cancel()
    async with asyncio.timeout(30):
        while counted.in_flight("Rounds"):
            await asyncio.sleep(0.005)
    assert sum(counted.calls().values()) == 1 and counted.draft.ended == 1


async def test_a_handler_that_is_cancelled_counts_as_that(counted: Counted) -> None:
    counted.draft.error = TimeoutError()
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE"):
        await counted.stub.GetInfo(common_pb2.InfoRequest(), timeout=0.2)
    await counted.until("GetInfo", "CANCELLED")
    assert counted.in_flight("GetInfo") == 0


async def test_methods_that_do_not_exist_share_one_label(counted: Counted) -> None:
    for i in range(3):
        with pytest.raises(grpc.aio.AioRpcError):
            await counted.channel.unary_unary(f"/{SERVICE}/Made{i}Up")(b"", timeout=10)
    assert counted.calls() == {("other", "UNIMPLEMENTED"): 3}
