"""The draft is told what the next round will want while this one is verified."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle, plain, random_tree
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.errors import NotReady
from specbridge.rounds import DraftRequest, Propose, SessionKey, Verify

LIMITS = SchedulerLimits(min_tree=1, max_verify_rows=256, draft_timeout=5.0, cohorts=1)


class Watched(FakeDraft):
    """Keeps what it was asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[Propose] = []

    def send(self, request: DraftRequest) -> None:
        self.asked += request.proposes
        super().send(request)

    @property
    def now(self) -> list[Propose]:
        return [p for p in self.asked if not p.on_arrival]


def services(draft: FakeDraft, *, delay: float = 0.001) -> tuple[FakeTarget, FakeDraft]:
    target = FakeTarget(delay=delay)
    linked(target, draft)
    return target, draft


def requests(n: int, *, max_tokens: int = 60) -> list[GenerationRequest]:
    return [make_request(i, max_tokens=max_tokens, ignore_eos=True) for i in range(n)]


def run(
    target: FakeTarget, draft: FakeDraft, wanted: Sequence[GenerationRequest], **change: Any
) -> tuple[Recorder, int]:
    """All texts are plain decoding's; returns what was recorded, and the draft's exchanges that are left."""
    observer = Recorder()
    left = -1

    async def body(scheduler: Scheduler) -> None:
        nonlocal left
        texts = await asyncio.gather(*(collect(scheduler, r) for r in wanted))
        for request, text in zip(wanted, texts, strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
        await asyncio.sleep(0.02)
        assert scheduler._draft is not None
        left = len(scheduler._draft._exchanges)

    limits = dataclasses.replace(LIMITS, **change)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    observer.reconcile()
    return observer, left


@pytest.mark.parametrize("streams", [1, 5])
@pytest.mark.parametrize("drafter", [oracle, random_tree])
def test_only_the_first_round_of_a_session_asks(streams: int, drafter: Any) -> None:
    draft = Watched(drafter, delay=0.001)
    target, _ = services(draft)
    observer, left = run(target, draft, requests(streams))
    rounds = [r for r in observer.rounds if r.speculating]
    assert len(rounds) > 6 and len(draft.now) == streams
    assert draft.answered_ahead >= sum(r.speculating for r in rounds) - streams
    assert all(r.draft_service_s > 0 for r in rounds)
    assert not observer.fallbacks and left <= 1


def test_full_acceptance_survives_and_the_last_round_asks_for_nothing() -> None:
    draft = Watched(oracle)
    target, _ = services(draft)
    observer, _ = run(target, draft, requests(1, max_tokens=33), tree_budget=7)
    # The first token is the prefill's; each round brings 8.
    assert [r.tokens for r in observer.rounds] == [8, 8, 8, 8]
    assert len(draft.now) == 1 and len(draft.asked) == 5
    assert [p.max_depth for p in draft.asked if p.on_arrival] == [7, 7, 7, 6]


def test_a_draft_that_does_not_take_them_is_asked_as_ever() -> None:
    draft = Watched(oracle, on_arrival=False)
    target, _ = services(draft)
    observer, _ = run(target, draft, requests(2))
    assert len(draft.now) == len(draft.asked) == sum(r.speculating for r in observer.rounds)


def test_a_plain_round_asks_for_nothing_ahead() -> None:
    draft = Watched(oracle)
    target, _ = services(draft)
    run(target, draft, [dataclasses.replace(make_request(1, max_tokens=30), max_tree_nodes=0)])
    assert not draft.asked


class Losing(Watched):
    """Rows of some rounds reach it late."""

    def __init__(self, *args: Any, lost: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost, self.came = lost, 0

    def rows(self, key: SessionKey, first: int, tokens: Sequence[int], anchor: int) -> None:
        self.came += 1
        self.channel_delay = 0.12 if self.came % self.lost == 0 else 0.0
        super().rows(key, first, tokens, anchor)


def test_rows_that_stay_away_end_in_the_ordinary_question() -> None:
    draft = Losing(oracle, lost=4)
    target, _ = services(draft)
    observer, left = run(target, draft, requests(1, max_tokens=120), draft_timeout=0.1)
    # Asked again it says what is wrong, at once.
    assert observer.fallbacks["not_ready"] >= 1 and observer.fallbacks["draft_timeout"] == 0
    assert len(draft.now) > 2 and not draft.resets and left <= 1


class Hanging(Losing):
    """Dead from one of its rounds on."""

    def rows(self, key: SessionKey, first: int, tokens: Sequence[int], anchor: int) -> None:
        self.hang = self.came >= self.lost
        super().rows(key, first, tokens, anchor)


def test_a_dead_draft_is_waited_for_no_longer_than_ever() -> None:
    draft = Hanging(oracle, lost=3)
    target, _ = services(draft)
    observer, _ = run(target, draft, requests(1), draft_timeout=2.0)
    assert observer.fallbacks["draft_timeout"] == 1
    longest = max(r.draft_wait_s for r in observer.rounds)
    assert 1.9 <= longest < 2.8  # one time-out, not one after the other


class Slow(Watched):
    """A pass takes longer than the gateway waits for what it asked ahead; one thread does all, in turn."""

    def _handle(self, request: DraftRequest, epoch: int) -> None:
        if self.passes_ahead:
            asyncio.get_running_loop().call_later(0.005, self._handle, request, epoch)
        else:
            super()._handle(request, epoch)

    def _arrived(self, place: tuple[bytes, int]) -> None:
        delay, self.delay = self.delay, 0.06
        super()._arrived(place)
        self.delay = delay


def test_a_slow_draft_is_not_taken_for_a_dead_one() -> None:
    draft = Slow(oracle)
    target, _ = services(draft)
    observer, left = run(target, draft, requests(1, max_tokens=40), draft_timeout=0.1)
    assert not observer.fallbacks and not draft.resets and left <= 1
    assert all(r.speculating for r in observer.rounds)


class Astray(Watched):
    """Answers what was asked ahead for another place than the rows ended at."""

    def _answer_ahead(self, propose: Propose, batch_id: int, epoch: int) -> None:
        self.wrong = getattr(self, "wrong", 0) + 1
        change = {"anchor": propose.anchor + 1} if self.wrong % 2 else {"base": propose.base - 1}
        session = self.sessions.get((propose.session.gateway, propose.session.number))
        if session is not None and "base" in change:
            session.context.pop()
        super()._answer_ahead(dataclasses.replace(propose, **change), batch_id, epoch)
        if session is not None and "base" in change:
            session.context.append(0)


def test_a_tree_for_another_place_is_asked_for_again() -> None:
    draft = Astray(oracle)
    target, _ = services(draft)
    observer, _ = run(target, draft, requests(2))
    assert not observer.fallbacks
    assert len(draft.now) == sum(r.speculating for r in observer.rounds)


def test_a_session_that_did_not_move_is_asked_again() -> None:
    """The target answers NOT_READY: no rows are on their way, so nobody waits for them."""
    draft = Watched(oracle)
    target, _ = services(draft)
    seen = 0

    def script(_verify: Verify) -> NotReady | None:
        nonlocal seen
        seen += 1
        return NotReady("the test") if seen % 3 == 0 else None

    target.script = script
    observer, left = run(target, draft, requests(1))
    assert seen > 6 and not observer.fallbacks and left <= 1
    assert len(draft.now) == 1 + seen // 3


def test_two_cohorts_ask_when_their_turn_comes() -> None:
    draft = Watched(oracle, delay=0.001)
    target, _ = services(draft, delay=0.002)
    observer, _ = run(target, draft, requests(4, max_tokens=40), cohorts=2)
    paired = [r for r in observer.rounds if r.cohorts == 2]
    assert paired and len(draft.now) >= sum(r.speculating for r in paired) - 4
