"""Through real processes: the OpenAI client, gRPC with reflection and health, /metrics, many clients,
cancels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from running_stack import RunningStack, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def expected(tiny_models: tuple[Path, Path]) -> str:
    """Greedy continuation of PROMPT by transformers."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(tiny_models[0], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_models[0])
    ids = tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=48, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_openai_client_gets_transformers_text(client: openai.OpenAI, expected: str) -> None:
    reply = client.chat.completions.create(
        model=_model(client), messages=PROMPT, max_tokens=48, temperature=0
    )
    assert reply.choices[0].message.content == expected
    assert reply.usage is not None and reply.usage.completion_tokens == 48
    assert reply.choices[0].finish_reason == "length"
    stats = (reply.model_extra or {})["metrics"]["speculative_decoding"]
    assert len(stats["acceptance_histogram"]) == stats["num_spec_tokens"] + 1 == 8
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] > 0


def test_openai_client_streams_the_same(client: openai.OpenAI, expected: str) -> None:
    stream = client.chat.completions.create(
        model=_model(client), messages=PROMPT, max_tokens=48, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == expected
    assert usage is not None and usage.completion_tokens == 48
    assert finish == "length"


def test_completions_and_seeded_sampling_repeat(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        reply = client.completions.create(
            model=_model(client),
            prompt="abc",
            max_tokens=32,
            temperature=1.0,
            seed=seed,
            extra_body={"top_k": 50},
        )
        return reply.choices[0].text

    assert ask(3) == ask(3)
    assert ask(3) != ask(4)


def test_unsupported_field_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=_model(client), messages=PROMPT, n=2)
    assert caught.value.param == "n"


@pytest.mark.parametrize("service", ["target", "draft", "gateway"])
def test_health_and_reflection_on_every_service(stack: RunningStack, service: str) -> None:
    address = stack.grpc if service == "gateway" else stack.socket(service)
    name = {"target": "Target", "draft": "Draft", "gateway": "Generation"}[service]
    full_name = f"specbridge.v1.{name}"
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for which in ("", full_name):
            reply = health.Check(health_pb2.HealthCheckRequest(service=which), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert full_name in database.get_services()
        pool = DescriptorPool(database)
        methods = {method.name for method in pool.FindServiceByName(full_name).methods}
    assert {"Target": "Rounds", "Draft": "Rounds", "Generation": "Generate"}[name] in methods


def test_counters_reconcile_with_usage(stack: RunningStack, client: openai.OpenAI) -> None:
    before = stack.metrics("gateway")
    usage = [
        client.chat.completions.create(
            model=_model(client), messages=[{"role": "user", "content": str(i)}], max_tokens=20, temperature=0
        ).usage
        for i in range(3)
    ]
    after = stack.metrics("gateway")

    def gained(name: str) -> float:
        return sum(v - before.get(k, 0.0) for k, v in after.items() if k.split("{")[0] == name)

    assert gained("specbridge_gateway_generation_tokens_total") == sum(
        u.completion_tokens for u in usage if u
    )
    assert gained("specbridge_gateway_prompt_tokens_total") == sum(u.prompt_tokens for u in usage if u)


async def test_sixty_four_concurrent_clients_get_their_own_text(stack: RunningStack) -> None:
    async def ask(client: httpx.AsyncClient, i: int) -> str:
        body = {
            "messages": [{"role": "user", "content": f"number {i % 16}"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        reply = await client.post("/v1/chat/completions", json={**body, "model": "target"})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=stack.url, timeout=200, limits=limits) as client:
        texts = await asyncio.gather(*(ask(client, i) for i in range(64)))
        alone = [await ask(client, i) for i in range(16)]
    assert texts == alone * 4


async def test_cancel_storm_leaves_nothing_behind(stack: RunningStack) -> None:
    async def start_and_leave(client: httpx.AsyncClient, i: int) -> None:
        body = {
            "model": "target",
            "prompt": f"storm {i}",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
        }
        if i % 2:  # a streaming client that goes away after the first line
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                async for _ in response.aiter_lines():
                    break
        else:  # one that waits for the whole text and gives up
            with pytest.raises(httpx.TimeoutException):
                await client.post(
                    "/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.05 + 0.01 * (i % 10))
                )

    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        for _ in range(3):
            await asyncio.gather(*(start_and_leave(client, i) for i in range(32)))

    def all_gone() -> bool:
        gateway = stack.total("gateway", "specbridge_gateway_requests_running")
        sessions = [stack.total(s, f"specbridge_{s}_sessions") for s in ("target", "draft")]
        return gateway == 0 and not any(sessions)

    wait_for(all_gone, 20, "zero sessions")


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
