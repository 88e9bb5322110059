"""The OpenAI vocabulary: what requests may say, and how errors and responses look."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from surface import Surface, make_surface

from gateway import answers
from gateway.completion import Phase, Summary
from gateway.generation import SpecStats
from specbridge.errors import CapacityError, InternalError, Unavailable
from specbridge.rounds import FinishReason

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def surface() -> Surface:
    made = make_surface()
    made.plays("ok", finish=FinishReason.LENGTH)
    return made


async def post(surface: Surface, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"model": "toy", **({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}), **fields}
    async with surface.client() as client:
        return await client.post(path, json=body)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


WRONG: list[tuple[str, Any]] = [
    ("n", 2),
    ("best_of", 3),
    ("logprobs", True),
    ("logprobs", 5),
    ("top_logprobs", 2),
    ("prompt_logprobs", 1),
    ("echo", True),
    ("suffix", "x"),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 10}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a"}),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"),
    ("use_beam_search", True),
    ("chat_template", "x"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}={json.dumps(v)[:20]}" for n, v in WRONG])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_unsupported_fields_are_refused_by_name(
    surface: Surface, path: str, name: str, value: Any
) -> None:
    error = error_of(await post(surface, path, **{name: value}))
    assert (error["param"], error["type"], error["code"]) == (
        name,
        "invalid_request_error",
        "unsupported_parameter",
    )
    assert name in error["message"]
    assert not surface.scheduler.generations


NEUTRAL = {
    "n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "echo": False, "suffix": None,
    "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True, "user": "me",
    "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "functions": None, "modalities": ["text"],
    "stream_options": None, "temperature": None, "stop": None, "max_tokens": None, "seed": None,
    "stream": False,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_values_that_ask_for_nothing_are_accepted(surface: Surface, path: str) -> None:
    response = await post(surface, path, **NEUTRAL)
    assert response.status_code == 200, response.text


async def test_stream_options_of_guidellm_are_tolerated(surface: Surface) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert (await post(surface, stream=True, stream_options=options)).status_code == 200
    error = error_of(await post(surface, stream=True, stream_options={"colour": 1}))
    assert error["param"] == "stream_options" and "stream_options.colour" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown field temprature"),
        ({"temperature": "1"}, "temperature", 'temperature is "1"'),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_p": 0}, "top_p", "in (0, 1]"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5"),
        ({"min_p": 1.0}, "min_p", "min_p"),
        ({"top_k": -2}, "top_k", "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "max_tokens is true"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "min_tokens is 5"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"seed": 1.5}, "seed", "seed is 1.5"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ["x"] * 40}, "stop", "40 strings"),
        ({"stop": 3}, "stop", "stop is 3"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
        ({"max_tree_nodes": -1}, "max_tree_nodes", "max_tree_nodes is -1"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": ""}] * 20_001}, "messages", "20000"),
        ({"messages": "hi"}, "messages", "messages"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "text",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages",
            "tool_calls",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "give one"),
    ],
)
async def test_wrong_values_name_field_value_and_fix(
    surface: Surface, fields: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(await post(surface, **fields))
    assert error["param"] == param and says in error["message"]
    assert not surface.scheduler.generations


async def test_a_request_longer_than_the_model_names_both_numbers(surface: Surface) -> None:
    prompt = len(surface.tokenizer.encode_chat(MESSAGES))
    error = error_of(await post(surface, max_completion_tokens=500))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_completion_tokens"
    assert f"{prompt} tokens" in error["message"] and "500" in error["message"] and "512" in error["message"]
    error = error_of(await post(surface, PLAIN, prompt="x" * 512))
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    fits = await post(surface, max_tokens=512 - prompt)
    assert fits.status_code == 200


async def test_max_tokens_left_out_is_what_is_left(surface: Surface) -> None:
    await post(surface, PLAIN, prompt="x" * 100)
    assert surface.scheduler.request.stop.max_tokens == 412


async def test_parameters_reach_the_scheduler(surface: Surface) -> None:
    response = await post(
        surface, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-3, max_completion_tokens=7,
        min_tokens=2, stop_token_ids=[5], ignore_eos=True, stop="Z", no_speculation=True,
        max_tree_nodes=3, cache_salt="t",
    )  # fmt: skip
    assert response.status_code == 200 and response.json()["seed"] == -3
    request = surface.scheduler.request
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (7, 2, (5,), True)
    assert (request.seed, request.speculate, request.max_tree_nodes) == (-3, False, 3)
    assert (request.cache_salt, request.hold_back) == (b"t", True)


async def test_more_stop_ids_than_the_target_takes_are_refused_here(surface: Surface) -> None:
    fine = await post(surface, stop_token_ids=[1] * 256)
    assert fine.status_code == 200
    refused = await post(surface, stop_token_ids=[1] * 257)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"
    assert "257" in refused.json()["error"]["message"]


async def test_a_text_that_can_not_fit_is_refused_before_it_is_tokenised(
    surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising tens of megabytes takes the better part of a minute."""
    assert surface.scheduler.info is not None
    most = surface.scheduler.info.max_length * surface.tokenizer.longest_token
    monkeypatch.setattr(type(surface.tokenizer), "encode", lambda *_, **__: pytest.fail("was tokenised"))
    long = "x" * (most + 1)
    for path, fields, param in (
        (PLAIN, {"prompt": long}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        error = error_of(await post(surface, path, **fields))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert f"{most} at most" in error["message"]


async def test_null_is_as_good_as_absent(surface: Surface) -> None:
    for path in (CHAT, PLAIN):
        await post(surface, path)
        absent = surface.scheduler.request
        names = (
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
        )
        response = await post(surface, path, **dict.fromkeys(names))
        assert response.status_code == 200, response.text
        request = surface.scheduler.request
        assert (request.stop, request.sampling) == (absent.stop, absent.sampling)


async def test_a_seed_is_drawn_reported_and_survives_doubles(surface: Surface) -> None:
    seeds = [(await post(surface)).json()["seed"] for _ in range(2)]
    assert seeds == [g.request.seed for g in surface.scheduler.generations]
    assert seeds[0] != seeds[1] and max(seeds) < 2**53


async def test_content_parts_and_replayed_messages_are_accepted(surface: Surface) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
            "audio": None,
        },
        {"role": "user", "content": "d", "name": "me"},
    ]
    assert (await post(surface, messages=messages)).status_code == 200
    text = surface.tokenizer.decode(surface.scheduler.request.tokens, skip_special_tokens=False)
    assert "user\na\nb<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")


