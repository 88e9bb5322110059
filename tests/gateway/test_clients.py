"""The gRPC clients against real servers: streams, reconnects, restarts, draining, keepalive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle, plain
from grpc_fakes import serve_draft, serve_target
from scheduler_harness import Recorder, collect, make_request

from gateway import clients
from gateway.clients import GrpcDraftClient, GrpcTargetClient
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.errors import Unavailable
from specbridge.rounds import (
    SamplingParams,
    SessionKey,
    StopParams,
    TargetOpen,
    TargetRequest,
    TargetResultKind,
)

LIMITS = SchedulerLimits(min_tree=1, draft_timeout=0.5)


class Listener:
    def __init__(self) -> None:
        self.infos: list[Any] = []
        self.reasons: list[str] = []
        self.replies: list[Any] = []

    def on_connected(self, info: Any) -> None:
        self.infos.append(info)

    def on_disconnected(self, reason: str) -> None:
        self.reasons.append(reason)

    def on_reply(self, reply: Any) -> None:
        self.replies.append(reply)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(main())


def open_request(number: int) -> TargetRequest:
    key = SessionKey(b"g" * 16, number)
    item = TargetOpen(key, (1, 2, 3), 3, SamplingParams(seed=5), StopParams(max_tokens=4))
    return TargetRequest(1, opens=(item,))


def test_connect_send_reset_and_close(tmp_path: Path) -> None:
    async def body() -> None:
        target = FakeTarget()
        server, servicer = await serve_target(target, f"unix:{tmp_path}/t")
        client, listener = GrpcTargetClient(f"unix:{tmp_path}/t"), Listener()
        with pytest.raises(Unavailable):
            client.send(open_request(1))
        client.start(listener)
        with pytest.raises(RuntimeError):
            client.start(listener)
        await until(lambda: client.connected)
        assert listener.infos[0].instance == target.instance == (await client.info(1.0)).instance
        client.send(open_request(1))
        await until(lambda: len(listener.replies) == 2)
        kinds = [r.kind for reply in listener.replies for r in reply.results]
        assert kinds == [TargetResultKind.OPENED, TargetResultKind.FIRST]
        client.reset("it does not answer")
        await until(lambda: len(listener.infos) == 2 and servicer.streams == 2)
        assert listener.reasons == ["it does not answer"]
        # What was sent just before close still arrives.
        client.send(TargetRequest(2, releases=(SessionKey(b"g" * 16, 1),)))
        await client.close()
        await until(lambda: not target.sessions)
        assert not client.connected and len(listener.reasons) == 2
        await server.stop(0)

    run(body)


def test_a_service_that_is_still_starting_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All services of a stack start at once; one that stays away, or was there, is one."""
    caplog.set_level(logging.INFO, logger="gateway.clients")

    def said() -> list[int]:
        return [r.levelno for r in caplog.records if "target not connected" in r.getMessage()]

    async def body() -> None:
        monkeypatch.setattr(clients, "PATIENCE_S", 0.5)
        client = GrpcTargetClient(f"unix:{tmp_path}/t", connect_timeout_s=0.2)
        client.start(Listener())
        await until(said)
        assert set(said()) == {logging.INFO}
        await until(lambda: logging.WARNING in said())
        assert said().count(logging.WARNING) == 1
        await client.close()

        caplog.clear()
        monkeypatch.setattr(clients, "PATIENCE_S", 60.0)
        server, _ = await serve_target(FakeTarget(), f"unix:{tmp_path}/u")
        client = GrpcTargetClient(f"unix:{tmp_path}/u", connect_timeout_s=0.2)
        client.start(Listener())
        await until(lambda: client.connected)
        await server.stop(0)
        await until(said)
        assert set(said()) == {logging.WARNING}
        await client.close()

    run(body)


