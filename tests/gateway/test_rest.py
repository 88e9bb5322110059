"""The REST API: streaming, ends, disconnects, the openai client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_services import EOS, VOCAB, FakeDraft, FakeTarget, linked, oracle
from prometheus_client import CollectorRegistry
from surface import (
    EOS_TEXT,
    Surface,
    ids_of,
    live_server,
    make_surface,
    sse_events,
    until,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from gateway.completion import CompletionService, Phase
from gateway.generation import SpecStats
from gateway.limits import SchedulerLimits
from gateway.metrics import GatewayMetrics
from gateway.rest import create_app
from gateway.scheduler import Scheduler
from gateway.text import Tokenizer
from specbridge.errors import Unavailable
from specbridge.rounds import FinishReason

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
GOLDEN = Path(__file__).parent.parent / "golden" / "sse_chat.txt"


@pytest.fixture
def surface() -> Surface:
    return make_surface(extra=["Hello", " wor", "ld", "STOP"])


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}


def hello(surface: Surface) -> list[tuple[int, ...]]:
    """Two blocks that spell "Hello world" and end with eos."""
    return [ids_of(surface.tokenizer, "Hello", " wor"), ids_of(surface.tokenizer, "ld", EOS_TEXT)]


async def stream(surface: Surface, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    async with surface.client() as client:
        response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return list(sse_events(response.text))


# ---- shapes and order -----------------------------------------------------------------------


async def test_chat_response(surface: Surface) -> None:
    surface.plays(*hello(surface), cached_tokens=16)
    async with surface.client(**{"x-request-id": "abc-1"}) as client:
        response = await client.post(CHAT, json=chat_body())
    body = response.json()
    assert response.headers["x-request-id"] == "abc-1" and surface.scheduler.request.request_id == "abc-1"
    assert body["object"] == "chat.completion" and body["model"] == "toy"
    assert body["system_fingerprint"] == "fp_abcdef0123456789"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len(surface.scheduler.request.tokens)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert body["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 1, 2]
    assert surface.scheduler.ends == ["finish"]


async def test_stream_order_with_usage(surface: Surface) -> None:
    surface.plays(*hello(surface))
    events = await stream(surface, chat_body(stream_options={"include_usage": True}))
    assert events.pop() == "[DONE]"
    first, *deltas, finish, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [d["choices"][0]["delta"]["content"] for d in deltas] == ["Hello wor", "ld"]
    assert all(e["choices"][0]["finish_reason"] is None for e in (first, *deltas))
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "stop"
    assert all(e["usage"] is None and "metrics" not in e for e in (first, *deltas, finish))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert "speculative_decoding" in usage["metrics"] and "seed" in usage
    assert len({(e["id"], e["created"], e["object"]) for e in events}) == 1


async def test_stream_without_usage_puts_the_statistics_on_the_finish_event(surface: Surface) -> None:
    surface.plays(*hello(surface))
    events = await stream(surface, {"model": "toy", "prompt": "x"}, PLAIN)
    assert events.pop() == "[DONE]"
    assert [e["choices"][0]["text"] for e in events] == ["Hello wor", "ld", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop" and "metrics" in events[-1]
    assert all("usage" not in e for e in events)
    assert events[0]["object"] == "text_completion"


async def test_stream_transcript_equals_the_golden_file(surface: Surface) -> None:
    """Regenerate with REGENERATE_GOLDEN=1 and read the diff."""
    surface.plays(*hello(surface), cached_tokens=16)
    body = chat_body(stream=True, stream_options={"include_usage": True}, return_token_ids=True, seed=11)
    async with surface.client() as client:
        text = (await client.post(CHAT, json=body)).text
    text = re.sub(r'"chatcmpl-[0-9a-f]{24}"', '"chatcmpl-ID"', text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


async def test_token_ids_and_meta_info_when_asked_for(surface: Surface) -> None:
    surface.plays(*hello(surface))
    async with surface.client() as client:
        body = (await client.post(CHAT, json=chat_body(return_token_ids=True, return_meta_info=True))).json()
    assert body["choices"][0]["token_ids"] == [i for block in hello(surface) for i in block]
    assert body["prompt_token_ids"] == list(surface.scheduler.request.tokens)
    assert body["choices"][0]["meta_info"]["spec_verify_ct"] == 3


@pytest.mark.parametrize("detailed", [False, True])
async def test_per_round_lists_only_in_detailed_statistics(surface: Surface, detailed: bool) -> None:
    surface.service.detailed = detailed
    stats = SpecStats((0, 1, 1), 2, 2, 3, 4, 3, 5, per_step_accepted=(1, 2), per_step_drafted=(2, 2))
    surface.plays(*hello(surface), stats=stats)
    async with surface.client() as client:
        value = (await client.post(CHAT, json=chat_body())).json()["metrics"]["speculative_decoding"]
    assert value.get("per_step_accepted") == ([1, 2] if detailed else None)


async def test_status_routes(surface: Surface) -> None:
    async with surface.client() as client:
        models = (await client.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["toy"] and models["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/path/to/toy")).json()["id"] == "path/to/toy"
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok"}
        surface.scheduler.target_connected = False
        lost = await client.get("/health")
        assert lost.status_code == 503 and lost.json() == {"status": "target disconnected"}
        assert "version" in (await client.get("/version")).json()
        missing = await client.get("/v2/none")
        assert missing.status_code == 404 and "/v2/none" in missing.json()["error"]["message"]
        assert (await client.get(CHAT)).status_code == 405
        metrics = (await client.get("/metrics")).text
    assert 'specbridge_gateway_http_requests_total{code="200",method="GET",route="/v1/models"} 1.0' in metrics
    assert 'code="404",method="GET",route="other"' in metrics


async def test_tokenize_and_detokenize(surface: Surface) -> None:
    async with surface.client() as client:
        ids = (await client.post("/tokenize", json={"model": "toy", "prompt": "é"})).json()
        assert (
            ids["count"] == 2 and ids["tokens"] == surface.tokenizer.encode("é") and ids["token_strs"] is None
        )
        chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
        chat_ids = (await client.post("/tokenize", json=chat)).json()
        assert chat_ids["token_strs"][0] == "<|im_start|>"
        text = (await client.post("/detokenize", json={"tokens": chat_ids["tokens"]})).json()["prompt"]
        assert text == surface.tokenizer.render_chat(chat["messages"])  # type: ignore[arg-type]
        assert (await client.post("/detokenize", json={"tokens": [99999]})).status_code == 400
        assert (await client.post("/tokenize", json={})).status_code == 400


async def test_api_key_guards_everything_but_health(surface: Surface) -> None:
    guarded = make_surface(api_key="k3y")
    guarded.plays("ok")
    async with guarded.client() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "k3y"}):
            refused = await client.post(CHAT, json=chat_body(), headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        accepted = await client.post(CHAT, json=chat_body(), headers={"authorization": "Bearer k3y"})
        assert accepted.status_code == 200
    assert len(guarded.scheduler.generations) == 1


async def test_each_of_several_keys_is_a_tenant_and_priorities_arrive() -> None:
    guarded = make_surface(api_key="k3y, other")
    guarded.plays("ok")
    async with guarded.client() as client:
        for key, priority in (("k3y", 0), ("other", -2), ("k3y", None), ("k3y,other", 1)):
            body = chat_body() if priority is None else chat_body(priority=priority)
            answer = await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (401 if "," in key else 200)
        requests = [generation.request for generation in guarded.scheduler.generations]
        assert [request.priority for request in requests] == [0, -2, 0]
        assert requests[0].tenant == requests[2].tenant != requests[1].tenant
        assert not any("k3y" in request.tenant for request in requests)
        refused = await client.post(
            CHAT, json=chat_body(priority=5000), headers={"authorization": "Bearer other"}
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


async def test_bodies_past_the_limit_are_refused_announced_or_not() -> None:
    small = make_surface(max_body=2000)
    big = json.dumps(chat_body(user="x" * 4000)).encode()

    async def chunks() -> Any:
        yield big[:1000]
        yield big[1000:]

    async with small.client() as client:
        headers = {"content-type": "application/json"}
        assert (await client.post(CHAT, content=big, headers=headers)).status_code == 413
        assert (await client.post(CHAT, content=chunks(), headers=headers)).status_code == 413


# ---- ends -----------------------------------------------------------------------------------


async def test_stop_string_inside_a_block_beats_the_length_that_ends_it(surface: Surface) -> None:
    tokenizer = surface.tokenizer
    surface.plays(
        [*tokenizer.encode("ab"), *ids_of(tokenizer, "STOP"), *tokenizer.encode("cd")],
        finish=FinishReason.LENGTH,
    )
    async with surface.client() as client:
        body = (await client.post(PLAIN, json={"prompt": "x", "max_tokens": 5, "stop": ["STOP"]})).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "STOP")
    assert body["usage"]["completion_tokens"] == 2 and surface.scheduler.generations[0].delivered == 2


async def test_stop_id_inside_the_budget_is_a_stop_and_shows_no_text(surface: Surface) -> None:
    # The target ends the block [10, 11, STOP, ...] at its stop id: three tokens, two of them visible.
    ids = [*surface.tokenizer.encode("ab"), *ids_of(surface.tokenizer, "STOP")]
    surface.plays(ids)
    async with surface.client() as client:
        fields = {"prompt": "x", "max_tokens": 5, "stop_token_ids": [ids[2]], "return_token_ids": True}
        body = (await client.post(PLAIN, json=fields)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ids[2])
    assert choice["token_ids"] == ids and body["usage"]["completion_tokens"] == 3


async def test_stop_string_split_over_events_of_a_stream(surface: Surface) -> None:
    surface.plays("x own", " f", "ox jumps", "more", finish=FinishReason.LENGTH)
    events = await stream(surface, {"prompt": "q", "stop": "own fox", "return_token_ids": True}, PLAIN)
    texts = [e["choices"][0]["text"] for e in events if e != "[DONE]"]
    assert "".join(texts) == "x "
    ids = [i for e in events if e != "[DONE]" for i in e["choices"][0].get("token_ids", [])]
    assert ids == surface.tokenizer.encode("x ")
    assert surface.scheduler.ends == ["stop"]


async def test_stop_string_at_the_very_start_gives_an_empty_answer(surface: Surface) -> None:
    surface.plays("STOP", finish=FinishReason.LENGTH)
    events = await stream(surface, chat_body(stop=["STOP"], stream_options={"include_usage": True}))
    assert [e["choices"][0]["delta"] for e in events[:2]] == [{"role": "assistant", "content": ""}, {}]
    assert events[2]["usage"]["completion_tokens"] == 0 and events[3] == "[DONE]"


async def test_length_flushes_what_stop_strings_held_back(surface: Surface) -> None:
    surface.plays("abc own", finish=FinishReason.LENGTH)
    events = await stream(surface, {"prompt": "q", "stop": "own fox"}, PLAIN)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "abc own"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_an_error_before_the_first_token_is_a_status_and_later_an_event(surface: Surface) -> None:
    surface.plays(Unavailable("the target is gone"))
    async with surface.client() as client:
        early = await client.post(CHAT, json=chat_body(stream=True))
    assert early.status_code == 503 and early.json()["error"]["message"] == "the target is gone"
    surface.plays("ab", Unavailable("the target is gone"))
    events = await stream(surface, chat_body())
    assert events[1]["choices"][0]["delta"]["content"] == "ab"
    assert events[2]["error"] == {
        "message": "the target is gone",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert len(events) == 3  # no [DONE]: the answer is not complete
    surface.plays("ab", RuntimeError("secret"))
    assert "secret" not in json.dumps(await stream(surface, chat_body()))
    assert surface.scheduler.live == 0


# ---- clients that go away -------------------------------------------------------------------


async def open_and_drop(url: str, body: dict[str, Any], *, read: bool, ready: Any) -> None:
    """Send a request over a raw connection, wait for `ready()`, and close it without reading on."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await writer.drain()
    if read:
        await reader.readuntil(b"Hello wor")
    await until(ready)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("tokens_first", [True, False])