async def test_prompts_as_ids_and_lists_of_one(surface: Surface) -> None:
    for prompt in ("hi", ["hi"], surface.tokenizer.encode("hi"), [surface.tokenizer.encode("hi")]):
        assert (await post(surface, PLAIN, prompt=prompt)).status_code == 200
        assert surface.scheduler.request.tokens == tuple(surface.tokenizer.encode("hi"))
    assert error_of(await post(surface, PLAIN, prompt=["a", "b"]))["param"] == "prompt"
    assert "empty" in error_of(await post(surface, PLAIN, prompt=""))["message"]
    assert "empty" in error_of(await post(surface, PLAIN, prompt=[]))["message"]
    assert "token id 9999" in error_of(await post(surface, PLAIN, prompt=[9999]))["message"]


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b'{"model": "toy", ', {"content-type": "application/json"}, "not valid JSON"),
        (b"[1]", {"content-type": "application/json"}, "must be a JSON object"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, "Content-Type: application/json"),
    ],
)
async def test_bodies_that_are_no_json_objects(
    surface: Surface, body: bytes, headers: dict[str, str], says: str
) -> None:
    async with surface.client() as client:
        assert says in error_of(await client.post(CHAT, content=body, headers=headers))["message"]


async def test_unknown_model_is_404_and_aliases_work(surface: Surface) -> None:
    error = error_of(await post(surface, model="gpt-x"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-x" in error["message"] and "toy" in error["message"]
    assert (await post(surface, model="path/to/toy")).json()["model"] == "path/to/toy"


async def test_refusals_have_their_status_and_retry_after(surface: Surface) -> None:
    surface.scheduler.refuse = CapacityError("the queue is full: 7 wait", retry_after=2.6)
    response = await post(surface)
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "3"
    surface.scheduler.refuse = Unavailable("no target")
    response = await post(surface, stream=True)
    assert error_of(response, 503)["message"] == "no target" and response.headers["retry-after"] == "1"
    surface.scheduler.refuse = RuntimeError("secret path /x")
    assert "secret" not in error_of(await post(surface), 500)["message"]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING])
async def test_503_while_warming_and_draining(surface: Surface, phase: Phase) -> None:
    surface.service.phase = phase
    for path in (CHAT, PLAIN):
        response = await post(surface, path)
        assert error_of(response, 503)["type"] == "server_error" and "retry-after" in response.headers
    async with surface.client() as client:
        assert (await client.get("/health")).status_code == 503


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "finish_reason": FinishReason.STOP, "stop_reason": None, "prompt_tokens": 3, "completion_tokens": 9,
        "cached_tokens": 2, "seed": 5,
    }  # fmt: skip
    stats = SpecStats((1, 1, 2), 2, 4, 5, 8, 6, 9)
    return Summary(**{**values, "stats": stats, **changes})


def test_speculation_object_has_the_de_facto_shape() -> None:
    value = answers.closing_json(summary())["metrics"]["speculative_decoding"]
    assert value == {
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 0.625,
        "acceptance_histogram": [1, 1, 2],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 8,
        "num_spec_tokens": 2,
        "num_rounds": 6,
    }
    histogram = value["acceptance_histogram"]
    assert len(histogram) == value["num_spec_tokens"] + 1
    assert sum(histogram) == value["num_spec_steps"]


def test_events_are_compact_json_and_keep_any_text() -> None:
    head = answers.Head(chat=True, response_id="i", created=1, model='m"', fingerprint="f", usage_field=True)
    text = 'a"\\\n\u2028😀\x00\ufffd'
    event = head.text_event(text, [1, 2])
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2
    value = json.loads(event[6:])
    assert value["choices"][0]["delta"] == {"content": text}
    assert value["choices"][0]["token_ids"] == [1, 2] and value["usage"] is None and value["model"] == 'm"'
    assert json.loads(answers.error_event(InternalError("x"))[6:])["error"]["message"] == "x"
