"""While no draft is expected for long, new sessions are not opened there; when it pays again they are."""

from __future__ import annotations

import asyncio
import random

import pytest
from budget_sim import Bench, Costs, grow
from fake_services import FakeDraft, FakeTarget, linked, oracle, plain
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.budget import WANTED_ROUNDS, Candidate, SharedRows
from gateway.cost_budget import SPARED_ROUNDS, CostBudget
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from gateway.standing import SCOUT_EVERY
from gateway.steering import Load

LIMITS = SchedulerLimits(max_verify_rows=256, min_tree=1)


class Scripted(SharedRows):
    """A fixed budget that spares and wants when it is told to."""

    probes = True

    def __init__(self, *, spare: bool = True, want: bool = False, worth: bool = True) -> None:
        super().__init__(tree_budget=5, max_verify_rows=256, min_tree=1)
        self.spare, self.want, self.worth = spare, want, worth
        self.asked: list[tuple[int, int, int]] = []

    def spares(self, sessions: int) -> bool:
        return self.spare

    def wants_draft(self, sessions: int) -> bool:
        return self.want

    def worth_capturing(self, *, rows: int, remaining: int, sessions: int) -> bool:
        self.asked.append((rows, remaining, sessions))
        return self.worth


def run(policy: Scripted, count: int, *, max_tokens: int = 60, turn: int = 0) -> tuple[FakeDraft, Recorder]:
    """`count` sessions; after `turn` rounds the policy wants the draft."""
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()
    wanted = [make_request(i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)]

    async def body(scheduler: Scheduler) -> None:
        tasks = [asyncio.create_task(collect(scheduler, r)) for r in wanted]
        if turn:
            while len(observer.rounds) < turn:
                await asyncio.sleep(0.001)
            policy.want = True
        for request, text in zip(wanted, await asyncio.gather(*tasks), strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer, policy=policy)
    assert not target.sessions and not draft.sessions
    # The target's own prefix is used alone: nothing is held back for a draft that knows nothing.
    spared = [item for item in target.opened if item.draft_absent]
    assert all(item.draft_prefix == len(item.tokens) for item in spared)
    assert len(spared) == (count - count // SCOUT_EVERY if policy.spare else 0)
    observer.reconcile()
    return draft, observer


def test_a_spared_session_never_meets_the_draft() -> None:
    draft, observer = run(Scripted(), 3)
    assert not draft.opens and not draft.releases and not draft.proposes
    assert not observer.fallbacks and not observer.reopens  # it is a choice, not a failure
    assert {r.skipped for r in observer.rounds} == {"budget"}


def test_scouts_are_opened_all_the_same() -> None:
    draft, observer = run(Scripted(), 2 * SCOUT_EVERY + 1, max_tokens=20)
    assert len({key.number for key in draft.opens}) == 2
    assert all(r.drafted <= 2 for r in observer.rounds) and any(r.nodes for r in observer.rounds)


def test_when_the_draft_is_wanted_again_spared_sessions_are_opened_there() -> None:
    policy = Scripted()
    draft, observer = run(policy, 3, max_tokens=150, turn=10)
    assert draft.recaptures == 3 and observer.reopens["draft", "wanted"] == 3
    assert any(r.speculating == 3 for r in observer.rounds)
    assert not any(r.nodes for r in observer.rounds[:10])
    assert {sessions for _, _, sessions in policy.asked} == {3}
    # Prompts have 3 to 5 tokens; the anchor is no row.
    assert all(152 <= rows + remaining <= 154 for rows, remaining, _ in policy.asked)


def test_not_if_capturing_costs_more_than_it_saves() -> None:
    draft, observer = run(Scripted(worth=False), 2, turn=5)
    assert not draft.opens and not observer.reopens


def test_without_sparing_everybody_is_opened() -> None:
    draft, _ = run(Scripted(spare=False), 3)
    assert len(draft.opens) == 3 and draft.proposes


# ---- the fixed budget's answers -------------------------------------------------------------


def able(count: int) -> list[Candidate]:
    return [Candidate(i, 64, 7, 100) for i in range(count)]


def test_the_fixed_budget_spares_where_it_skips_the_draft() -> None:
    """Twelve rows, at least four nodes each: two sessions draft, three don't."""
    policy = SharedRows(tree_budget=5, max_verify_rows=12, min_tree=4)
    for sessions in range(1, 9):
        assert policy.spares(sessions) is not policy.plan(able(sessions)).drafts
    assert not policy.spares(2) and policy.spares(3)


def test_the_fixed_budget_wants_the_draft_back_when_the_load_has_fallen() -> None:
    policy = SharedRows(tree_budget=5, max_verify_rows=12, min_tree=4)
    for _ in range(3):  # gaps between requests
        assert not any(policy.wants_draft(2) for _ in range(WANTED_ROUNDS))
        assert not policy.wants_draft(4)
    assert [policy.wants_draft(1) for _ in range(WANTED_ROUNDS + 2)] == [False] * WANTED_ROUNDS + [True] * 2
    assert policy.worth_capturing(rows=100, remaining=50, sessions=1)
    assert not policy.worth_capturing(rows=100, remaining=49, sessions=1)
    off = SharedRows(tree_budget=0, max_verify_rows=12, min_tree=4)
    assert not any(off.wants_draft(1) for _ in range(2 * WANTED_ROUNDS))


@pytest.mark.parametrize("rows", [12, 13, 264])
def test_two_cohorts_draft_where_one_would(rows: int) -> None:
    """They share the rows by their sessions: one beside a cohort of two drafts no more than three do."""
    policy = SharedRows(tree_budget=16, max_verify_rows=rows, min_tree=4)
    for own in range(1, 60):
        for other in range(own + 2):
            together = policy.plan(able(own + other))
            parts = policy.plan(able(own), others=other), policy.plan(able(other), others=own)
            assert parts[0].drafts is together.drafts is not policy.spares(own + other)
            assert other == 0 or parts[1].drafts is together.drafts
            nodes = sum(map(sum, (part.nodes for part in parts)))
            # What does not divide goes to somebody with one cohort, at most a row of it to nobody with two.
            assert sum(together.nodes) - 1 <= nodes <= sum(together.nodes)
            if together.drafts:
                assert nodes + own + other <= rows
    assert policy.plan(able(1)).nodes == (min(16, rows - 1),)


def test_speculation_comes_back_to_spared_sessions_under_the_fixed_budget() -> None:
    """Four streams skip the draft, so a fifth is not opened there; when it is alone it is drafted for."""
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()
    first = [make_request(i, max_tokens=100, ignore_eos=True) for i in range(4)]
    last = make_request(9, max_tokens=400, ignore_eos=True)

    async def body(scheduler: Scheduler) -> None:
        tasks = [asyncio.create_task(collect(scheduler, r)) for r in first]
        while len(observer.rounds) < 30:
            await asyncio.sleep(0.001)
        text = await collect(scheduler, last)
        assert text.tokens == plain(last.tokens, last.stop, last.seed or 0).tokens
        await asyncio.gather(*tasks)

    run_scheduler(body, target, draft, limits=SchedulerLimits(), observer=observer)
    assert draft.recaptures == observer.reopens["draft", "wanted"] >= 1
    begun = next(i for i, r in enumerate(observer.rounds) if r.sessions == 5)
    assert not any(r.drafted for r in observer.rounds[begun:] if r.sessions >= 3)
    assert any(r.nodes for r in observer.rounds[begun:] if r.sessions == 1)


# ---- the cost budget's answers --------------------------------------------------------------

TREES = [grow(random.Random(i), sure=0.6, honest=0.8) for i in range(40)]
# One session gains, eight lose: rows cost as much as they do alone.
STEEP = Costs(lambda rows: 0.01 + 0.004 * max(0, rows - 6), lambda sessions: 0.004, noise=0.02)


def test_a_load_spares_once_it_is_known_to_lose() -> None:
    policy = CostBudget()
    policy.measured(STEEP.target(), STEEP.drafter())
    assert not policy.spares(8)
    bench = Bench(STEEP, TREES)
    bench.run(policy, 8, 10)
    assert not policy.spares(8)
    bench.run(policy, 8, 2 * SPARED_ROUNDS)
    assert policy.spares(8) and policy.steering.drafting(Load(8)) is False
    bench.run(policy, 1, 100)
    assert not policy.spares(1) and policy.steering.drafting(Load(1))


def test_the_draft_is_wanted_after_some_rounds_of_a_load_that_gains() -> None:
    policy = CostBudget()
    policy.measured(STEEP.target(), STEEP.drafter())
    bench = Bench(STEEP, TREES)
    for sessions in (1, 8):
        bench.run(policy, sessions, 60)
    assert not any(policy.wants_draft(8) for _ in range(50))
    for _ in range(5):  # gaps between requests
        assert not any(policy.wants_draft(1) for _ in range(WANTED_ROUNDS))
        assert not policy.wants_draft(8)
    assert [policy.wants_draft(1) for _ in range(WANTED_ROUNDS + 2)] == [False] * WANTED_ROUNDS + [True] * 2


@pytest.mark.parametrize("met", [True, False])
def test_capturing_pays_with_enough_tokens_to_go(met: bool) -> None:
    policy = CostBudget()
    policy.measured(STEEP.target(), STEEP.drafter())
    Bench(STEEP, TREES).run(policy, 1 if met else 2, 100)
    # 40 rows take some 0.15 s, a plain token 0.01 s: a few tokens can't save that, hundreds can.
    assert not policy.worth_capturing(rows=40, remaining=5, sessions=1)
    assert policy.worth_capturing(rows=40, remaining=400, sessions=1)
    assert not policy.worth_capturing(rows=40, remaining=400, sessions=64)


def test_the_first_of_a_burst_is_spared_where_the_last_burst_was() -> None:
    """Its first millisecond alone would have it opened at the draft, its prompt computed again for that."""
    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    policy = SharedRows(tree_budget=5, max_verify_rows=12, min_tree=4)
    opened: list[int] = []

    async def body(scheduler: Scheduler) -> None:
        for turn in range(2):
            wanted = [make_request(i + 8 * turn, max_tokens=200, ignore_eos=True) for i in range(8)]
            tasks = []
            for request in wanted:
                tasks.append(asyncio.create_task(collect(scheduler, request)))
                await asyncio.sleep(0.005)
            texts = await asyncio.gather(*tasks)
            for request, text in zip(wanted, texts, strict=True):
                assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
            opened.append(len(draft.opens) - draft.recaptures)

    limits = SchedulerLimits(max_verify_rows=12, min_tree=4)
    run_scheduler(body, target, draft, limits=limits, policy=policy)
    assert 0 < opened[0] < 8 and opened[1] == opened[0]
