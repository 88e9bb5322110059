"""Responses, per-request statistics and counters say the same, to the token, whatever becomes of requests.

Real surfaces, scheduler and metrics over scripted services, under load with stop strings, stop ids, clients
that leave, requests that fail inside, a draft that dies and comes back and a target that loses its stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fake_services import MAX_LENGTH, FakeDraft, FakeTarget, linked, oracle, random_tree
from prometheus_client import CollectorRegistry
from surface import byte_tokenizer, live_server, sse_events

from gateway.completion import CompletionService, Phase
from gateway.generation import RequestRecord, SpecStats
from gateway.limits import SchedulerLimits
from gateway.metrics import MAX_POSITIONS, PREFIX, STAGES, TREE_SIZES, GatewayMetrics
from gateway.rest import create_app
from gateway.scheduler import Scheduler
from specbridge.errors import InvalidRequest, Stale
from specbridge.rounds import TargetInfo, TargetOpen, Verify
from specbridge.tree import EMPTY_TREE, DraftTree

COUNT = 48
FAILS = "fails inside"


def mixed(tokens: list[int], seed: int, max_nodes: int, max_depth: int) -> DraftTree:
    """Right, wrong and empty trees of several sizes, by turns."""
    kind = len(tokens) % 4
    if kind == 0:
        return EMPTY_TREE
    return (random_tree if kind == 1 else oracle)(tokens, seed, max(1, max_nodes - kind), max_depth)


class Target(FakeTarget):
    """Its vocabulary is the tokenizer's. Sessions whose prompt says so are lost after a few tokens, and
    refused when they come back.
    """

    def __init__(self, vocab_size: int, failing: list[int]) -> None:
        super().__init__(delay=0.001)
        self._vocab_size = vocab_size
        self._failing = failing
        self.script = self._lose
        self.open_script = self._refuse

    def make_info(self) -> TargetInfo:
        info = super().make_info()
        return replace(info, vocab_size=self._vocab_size, eos_token_ids=())

    def _fails(self, tokens: Sequence[int]) -> bool:
        return list(tokens[: len(self._failing)]) == self._failing

    def _lose(self, verify: Verify) -> Stale | None:
        session = self.sessions.get((verify.session.gateway, verify.session.number))
        late = session is not None and len(session.tokens) > session.prompt_length + 6
        return Stale("lost") if late and self._fails(session.tokens) else None

    def _refuse(self, request: TargetOpen) -> InvalidRequest | None:
        again = len(request.tokens) > request.prompt_length
        return InvalidRequest("refused") if again and self._fails(request.tokens) else None


class Metrics(GatewayMetrics):
    """Keeps the requests' records."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.records: dict[str, RequestRecord] = {}

    def on_request(self, record: RequestRecord) -> None:
        assert record.request_id not in self.records, "a request ended twice"
        self.records[record.request_id] = record
        super().on_request(record)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(PREFIX + name, labels)
        assert value is not None, name
        return value


@dataclass
class Outcome:
    """What one client saw. speculation: of `metrics` in the response."""

    prompt_tokens: int
    status: int = 0
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    finish_reason: str = ""
    left: bool = False
    error: bool = False


def body_of(number: int) -> dict[str, Any]:
    """Requests of many kinds, by turns."""
    body: dict[str, Any] = {
        "model": "toy",
        "prompt": f"request {number} " + "and more " * (number % 4),
        "max_tokens": 20 + 5 * (number % 7),
        "temperature": 0.8,
        "seed": number,
        "stream": number % 3 != 0,
    }
    kind = number % 6
    if kind == 1:
        body["stop"] = ["A", "b1", "~"]
    elif kind == 2:
        body["stop_token_ids"] = [7, 8, 9, 10, 11, 12]
    elif kind == 3:
        body["ignore_eos"] = True
    elif kind == 4:
        body |= {"stop": ["Q"], "include_stop_str_in_output": True}
    if number % 12 == 5:  # leaves early: it would run for long
        body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
    if number % 16 == 10:
        body |= {"prompt": FAILS, "max_tokens": 200, "ignore_eos": True, "stream": number % 32 == 10}
        body.pop("stop", None)
        body.pop("stop_token_ids", None)
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


async def ask(client: httpx.AsyncClient, number: int, prompt_tokens: int) -> Outcome:
    body, outcome = body_of(number), Outcome(prompt_tokens)
    headers = {"x-request-id": f"r{number}"}
    if not body["stream"]:
        reply = await client.post("/v1/completions", json=body, headers=headers)
        outcome.status = reply.status_code
        outcome.error = reply.status_code != 200
        if not outcome.error:
            _take(outcome, reply.json())
        return outcome
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        outcome.status = reply.status_code
        text = ""
        async for part in reply.aiter_text():
            text += part
            if body["max_tokens"] == 400 and text.count("data: ") > 4:
                outcome.left = True
                return outcome
    if reply.status_code != 200:
        outcome.error = True
        return outcome
    for event in sse_events(text):
        if event != "[DONE]" and "error" in event:
            outcome.error = True
        elif event != "[DONE]":
            _take(outcome, event)
    return outcome


