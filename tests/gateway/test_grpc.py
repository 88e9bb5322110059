"""The gRPC Generation service, and the process around both surfaces: readiness, drain, keepalive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_services import EOS, VOCAB, FakeTarget
from grpc_fakes import serve_target
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from surface import EOS_TEXT, Surface, ids_of, make_surface, until
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from gateway.completion import Phase
from gateway.config import GatewaySettings
from gateway.server import GENERATION, grpc_server, serve
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from specbridge.errors import CapacityError, ConfigError, DeadlineExceeded, InvalidRequest, Stale, Unavailable
from specbridge.rounds import FinishReason
from specbridge.server import channel_options
from specbridge.settings import load


@pytest.fixture
def surface() -> Surface:
    return make_surface(extra=["Hello", " wor", "ld", "STOP"])


@asynccontextmanager
async def served(surface: Surface, *, keepalive_s: float | None = None) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc_server(
        surface.service, surface.metrics, "127.0.0.1:0", drain_s=0.2, keepalive_s=keepalive_s
    )
    await server.start()
    await server.set_serving()
    try:
        options = channel_options(keepalive_s) if keepalive_s is not None else None
        async with grpc.aio.insecure_channel(server.bound, options=options) as channel:
            yield channel
    finally:
        await server.stop()


async def generate(channel: grpc.aio.Channel, **fields: Any) -> list[gateway_pb2.GenerateReply]:
    stub = gateway_pb2_grpc.GenerationStub(channel)
    return [reply async for reply in stub.Generate(gateway_pb2.GenerateRequest(**fields), timeout=10)]


def counted(surface: Surface, code: str, method: str = "Generate") -> float:
    name = "specbridge_gateway_grpc_requests_total"
    return surface.metrics.registry.get_sample_value(name, {"method": method, "code": code}) or 0.0


async def test_deltas_then_the_final_message(surface: Surface) -> None:
    blocks = [ids_of(surface.tokenizer, "Hello", " wor"), ids_of(surface.tokenizer, "ld", EOS_TEXT)]
    surface.plays(*blocks, cached_tokens=16)
    async with served(surface) as channel:
        chat = gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
        *deltas, last = await generate(channel, chat=chat, temperature=0, seed=-1, request_id="r-7")
    assert [d.delta.text for d in deltas] == ["Hello wor", "ld"]
    assert [tuple(d.delta.token_ids) for d in deltas] == blocks
    final = last.final
    assert final.finish_reason == common_pb2.FINISH_REASON_STOP and final.matched_stop == ""
    assert (final.completion_tokens, final.cached_tokens, final.seed) == (4, 16, 2**64 - 1)
    assert final.request_id == "r-7" and surface.scheduler.request.request_id == "r-7"
    assert list(final.speculation.acceptance_histogram) == [0, 1, 2] and final.speculation.num_rounds == 4
    assert surface.scheduler.request.sampling.temperature == 0.0
    assert surface.scheduler.ends == ["finish"] and counted(surface, "OK") == 1


async def test_stop_strings_cut_text_and_ids_together(surface: Surface) -> None:
    ids = [
        *surface.tokenizer.encode("ab"),
        *ids_of(surface.tokenizer, "STOP"),
        *surface.tokenizer.encode("cd"),
    ]
    surface.plays(ids[:1], ids[1:], finish=FinishReason.LENGTH)
    async with served(surface) as channel:
        *deltas, last = await generate(channel, token_ids=gateway_pb2.TokenIds(ids=[1]), stop=["bSTOP"])
    assert "".join(d.delta.text for d in deltas) == "a"
    assert [i for d in deltas for i in d.delta.token_ids] == ids[:1]
    assert last.final.matched_stop == "bSTOP" and last.final.completion_tokens == 1


async def test_parameters_left_out_take_the_models_defaults_and_given_ones_arrive(surface: Surface) -> None:
    surface.plays("x")
    async with served(surface) as channel:
        await generate(channel, text="abc")
        assert surface.scheduler.request.sampling.temperature == 1.0
        assert surface.scheduler.request.stop.max_tokens == 512 - 3
        await generate(
            channel, text="abc", top_k=4, top_p=0.5, min_p=0.25, max_tokens=9, min_tokens=2,
            stop_token_ids=[7], ignore_eos=True, no_speculation=True, max_tree_nodes=5, priority=-3,
        )  # fmt: skip
    request = surface.scheduler.request
    assert (request.sampling.top_k, request.sampling.top_p, request.sampling.min_p) == (4, 0.5, 0.25)
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.stop_token_ids) == (9, 2, (7,))
    assert request.stop.ignore_eos and not request.speculate and request.max_tree_nodes == 5
    assert request.deadline_s is not None and 0 < request.deadline_s < 11
    assert (request.priority, request.tenant) == (-3, "")


async def test_a_refusal_says_when_to_come_back_and_keys_are_told_apart(surface: Surface) -> None:
    surface.plays("x")
    async with served(surface) as channel:
        stub = gateway_pb2_grpc.GenerationStub(channel)
        tenants = []
        for key in ("a", "b", "a"):
            call = stub.Generate(
                gateway_pb2.GenerateRequest(text="abc"), metadata=(("authorization", f"Bearer {key}"),)
            )
            assert [reply async for reply in call]
            tenants.append(surface.scheduler.request.tenant)
        assert tenants[0] == tenants[2] != tenants[1] and "a" not in tenants
        surface.scheduler.refuse = CapacityError("the queue is full", retry_after=2.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, text="abc")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CapacityError("the queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (InvalidRequest("top_p is 3"), grpc.StatusCode.INVALID_ARGUMENT),
        (Unavailable("no target"), grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded("too slow"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (Stale("old"), grpc.StatusCode.FAILED_PRECONDITION),
        (RuntimeError("oops"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_typed_errors_become_status_codes(
    surface: Surface, error: Exception, code: grpc.StatusCode
) -> None:
    async with served(surface) as channel:
        for script in ([error], ["ab", error]):
            surface.plays(*script)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel, text="x")
            assert caught.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert surface.scheduler.live == 0 and counted(surface, code.name) >= 2


async def test_a_cancellation_inside_is_answered_promptly(surface: Surface) -> None:
    surface.plays("ab", asyncio.CancelledError())
    async with served(surface) as channel:
        async with asyncio.timeout(30):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel, text="x")
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert surface.scheduler.live == 0


async def test_many_cancelled_streams_free_their_sessions_and_the_server_answers_on(surface: Surface) -> None:
    surface.plays("ab", None)
    async with served(surface) as channel:
        stub = gateway_pb2_grpc.GenerationStub(channel)
        calls = [stub.Generate(gateway_pb2.GenerateRequest(text="x")) for _ in range(64)]
        for call in calls:
            assert (await call.read()).delta.text == "ab"
        assert surface.scheduler.live == 64
        for call in calls:
            call.cancel()
        await until(lambda: surface.scheduler.live == 0)
        assert surface.scheduler.ends == ["abort"] * 64
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=GENERATION), timeout=3)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        surface.plays("ok")
        assert (await generate(channel, text="x"))[0].delta.text == "ok"


async def test_a_deadline_frees_the_session(surface: Surface) -> None:
    surface.plays("ab", None)
    async with served(surface) as channel:
        stub = gateway_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=0.3):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: surface.scheduler.live == 0)


async def test_an_idle_stream_survives_many_keepalive_intervals(surface: Surface) -> None:
    # gRPC caps keepalive at one ping a second; five intervals without data.
    surface.plays(5.2, "ab")
    async with served(surface, keepalive_s=1.0) as channel:
        assert (await generate(channel, text="x"))[0].delta.text == "ab"


async def test_model_tokenize_detokenize_and_reflection(surface: Surface) -> None:
    async with served(surface) as channel:
        stub = gateway_pb2_grpc.GenerationStub(channel)
        model = await stub.GetModel(common_pb2.InfoRequest(), timeout=3)
        assert (model.model_id, model.max_length, model.tree_budget, model.drafter_id) == ("toy", 512, 16, "")
        ids = (await stub.Tokenize(gateway_pb2.TokenizeRequest(text="é!"), timeout=3)).ids
        assert list(ids) == surface.tokenizer.encode("é!")
        assert (await stub.Detokenize(gateway_pb2.DetokenizeRequest(ids=ids), timeout=3)).text == "é!"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Detokenize(gateway_pb2.DetokenizeRequest(ids=[99999]), timeout=3)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        services = [s.name async for reply in listing for s in reply.list_services_response.service]
    assert GENERATION in services and "grpc.health.v1.Health" in services


async def test_requests_are_refused_while_draining(surface: Surface) -> None:
    surface.service.phase = Phase.DRAINING
    async with served(surface) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await generate(channel, text="x")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- the process ----------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    """Tokenizer files for the fake target's vocabulary."""
    pieces = ["</s>", *(chr(0x4E00 + i) for i in range(1, VOCAB))]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION), timeout=3)).status)


