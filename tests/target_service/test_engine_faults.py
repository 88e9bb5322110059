"""The engine under wrong requests, failing steps, a dead model, short pages and broken streams."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
from toy_target import (
    GATEWAY,
    PROMPT,
    TOY_LIMITS,
    Client,
    Start,
    chain_tree,
    expected,
    open_request,
)

from specbridge.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    NotReady,
    SpecBridgeError,
    Stale,
    Unavailable,
    Unsupported,
)
from specbridge.rounds import SamplingParams, SessionKey, StopParams, TargetResultKind, Verify
from specbridge.tree import DraftTree

# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"tokens": ()}, InvalidRequest, "empty"),
        ({"tokens": (1, 12)}, InvalidRequest, "token id 12"),
        ({"tokens": (0,) * 400}, InvalidRequest, "400"),
        ({"prompt_length": 0}, InvalidRequest, "prompt_length is 0"),
        ({"prompt_length": 4}, InvalidRequest, "prompt_length is 4"),
        ({"stop": StopParams(0)}, InvalidRequest, "max_tokens is 0"),
        ({"stop": StopParams(2), "prompt_length": 1}, InvalidRequest, "nothing"),
        ({"stop": StopParams(2, min_tokens=3)}, InvalidRequest, "min_tokens is 3"),
        ({"stop": StopParams(2, stop_token_ids=(99,))}, InvalidRequest, "99"),
        ({"sampling": SamplingParams(temperature=-1.0)}, InvalidRequest, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, InvalidRequest, "top_p"),
        ({"sampling": SamplingParams(presence_penalty=1.0)}, Unsupported, "presence_penalty"),
        ({"draft_prefix": 9}, InvalidRequest, "draft_prefix is 9"),
        ({"want_logprobs": 50}, InvalidRequest, "want_logprobs is 50"),
    ],
)
def test_a_wrong_open_is_refused_with_field_and_value(
    start: Start, changes: dict[str, object], kind: type[SpecBridgeError], words: str
) -> None:
    _, engine, client = start()
    request = replace(open_request(1, [1, 2, 3]), **changes)  # type: ignore[arg-type]
    client.send(opens=[request, open_request(2, [1, 2])])
    error = client.result(request.session, TargetResultKind.ERROR).error
    assert type(error) is kind and words in str(error)
    # One bad session never fails its batch.
    assert client.result(SessionKey(GATEWAY, 2), TargetResultKind.FIRST).tokens
    assert engine.num_sessions == 1


def test_stale_messages_and_idempotent_releases(start: Start) -> None:
    runner, engine, client = start()
    key = SessionKey(GATEWAY, 1)
    first = client.open(open_request(1, PROMPT, incarnation=0))
    newer = SessionKey(GATEWAY, 1, 2)
    first = client.open(open_request(1, PROMPT, incarnation=2))
    reply = client.verify(
        [Verify(key, first.kv_length), Verify(SessionKey(GATEWAY, 77), 5), Verify(newer, first.kv_length)]
    )
    assert [type(r.error) for r in reply.results] == [Stale, Stale, type(None)]
    stale = client.open(open_request(1, PROMPT, incarnation=1))
    assert isinstance(stale.error, Stale)
    assert engine.num_sessions == 1
    client.send(releases=[key, SessionKey(GATEWAY, 77)])
    client.result(key, TargetResultKind.RELEASED)
    assert engine.num_sessions == 1
    for _ in range(2):
        client.send(releases=[newer])
        client.result(newer, TargetResultKind.RELEASED)
    assert engine.num_sessions == 0


def test_a_wrong_base_or_tree_ends_that_session_only(start: Start) -> None:
    _, engine, client = start()
    keys = [SessionKey(GATEWAY, n) for n in range(4)]
    firsts = [client.open(open_request(n, PROMPT)) for n in range(4)]
    base = firsts[0].kv_length
    reply = client.verify(
        [
            Verify(keys[0], base - 1),
            Verify(keys[1], base, DraftTree((99,), (-1,), (-0.1,))),
            Verify(keys[2], base, chain_tree([1] * 20)),
            Verify(keys[3], base),
        ]
    )
    assert [type(r.error) for r in reply.results] == [Stale, InvalidRequest, InvalidRequest, type(None)]
    assert "depth 19, at most 18" in str(reply.results[2].error)
    assert engine.num_sessions == 1


def test_a_verify_during_the_prefill_is_not_ready_and_does_no_harm(start: Start) -> None:
    gate = threading.Event()
    runner, _, client = start()
    runner.before_forward = lambda step: gate.wait(10) and None
    key = SessionKey(GATEWAY, 1)
    client.send(opens=[open_request(1, PROMPT)])
    batch = client.send(verifies=[Verify(key, len(PROMPT))])
    gate.set()
    (result,) = client.wait(lambda r: r.batch_id == batch).results
    assert isinstance(result.error, NotReady)
    assert client.result(key, TargetResultKind.FIRST).kv_length == len(PROMPT)


def test_opens_and_releases_are_acknowledged_before_the_prefill_runs(start: Start) -> None:
    gate = threading.Event()
    runner, _, client = start()
    # Longer than the client waits for an answer: one that came only after the prefill would be too late.
    runner.before_forward = lambda step: gate.wait(3 * client.timeout) and None
    try:
        client.send(opens=[open_request(1, PROMPT)], releases=[SessionKey(GATEWAY, 2)])
        client.result(SessionKey(GATEWAY, 1), TargetResultKind.OPENED)
        client.result(SessionKey(GATEWAY, 2), TargetResultKind.RELEASED)
    finally:
        gate.set()
    assert client.result(SessionKey(GATEWAY, 1), TargetResultKind.FIRST).kv_length == len(PROMPT)


def test_verifies_are_not_held_for_a_long_prefill(start: Start) -> None:
    runner, _, client = start()
    first = client.open(open_request(1, PROMPT))
    steps: list[int] = []
    runner.before_forward = lambda step: steps.append(len(step.tokens))
    long_prompt = [n % 12 for n in range(390)]
    client.send(opens=[open_request(2, long_prompt, max_tokens=2)])
    kv = first.kv_length
    for _ in range(10):
        (result,) = client.verify([Verify(first.session, kv)]).results
        kv = result.kv_length
    client.result(SessionKey(GATEWAY, 2), TargetResultKind.FIRST)
    assert max(steps) <= TOY_LIMITS.prefill_chunk + 1


def test_a_failing_step_ends_its_sessions_and_not_the_engine(start: Start) -> None:
    runner, engine, client = start()
    first = client.open(open_request(1, PROMPT))

    def explode(step: object) -> None:
        raise RuntimeError("boom")

    runner.before_forward = explode
    (result,) = client.verify([Verify(first.session, first.kv_length)]).results
    assert isinstance(result.error, InternalError) and "boom" in str(result.error)
    failed = client.open(open_request(2, PROMPT))
    assert isinstance(failed.error, InternalError)
    runner.before_forward = None
    assert engine.num_sessions == 0
    assert client.generate(open_request(3, PROMPT)).tokens == expected(runner, PROMPT)[0]


def test_a_dead_model_fails_everything_with_unavailable_and_is_reported_once(start: Start) -> None:
    reports: list[SpecBridgeError] = []
    runner, engine, client = start(on_failure=reports.append)
    first = client.open(open_request(1, PROMPT))
    client.open(open_request(2, PROMPT))
    runner.dead = Unavailable("rank 1 died")
    (result,) = client.verify([Verify(first.session, first.kv_length)]).results
    assert isinstance(result.error, Unavailable) and "rank 1" in str(result.error)
    other = client.result(SessionKey(GATEWAY, 2), TargetResultKind.ERROR)
    assert isinstance(other.error, Unavailable)
    late = client.open(open_request(3, PROMPT))
    assert isinstance(late.error, Unavailable)
    assert len(reports) == 1 and engine.failure is reports[0]


def test_an_idle_engine_notices_a_dead_rank(start: Start) -> None:
    failed = threading.Event()
    runner, _, _ = start(on_failure=lambda error: failed.set())
    runner.dead = Unavailable("rank 3 died")
    assert failed.wait(10)


def test_closing_answers_what_is_queued(start: Start) -> None:
    runner, engine, client = start()
    gate = threading.Event()
    runner.before_forward = lambda step: gate.wait(10) and None
    client.send(opens=[open_request(1, PROMPT)])
    client.result(SessionKey(GATEWAY, 1), TargetResultKind.OPENED)
    threading.Timer(0.1, gate.set).start()
    engine.close()
    assert isinstance(client.result(SessionKey(GATEWAY, 1), TargetResultKind.ERROR).error, Unavailable)
    assert runner.closed


# ---- capacity and leases --------------------------------------------------------------------------


def test_too_many_sessions(start: Start) -> None:
    _, _, client = start(replace(TOY_LIMITS, max_sessions=2))
    client.open(open_request(1, PROMPT))
    client.open(open_request(2, PROMPT))
    third = client.open(open_request(3, PROMPT))
    assert isinstance(third.error, CapacityError) and "2 sessions" in str(third.error)
    client.send(releases=[SessionKey(GATEWAY, 1)])
    assert client.open(open_request(4, PROMPT)).error is None


def test_page_shortage_preempts_the_youngest_and_the_reopened_text_is_the_same(start: Start) -> None:
    # 8 pages of 16: two sessions of 37 tokens need 3 each, and the second leaves 2 to spare.
    runner, engine, client = start(replace(TOY_LIMITS, num_pages=8, max_length=96))
    other = [(t + 1) % 12 for t in PROMPT]
    old = client.open(open_request(1, PROMPT, max_tokens=50))
    young = client.open(open_request(2, other, max_tokens=50))
    texts = {1: [*PROMPT, *old.tokens], 2: [*other, *young.tokens]}
    kv = {1: old.kv_length, 2: young.kv_length}
    keys = {1: old.session, 2: young.session}
    preempted = False
    for _ in range(40):
        reply = client.verify([Verify(keys[n], kv[n]) for n in (1, 2)])
        for n, result in zip((1, 2), reply.results, strict=True):
            if result.kind is TargetResultKind.PREEMPTED:
                preempted = True
                assert n == 2
            else:
                assert result.error is None
                texts[n] += result.tokens
                kv[n] = result.kv_length
        if preempted:
            break
    assert preempted
    assert engine.num_sessions == 1
    client.send(releases=[keys[1]])
    want, _ = expected(runner, other, stop=StopParams(50))
    done = len(texts[2]) - len(other)
    assert texts[2][len(other) :] == want[:done]
    again = open_request(2, texts[2], incarnation=1, prompt_length=len(other), max_tokens=50)
    assert client.generate(again).tokens == want[done:]


def test_the_only_session_gets_resource_exhausted_with_the_numbers(start: Start) -> None:
    _, engine, client = start(replace(TOY_LIMITS, num_pages=3, max_length=400))
    first = client.open(open_request(1, PROMPT, max_tokens=99))
    kv = first.kv_length
    for _ in range(20):
        (result,) = client.verify([Verify(first.session, kv)]).results
        if result.error is not None:
            break
        kv = result.kv_length
    assert isinstance(result.error, CapacityError) and "of 3" in str(result.error)
    assert kv == 48
    assert engine.num_sessions == 0
    refused = client.open(open_request(2, [1] * 60))
    assert isinstance(refused.error, CapacityError) and "--kv-tokens" in str(refused.error)


def test_a_prompt_waits_for_pages_of_an_older_session(start: Start) -> None:
    runner, _, client = start(replace(TOY_LIMITS, num_pages=4, max_length=64))
    old = client.open(open_request(1, PROMPT))
    other = [(t + 1) % 12 for t in PROMPT]
    client.send(opens=[open_request(2, other)])
    client.result(SessionKey(GATEWAY, 2), TargetResultKind.OPENED)
    (result,) = client.verify([Verify(old.session, old.kv_length)]).results
    assert result.error is None
    client.send(releases=[old.session])
    first = client.result(SessionKey(GATEWAY, 2), TargetResultKind.FIRST)
    assert list(first.tokens) == expected(runner, other)[0][:1]


def test_a_broken_stream_s_sessions_live_for_their_lease(start: Start) -> None:
    _, engine, client = start(replace(TOY_LIMITS, session_lease=0.3))
    kept = client.open(open_request(1, PROMPT))
    client.open(open_request(2, PROMPT))
    engine.drop_stream(client.sink)
    # The gateway is back on another stream in time for one of them.
    back = Client(engine)
    (result,) = back.verify([Verify(kept.session, kept.kv_length)]).results
    assert result.kind is TargetResultKind.VERIFIED
    deadline = time.monotonic() + 30
    while engine.num_sessions > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.num_sessions == 1
    (result,) = back.verify([Verify(kept.session, result.kv_length)]).results
    assert result.error is None
    (gone,) = back.verify([Verify(SessionKey(GATEWAY, 2), len(PROMPT))]).results
    assert isinstance(gone.error, Stale)
    assert engine._metrics.registry.get_sample_value("specbridge_target_lease_timeouts_total") == 1


def test_a_storm_of_opens_and_releases_leaves_nothing(start: Start) -> None:
    _, engine, client = start()
    rng = random.Random(11)
    for n in range(120):
        client.send(opens=[open_request(n, [rng.randrange(12) for _ in range(rng.randrange(1, 60))])])
        if n >= 20:
            client.send(releases=[SessionKey(GATEWAY, n - 20)])
    client.send(releases=[SessionKey(GATEWAY, n) for n in range(120)])
    client.result(SessionKey(GATEWAY, 119), TargetResultKind.RELEASED)
    assert engine.num_sessions == 0
    assert engine._cache.used == 0
