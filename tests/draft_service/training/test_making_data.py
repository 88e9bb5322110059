"""From prompt files to shards: what is asked for, what is left out, and going on after an interruption."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_service.training import endpoint as endpoint_module
from draft_service.training.endpoint import Endpoint, EndpointSource
from draft_service.training.generate import Made, Progress, Wanted, parse_mix, produce, wanted
from draft_service.training.head import rank_tokens
from draft_service.training.prompts import Counts, Exclusions, Prompt, read_prompts, select
from draft_service.training.shards import Manifest, Shards, ShardWriter
from specbridge.errors import ConfigError, Unavailable

MIX = parse_mix(["0:1", "0.8:1", "1.0:2"])


def prompt(text: str) -> Prompt:
    return Prompt(({"role": "user", "content": text},), "file")


# ---- prompts ------------------------------------------------------------------------------------


def test_rows_of_both_kinds_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "prompt": "Why?", "source": "elsewhere"},
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi!"},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "an answer to be replaced"},
            ]
        },
    ]
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"))
    first, second = read_prompts(path)
    assert (first.text, first.source) == ("Why?", "some")
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.text == "Hello\nAnd?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:2 is not JSON"),
        ('{"text": "x"}', "bad.jsonl:2 holds no prompt"),
        ('{"prompt": " "}', "bad.jsonl:2 holds no prompt"),
        ('{"messages": [{"role": "user"}]}', "bad.jsonl:2 holds no prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "bad.jsonl:2: its messages have no turn"),
    ],
)
def test_rows_without_a_prompt_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_what_is_evaluated_on_is_left_out() -> None:
    words = [f"w{i}" for i in range(40)]
    held_out = Exclusions([" ".join(words), "What is 2 + 2?"])
    counts = Counts()
    kept = select(
        map(
            prompt,
            [
                "WHAT is 2+2 ?!",  # equal but for case and punctuation
                "Please: " + " ".join(words[7:20]) + " and so on",  # 13 words in a row
                "Please: " + " ".join(words[7:19]) + " and so on",  # 12
                "please " + " ".join(words[7:19]) + " and so ON!",  # once more
                "What is 3 + 3?",
            ],
        ),
        held_out,
        counts,
    )
    assert [p.text[-6:] for p in kept] == [" so on", "3 + 3?"]
    assert counts.as_notes() == {
        "prompts_read": 5,
        "duplicates_dropped": 1,
        "excluded_equal": 1,
        "excluded_overlap": 1,
        "too_long": 0,
    }


# ---- what is asked for --------------------------------------------------------------------------


def test_the_plan_follows_from_the_prompts_alone() -> None:
    prompts = [([i, i + 1, 3], f"text {i}") for i in range(400)]
    plan = wanted(prompts, mix=MIX, samples=3, seed=5)
    assert plan == wanted(reversed(prompts), mix=MIX, samples=3, seed=5)
    assert [one.key for one in plan] == sorted({one.key for one in plan})
    assert all(0 <= one.seed < 2**53 and 0 <= one.key < 2**63 for one in plan)
    assert len({one.seed for one in plan}) == len(plan) == 1200
    other = {one.key for one in wanted(prompts, mix=MIX, samples=3, seed=6)}
    assert not other & {one.key for one in plan}
    # Fewer samples are a part of more.
    assert {one.key for one in wanted(prompts, mix=MIX, samples=2, seed=5)} < {one.key for one in plan}


def test_temperatures_have_their_shares_and_no_greedy_answer_twice() -> None:
    prompts = [([i, 7], "") for i in range(4000)]
    plan = wanted(prompts, mix=MIX, samples=1, seed=0)
    shares = {t: sum(one.temperature == t for one in plan) / len(plan) for t in MIX.temperatures}
    assert shares[0.0] == pytest.approx(0.25, abs=0.03) and shares[1.0] == pytest.approx(0.5, abs=0.03)
    many = wanted(prompts[:50], mix=MIX, samples=20, seed=0)
    assert len(many) == 1000
    greedy = [one.tokens for one in many if one.temperature == 0.0]
    assert len(greedy) == len(set(greedy)) > 45
    assert len(wanted(prompts[:50], mix=parse_mix(["0"]), samples=20, seed=0)) == 50


@pytest.mark.parametrize("items", [[], ["hot:1"], ["0:x"], ["0:0"], ["-1:1"], ["1:1", "1.0:2"], ["1:inf"]])
def test_mixes_that_mean_nothing(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="--temperatures"):
        parse_mix(items)


class Interrupted(Exception):
    pass


def answers(wanted: Iterable[Wanted]) -> Iterator[Made]:
    for one in wanted:
        yield Made(one.key, [one.key % 50 + 1] * (one.key % 4))  # a fourth of them is empty


def test_an_interrupted_run_goes_on_and_ends_alike(tmp_path: Path) -> None:
    plan = wanted([([i, 1], "") for i in range(60)], mix=MIX, samples=1, seed=0)
    manifest = Manifest("t", "f", 64)
    asked: list[int] = []

    def broken(part: Iterable[Wanted]) -> Iterator[Made]:
        for number, made in enumerate(answers(part)):
            if number == 33:
                raise Interrupted
            yield made

    def rest(part: Iterable[Wanted]) -> Iterator[Made]:
        part = list(part)
        asked.extend(one.key for one in part)
        yield from answers(part)

    with pytest.raises(Interrupted), ShardWriter(tmp_path / "a", manifest, shard_responses=10) as writer:
        produce(plan, broken, writer)
    held = set(Shards(tmp_path / "a").keys.tolist())
    assert len(held) > 15
    seen: list[Progress] = []
    with ShardWriter(tmp_path / "a", manifest, shard_responses=10) as writer:
        end = produce(plan, rest, writer, seen.append)
    assert set(asked) == {one.key for one in plan} - held
    assert end.responses == end.total == 60 and seen[-1] == end
    with ShardWriter(tmp_path / "b", manifest, shard_responses=10) as writer:
        produce(plan, answers, writer)
    found = []
    for folder in ("a", "b"):
        data = Shards(tmp_path / folder)
        found.append(sorted((r.key, r.tokens.tolist(), r.temperature, r.seed, r.prompt_length)
                            for r in map(data.get, range(len(data)))))  # fmt: skip
    assert found[0] == found[1] and len(found[0]) == sum(one.key % 4 > 0 for one in plan)


def test_frequent_tokens_come_first_and_cover_what_was_not_counted(tmp_path: Path) -> None:
    """Token k + 1 has a share of 2^-k or so; prompts consist of token 0, which is not counted."""
    with ShardWriter(tmp_path, Manifest("t", "f", 64)) as writer:
        for i in range(200):
            body = [k + 1 for k in range(6) for _ in range(64 >> k)]
            writer.add([0] * 50 + body, 50, 0.0, 0, key=i)
    ranked = rank_tokens(Shards(tmp_path), 3)
    assert ranked.ids == (1, 2, 3)
    assert ranked.coverage == pytest.approx((64 + 32 + 16) / 126)
    assert rank_tokens(Shards(tmp_path), 8).ids == (1, 2, 3, 4, 5, 6, 0, 7)
    with pytest.raises(ConfigError, match="--size 65"):
        rank_tokens(Shards(tmp_path), 65)


# ---- endpoint -----------------------------------------------------------------------------------


class Server:
    """An OpenAI-compatible one: its answer to a prompt is the prompt's length, then 9. takes_ids: whether it
    knows token ids. busy: 429s that come first."""

    def __init__(self, *, takes_ids: bool = True, busy: int = 0, broken_from: int = 10**9) -> None:
        self.takes_ids, self.busy, self.broken_from = takes_ids, busy, broken_from
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "its-model"}]})
        assert request.url.path == "/v1/completions"
        assert request.headers["authorization"] == "Bearer secret"
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.busy:
            self.busy -= 1
            return httpx.Response(429, json={})
        if len(self.bodies) > self.broken_from:
            return httpx.Response(503, text="gone")
        if not self.takes_ids and ("return_token_ids" in body or not isinstance(body["prompt"], str)):
            return httpx.Response(400, text="prompt must be a string")
        choice: dict[str, Any] = {"text": f"{len(body['prompt'])} 9", "finish_reason": "stop"}
        if self.takes_ids:
            choice["token_ids"] = [len(body["prompt"]), 9]
        return httpx.Response(200, json={"choices": [choice]})


def source(server: Server, monkeypatch: pytest.MonkeyPatch) -> EndpointSource:
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 0.0)
    return EndpointSource(
        Endpoint("http://there/v1/", key="secret", concurrency=4),
        max_tokens=7,
        encode=lambda text: [int(word) for word in text.split()],
        end_id=2,
        transport=httpx.MockTransport(server),
    )


PLAN = [Wanted(key, (1,) * (key + 1), 0.7, 2**53 - key - 1, text="x" * 10 * (key + 1)) for key in range(9)]


@pytest.mark.parametrize("takes_ids", [True, False])
def test_an_endpoint_answers_in_ids_or_in_text(monkeypatch: pytest.MonkeyPatch, takes_ids: bool) -> None:
    server = Server(takes_ids=takes_ids, busy=3 if takes_ids else 0)
    asked = source(server, monkeypatch)
    made = {one.key: list(one.tokens) for one in asked(PLAN)}
    assert made == {k: [k + 1, 9] if takes_ids else [10 * (k + 1), 9, 2] for k in range(9)}
    body = server.bodies[-1]
    one = PLAN[len(body["prompt"]) // (1 if takes_ids else 10) - 1]
    assert body["model"] == "its-model" and body["max_tokens"] == 7 and body["temperature"] == 0.7
    assert body["seed"] == one.seed and body["prompt"] == (list(one.tokens) if takes_ids else one.text)
    assert asked.failed == 0


def test_an_endpoint_that_goes_away_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "GIVE_UP_AFTER", 3)
    asked = source(Server(broken_from=2), monkeypatch)
    made = []
    with pytest.raises(Unavailable, match="3 requests in a row failed.*HTTP 503: gone"):
        for one in asked(PLAN):
            made.append(one.key)
    assert len(made) == 2 and 3 <= asked.failed <= 6  # those under way, too


def test_a_server_that_refuses_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = source(Server(broken_from=0), monkeypatch)
    with pytest.raises(ConfigError, match="did not answer the first request: HTTP 503"):
        list(asked(PLAN))
