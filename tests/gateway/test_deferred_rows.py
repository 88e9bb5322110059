"""While the budget skips the draft, rows are deferred; before the draft is asked again, one round brings
them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fake_services import FakeDraft, FakeTarget, linked, oracle, plain
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler

# Room for trees of up to two sessions; with three, the round skips the draft.
LIMITS = SchedulerLimits(tree_budget=5, max_verify_rows=12, min_tree=4)


async def beside(
    scheduler: Scheduler, observer: Recorder, first: Sequence[Any], more: Sequence[Any]
) -> list[Any]:
    """The texts of all; `more` come when `first` have been running for a while."""
    tasks = [asyncio.create_task(collect(scheduler, r)) for r in first]
    while len(observer.rounds) < 5:
        await asyncio.sleep(0.001)
    return await asyncio.gather(*tasks, *(collect(scheduler, r) for r in more))


def test_speculation_comes_back_without_a_miss_when_the_load_falls() -> None:
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()
    lengths = (250, 160, 30, 30)
    requests = [make_request(i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]

    async def body(scheduler: Scheduler) -> None:
        texts = await beside(scheduler, observer, requests[:2], requests[2:])
        for request, text in zip(requests, texts, strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert any(v.defer_rows for v in target.verified)
    assert not any(v.defer_rows and v.tree for v in target.verified)
    skipped = [r for r in observer.rounds if r.skipped == "budget"]
    assert skipped and all(r.sessions >= 3 for r in skipped)
    speculating = [r for r in observer.rounds if r.speculating]
    assert speculating and all(r.sessions <= 2 for r in speculating)
    # Each session catches up once, and the draft is never asked for rows it can't have.
    assert 1 <= observer.fallbacks["deferred"] <= len(lengths)
    assert not observer.fallbacks["not_ready"]
    assert sum(r.accepted for r in observer.rounds) == sum(r.nodes for r in observer.rounds) > 0


def test_a_session_without_speculation_defers_nothing() -> None:
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()
    requests = [make_request(i, max_tokens=100, ignore_eos=True, speculate=i > 0) for i in range(4)]

    async def body(scheduler: Scheduler) -> None:
        await beside(scheduler, observer, requests[:2], requests[2:])

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    deferred = {v.session.number for v in target.verified if v.defer_rows}
    plain_numbers = {item.session.number for item in target.opened if not item.speculate}
    assert deferred and not deferred & plain_numbers