def _take(outcome: Outcome, value: dict[str, Any]) -> None:
    if value.get("usage"):
        outcome.usage = value["usage"]
    if value.get("metrics"):
        outcome.speculation = value["metrics"]["speculative_decoding"]
    for choice in value["choices"]:
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason


async def run_load(metrics: Metrics) -> list[Outcome]:
    tokenizer = byte_tokenizer()
    target = Target(tokenizer.vocab_size, tokenizer.encode(FAILS))
    draft = FakeDraft(mixed, delay=0.001)
    draft.vocab_size = tokenizer.vocab_size
    linked(target, draft)
    limits = SchedulerLimits(
        tree_budget=6,
        max_verify_rows=200,
        min_tree=1,
        max_running=12,
        draft_timeout=2.0,
        reopen_backoff=0.005,
    )
    scheduler = Scheduler(target, draft, limits=limits, observer=metrics)
    service = CompletionService(scheduler, tokenizer, names=["toy"], tree_budget=lambda: 6)
    service.phase = Phase.SERVING
    metrics.watch(running=lambda: scheduler.running, waiting=lambda: scheduler.queue_length)
    await scheduler.start()
    await scheduler.wait_ready(5.0)
    try:
        async with (
            live_server(create_app(service, metrics)) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            tasks = [
                asyncio.create_task(ask(client, number, len(tokenizer.encode(body_of(number)["prompt"]))))
                for number in range(COUNT)
            ]
            for done, fault in ((6, draft.kill), (12, draft.restart), (20, target.break_stream)):
                while sum(task.done() for task in tasks) < done:
                    await asyncio.sleep(0.001)
                fault()
            outcomes = list(await asyncio.gather(*tasks))
            too_long = await client.post(
                "/v1/completions", json={"model": "toy", "prompt": "x" * (MAX_LENGTH + 1), "max_tokens": 1}
            )
            assert too_long.status_code == 400
            while scheduler.running:  # those whose client has left
                await asyncio.sleep(0.005)
    finally:
        await scheduler.close()
    return outcomes


@pytest.fixture(scope="module")
def loaded() -> tuple[Metrics, list[Outcome]]:
    metrics = Metrics()

    async def main() -> list[Outcome]:
        async with asyncio.timeout(90):
            return await run_load(metrics)

    return metrics, asyncio.run(main())


Loaded = tuple[Metrics, list[Outcome]]


def test_the_load_had_everything(loaded: Loaded) -> None:
    metrics, outcomes = loaded
    assert sum(o.left for o in outcomes) == 4 and sum(o.error for o in outcomes) == 3
    assert {o.finish_reason for o in outcomes if not o.error and not o.left} == {"stop", "length"}
    assert metrics("aborted_tokens_total") > 0
    assert metrics("fallbacks_total", cause="draft_down") > 0
    assert metrics("session_reopens_total", service="target", cause="disconnected") > 0
    cut = [r for r in metrics.records.values() if r.stats.num_spec_steps]
    assert any(r.stats.num_accepted_draft_tokens for r in cut)


def test_responses_agree_with_the_records_of_their_requests(loaded: Loaded) -> None:
    metrics, outcomes = loaded
    assert sorted(metrics.records) == sorted(f"r{number}" for number in range(COUNT))
    for number, outcome in enumerate(outcomes):
        record = metrics.records[f"r{number}"]
        assert record.prompt_tokens == outcome.prompt_tokens
        if outcome.left or outcome.error:
            assert outcome.usage is None and (record.error is not None) == outcome.error
            continue
        assert outcome.usage is not None and outcome.speculation is not None
        assert outcome.usage["completion_tokens"] == record.output_tokens == record.stats.num_output_tokens
        assert outcome.usage["prompt_tokens"] == record.prompt_tokens
        assert outcome.finish_reason == record.finish_reason.openai
        stats = outcome.speculation
        for name in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_rounds"):
            assert stats[name] == getattr(record.stats, name), (number, name)
        assert stats["acceptance_histogram"] == list(record.stats.acceptance_histogram)


def test_token_counters_are_the_sums_of_usage(loaded: Loaded) -> None:
    metrics, outcomes = loaded
    used = [o.usage for o in outcomes if o.usage is not None]
    delivered = sum(usage["completion_tokens"] for usage in used)
    assert metrics("generation_tokens_total") == delivered + metrics("aborted_tokens_total")
    assert metrics("prompt_tokens_total") == sum(o.prompt_tokens for o in outcomes)
    assert metrics("delivery_tokens_sum") == metrics("generation_tokens_total")
    assert metrics("request_generation_tokens_sum") == metrics("generation_tokens_total")
    with_tokens = [r for r in metrics.records.values() if r.output_tokens]
    assert metrics("time_to_first_token_seconds_count") == len(with_tokens)
    assert metrics("inter_token_latency_seconds_count") <= metrics("generation_tokens_total") - len(
        with_tokens
    )
    rounds = metrics("round_tokens_total")
    assert rounds + len(with_tokens) >= metrics("generation_tokens_total"), "delivered, but of no round"


def test_requests_are_counted_once_by_their_end(loaded: Loaded) -> None:
    metrics, outcomes = loaded
    reasons = Counter("error" if o.error else "abort" if o.left else o.finish_reason for o in outcomes)
    for reason in ("stop", "length", "abort", "error"):
        assert metrics("requests_total", finish_reason=reason) == reasons[reason], reason
    for name in ("request_rounds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert metrics(f"{name}_count") == COUNT
    codes = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"{PREFIX}http_requests_total" and sample.labels["route"] == "/v1/completions"
    ]
    assert sum(sample.value for sample in codes) == COUNT + 1


def test_speculative_counters_are_the_sums_of_the_requests_statistics(loaded: Loaded) -> None:
    metrics, _ = loaded
    stats: list[SpecStats] = [record.stats for record in metrics.records.values()]
    histogram: Counter[int] = Counter()
    for one in stats:
        histogram.update(dict(enumerate(one.acceptance_histogram)))
    assert metrics("spec_decode_drafts_total") == sum(s.num_spec_steps for s in stats) > 0
    assert metrics("spec_decode_draft_tokens_total") == sum(s.num_draft_tokens for s in stats)
    assert metrics("spec_decode_accepted_tokens_total") == sum(s.num_accepted_draft_tokens for s in stats) > 0
    assert metrics("request_rounds_sum") == sum(s.num_rounds for s in stats)
    for position in range(MAX_POSITIONS):
        count = sum(n for accepted, n in histogram.items() if accepted > position)
        assert metrics("spec_decode_accepted_tokens_per_position_total", position=str(position)) == count
    below = 0
    for accepted in range(7):
        below += histogram[accepted]
        assert metrics("acceptance_length_tokens_bucket", le=f"{accepted + 1}.0") == below
    for name, total in (
        ("spec_decode_drafts_by_size_total", "spec_decode_drafts_total"),
        ("spec_decode_accepted_tokens_by_size_total", "spec_decode_accepted_tokens_total"),
    ):
        sizes = (*map(str, TREE_SIZES), "more")
        assert sum(metrics(name, nodes=size) for size in sizes) == metrics(total), name
    assert metrics("request_acceptance_length_tokens_count") == sum(bool(s.num_spec_steps) for s in stats)


def test_stages_add_up_to_the_rounds(loaded: Loaded) -> None:
    metrics, _ = loaded
    stages = {stage: metrics("round_stage_seconds_total", stage=stage) for stage in STAGES}
    assert sum(stages.values()) == pytest.approx(metrics("round_seconds_sum"), rel=1e-9)
    assert all(seconds >= 0 for seconds in stages.values()) and stages["verify"] > 0 and stages["draft"] > 0
    kinds = sum(metrics("rounds_total", kind=kind) for kind in ("speculative", "plain"))
    assert metrics("round_seconds_count") == kinds


def test_aliases_show_the_same_numbers(loaded: Loaded) -> None:
    metrics, _ = loaded
    metrics.tell(model_name="toy", version="1", drafts=True, vllm_aliases=True)
    labels = {"model_name": "toy", "engine": "0"}

    def theirs(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"vllm:{name}", labels | more)

    for name, ours in (
        ("generation_tokens_total", "generation_tokens_total"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("prefix_cache_hits_total", "cached_prompt_tokens_total"),
        ("num_preemptions_total", "preemptions_total"),
        ("spec_decode_num_drafts_total", "spec_decode_drafts_total"),
        ("spec_decode_num_draft_tokens_total", "spec_decode_draft_tokens_total"),
        ("spec_decode_num_accepted_tokens_total", "spec_decode_accepted_tokens_total"),
        ("num_requests_running", "requests_running"),
        ("kv_cache_usage_perc", "target_kv_usage_ratio"),
        ("num_requests_waiting", "requests_waiting"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
    ):
        assert theirs(name) == metrics(ours), name
    for reason in ("stop", "length", "abort"):
        assert theirs("request_success_total", finished_reason=reason) == metrics(
            "requests_total", finish_reason=reason
        )
    assert theirs("spec_decode_num_accepted_tokens_per_pos_total", position="0") == metrics(
        "spec_decode_accepted_tokens_per_position_total", position="0"
    )
    assert theirs("time_to_first_token_seconds_bucket", le="+Inf") == metrics(
        "time_to_first_token_seconds_count"
    )