async def test_disconnect_frees_the_session(surface: Surface, streaming: bool, tokens_first: bool) -> None:
    surface.plays(*(hello(surface)[:1] if tokens_first else []), None)
    async with live_server(surface.app) as url:
        read = streaming and tokens_first
        body = chat_body(stream=streaming)
        await open_and_drop(url, body, read=read, ready=lambda: surface.scheduler.live == 1)
        await until(lambda: surface.scheduler.live == 0)
        assert surface.scheduler.ends == ["abort"]


async def test_a_hundred_normal_requests_abort_nothing_and_cancelled_ones_each_once(surface: Surface) -> None:
    surface.plays(*hello(surface))
    async with live_server(surface.app) as url, httpx.AsyncClient(base_url=url) as client:
        for i in range(0, 100, 20):
            answers = await asyncio.gather(
                *(client.post(CHAT, json=chat_body(stream=bool(j % 2))) for j in range(i, i + 20))
            )
            assert {a.status_code for a in answers} == {200}
        assert surface.scheduler.ends == ["finish"] * 100
        surface.plays(*hello(surface)[:1], None)
        for streaming in (True, False):
            await open_and_drop(
                url, chat_body(stream=streaming), read=streaming, ready=lambda: surface.scheduler.live
            )
            await until(lambda: surface.scheduler.live == 0)
    assert surface.scheduler.ends[100:] == ["abort", "abort"]


