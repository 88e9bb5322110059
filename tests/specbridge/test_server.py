"""The gRPC server lifecycle: health, reflection, limits, typed errors, cancellation, keepalive, drain."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2, draft_pb2, draft_pb2_grpc
from specbridge import errors
from specbridge.server import (
    MAX_MESSAGE_BYTES,
    REQUEST_ID_KEY,
    Server,
    channel_options,
    ended_before,
    request_id,
    stop_event,
    typed_errors,
)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name
HELPER = Path(__file__).parents[1] / "helpers" / "fake_process.py"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Draft(draft_pb2_grpc.DraftServicer):
    """GetInfo runs `body`; Rounds echoes batch ids until told to stop."""

    def __init__(self, body: Callable[[], Awaitable[Any]] | None = None) -> None:
        self.body = body
        self.ended = 0

    async def GetInfo(self, request: Any, context: Any) -> Any:
        async with typed_errors(context):
            value = await self.body() if self.body else None
            return draft_pb2.DraftInfo(drafter_id=str(value))

    async def Rounds(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with typed_errors(context):
                async for request in request_iterator:
                    yield draft_pb2.DraftReply(batch_id=request.batch_id)
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def serving(
    servicer: Draft, *, ready: bool = True, address: str = "127.0.0.1:0", **options: Any
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server(
        address, [SERVICE], add=lambda s: draft_pb2_grpc.add_DraftServicer_to_server(servicer, s), **options
    )
    await server.start()
    if ready:
        await server.set_serving()
    async with grpc.aio.insecure_channel(server.bound, options=channel_options()) as channel:
        yield server, channel
    await server.stop(0)


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=5
    )
    return int(reply.status)


async def info(channel: grpc.aio.Channel, **options: Any) -> Any:
    return await draft_pb2_grpc.DraftStub(channel).GetInfo(common_pb2.InfoRequest(), timeout=10, **options)


async def test_health_follows_the_life_of_the_server() -> None:
    async with serving(Draft(), ready=False) as (server, channel):
        for name in ("", SERVICE):
            assert await health(channel, name) == NOT_SERVING
        await server.set_serving()
        for name in ("", SERVICE):
            assert await health(channel, name) == SERVING
        await server.set_not_serving()
        assert await health(channel) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_services_and_finds_their_files() -> None:
    async with serving(Draft()) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        replies = [reply async for reply in stub.ServerReflectionInfo(iter(requests), timeout=5)]
    names = {service.name for service in replies[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    assert b"draft.proto" in replies[1].file_descriptor_response.file_descriptor_proto[0]


def raising(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def body() -> Any:
        raise error

    return body


@pytest.mark.parametrize("kind", [kind for kind, _ in errors.TABLE])
async def test_typed_errors_become_their_status(kind: type[errors.SpecBridgeError]) -> None:
    expected = errors.mapping(kind("why")).grpc_status
    async with serving(Draft(raising(kind("the value 7 is wrong; use 8")))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await info(channel)
    assert caught.value.code() is grpc.StatusCode[expected]
    assert caught.value.details() == "the value 7 is wrong; use 8"


async def test_unexpected_error_is_internal_and_logged_and_the_server_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer = Draft(raising(ZeroDivisionError()))
    async with serving(servicer) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await info(channel)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.INTERNAL,
            "ZeroDivisionError",
        )
        assert "Traceback" in caplog.text
        servicer.body = None
        assert (await info(channel)).drafter_id == "None"


async def test_cancellation_inside_a_handler_is_answered_at_once() -> None:
    """Case 16: the client must not hang when a task inside the service was cancelled."""

    async def body() -> Any:
        task = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        await task

    async with serving(Draft(body)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                await info(channel)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_many_cancelled_streams_leave_health_answering() -> None:
    """Case 15: a client that goes away ends its handler; no pool runs dry."""
    servicer = Draft()
    async with serving(servicer) as (_, channel):
        calls = [draft_pb2_grpc.DraftStub(channel).Rounds() for _ in range(100)]
        for i, call in enumerate(calls):
            await call.write(draft_pb2.DraftRequest(batch_id=i))
            assert (await call.read()).batch_id == i
        for call in calls:
            call.cancel()
        assert await health(channel) == SERVING
        async with asyncio.timeout(30):
            while servicer.ended < len(calls):
                await asyncio.sleep(0.01)


async def test_idle_stream_outlives_many_keepalive_intervals() -> None:
    """Case 18: no GOAWAY too_many_pings while nothing is said for a long prefill."""
    # 1 s is the shortest that gRPC's client grants; it would raise a smaller one.
    async with (
        serving(Draft(), keepalive_s=1.0) as (server, _),
        grpc.aio.insecure_channel(server.bound, options=channel_options(1.0)) as channel,
    ):
        call = draft_pb2_grpc.DraftStub(channel).Rounds()
        await call.write(draft_pb2.DraftRequest(batch_id=1))
        assert (await call.read()).batch_id == 1
        await asyncio.sleep(5.5)
        await call.write(draft_pb2.DraftRequest(batch_id=2))
        assert (await call.read()).batch_id == 2
        call.cancel()


async def test_request_ids_come_from_the_caller_or_are_made_up() -> None:
    async def body() -> str:
        return request_id.get()

    async with serving(Draft(body)) as (_, channel):
        assert (await info(channel, metadata=[(REQUEST_ID_KEY, "abc")])).drafter_id == "abc"
        made = {(await info(channel)).drafter_id for _ in range(3)}
    assert len(made) == 3 and all(len(name) == 16 for name in made)


async def test_large_messages_pass() -> None:
    size = 8 * 1024 * 1024  # gRPC's own default is 4 MiB

    async def body() -> str:
        return "x" * size

    assert size < MAX_MESSAGE_BYTES
    async with serving(Draft(body)) as (_, channel):
        assert len((await info(channel)).drafter_id) == size


async def test_address_in_use_is_a_config_error(tmp_path: Path) -> None:
    async with serving(Draft()) as (server, _):
        other = Server(server.bound, [SERVICE], add=lambda s: None)
        with pytest.raises(errors.ConfigError, match="choose another address"):
            await other.start()
        await other.stop(0)


async def test_unix_socket(tmp_path: Path) -> None:
    async with serving(Draft(), address=f"unix:{tmp_path}/s.sock") as (server, channel):
        assert server.bound == f"unix:{tmp_path}/s.sock"
        assert await health(channel) == SERVING


async def test_stop_lets_calls_under_way_finish_and_takes_no_new_ones() -> None:
    inside, go = asyncio.Event(), asyncio.Event()

    async def body() -> str:
        inside.set()
        await go.wait()
        return "done"

    async with serving(Draft(body), drain_s=10.0) as (server, channel):
        call = asyncio.ensure_future(info(channel))
        await inside.wait()
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(server.bound, options=channel_options()) as late:
                await draft_pb2_grpc.DraftStub(late).GetInfo(common_pb2.InfoRequest(), timeout=0.5)
        go.set()
        assert (await call).drafter_id == "done"
        await stopping


async def test_health_says_not_serving_first_when_stopping() -> None:
    async with serving(Draft(), drain_s=5.0) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.ensure_future(server.stop())
        async with asyncio.timeout(30):
            assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await stopping


async def test_stop_event_hears_sigterm_and_sigint() -> None:
    loop = asyncio.get_running_loop()
    try:
        for signum in (signal.SIGTERM, signal.SIGINT):
            event = stop_event()
            os.kill(os.getpid(), signum)
            async with asyncio.timeout(30):
                await event.wait()
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def test_process_drains_on_sigterm_and_exits_with_zero(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(HELPER), f"unix:{tmp_path}/s.sock", "--log", str(log), "--drain", "0.2"]
    with subprocess.Popen(command, env=env) as process:
        with grpc.insecure_channel(f"unix:{tmp_path}/s.sock") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            while stub.Check(request, timeout=30, wait_for_ready=True).status != SERVING:
                pass
        process.terminate()
        assert process.wait(20) == 0
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["started", "term", "ended"]


def _child_rpc(address: str, results: Any) -> None:
    """In a spawned process: a server of its own, and a call to the parent's."""

    async def main() -> tuple[int, int]:
        async with (
            grpc.aio.insecure_channel(address, options=channel_options()) as channel,
            serving(Draft()) as own,
        ):
            return await health(channel), await health(own[1])

    results.put(asyncio.run(main()))


