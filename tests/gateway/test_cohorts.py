"""One cohort or two: who is in which, when there are two, and that it changes no text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle, plain, random_tree
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.budget import Beside, Candidate, Plan, SharedRows
from gateway.cohorts import AUTO, CohortChooser, Cohorts
from gateway.cost_budget import CostBudget
from gateway.generation import RoundRecord
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.errors import ConfigError

# ---- the choice -----------------------------------------------------------------------------


def rounds(
    chooser: CohortChooser,
    sessions: int,
    count: int,
    *,
    one: float,
    two: float,
    forecast: float,
    noise: Callable[[int], float] = lambda _: 1.0,
) -> list[int]:
    """`count` rounds; one, two: tokens a second with so many cohorts; forecast: gain that the model sees."""
    used = []
    for number in range(count):
        cohorts = chooser.choose(sessions, lambda n: 100.0 if n == 1 else 100.0 * forecast)
        used.append(cohorts)
        tokens = 2 * sessions // cohorts
        rate = (one if cohorts == 1 else two / 2) * noise(number)
        chooser.observe(
            RoundRecord(
                sessions=sessions // cohorts, speculating=0, rows=1, nodes=0, tokens=tokens, accepted=0,
                total_s=0.8 * tokens / rate, turn_wait_s=0.2 * tokens / rate, cohort=number % cohorts,
                cohorts=cohorts,
            )
        )  # fmt: skip
    return used


def test_two_cohorts_where_they_bring_more() -> None:
    chooser = CohortChooser()
    used = rounds(chooser, 32, 4000, one=1000.0, two=1250.0, forecast=1.2)
    assert used[0] == 1 and used[-1] == 2
    assert used.index(2) < 100
    # One is tried again now and then, briefly.
    later = used[1000:]
    assert 0 < later.count(1) < 0.1 * len(later)


def test_one_cohort_where_two_share_a_device() -> None:
    """The model takes draft and target for separate devices: a trial shows that they are not."""
    used = rounds(CohortChooser(), 32, 20_000, one=1000.0, two=800.0, forecast=1.3)
    assert 0 < used.count(2) < 0.03 * len(used)
    assert used[-1] == 1


def test_no_trial_without_promise() -> None:
    assert set(rounds(CohortChooser(), 32, 3000, one=1000.0, two=2000.0, forecast=1.02)) == {1}
    assert set(rounds(CohortChooser(), 1, 300, one=100.0, two=200.0, forecast=2.0)) == {1}
    silent = CohortChooser()
    assert {silent.choose(8, lambda _: None) for _ in range(300)} == {1}


def test_what_paid_and_no_longer_does_is_given_up() -> None:
    chooser = CohortChooser()
    assert rounds(chooser, 16, 1000, one=1000.0, two=1300.0, forecast=1.2)[-1] == 2
    assert rounds(chooser, 16, 3000, one=1000.0, two=900.0, forecast=1.2)[-1] == 1


@pytest.mark.parametrize("two", [0.99, 1.01, 1.03])
def test_no_flapping_where_both_are_alike(two: float) -> None:
    def noise(number: int) -> float:
        return (0.9, 1.1, 1.05, 0.95, 0.85, 1.15)[number * number % 6]

    used = rounds(CohortChooser(), 16, 20_000, one=1000.0, two=1000.0 * two, forecast=1.2, noise=noise)
    changes = sum(a != b for a, b in zip(used, used[1:], strict=False))
    assert changes <= 40


def test_loads_are_judged_apart() -> None:
    chooser = CohortChooser()
    assert rounds(chooser, 32, 600, one=1000.0, two=1300.0, forecast=1.2)[-1] == 2
    assert set(rounds(chooser, 4, 600, one=1000.0, two=900.0, forecast=1.0)) == {1}
    assert rounds(chooser, 32, 1, one=1000.0, two=1300.0, forecast=1.2) == [2]


# ---- who is in which ------------------------------------------------------------------------


def session(number: int) -> Any:
    return SimpleNamespace(key=SimpleNamespace(number=number))


def sizes(cohorts: Cohorts) -> list[int]:
    return [len(cohort.running) for cohort in cohorts.all]


def test_one_cohort_has_no_second() -> None:
    cohorts = Cohorts(1, lambda sessions, count: None)
    for number in range(5):
        cohorts.add(session(number))
    cohorts.settle(cohorts.all[0])
    assert sizes(cohorts) == [5] and cohorts.beside(cohorts.all[0]) is None
    assert cohorts.report().allowed == "1"


def test_two_cohorts_are_evened_out_by_the_larger_one() -> None:
    cohorts = Cohorts(2, lambda sessions, count: None)
    first, second = cohorts.all
    cohorts.add(session(0))
    assert sizes(cohorts) == [1, 0]
    for number in range(1, 9):
        cohorts.add(session(number))
    assert sizes(cohorts) == [5, 4]
    for number in (1, 3, 5, 7):
        cohorts.remove(number)  # all of one cohort's
    assert sorted(sizes(cohorts)) == [0, 5]
    small = min(cohorts.all, key=lambda cohort: len(cohort.running))
    cohorts.settle(small)  # the one without cannot take: sessions of the other are in a round
    assert sorted(sizes(cohorts)) == [0, 5]
    large = first if small is second else second
    small.filled.clear()
    cohorts.settle(large)
    assert sorted(sizes(cohorts)) == [2, 3] and small.filled.is_set()
    assert sorted([*first.running, *second.running]) == [0, 2, 4, 6, 8]


def test_a_single_session_needs_no_second_cohort() -> None:
    cohorts = Cohorts(2, lambda sessions, count: None)
    first, second = cohorts.all
    second.add(session(7))
    cohorts.settle(second)
    assert list(first.running) == [7] and not second.running and cohorts.in_use == 1


def test_all_go_to_the_first_when_one_is_enough() -> None:
    class One(CohortChooser):
        answer = 2

        def choose(self, sessions: int, forecast: Callable[[int], float | None]) -> int:
            return self.answer

    chooser = One()
    cohorts = Cohorts(AUTO, lambda sessions, count: None, chooser=chooser)
    first, second = cohorts.all
    for number in range(6):
        cohorts.add(session(number))
    assert sizes(cohorts) == [6, 0]
    cohorts.settle(first)
    assert sizes(cohorts) == [3, 3]
    chooser.answer = 1
    cohorts.settle(first)
    assert sizes(cohorts) == [3, 3]  # the second is in a round
    cohorts.settle(second)
    assert sizes(cohorts) == [6, 0]
    assert cohorts.report().allowed == "auto" and cohorts.report().in_use == 1


def test_what_a_budget_is_told_of_the_other_cohort() -> None:
    cohorts = Cohorts(2, lambda sessions, count: None)
    first, second = cohorts.all
    for number in range(4):
        cohorts.add(session(number))
    assert cohorts.beside(first) is None  # nothing is known of it
    record = RoundRecord(
        sessions=2, speculating=2, rows=8, nodes=6, tokens=5, accepted=3, total_s=0.02, cohort=1, cohorts=2
    )
    cohorts.observe(record, verify_s=0.01)
    assert cohorts.beside(first) == Beside(5.0, 0.01)
    assert cohorts.beside(second) is None


# ---- through the scheduler ------------------------------------------------------------------


class Overlap(FakeDraft):
    """Counts the proposals that arrive while the target has a batch."""

    beside = 0

    def _handle(self, request: Any, epoch: int) -> None:
        asked_now = any(not p.on_arrival for p in request.proposes)
        if asked_now and self.target is not None and self.target.in_flight:
            self.beside += 1
        super()._handle(request, epoch)


@pytest.mark.parametrize("budget", ["fixed", "cost"])
@pytest.mark.parametrize("streams", [1, 2, 7])
def test_two_cohorts_alternate_and_change_no_text(streams: int, budget: str) -> None:
    target, draft = FakeTarget(delay=0.002), Overlap(random_tree, delay=0.001)
    linked(target, draft)
    observer = Recorder()
    wanted = [make_request(i, max_tokens=40, ignore_eos=True) for i in range(streams)]

    async def body(scheduler: Scheduler) -> None:
        texts = await asyncio.gather(*(collect(scheduler, r) for r in wanted))
        for request, text in zip(wanted, texts, strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
        report = scheduler.report()
        assert report.decisions and report.budget.policy == budget
        assert {d.cohort for d in report.decisions} == ({0, 1} if streams > 1 else {0})

    limits = SchedulerLimits(cohorts=2, budget=budget, max_verify_rows=128, min_tree=1)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert target.most_in_flight == min(2, streams)
    # While one is verified the other is drafted for, and never both at once: then they would stay in step.
    assert draft.most_in_flight == 1
    assert (draft.beside > 0) == (streams > 1)
    paired = [r for r in observer.rounds if r.cohorts == 2]
    assert all(r.sessions <= -(-streams // 2) for r in paired[4:])
    assert bool(paired) == (streams > 1)
    observer.reconcile()


def test_the_fixed_budget_counts_the_other_cohort_s_sessions() -> None:
    """Three streams are too many for twelve rows, in whatever cohorts they are."""
    planned = []

    class Seen(SharedRows):
        def plan(
            self, candidates: Sequence[Candidate], beside: Beside | None = None, *, others: int = 0
        ) -> Plan:
            found = super().plan(candidates, beside, others=others)
            planned.append((len(candidates), others, found.drafts))
            return found

    target, draft = FakeTarget(delay=0.001), FakeDraft(oracle)
    linked(target, draft)
    limits = SchedulerLimits(cohorts=2)
    policy = Seen(tree_budget=limits.tree_budget, max_verify_rows=limits.max_verify_rows, min_tree=4)

    async def body(scheduler: Scheduler) -> None:
        wanted = [make_request(i, max_tokens=40, ignore_eos=True) for i in range(3)]
        await asyncio.gather(*(collect(scheduler, r) for r in wanted))

    run_scheduler(body, target, draft, limits=limits, policy=policy)
    of_three = [plan for plan in planned if plan[0] + plan[1] == 3]
    assert {(1, 2, False), (2, 1, False)} <= set(of_three)
    assert not any(drafts for _, _, drafts in of_three)


def test_a_hanging_draft_keeps_neither_cohort() -> None:
    """The second cohort does not wait once more for what the first has given up."""

    class Hanging(FakeDraft):
        def _handle(self, request: Any, epoch: int) -> None:
            self.hang = self.proposes > 9
            super()._handle(request, epoch)

    target, draft = FakeTarget(delay=0.001), Hanging(oracle)
    linked(target, draft)
    observer = Recorder()
    wanted = [make_request(i, max_tokens=60, ignore_eos=True) for i in range(6)]

    async def body(scheduler: Scheduler) -> None:
        texts = await asyncio.gather(*(collect(scheduler, r) for r in wanted))
        for request, text in zip(wanted, texts, strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens

    limits = SchedulerLimits(cohorts=2, max_verify_rows=128, min_tree=1, draft_timeout=0.05, draft_stall=60.0)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    hung = [r for r in observer.rounds if r.drafted and r.draft_timings is None]
    assert len(hung) == 1 and observer.fallbacks["draft_timeout"] == hung[0].drafted
    after = observer.rounds[observer.rounds.index(hung[0]) + 1 :]
    assert {r.cohort for r in after if r.skipped == "draft_busy"} == {0, 1}


def test_auto_with_a_fixed_budget_is_one_cohort() -> None:
    target, draft = FakeTarget(), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await asyncio.gather(*(collect(scheduler, make_request(i, max_tokens=60)) for i in range(8)))

    run_scheduler(body, target, draft, limits=SchedulerLimits(cohorts=0), observer=observer)
    assert {(r.cohort, r.cohorts) for r in observer.rounds} == {(0, 1)}


def test_wrong_numbers_of_cohorts() -> None:
    with pytest.raises(ConfigError, match="cohorts is 3"):
        SchedulerLimits(cohorts=3)
    with pytest.raises(ConfigError, match="budget is 'dear'"):
        SchedulerLimits(budget="dear")
    assert CostBudget().throughput(0, 2) is None
