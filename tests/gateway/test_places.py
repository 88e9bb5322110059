"""When a request gets its place: bounds of the queue, hints, pages at the target, turns, preemption."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget, linked, plain, random_tree
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.admission import LEAST_RETRY_S, MOST_RETRY_S, Admission
from gateway.generation import GenerationRequest
from gateway.ledger import Ledger
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from gateway.session import Phase
from specbridge.errors import CapacityError, DeadlineExceeded, InvalidRequest
from specbridge.rounds import TargetResult, TargetResultKind, Verify

LIMITS = SchedulerLimits(tree_budget=16, min_tree=1, max_verify_rows=256, reopen_backoff=0.002)
PAGE = 16


class PagedTarget(FakeTarget):
    """Sessions hold pages, replies say how many are left, a round that finds none preempts the youngest."""

    def __init__(self, pages: int, **options: Any) -> None:
        super().__init__(**options)
        self.pages = pages
        self.preempted: list[int] = []
        self._gone: set[Any] = set()

    def make_info(self) -> Any:
        return dataclasses.replace(super().make_info(), total_pages=self.pages)

    @property
    def used(self) -> int:
        return sum(-(-len(s.tokens) // PAGE) for s in self.sessions.values())

    def _verify(self, item: Verify) -> TargetResult:
        result = super()._verify(item)
        while self.used > self.pages:
            # Session numbers count up: the highest is the youngest.
            victim = max(self.sessions, key=lambda place: place[1])
            self._gone.add(self.sessions.pop(victim).key)
            self.preempted.append(victim[1])
        gone = item.session in self._gone
        return TargetResult(item.session, TargetResultKind.PREEMPTED) if gone else result

    def _reply(self, reply: Any, epoch: int) -> None:
        left = max(0, self.pages - self.used)
        super()._reply(dataclasses.replace(reply, available_pages=left), epoch)


def paged(pages: int, **options: Any) -> tuple[PagedTarget, FakeDraft]:
    target, draft = PagedTarget(pages, **options), FakeDraft(random_tree)
    linked(target, draft)
    return target, draft


def wish(i: int, **changes: Any) -> GenerationRequest:
    return make_request(i, **{"ignore_eos": True, "max_tokens": 60, **changes})


async def texts_are_right(scheduler: Scheduler, requests: Sequence[GenerationRequest]) -> None:
    texts = await asyncio.gather(*(collect(scheduler, request) for request in requests))
    for request, text in zip(requests, texts, strict=True):
        assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens


# ---- pages ----------------------------------------------------------------------------------


def test_newcomers_wait_while_their_pages_would_cost_others_theirs() -> None:
    """Room for one page and the next 64 tokens each: 16 pages are three sessions' at first."""
    target, draft = paged(16, delay=0.002)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await texts_are_right(scheduler, [wish(i) for i in range(12)])

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert not target.preempted
    assert 2 <= max(r.sessions for r in observer.rounds) <= 4


def test_preempted_ones_come_back_before_newcomers_and_end_with_their_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = paged(18, delay=0.001)
    observer = Recorder()
    events: list[tuple[str, int]] = []
    admit, put_back = Admission.next, Admission.put_back

    def admitted(self: Admission) -> Any:
        session = admit(self)
        if session is not None:
            events.append(("in", session.key.number))
        return session

    def returned(self: Admission, session: Any) -> None:
        events.append(("back", session.key.number))
        put_back(self, session)

    monkeypatch.setattr(Admission, "next", admitted)
    monkeypatch.setattr(Admission, "put_back", returned)

    async def body(scheduler: Scheduler) -> None:
        await texts_are_right(scheduler, [wish(i, max_tokens=130) for i in range(14)])
        assert scheduler.running == scheduler.queue_length == 0
        await asyncio.sleep(0.02)
        assert not target.sessions and not draft.sessions

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    lost = [n for what, n in events if what == "back"]
    assert lost and observer.reopens["target", "preempted"] == len(lost) == len(target.preempted)
    # Twice as much room each time, up to all it may need: three times at most for 130 tokens.
    assert max(lost.count(n) for n in lost) <= 3
    away: set[int] = set()
    for what, n in events:
        if what == "back":
            away.add(n)
        else:
            assert n in away or not away, events
            away.discard(n)
    # What it held at the draft is given back too, and asked for again.
    assert len([key for key in draft.opens if key.number == lost[0]]) == 1 + lost.count(lost[0])
    assert draft.releases[lost[0]] == 1 + lost.count(lost[0])
    observer.reconcile()


