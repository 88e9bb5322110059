"""The engine when its own code raises, or its model answers nonsense: all that was asked is answered."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_target import (
    GATEWAY,
    PROMPT,
    SAMPLED,
    TOY_LIMITS,
    Client,
    Start,
    chain_tree,
    expected,
    open_request,
)

from specbridge.errors import InternalError, SpecBridgeError, Stale
from specbridge.rounds import SamplingParams, SessionKey, TargetResultKind, Verify
from target_service.engine import Engine
from target_service.step import Step

KEYS = [SessionKey(GATEWAY, n) for n in range(8)]


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("injected")


def value(engine: Engine, name: str) -> float:
    return engine._metrics.registry.get_sample_value(f"specbridge_target_{name}") or 0.0


# ---- the loop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["expire", "update_gauges", "flush"])
def test_an_exception_in_the_loop_ends_the_service_and_not_just_the_thread(start: Start, where: str) -> None:
    reports: list[SpecBridgeError] = []
    _, engine, client = start(on_failure=reports.append)
    first = client.open(open_request(1, PROMPT))
    working = getattr(engine._book, where)

    def once(**kwargs: object) -> None:
        setattr(engine._book, where, working)
        broken()

    setattr(engine._book, where, once)
    error = client.result(first.session, TargetResultKind.ERROR).error
    assert isinstance(error, InternalError) and "injected" in str(error)
    assert len(reports) == 1 and engine.failure is reports[0]
    late = client.open(open_request(2, PROMPT))
    assert isinstance(late.error, InternalError)
    assert engine._thread is not None and engine._thread.is_alive()


def test_even_if_failing_the_sessions_fails_the_service_ends(start: Start) -> None:
    reports: list[SpecBridgeError] = []
    runner, engine, client = start(on_failure=reports.append)
    client.open(open_request(1, PROMPT))
    working = engine._book.fail_all
    engine._book.fail_all = broken  # type: ignore[method-assign]
    engine._book.expire = broken  # type: ignore[method-assign]
    deadline = time.monotonic() + 20
    while not reports and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(reports) == 1
    time.sleep(0.05)
    assert value(engine, "defects_total") < 20, "a broken loop must not spin"
    engine.close()
    assert runner.closed
    engine._book.fail_all = working  # type: ignore[method-assign]
    working(reports[0])


def test_a_callback_that_raises_does_not_hide_the_failure(start: Start) -> None:
    _, engine, client = start(on_failure=broken)
    first = client.open(open_request(1, PROMPT))
    engine._book.update_gauges = broken  # type: ignore[method-assign]
    assert isinstance(client.result(first.session, TargetResultKind.ERROR).error, InternalError)
    assert engine.failure is not None


# ---- messages ---------------------------------------------------------------------------------------


def test_a_request_that_breaks_the_engine_is_answered_item_by_item(start: Start) -> None:
    runner, engine, client = start()
    for n in (1, 2, 3):
        client.open(open_request(n, PROMPT))
    working = engine._book.find
    calls = 0

    def breaks_late(key: SessionKey) -> Any:
        """The release and the first verify get through, the second one does not."""
        nonlocal calls
        calls += 1
        if calls == 3:
            engine._book.find = working  # type: ignore[method-assign]
            broken()
        return working(key)

    engine._book.find = breaks_late  # type: ignore[method-assign]
    batch = client.send(
        opens=[open_request(5, PROMPT)],
        verifies=[Verify(KEYS[2], len(PROMPT)), Verify(KEYS[3], len(PROMPT))],
        releases=[KEYS[1]],
    )
    for key in (KEYS[1], KEYS[5]):
        kinds = (TargetResultKind.ERROR, TargetResultKind.RELEASED)
        assert isinstance(client.result(key, *kinds).error, InternalError)
    reply = client.wait(lambda r: r.batch_id == batch and r.timings is not None)
    assert [r.session for r in reply.results] == [KEYS[2], KEYS[3]]
    assert all(isinstance(r.error, InternalError) and "injected" in str(r.error) for r in reply.results)
    assert engine.num_sessions == 0, "what was answered with an error must not live on"
    assert value(engine, "defects_total") == 1
    assert engine.failure is None
    assert client.generate(open_request(6, PROMPT)).tokens == expected(runner, PROMPT)[0]


def test_a_broken_notice_of_the_channel_does_no_harm(start: Start) -> None:
    runner, engine, client = start()
    engine._capture.attached = broken  # type: ignore[method-assign]
    engine.channel_attached("inline", "test")
    assert client.generate(open_request(1, PROMPT)).tokens == expected(runner, PROMPT)[0]
    assert value(engine, "defects_total") == 1 and engine.failure is None


def test_whoever_opened_a_session_on_another_stream_is_told_of_its_end(start: Start) -> None:
    """Else that stream, half-closed, would wait for a first token for ever."""
    runner, engine, client = start()
    other = Client(engine)
    held = [KEYS[1], KEYS[2]]

    def act(step: Step) -> None:
        runner.before_forward = None
        other.send(opens=[open_request(1, PROMPT, incarnation=1)], releases=[KEYS[2]])

    runner.before_forward = act
    client.send(opens=[open_request(1, PROMPT), open_request(2, PROMPT)])
    for key in held:
        assert isinstance(client.result(key, TargetResultKind.ERROR).error, Stale)
    assert other.result(SessionKey(GATEWAY, 1, 1), TargetResultKind.FIRST).tokens


# ---- logits that are no numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_round_without_numbers_ends_its_session_and_no_other(
    start: Start, sampling: SamplingParams, number: float
) -> None:
    runner, engine, client = start()
    sick = client.open(open_request(1, PROMPT, sampling=sampling))
    well = client.open(open_request(2, PROMPT[:20]))

    def bad(step: Step, logits: torch.Tensor) -> None:
        logits[1, 3] = number  # a node of the first session's tree

    runner.spoil = bad
    reply = client.verify(
        [Verify(sick.session, len(PROMPT), chain_tree([1, 2])), Verify(well.session, 20, chain_tree([1]))]
    )
    assert isinstance(reply.results[0].error, InternalError) and "NaN" in str(reply.results[0].error)
    assert reply.results[1].error is None
    text = [*well.tokens, *reply.results[1].tokens]
    assert text == expected(runner, PROMPT[:20])[0][: len(text)]
    assert engine.num_sessions == 1 and value(engine, "bad_logits_total") == 1


def test_a_prompt_without_numbers_ends_and_leaves_no_prefix(start: Start) -> None:
    runner, engine, client = start()

    def bad(step: Step, logits: torch.Tensor) -> None:
        logits.fill_(float("nan"))

    runner.spoil = bad
    first = client.open(open_request(1, PROMPT))
    assert isinstance(first.error, InternalError)
    assert engine.num_sessions == 0 and engine._cache.used == 0 and engine._cache.cached == 0
    runner.spoil = None
    again = client.generate(open_request(2, PROMPT))
    assert again.cached_tokens == 0 and again.tokens == expected(runner, PROMPT)[0]


# ---- a prompt that waits ----------------------------------------------------------------------------


def test_a_prompt_that_waits_for_pages_is_not_hashed_at_every_turn(start: Start) -> None:
    _, engine, client = start(replace(TOY_LIMITS, num_pages=4, max_length=64))
    old = client.open(open_request(1, PROMPT))
    other = [(t + 1) % 12 for t in PROMPT]
    client.send(opens=[open_request(2, other)])
    client.result(KEYS[2], TargetResultKind.OPENED)
    lookups, turns = 0, 0
    look_up, plan = engine._cache.pool.match, engine._stepper.planner.plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return look_up(*args, **kwargs)

    def planned() -> Any:
        nonlocal turns
        turns += 1
        return plan()

    engine._cache.pool.match = counted  # type: ignore[method-assign]
    engine._stepper.planner.plan = planned  # type: ignore[method-assign]
    deadline = time.monotonic() + 20
    while turns < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert turns >= 10 and lookups == 0
    client.send(releases=[old.session])
    assert client.result(KEYS[2], TargetResultKind.FIRST).tokens
