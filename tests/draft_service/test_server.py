"""The draft service over gRPC, with a target that has nothing but the channel and GetInfo."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from channel_peers import ChannelTarget
from draft_bench import hidden_states, key, text
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny import make_drafter, make_target
from tiny_drafters import HIDDEN, TARGET_LAYERS, VOCAB, layout

from draft_service.config import DraftSettings
from draft_service.loading import load_engine
from draft_service.metrics import ChannelCollector, DraftMetrics
from draft_service.server import DraftServicer, TargetLink, drain
from protos import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from specbridge import wire
from specbridge.channel.base import ChannelLayout
from specbridge.cli import main
from specbridge.errors import NotReady
from specbridge.rounds import (
    DraftInfo,
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    Propose,
    SamplingParams,
    SessionKey,
    TargetInfo,
)
from specbridge.server import Server, channel_options
from specbridge.settings import load

WIDTH = 3 * HIDDEN
PATIENCE_S = 20.0


class FakeTarget(ChannelTarget):
    """A target service that knows who it is and can publish rows."""

    def __init__(self, address: str, fingerprint: str = "print") -> None:
        super().__init__(address, layout=ChannelLayout(WIDTH, "float32"))
        self.fingerprint = fingerprint

    async def GetInfo(self, request: common_pb2.InfoRequest, context: Any) -> target_pb2.TargetInfo:
        return wire.target_info_to_pb(
            TargetInfo(
                model_id="tiny", fingerprint=self.fingerprint, vocab_size=VOCAB, eos_token_ids=(),
                hidden_size=HIDDEN, num_layers=TARGET_LAYERS, page_size=16, max_length=512, tp_size=1,
                max_sessions=8, max_tree_nodes=64, total_pages=32, dtype="float32", device="cpu",
                instance=b"t" * 16,
            )
        )  # fmt: skip

    def publish(self, session: SessionKey, tokens: list[int], first: int, stop: int) -> None:
        rows = hidden_states(tokens[:stop], WIDTH)[first:]
        reservation = self.channel.reserve(stop - first)
        assert reservation is not None
        self.channel.rows(reservation)[: len(rows)].copy_(rows)
        assert self.channel.publish(
            reservation, session=session, first_position=first, count=len(rows), tokens=tokens[first:stop],
            anchor=tokens[stop],
        )  # fmt: skip


class Running:
    """A draft service in this process, and a client of it."""

    def __init__(self, folder: Path, built: Any) -> None:
        self.target_address = f"unix:{folder}/target.sock"
        self.address = f"unix:{folder}/draft.sock"
        self.settings = load(
            DraftSettings, device="cpu", dtype="float32", session_lease=0.2, propose_wait=10.0, eager=False
        )
        self.metrics = DraftMetrics()
        self.loaded = load_engine(self.settings, built.draft_folder, built.target_folder, self.metrics)
        self.servicer = DraftServicer("tiny-drafter")
        self.link: TargetLink | None = None

    async def __aenter__(self) -> Running:
        name = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name
        self.server = Server(
            self.address, [name], add=lambda s: draft_pb2_grpc.add_DraftServicer_to_server(self.servicer, s)
        )
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address, options=channel_options())
        self.stub = draft_pb2_grpc.DraftStub(self.channel)
        return self

    async def serve(self) -> None:
        await asyncio.to_thread(self.loaded.engine.start, warm_up_sessions=(1, 2), repeats=1, context=32)
        self.link = TargetLink(self.target_address, self.loaded, self.servicer, transport="auto")
        self.metrics.registry.register(ChannelCollector(self.link.client.stats.snapshot))
        self.servicer.serve(self.loaded)
        self.link.start()
        await self.server.set_serving()

    async def info(self) -> DraftInfo:
        return wire.draft_info_from_pb(await self.stub.GetInfo(common_pb2.InfoRequest(), timeout=PATIENCE_S))

    async def until_attached(self, attached: bool = True) -> DraftInfo:
        end = time.monotonic() + PATIENCE_S
        while (info := await self.info()).attached != attached or (attached and not info.target_fingerprint):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        return info

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        if self.link is not None:
            await self.link.close()
            await asyncio.to_thread(self.loaded.engine.close)
        await self.server.stop(grace=0.1)


class Rounds:
    """One Rounds stream."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Rounds()
        self.batch = 0

    async def ask(self, count: int, **parts: Any) -> list[DraftResult]:
        self.batch += 1
        await self.call.write(wire.draft_request_to_pb(DraftRequest(self.batch, **parts)))
        results: list[DraftResult] = []
        while len(results) < count:
            reply: DraftReply = wire.draft_reply_from_pb(await asyncio.wait_for(self.call.read(), PATIENCE_S))
            assert reply.batch_id == self.batch
            results.extend(reply.results)
        return results


