"""The target over real gRPC: streams, half-closed clients, leases, the channel, the process's life."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import tiny
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from toy_target import (
    GATEWAY,
    TOY_LIMITS,
    Client,
    ToyConfig,
    ToyRunner,
    chain_tree,
    make_engine,
    open_request,
    reference,
)

from protos import common_pb2, target_pb2, target_pb2_grpc
from specbridge import wire
from specbridge.channel.consumer import HiddenStateClient
from specbridge.cli import main
from specbridge.errors import InvalidRequest
from specbridge.rounds import (
    SamplingParams,
    SessionKey,
    StopParams,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    Verify,
)
from specbridge.server import Server, channel_options
from target_service.config import TargetSettings
from target_service.engine import Engine
from target_service.runner import load_runner
from target_service.server import TargetServicer, connect_channel

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
NAME = "specbridge.v1.Target"


class Toy:
    """A served toy engine."""

    def __init__(
        self, runner: ToyRunner, engine: Engine, servicer: TargetServicer, address: str, stub: Any
    ) -> None:
        self.runner, self.engine, self.servicer, self.address, self.stub = (
            runner,
            engine,
            servicer,
            address,
            stub,
        )


@pytest.fixture
async def toy(tmp_path: Path) -> AsyncIterator[Toy]:
    runner = ToyRunner(config=ToyConfig())
    engine = make_engine(runner, replace(TOY_LIMITS, session_lease=0.3))
    channel = connect_channel(engine, TargetSettings(channel_slots=256), engine._metrics)
    engine.start()
    servicer = TargetServicer()
    server = Server(
        f"unix:{tmp_path}/t.sock",
        [NAME],
        add=lambda s: target_pb2_grpc.add_TargetServicer_to_server(servicer, s),
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.bound, options=channel_options()) as connection:
        stub: Any = target_pb2_grpc.TargetStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetInfo(common_pb2.InfoRequest(), timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        servicer.serve(engine, channel)
        await server.set_serving()
        yield Toy(runner, engine, servicer, server.bound, stub)
    channel.close()
    await asyncio.to_thread(engine.close)
    await server.stop(grace=0)


class Rounds:
    """A Rounds stream as a gateway holds it."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Rounds()
        self.results: list[TargetResult] = []

    async def send(self, **kwargs: Any) -> None:
        await self.call.write(wire.target_request_to_pb(TargetRequest(**kwargs)))

    async def reply(self) -> TargetReply:
        return wire.target_reply_from_pb(await asyncio.wait_for(self.call.read(), 30))

    async def result(self, kind: TargetResultKind) -> TargetResult:
        while True:
            for result in self.results:
                if result.kind is kind:
                    self.results.remove(result)
                    return result
            self.results += (await self.reply()).results


def opened(number: int, **kwargs: Any) -> TargetOpen:
    return open_request(number, PROMPT, **kwargs)


async def test_info_and_a_generation_over_the_wire(toy: Toy) -> None:
    info = wire.target_info_from_pb(await toy.stub.GetInfo(common_pb2.InfoRequest(), timeout=5))
    assert info == toy.engine.info()
    want, _ = reference(toy.runner.logits_after, PROMPT, sampling=SamplingParams(), stop=StopParams(20))
    stream = Rounds(toy.stub)
    await stream.send(batch_id=1, opens=(opened(1),))
    await stream.result(TargetResultKind.OPENED)
    first = await stream.result(TargetResultKind.FIRST)
    got, kv = list(first.tokens), first.kv_length
    batch = 2
    while len(got) < 20:
        tree = chain_tree(want[len(got) :][: min(4, 20 - len(got) - 1)])
        await stream.send(batch_id=batch, verifies=(Verify(first.session, kv, tree),))
        reply = await stream.reply()
        assert reply.batch_id == batch and reply.timings is not None and reply.timings.service_ns > 0
        (result,) = reply.results
        got, kv, batch = [*got, *result.tokens], result.kv_length, batch + 1
    assert got == want
    await stream.send(batch_id=batch, releases=(first.session,))
    assert (await stream.reply()).results[0].kind is TargetResultKind.RELEASED
    stream.call.cancel()


async def test_a_half_closed_stream_still_gets_what_it_is_owed(toy: Toy) -> None:
    """As command-line clients do: write, close the sending side, read to the end."""
    stream = Rounds(toy.stub)
    await stream.send(batch_id=1, opens=(opened(1),), releases=(SessionKey(GATEWAY, 9),))
    await stream.send(batch_id=2, verifies=(Verify(SessionKey(GATEWAY, 8), 4),))
    await stream.call.done_writing()
    kinds = [result.kind async for pb in stream.call for result in wire.target_reply_from_pb(pb).results]
    assert sorted(kinds) == sorted(
        [TargetResultKind.OPENED, TargetResultKind.FIRST, TargetResultKind.RELEASED, TargetResultKind.ERROR]
    )