async def test_not_serving_until_the_target_is_there_then_drain(tmp_path: Path) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    own, target_at = (f"unix:{tmp_path}/{name}" for name in ("own", "target"))
    settings = load(
        GatewaySettings,
        target=str(model_folder(tmp_path)),
        target_address=target_at,
        grpc_listen=own,
        http_port=free_port(),
        drain=10.0,
    )
    url = f"http://127.0.0.1:{settings.http_port}"
    stop = asyncio.Event()
    gateway = asyncio.create_task(serve(settings, stop=stop))
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    async with httpx.AsyncClient(base_url=url) as client:

        async def status() -> int:
            with_retry = httpx.AsyncHTTPTransport(retries=5)
            async with httpx.AsyncClient(base_url=url, transport=with_retry) as fresh:
                return (await fresh.get("/health")).status_code

        assert await status() == 503
        assert await health_of(own) == not_serving
        assert (await client.post("/v1/completions", json=body)).status_code == 503

        fake = FakeTarget(delay=0.02)
        server, _ = await serve_target(fake, target_at)
        async with asyncio.timeout(30):
            while await health_of(own) != serving:
                await asyncio.sleep(0.02)
        assert await status() == 200
        whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["usage"]["completion_tokens"] == 12 and whole["model"] == tmp_path.name

        # SIGTERM's way: what runs is finished, what comes is refused, health says so first.
        body["max_tokens"] = 40
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(30):
            while len(fake.opens) < 2:
                await asyncio.sleep(0.005)
        stop.set()
        async with asyncio.timeout(30):
            while await health_of(own) != not_serving:
                await asyncio.sleep(0.005)
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        finished = await running
        assert finished.status_code == 200 and finished.json()["usage"]["completion_tokens"] == 40
        await asyncio.wait_for(gateway, 30)
        assert not fake.sessions
        await server.stop(0)


async def test_a_target_with_another_vocabulary_keeps_the_process_not_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, target_at = (f"unix:{tmp_path}/{name}" for name in ("own", "target"))
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    settings = load(
        GatewaySettings,
        target=str(folder),
        target_address=target_at,
        grpc_listen=own,
        http_port=free_port(),
        drain=0.1,
    )
    server, _ = await serve_target(FakeTarget(), target_at)
    stop = asyncio.Event()
    gateway = asyncio.create_task(serve(settings, stop=stop))
    await until(lambda: "not serving: the tokenizer's end-of-text ids are [0, 7]" in caplog.text)
    assert await health_of(own) == health_pb2.HealthCheckResponse.NOT_SERVING
    async with grpc.aio.insecure_channel(own) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="--target") as caught:
            await generate(channel, text="x")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stop.set()
    await asyncio.wait_for(gateway, 30)
    await server.stop(0)


async def test_addresses_that_are_taken_are_configuration_errors(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    settings = load(GatewaySettings, target=str(folder), http_port=port, grpc_listen=f"unix:{tmp_path}/own")
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        await serve(settings, stop=asyncio.Event())
    taken.close()
    await taken.wait_closed()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