def test_reconnects_to_a_restarted_service(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"unix:{tmp_path}/t"
        client, listener = GrpcTargetClient(address, connect_timeout_s=1.0), Listener()
        client.start(listener)  # before there is a server
        await asyncio.sleep(0.1)
        assert not client.connected
        with pytest.raises(Unavailable, match="target at"):
            await client.info(0.2)
        server, _ = await serve_target(FakeTarget(), address)
        await until(lambda: client.connected)
        await server.stop(0)
        await until(lambda: not client.connected)
        server, _ = await serve_target(FakeTarget(), address)
        await until(lambda: client.connected)
        assert len(listener.infos) == 2 and listener.infos[0].instance != listener.infos[1].instance
        await client.close()
        await server.stop(0)

    run(body)


@pytest.mark.parametrize(
    "where", ["on_connected", "on_reply", "on_disconnected", "_from_pb", "_info_from_pb"]
)
def test_a_defect_in_a_callback_or_conversion_costs_one_stream(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its traceback, the listener hears of the end, and the client connects again."""

    async def body() -> None:
        server, _ = await serve_target(FakeTarget(), f"unix:{tmp_path}/t")
        client, listener = GrpcTargetClient(f"unix:{tmp_path}/t"), Listener()
        owner: Any = GrpcTargetClient if where.startswith("_") else Listener
        honest = getattr(owner, where)
        failures = 0

        def once(*args: Any) -> Any:
            nonlocal failures
            if not failures:
                failures += 1
                raise ZeroDivisionError(where)
            return honest(*args)

        monkeypatch.setattr(owner, where, staticmethod(once) if where.startswith("_") else once)
        client.start(listener)
        if where not in ("on_connected", "_info_from_pb"):
            await until(lambda: client.connected)
            client.send(open_request(1))
            await until(lambda: failures or listener.replies)
            if where == "on_disconnected":
                client.reset("to be told")
        await until(lambda: failures and client.connected)
        assert (
            client.connected and "Traceback" in caplog.text and f"ZeroDivisionError: {where}" in caplog.text
        )
        if where not in ("_info_from_pb", "on_disconnected"):
            assert listener.reasons == [f"ZeroDivisionError: {where}"]
        client.send(open_request(2))
        await until(lambda: any(r.results[0].session.number == 2 for r in listener.replies))
        await client.close()
        await server.stop(0)

    run(body)


def test_a_request_that_cannot_be_converted_breaks_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Left alone, everything sent behind it would wait for its time-out."""

    async def body() -> None:
        server, servicer = await serve_target(FakeTarget(), f"unix:{tmp_path}/t")
        client, listener = GrpcTargetClient(f"unix:{tmp_path}/t"), Listener()
        client.start(listener)
        await until(lambda: client.connected)
        client.send(TargetRequest(-1))  # no uint64
        await until(lambda: len(listener.infos) == 2 and servicer.streams == 2)
        assert "ValueError" in listener.reasons[0] and "can't be converted" in caplog.text
        await client.close()
        await server.stop(0)

    run(body)


def test_cancelling_close_does_not_hang_on_a_dead_service(tmp_path: Path) -> None:
    async def body() -> None:
        client = GrpcDraftClient(f"unix:{tmp_path}/nobody")
        client.start(Listener())
        await asyncio.sleep(0.02)
        await asyncio.wait_for(client.close(), 2.0)

    run(body)


def test_idle_stream_outlives_keepalive(tmp_path: Path) -> None:
    """cases.md 18, scaled down: pings on an idle stream bring no GOAWAY."""

    async def body() -> None:
        target = FakeTarget()
        server, servicer = await serve_target(target, f"unix:{tmp_path}/t")
        client, listener = GrpcTargetClient(f"unix:{tmp_path}/t", keepalive_s=0.2), Listener()
        client.start(listener)
        await until(lambda: client.connected)
        await asyncio.sleep(1.2)
        assert servicer.streams == 1 and not listener.reasons
        await client.close()
        await server.stop(0)

    run(body)


def test_scheduler_over_sockets(tmp_path: Path) -> None:
    """The whole path through protobuf: trees, restarts of both services, same text."""

    async def body() -> None:
        addresses = f"unix:{tmp_path}/t", f"unix:{tmp_path}/d"
        target, draft = FakeTarget(delay=0.002), FakeDraft(oracle, delay=0.002)
        linked(target, draft)
        target_server, _ = await serve_target(target, addresses[0])
        draft_server, _ = await serve_draft(draft, addresses[1])
        observer = Recorder()
        scheduler = Scheduler(
            GrpcTargetClient(addresses[0]), GrpcDraftClient(addresses[1]), limits=LIMITS, observer=observer
        )
        await scheduler.start()
        await scheduler.wait_ready(5.0)
        await until(lambda: scheduler.draft_connected)
        assert scheduler.draft_info is not None and scheduler.num_spec_tokens == draft.block_size - 1
        wanted = [make_request(i, max_tokens=400, ignore_eos=True) for i in range(3)]
        tasks = [asyncio.create_task(collect(scheduler, r)) for r in wanted]
        await until(lambda: sum(r.nodes for r in observer.rounds) > 0)
        await draft_server.stop(0)
        draft.kill()
        await until(lambda: observer.fallbacks["draft_down"] > 0)
        draft.restart()
        draft_server, _ = await serve_draft(draft, addresses[1])
        await until(lambda: scheduler.draft_connected)
        seen = len(observer.rounds)
        await until(lambda: any(r.nodes for r in observer.rounds[seen:]) or all(t.done() for t in tasks))
        await target_server.stop(0)
        target.kill()
        await asyncio.sleep(0.05)
        target.restart()
        target_server, _ = await serve_target(target, addresses[0])
        for request, task in zip(wanted, tasks, strict=True):
            assert (await task).tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
        assert observer.reopens["target", "disconnected"] > 0
        await until(lambda: not target.sessions and not draft.sessions)
        await scheduler.close()
        await target_server.stop(0)
        await draft_server.stop(0)
        observer.reconcile()

    run(body)