async def test_processes_spawned_beside_a_running_server_can_talk() -> None:
    """Case 20: workers are spawned, never forked; RPC works in parent and child, before and after."""
    context = multiprocessing.get_context("spawn")
    async with serving(Draft()) as (server, channel):
        assert await health(channel) == SERVING
        results = context.Queue()
        child = context.Process(target=_child_rpc, args=(server.bound, results))
        child.start()
        assert await asyncio.to_thread(results.get, True, 60) == (SERVING, SERVING)
        await asyncio.to_thread(child.join, 30)
        assert child.exitcode == 0
        assert await health(channel) == SERVING
        results.close()


async def test_a_status_that_no_longer_reaches_the_peer_is_no_error() -> None:
    """The peer went while the call was being ended: gRPC allows no second status; nobody waits for one."""

    class Ended:
        def done(self) -> bool:
            return True

        async def abort(self, *args: object) -> None:
            raise AssertionError("aborted a call that is over")

    async with typed_errors(Ended()):  # type: ignore[arg-type]
        raise RuntimeError("the status could not be sent")


async def test_work_ends_before_the_stop_or_is_given_up() -> None:
    stop = asyncio.Event()

    async def fails() -> None:
        raise ValueError("broken")

    assert await ended_before(stop, asyncio.sleep(0))
    with pytest.raises(ValueError, match="broken"):
        await ended_before(stop, fails())
    never = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await ended_before(stop, never) and never.cancelled()
    assert not await ended_before(stop, asyncio.Event().wait())