@pytest.fixture
async def running(tmp_path: Path, build: Callable[..., Any]) -> AsyncIterator[Running]:
    built = build(layout("z-lab"), dtype=torch.float32)
    async with Running(tmp_path, built) as service:
        yield service


async def test_rounds_over_grpc_with_hidden_states_from_a_channel(running: Running) -> None:
    await running.serve()
    async with FakeTarget(running.target_address) as target:
        info = await running.until_attached()
        assert info.channel_transport in ("shared_memory", "inline") and info.channel_reason
        assert (
            info.target_fingerprint == "print" and info.block_size == 6 and info.target_layer_ids == (1, 4, 6)
        )
        assert [point.rows for point in info.draft_cost] == [6, 12] and info.max_nodes == 64
        assert target.events[0] == ("attach", ((1, 4, 6), True))
        rounds, tokens = Rounds(running.stub), text(1, 60)
        opened = (await rounds.ask(1, opens=(DraftOpen(key(1), tuple(tokens[:20]), 20, SamplingParams()),)))[
            0
        ]
        assert (opened.kind, opened.draft_prefix) == (DraftResultKind.OPENED, 0)
        target.publish(key(1), tokens, 0, 20)
        first = (await rounds.ask(1, proposes=(Propose(key(1), 20, tokens[20], 8, 5),)))[0]
        assert first.kind is DraftResultKind.PROPOSED and len(first.tree) == 8
        first.tree.validate(vocab_size=VOCAB, max_nodes=8, max_depth=5)
        target.publish(key(1), tokens, 20, 23)
        second = (await rounds.ask(1, proposes=(Propose(key(1), 23, tokens[23], 8, 5),)))[0]
        assert second.kind is DraftResultKind.PROPOSED and second.tree != first.tree
        moved = running.metrics.registry.get_sample_value("specbridge_draft_channel_rows_total")
        assert moved == 23
        released = (await rounds.ask(1, releases=(key(1),)))[0]
        assert released.kind is DraftResultKind.RELEASED
        assert target.channel.ring_used == 0 or await settled(target)


async def settled(target: FakeTarget) -> bool:
    end = time.monotonic() + PATIENCE_S
    while target.channel.ring_used and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return target.channel.ring_used == 0


async def test_the_service_answers_while_the_target_is_away_and_attaches_again(running: Running) -> None:
    await running.serve()
    rounds, tokens = Rounds(running.stub), text(2, 60)
    await rounds.ask(1, opens=(DraftOpen(key(1), tuple(tokens[:9]), 9, SamplingParams()),))
    answer = (await rounds.ask(1, proposes=(Propose(key(1), 9, tokens[9], 8, 5),)))[0]
    assert isinstance(answer.error, NotReady)
    assert not (await running.info()).attached
    for _ in range(2):
        async with FakeTarget(running.target_address) as target:
            await running.until_attached()
            while not any(event[0] == "recapture" for event in target.events):
                await asyncio.sleep(0.01)
            assert [e[1][:2] for e in target.events if e[0] == "recapture"] == [(key(1), 0)]
        await running.until_attached(False)


async def test_a_target_with_other_weights_gets_no_cached_context(running: Running) -> None:
    await running.serve()
    rounds, tokens = Rounds(running.stub), text(6, 60)
    prefixes = []
    for number, fingerprint in enumerate(("one", "one", "two")):
        async with FakeTarget(running.target_address, fingerprint) as target:
            info = await running.until_attached()
            assert info.target_fingerprint == fingerprint
            item = DraftOpen(key(number), tuple(tokens[:40]), 40, SamplingParams())
            prefixes.append((await rounds.ask(1, opens=(item,)))[0].draft_prefix)
            target.publish(key(number), tokens, prefixes[-1], 40)
            proposed = (await rounds.ask(1, proposes=(Propose(key(number), 40, tokens[40], 8, 5),)))[0]
            assert proposed.kind is DraftResultKind.PROPOSED
            await rounds.ask(1, releases=(key(number),))
        assert not (await running.until_attached(False)).target_fingerprint
    assert prefixes == [0, 32, 0]
    assert running.metrics.registry.get_sample_value("specbridge_draft_target_changes_total") == 1