async def test_a_slow_first_token_does_not_hold_back_the_headers(
    surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.rest._HEADERS_AFTER_S", 0.05)
    surface.plays(0.4, *hello(surface))
    async with (
        live_server(surface.app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        assert response.status_code == 200 and surface.scheduler.generations[0].handed == 0
        text = "".join([chunk async for chunk in response.aiter_text()])
    assert list(sse_events(text))[-1] == "[DONE]"


async def test_fifty_streams_at_once_each_get_their_own_text(surface: Surface) -> None:
    surface.plays(0.01, *hello(surface))
    async with live_server(surface.app) as url, httpx.AsyncClient(base_url=url) as client:
        answers = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=True)) for _ in range(50)))
    ids = set()
    for answer in answers:
        events = list(sse_events(answer.text))
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Hello world"
        ids |= {e["id"] for e in events[:-1]}
    assert len(ids) == 50


# ---- the openai client ----------------------------------------------------------------------


async def test_openai_client(surface: Surface) -> None:
    async with (
        live_server(surface.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [m.id async for m in client.models.list()] == ["toy"]
        surface.plays(*hello(surface))
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="toy", messages=messages, seed=4)
        assert answer.choices[0].message.content == "Hello world" and answer.usage is not None
        assert answer.usage.completion_tokens == 4 and answer.choices[0].finish_reason == "stop"
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="toy", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4
        plain = await client.completions.create(
            model="toy", prompt="x", extra_body={"top_k": 5, "min_p": 0.1}
        )
        assert plain.choices[0].text == "Hello world"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="toy", messages=messages, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt", prompt="x")
        surface.plays("ab", Unavailable("the target is gone"))
        with pytest.raises(openai.APIError, match="target is gone"):
            async for _ in await client.completions.create(model="toy", prompt="x", stream=True):
                pass


# ---- over the real scheduler ----------------------------------------------------------------


def letters_tokenizer() -> Tokenizer:
    """One token per id of the fake target's vocabulary."""
    pieces = ["</s>", *(chr(0x4E00 + i) for i in range(1, VOCAB))]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_token_ids=[EOS])