@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_a_preempted_request_can_leave_while_it_waits(way: str) -> None:
    target, draft = paged(16, delay=0.001)

    async def body(scheduler: Scheduler) -> None:
        stays = asyncio.create_task(collect(scheduler, wish(1, max_tokens=200)))
        leaves = asyncio.create_task(collect(scheduler, wish(2, max_tokens=200, deadline_s=600.0)))
        while not scheduler.queue_length:
            await asyncio.sleep(0)
        assert target.preempted == [2] and scheduler.running == 1
        if way == "cancel":
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
        else:
            scheduler._expire(scheduler._sessions[2])
            with pytest.raises(DeadlineExceeded, match="in the queue"):
                await leaves
        assert scheduler.queue_length == 0
        await stays
        await asyncio.sleep(0.02)
        assert not target.sessions and not draft.sessions

    run_scheduler(body, target, draft, limits=LIMITS)


def test_a_target_that_does_not_speak_of_pages_gets_preempted_sessions_back() -> None:
    target, draft = FakeTarget(delay=0.001), FakeDraft(random_tree)
    linked(target, draft)
    left = [3]

    def script(verify: Verify) -> str | None:
        if verify.session.number == 2 and verify.base > 12 and left[0]:
            left[0] -= 1
            return "preempt"
        return None

    target.script = script

    async def body(scheduler: Scheduler) -> None:
        await texts_are_right(scheduler, [wish(i) for i in range(3)])

    run_scheduler(body, target, draft, limits=LIMITS)
    assert left == [0]


# ---- turns ----------------------------------------------------------------------------------


def order_of(requests: Sequence[GenerationRequest]) -> list[str]:
    """Request ids in the order of their admission, when all wait for one place."""
    target, draft = FakeTarget(), FakeDraft(random_tree)
    linked(target, draft)
    limits = dataclasses.replace(LIMITS, max_running=1, fair_quantum=40)

    async def body(scheduler: Scheduler) -> None:
        await asyncio.gather(*(collect(scheduler, request) for request in requests))

    run_scheduler(body, target, draft, limits=limits)
    by_seed = {request.seed: request.request_id for request in requests}
    return [by_seed[item.sampling.seed] for item in target.opened]


def test_api_keys_share_by_tokens_and_priorities_go_first() -> None:
    flood = [wish(i, tenant="a", max_tokens=30) for i in range(8)]
    other = [wish(20 + i, tenant="b", max_tokens=30) for i in range(2)]
    urgent = wish(30, tenant="a", priority=-1)
    patient = wish(31, tenant="c", priority=1)
    order = order_of([*flood, patient, *other, urgent])
    assert order[0] == "r0"  # the place was free
    assert order[1] == "r30" and order[-1] == "r31"
    assert max(order.index("r20"), order.index("r21")) <= 6, order


def test_a_priority_out_of_range_is_refused() -> None:
    target, draft = paged(64)

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(InvalidRequest, match=r"priority is 5000.*\[-1000, 1000\]"):
            scheduler.generate(wish(1, priority=5000))

    run_scheduler(body, target, draft)


# ---- bounds and hints -----------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waiting_session(number: int, tokens: int, max_tokens: int = 10) -> Any:
    request = make_request(number, tokens=tuple([1] * tokens), max_tokens=max_tokens)
    return SimpleNamespace(
        request=request, key=SimpleNamespace(number=number), tokens=[1] * tokens, prompt_length=tokens,
        phase=Phase.QUEUED, preemptions=0, charged=0, admitted_at=None, cached_tokens=0, finished=True,
        remaining=max_tokens, ledger=Ledger(),
    )  # fmt: skip


def test_the_queue_is_bounded_by_tokens_and_hints_follow_throughput() -> None:
    clock = Clock()
    limits = dataclasses.replace(LIMITS, max_running=1, max_queue=100, max_queue_tokens=3000)
    admission = Admission(limits, SimpleNamespace(info=None, available_pages=0), clock=clock)
    first = waiting_session(0, 500)
    admission.check(first.request)
    admission.put(first)
    assert admission.next() is first
    first.phase = Phase.RUNNING
    big = waiting_session(1, 2900)
    admission.check(big.request)  # alone it may be as large as it likes
    admission.put(big)
    assert admission.next() is None
    with pytest.raises(CapacityError, match="--max-queue-tokens 3000") as caught:
        admission.check(waiting_session(2, 100).request)
    assert caught.value.retry_after == LEAST_RETRY_S  # nothing has been measured yet
    # 500 tokens in ten seconds: some 50 a second, and 2,910 wait.
    clock.now += 5.0
    admission.end(first)
    clock.now += 5.0
    with pytest.raises(CapacityError) as caught:
        admission.check(waiting_session(2, 100).request)
    assert caught.value.retry_after == pytest.approx(2910 / 50, rel=0.2)
    clock.now += 300.0
    with pytest.raises(CapacityError) as caught:
        admission.check(waiting_session(2, 100).request)
    assert caught.value.retry_after == MOST_RETRY_S
    assert admission.next() is big