async def test_a_half_closed_stream_ends_though_a_session_was_reopened_in_its_prefill(toy: Toy) -> None:
    """Only the newer incarnation's first token comes."""
    gate = threading.Event()
    toy.runner.before_forward = lambda step: gate.wait(10) and None
    stream = Rounds(toy.stub)
    await stream.send(batch_id=1, opens=(opened(1),))
    await stream.result(TargetResultKind.OPENED)
    await stream.send(batch_id=2, opens=(opened(1, incarnation=1),))
    await stream.call.done_writing()
    gate.set()
    results = list(stream.results)
    while (pb := await asyncio.wait_for(stream.call.read(), 30)) is not grpc.aio.EOF:
        results += wire.target_reply_from_pb(pb).results
    assert results[-1].kind is TargetResultKind.FIRST and results[-1].session.incarnation == 1


async def test_a_request_that_can_not_be_taken_ends_its_stream_with_a_status(toy: Toy) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("not like this")

    toy.engine.submit = refuse  # type: ignore[method-assign]
    stream = Rounds(toy.stub)
    await stream.send(batch_id=1, releases=(SessionKey(GATEWAY, 1),))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.reply()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "not like this"


async def test_a_broken_stream_s_sessions_outlive_it_for_the_lease(toy: Toy) -> None:
    stream = Rounds(toy.stub)
    await stream.send(batch_id=1, opens=(opened(1), opened(2)))
    await stream.result(TargetResultKind.FIRST)
    first = await stream.result(TargetResultKind.FIRST)
    stream.call.cancel()
    again = Rounds(toy.stub)
    await again.send(batch_id=1, verifies=(Verify(first.session, first.kv_length),))
    assert (await again.reply()).results[0].kind is TargetResultKind.VERIFIED
    async with asyncio.timeout(30):
        while toy.engine.num_sessions > 1:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.4)
    assert toy.engine.num_sessions == 1
    again.call.cancel()
    async with asyncio.timeout(30):
        while toy.engine.num_sessions:
            await asyncio.sleep(0.02)


async def test_hidden_states_reach_an_attached_draft(toy: Toy) -> None:
    chunks: list[tuple[SessionKey, int, torch.Tensor]] = []
    attached = asyncio.Event()
    loop = asyncio.get_running_loop()
    client = HiddenStateClient(
        toy.address,
        target_layer_ids=(1, 3),
        normed_last_layer=False,
        on_attached=lambda info: loop.call_soon_threadsafe(attached.set),
        on_chunk=lambda chunk: (
            chunks.append((chunk.session, chunk.first_position, chunk.rows.clone())),
            client.ack([chunk.chunk_id]),
        ),
    )
    client.start()
    try:
        await asyncio.wait_for(attached.wait(), 30)
        assert toy.engine.info().channel_transport in ("shared_memory", "inline")
        stream = Rounds(toy.stub)
        await stream.send(batch_id=1, opens=(opened(1),))
        first = await stream.result(TargetResultKind.FIRST)
        assert first.draft_has_context
        async with asyncio.timeout(30):
            while sum(len(rows) for _, _, rows in chunks) < len(PROMPT):
                await asyncio.sleep(0.01)
        rows = torch.cat([rows for _, _, rows in chunks])
        assert rows[:, 0].tolist() == PROMPT and rows[:, 1].tolist() == list(range(len(PROMPT)))
        stream.call.cancel()
    finally:
        await client.close()
    async with asyncio.timeout(30):
        while toy.engine.info().channel_transport != "none":
            await asyncio.sleep(0.01)


async def test_a_drafter_for_another_model_is_refused(toy: Toy) -> None:
    call = toy.stub.HiddenStates()
    attach = target_pb2.Attach(target_layer_ids=[99], transports=["inline"])
    await call.write(target_pb2.ChannelRequest(attach=attach))
    reply = await asyncio.wait_for(call.read(), 30)
    assert reply.WhichOneof("kind") == "refused"
    assert "99" in reply.refused.error.message
    call.cancel()


async def test_a_draft_that_comes_while_the_model_loads_is_told_so(tmp_path: Path) -> None:
    """However its first message and the refusal meet: never "RPC finished" or "Internal error from Core"."""
    servicer = TargetServicer()
    server = Server(
        f"unix:{tmp_path}/loading",
        [NAME],
        add=lambda s: target_pb2_grpc.add_TargetServicer_to_server(servicer, s),
    )
    await server.start()
    attach = target_pb2.ChannelRequest(attach=target_pb2.Attach(target_layer_ids=[0]))
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/loading", options=channel_options()) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        for pause in [0.0, 0.05, *[0.0005 * i for i in range(20)]]:
            call = stub.HiddenStates()
            await asyncio.sleep(pause)
            await call.write(attach)
            with pytest.raises(grpc.aio.AioRpcError, match="still loading") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # One that says nothing and goes away is no trouble either.
        call = stub.HiddenStates()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await call.read()
    await server.stop(grace=0)