async def test_a_drain_waits_for_open_sessions_and_no_longer(running: Running) -> None:
    await running.serve()
    rounds, tokens = Rounds(running.stub), text(7, 60)
    await rounds.ask(1, opens=(DraftOpen(key(1), tuple(tokens[:9]), 9, SamplingParams()),))
    engine = running.loaded.engine
    await drain(engine, 0.2)
    assert engine.traffic == 1
    # Waits until the session ends, or the test's patience does.
    ends = asyncio.create_task(drain(engine, 10 * PATIENCE_S))
    released = (await rounds.ask(1, releases=(key(1),)))[0]
    assert released.kind is DraftResultKind.RELEASED
    await asyncio.wait_for(ends, PATIENCE_S)


async def test_a_broken_stream_frees_its_sessions_after_the_lease(running: Running) -> None:
    await running.serve()
    rounds, tokens = Rounds(running.stub), text(3, 60)
    await rounds.ask(1, opens=(DraftOpen(key(1), tuple(tokens[:9]), 9, SamplingParams()),))
    rounds.call.cancel()
    end = time.monotonic() + PATIENCE_S
    while running.metrics.registry.get_sample_value("specbridge_draft_lease_expiries_total") != 1:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_half_closed_stream_still_gets_its_answers(running: Running) -> None:
    await running.serve()
    call = running.stub.Rounds()
    tokens = text(4, 60)
    request = DraftRequest(
        5,
        opens=(DraftOpen(key(1), tuple(tokens[:9]), 9, SamplingParams()),),
        proposes=(Propose(key(1), 9, tokens[9], 8, 5),),
    )
    await call.write(wire.draft_request_to_pb(request))
    await call.done_writing()
    kinds = [result.kind async for pb in call for result in wire.draft_reply_from_pb(pb).results]
    assert kinds == [DraftResultKind.OPENED, DraftResultKind.ERROR]


async def test_nothing_is_served_before_the_engine_is_warm(running: Running) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest(service="specbridge.v1.Draft")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.info()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await running.serve()
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


def test_a_process_serves_and_ends_on_sigterm(tmp_path: Path, build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"), dtype=torch.float32)
    address = f"unix:{tmp_path}/draft.sock"
    code = (
        "import sys; from draft_service.config import DraftSettings; from draft_service.server import run\n"
        f"sys.exit(run(DraftSettings(draft={str(built.draft_folder)!r}, target={str(built.target_folder)!r}, "
        f"target_address='unix:{tmp_path}/none.sock', listen={address!r}, device='cpu', dtype='float32', "
        "warmup_repeats=1, threads=1)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) as process:
        try:
            with grpc.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                end = time.monotonic() + 60
                while True:
                    try:
                        status = health.Check(health_pb2.HealthCheckRequest(), timeout=2).status
                        if status == health_pb2.HealthCheckResponse.SERVING:
                            break
                    except grpc.RpcError:
                        pass
                    assert time.monotonic() < end and process.poll() is None
                    time.sleep(0.1)
                info = draft_pb2_grpc.DraftStub(channel).GetInfo(common_pb2.InfoRequest(), timeout=10)
            assert info.drafter_id == str(built.draft_folder) and len(info.draft_cost) == 4
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def test_a_folder_that_is_no_drafter_is_named_with_the_fix(
    tmp_path: Path, build: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    target = str(build(layout("z-lab"), dtype=torch.float32).target_folder)
    words = ["draft", "--target", target, "--draft", target, "--metrics-port=-1", "--device=cpu"]
    assert main([*words, f"--listen=unix:{tmp_path}/draft.sock"]) == 2
    errors = capfd.readouterr().err
    assert f"--draft {target} is no DFlash drafter" in errors and "--no-draft" in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named_with_the_fix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "target", dtype=torch.float32)
    draft = make_drafter(tmp_path / "draft", dtype=torch.float32)
    for service in (["target"], ["draft", "--draft", str(draft)]):
        assert main([*service, "--target", str(target), "--device=cuda", "--metrics-port=-1"]) == 2
        errors = capfd.readouterr().err
        assert "--device cuda needs GPU 0" in errors and "use --device cpu (or auto)" in errors
        assert "Traceback" not in errors
