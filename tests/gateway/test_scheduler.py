"""The scheduler against fake services: any drafter, budget and concurrency gives plain decoding's text."""

from __future__ import annotations

import asyncio

import pytest
from fake_services import (
    Drafter,
    FakeDraft,
    FakeTarget,
    adversarial,
    linked,
    oracle,
    plain,
    random_tree,
)
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler

DRAFTERS: dict[str, Drafter] = {"oracle": oracle, "random": random_tree, "adversarial": adversarial}


@pytest.mark.parametrize("concurrency", [1, 9])
@pytest.mark.parametrize("budget", [0, 1, 7, 32, 64, "cost"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_equals_plain_decoding(drafter: str, budget: int | str, concurrency: int) -> None:
    target, draft = FakeTarget(), FakeDraft(DRAFTERS[drafter])
    linked(target, draft)
    observer = Recorder()
    requests = [
        make_request(i, max_tokens=40 + i, ignore_eos=drafter == "oracle") for i in range(concurrency)
    ]

    async def body(scheduler: Scheduler) -> None:
        texts = await asyncio.gather(*(collect(scheduler, r) for r in requests))
        for request, text in zip(requests, texts, strict=True):
            expected = plain(request.tokens, request.stop, request.seed or 0)
            assert text.tokens == expected.tokens
            assert text.finish_reason == expected.finish_reason

    limits = SchedulerLimits(budget="cost")
    if isinstance(budget, int):
        limits = SchedulerLimits(tree_budget=budget, max_verify_rows=256, min_tree=1)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert not target.sessions and not draft.sessions
    assert target.most_in_flight <= 1 and draft.most_in_flight <= 1
    assert max(target.verified_nodes, default=0) <= (budget if isinstance(budget, int) else 64)
    if budget and drafter == "oracle":
        # Full acceptance: every verified node of a chain is right.
        accepted = sum(r.accepted for r in observer.rounds)
        assert accepted == sum(r.nodes for r in observer.rounds) > 0
    observer.reconcile()


def test_whoever_has_a_round_s_tokens_finds_the_round_in_the_books() -> None:
    """They are kept while the next service is at work already, but before any reader is woken."""
    target, draft = FakeTarget(), FakeDraft(DRAFTERS["oracle"])
    linked(target, draft)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        got = 0
        async with scheduler.generate(make_request(0, max_tokens=60, ignore_eos=True)) as generation:
            async for event in generation:
                got += len(event.tokens)
                # The first token is the prefill's.
                assert 1 + sum(r.tokens for r in observer.rounds) >= got
                assert len(scheduler.report().decisions) == len(observer.rounds)
        assert got == 60

    limits = SchedulerLimits(tree_budget=4, max_verify_rows=256, min_tree=1)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    observer.reconcile()