async def test_usage_counters_and_releases_reconcile_over_the_real_scheduler() -> None:
    target, draft = FakeTarget(), FakeDraft(oracle)
    linked(target, draft)
    metrics = GatewayMetrics(CollectorRegistry())
    scheduler = Scheduler(target, draft, limits=SchedulerLimits(min_tree=1), observer=metrics)
    service = CompletionService(scheduler, letters_tokenizer(), names=["toy"])
    await scheduler.start()
    await scheduler.wait_ready(5.0)
    service.phase = Phase.SERVING
    async with live_server(create_app(service, metrics)) as url, httpx.AsyncClient(base_url=url) as client:
        for i in range(12):
            fields: dict[str, Any] = {
                "prompt": [1 + i, 2, 3],
                "max_tokens": 40,
                "seed": i,
                "temperature": 0.8,
            }
            if i % 3 == 0:
                text = (await client.post(PLAIN, json=fields)).json()["choices"][0]["text"]
                fields["stop"] = text[len(text) // 2 :][:2]
            body = (await client.post(PLAIN, json=fields)).json()
            plain = (await client.post(PLAIN, json={**fields, "no_speculation": True})).json()
            assert body["choices"] == plain["choices"]
        text = (await client.get("/metrics")).text

        # An aborted stream is paid for up to where it was read.
        reader = asyncio.ensure_future(
            client.post(PLAIN, json={"prompt": [1], "ignore_eos": True, "max_tokens": 500, "stream": True})
        )
        await until(lambda: scheduler.running == 1)
        reader.cancel()
        await until(lambda: scheduler.running == 0)
        after = (await client.get("/metrics")).text
    await scheduler.close()
    assert not target.sessions and not draft.sessions
    assert value(text, 'requests_total{finish_reason="abort"}') == 0
    assert value(after, 'requests_total{finish_reason="abort"}') == 1
    assert value(after, "aborted_tokens_total") == value(after, "generation_tokens_total") - value(
        text, "generation_tokens_total"
    )
    assert value(text, "spec_decode_drafts_total") > 0
    positions = sum(
        value(text, f'spec_decode_accepted_tokens_per_position_total{{position="{p}"}}') for p in range(64)
    )
    assert positions == value(text, "spec_decode_accepted_tokens_total") > 0


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_two_events_leaves_counters_at_usage(
    speculate: bool, stream: bool
) -> None:
    """The first half of the stop string was handed out by the scheduler before the second ends the text."""
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    metrics = GatewayMetrics(CollectorRegistry())
    limits = SchedulerLimits(tree_budget=4, min_tree=1)
    scheduler = Scheduler(target, draft if speculate else None, limits=limits, observer=metrics)
    service = CompletionService(scheduler, letters_tokenizer(), names=["toy"])
    await scheduler.start()
    await scheduler.wait_ready(5.0)
    service.phase = Phase.SERVING
    app = create_app(service, metrics)
    transport = httpx.ASGITransport(app)
    paid = accepted = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://surface") as client:
        for at in range(3, 13):  # wherever the blocks begin, some of these stops span two events
            fields: dict[str, Any] = {"prompt": [5, 2], "max_tokens": 30, "ignore_eos": True, "seed": 4}
            full = (await client.post(PLAIN, json=fields)).json()
            stop = full["choices"][0]["text"][at : at + 2]
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            cut = await client.post(PLAIN, json={**fields, "stop": stop, **options})
            last: dict[str, Any] = {}
            for event in (e for e in sse_events(cut.text) if e != "[DONE]") if stream else [cut.json()]:
                last.update((name, found) for name, found in event.items() if found)
            assert last["usage"]["completion_tokens"] == at and last["choices"][0]["stop_reason"] == stop
            for body in (full, last):
                paid += body["usage"]["completion_tokens"]
                accepted += body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        await until(lambda: scheduler.running == 0)
        text = (await client.get("/metrics")).text
    await scheduler.close()
    assert value(text, "generation_tokens_total") == paid
    assert value(text, "spec_decode_accepted_tokens_total") == accepted and bool(accepted) == speculate


async def test_a_target_that_the_tokenizer_does_not_fit_is_not_served(
    surface: Surface, caplog: pytest.LogCaptureFixture
) -> None:
    good = surface.scheduler.info
    assert good is not None and surface.service.healthy
    for change, said in (
        ({"vocab_size": good.vocab_size - 1}, f"the target's model only {good.vocab_size - 1}"),
        ({"eos_token_ids": (1, 2)}, r"the target's [1, 2]"),
    ):
        caplog.clear()
        surface.scheduler.info = dataclasses.replace(good, **change)
        async with surface.client() as client:
            health = await client.get("/health")
            refused = await client.post(PLAIN, json={"prompt": "a"})
        assert health.status_code == refused.status_code == 503
        assert said in health.json()["status"] and said in refused.json()["error"]["message"]
        assert caplog.text.count("not serving: the tokenizer") == 1 and said in caplog.text
    surface.scheduler.info = dataclasses.replace(good, eos_token_ids=(), vocab_size=good.vocab_size + 24)
    assert surface.service.healthy, "a padded vocabulary, and a model that names no end of text, are fine"


def value(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(f"specbridge_gateway_{name} ")]
    return float(line.rsplit(" ", 1)[1])


def test_the_gateway_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gateway.server, gateway.scheduler\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800b"}]}),
        (CHAT, {"messages": [{"role": "\udfff", "content": "a"}]}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "cache_salt": "\ud800"}),
        ("/tokenize", {"prompt": "\ud800"}),
    ],
)
async def test_half_a_surrogate_pair_is_the_callers_mistake(
    surface: Surface, path: str, fields: dict[str, Any]
) -> None:
    """JSON's \\uD800 is legal syntax and no character."""
    surface.plays(*hello(surface))
    headers = {"content-type": "application/json"}
    async with surface.client(**headers) as client:
        response = await client.post(path, content=json.dumps({"model": "toy", **fields}).encode())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "surrogate" in response.json()["error"]["message"]