# ---- the process ------------------------------------------------------------------------------------

RUN = "import sys; from specbridge.cli import main; sys.exit(main(['target', *sys.argv[1:]]))"


async def spawn(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *args, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )


async def wait_serving(address: str, seconds: float = 90) -> None:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as connection:
        health: Any = health_pb2_grpc.HealthStub(connection)
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
                    if status.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.1)


async def test_the_process_serves_when_warm_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "model", dtype=torch.float32)
    address = f"unix:{tmp_path}/target.sock"
    process = await spawn(
        "--target",
        str(folder),
        "--listen",
        address,
        "--device",
        "cpu",
        "--warmup-repeats",
        "1",
        "--drain",
        "0.2",
    )
    try:
        await wait_serving(address)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as connection:
            stub: Any = target_pb2_grpc.TargetStub(connection)
            info = wire.target_info_from_pb(await stub.GetInfo(common_pb2.InfoRequest(), timeout=5))
            assert info.vocab_size == tiny.VOCAB_SIZE and info.verify_cost and info.dtype == "float32"
            stream = Rounds(stub)
            await stream.send(batch_id=1, opens=(opened(1),))
            assert (await stream.result(TargetResultKind.FIRST)).kv_length == len(PROMPT)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
        _, log = await process.communicate()
    assert b"Traceback" not in log, log.decode()


def test_options_that_can_not_work_end_with_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """cases.md 34."""
    folder = tiny.make_target(tmp_path / "model", dtype=torch.float32)
    assert main(["target", "--target", str(folder), "--max-length", "999999", "--metrics-port", "-1"]) == 2
    errors = capfd.readouterr().err
    assert "--max-length 999999" in errors and "Traceback" not in errors


@pytest.mark.slow
async def test_a_dead_rank_ends_the_process_with_an_error(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "model", dtype=torch.float32)
    address = f"unix:{tmp_path}/target.sock"
    process = await spawn(
        "--target", str(folder), "--listen", address, "--device", "cpu", "--tp", "2", "--warmup-repeats", "0"
    )
    try:
        await wait_serving(address)
        ranks = [
            child
            for child in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        ]
        assert len(ranks) == 1
        ranks[0].kill()
        assert await asyncio.wait_for(process.wait(), 60) == 1
    finally:
        if process.returncode is None:
            process.kill()
        _, log = await process.communicate()
    assert b"rank 1" in log


@pytest.mark.slow
async def test_eight_ranks_serve_what_one_does(tmp_path: Path) -> None:
    """One request over gRPC to a real process group, against the engine on one rank in this process."""
    folder = tiny.make_target(tmp_path / "model", layers=2, hidden=64, heads=8, kv_heads=2)
    runner = load_runner(folder, device="cpu", num_pages=16, page_size=16, max_rows=96)
    engine = make_engine(runner, replace(TOY_LIMITS, num_pages=16, max_length=200))
    engine.start()
    stop = StopParams(12, ignore_eos=True)
    want = await asyncio.to_thread(Client(engine).generate, open_request(1, PROMPT, stop=stop))
    await asyncio.to_thread(engine.close)
    address = f"unix:{tmp_path}/target.sock"
    process = await spawn(
        *("--target", str(folder), "--listen", address, "--device", "cpu", "--tp", "8"),
        *("--warmup-repeats", "0", "--kv-tokens", "256", "--max-length", "200", "--threads", "1"),
    )
    try:
        await wait_serving(address, seconds=240)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as connection:
            stub: Any = target_pb2_grpc.TargetStub(connection)
            info = wire.target_info_from_pb(await stub.GetInfo(common_pb2.InfoRequest(), timeout=20))
            assert info.tp_size == 8
            stream = Rounds(stub)
            await stream.send(batch_id=1, opens=(open_request(1, PROMPT, stop=stop),))
            first = await stream.result(TargetResultKind.FIRST)
            got, kv, accepted = list(first.tokens), first.kv_length, 0
            while len(got) < 12:
                tree = chain_tree(want.tokens[len(got) :][: min(4, 12 - len(got) - 1)])
                await stream.send(batch_id=len(got) + 1, verifies=(Verify(first.session, kv, tree),))
                (result,) = (await stream.reply()).results
                got, kv = [*got, *result.tokens], result.kv_length
                accepted += len(result.accepted)
            assert got == want.tokens and accepted > 0
            stream.call.cancel()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
        _, log = await process.communicate()
    assert b"Traceback" not in log, log.decode()
