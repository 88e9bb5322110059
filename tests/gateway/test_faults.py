"""Whatever fails, and whenever: the text is plain decoding's, nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from fake_services import FakeDraft, FakeTarget, linked, oracle, plain, random_tree
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.budget import Beside, Candidate, Plan, SharedRows
from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from gateway.standing import RateLimiter
from specbridge.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    NotReady,
    SpecBridgeError,
    Stale,
    Unavailable,
)
from specbridge.rounds import Propose, SamplingParams, StopParams, TargetOpen, Verify

FAST = SchedulerLimits(
    min_tree=1,
    max_verify_rows=256,
    draft_timeout=0.02,
    draft_stall=0.08,
    target_timeout=0.15,
    open_timeout=0.05,
    first_timeout=0.5,
    give_up=10.0,
    reopen_backoff=0.002,
    reopen_backoff_max=0.02,
    draft_reopens_per_s=2000.0,
    draft_reopen_min_tokens=0,
)


def services(
    *, delay: float = 0.0, drafter: Callable[..., object] = random_tree
) -> tuple[FakeTarget, FakeDraft]:
    target, draft = FakeTarget(delay=delay), FakeDraft(drafter, delay=delay)  # type: ignore[arg-type]
    linked(target, draft)
    return target, draft


def requests(n: int, *, max_tokens: int = 60) -> list[GenerationRequest]:
    return [make_request(i, max_tokens=max_tokens, ignore_eos=True) for i in range(n)]


async def check_texts(scheduler: Scheduler, wanted: list[GenerationRequest]) -> None:
    texts = await asyncio.gather(*(collect(scheduler, r) for r in wanted))
    for request, text in zip(wanted, texts, strict=True):
        assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens


async def at_rounds(observer: Recorder, *steps: tuple[int, Callable[[], None]]) -> None:
    """Do each step once that many rounds have run."""
    for count, step in steps:
        while len(observer.rounds) < count:
            await asyncio.sleep(0.001)
        step()


def run(
    target: FakeTarget,
    draft: FakeDraft | None,
    observer: Recorder,
    wanted: list[GenerationRequest],
    *steps: tuple[int, Callable[[], None]],
    limits: SchedulerLimits = FAST,
) -> None:
    async def body(scheduler: Scheduler) -> None:
        chaos = asyncio.create_task(at_rounds(observer, *steps))
        await check_texts(scheduler, wanted)
        await chaos

    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert not target.sessions, "sessions left at the target"
    assert draft is None or not draft.sessions, "sessions left at the draft"
    observer.reconcile()


# ---- the draft ------------------------------------------------------------------------------


def test_draft_killed_and_back() -> None:
    """cases.md 48: the stream goes on with the same text, the fall-back is counted, speculation resumes."""
    target, draft = services(delay=0.001, drafter=oracle)
    observer = Recorder()
    wanted = requests(3, max_tokens=250)
    marks: list[int] = []

    def die() -> None:
        draft.kill()
        marks.append(len(observer.rounds) + 1)  # one round may be under way

    def back() -> None:
        marks.append(len(observer.rounds))
        draft.restart()

    run(target, draft, observer, wanted, (3, die), (12, back))
    assert observer.fallbacks["draft_down"] >= 1
    assert all(r.nodes == 0 for r in observer.rounds[marks[0] : marks[1]])
    assert any(r.nodes > 0 for r in observer.rounds[marks[1] :]), "speculation did not resume"
    assert draft.recaptures == 3
    assert ("draft", False) in observer.connections
    # The incarnation stays: only the draft's side is opened again.
    assert {key.incarnation for key in draft.opens} == {0}


def test_draft_stream_breaks_and_sessions_survive() -> None:
    target, draft = services(drafter=oracle)
    observer = Recorder()
    run(target, draft, observer, requests(2, max_tokens=250), (3, draft.break_stream))
    assert draft.recaptures == 0, "the draft kept its sessions: no re-capture is needed"
    assert any(r.nodes > 0 for r in observer.rounds[-3:])


def test_draft_forgets_a_session() -> None:
    target, draft = services(drafter=oracle)
    observer = Recorder()
    run(target, draft, observer, requests(1, max_tokens=300), (4, draft.forget))
    assert observer.fallbacks["stale"] == 1


def test_slow_draft_is_not_waited_for() -> None:
    target, draft = services()
    observer = Recorder()

    def slow() -> None:
        draft.delay = 0.06

    run(target, draft, observer, requests(2, max_tokens=120), (2, slow))
    assert observer.fallbacks["draft_timeout"] >= 1
    assert observer.fallbacks["draft_busy"] >= 1
    assert draft.most_in_flight == 1


def test_hanging_draft_is_reset() -> None:
    target, draft = services(delay=0.002)
    observer = Recorder()

    def hang() -> None:
        draft.hang = True

    run(target, draft, observer, requests(1, max_tokens=200), (2, hang))
    assert draft.resets, "a draft that never answers must be reconnected"


def test_not_ready_backs_off() -> None:
    target, draft = services()
    observer = Recorder()
    draft.script = lambda _p: NotReady("behind")
    run(target, draft, observer, requests(1, max_tokens=100))
    assert observer.fallbacks["not_ready"] < 15 < len(observer.rounds), "asked every round in vain"
    assert observer.fallbacks["backoff"] > 20


def test_late_channel_gives_not_ready_then_trees() -> None:
    target, draft = services(delay=0.002)
    draft.channel_delay = 0.003
    observer = Recorder()
    run(target, draft, observer, requests(2, max_tokens=60))
    assert observer.fallbacks["not_ready"] > 0


def test_without_context_the_draft_is_asked_now_and_then_only() -> None:
    target, draft = services()
    target.has_context = False
    observer = Recorder()
    run(target, draft, observer, requests(1, max_tokens=100))
    assert observer.fallbacks["no_context"] > 40
    assert 1 < draft.proposes < 12


def test_draft_refuses_opens() -> None:
    target, draft = services()
    observer = Recorder()
    draft.open_script = lambda _o: CapacityError("no room")
    run(target, draft, observer, requests(2))
    assert observer.fallbacks["draft_error"] == 2
    assert sum(r.nodes for r in observer.rounds) == 0


def test_draft_for_another_target_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = services()
    draft.target_fingerprint = "someone-else"
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await check_texts(scheduler, requests(1))
        assert "speculation is off: the draft reads target 'someone-else'" in caplog.text

    run_scheduler(body, target, draft, limits=FAST, observer=observer)
    assert draft.proposes == 0 and not draft.opens
    assert observer.fallbacks["draft_mismatch"] > 0


def test_draft_that_learns_of_its_target_later() -> None:
    target, draft = services(delay=0.001, drafter=oracle)
    draft.target_fingerprint = "the-one-before"
    observer = Recorder()

    def learn() -> None:
        draft.target_fingerprint = target.fingerprint

    limits = dataclasses.replace(FAST, recheck=0.01)
    run(target, draft, observer, requests(1, max_tokens=300), (5, learn), limits=limits)
    assert observer.fallbacks["draft_mismatch"] > 0
    assert any(r.nodes for r in observer.rounds), "speculation did not begin"


def test_draft_vocabulary_mismatch() -> None:
    target, draft = services()
    draft.vocab_size = 5
    observer = Recorder()
    run(target, draft, observer, requests(1))
    assert draft.proposes == 0


def test_no_draft_at_all() -> None:
    target = FakeTarget()
    observer = Recorder()
    run(target, None, observer, requests(3))
    assert not observer.fallbacks
    assert not any(o.speculate for o in target.opened)


def test_draft_down_from_the_start_does_not_cap_the_target() -> None:
    target, draft = services()
    draft.alive = False
    observer = Recorder()
    wanted = requests(1)
    run(target, draft, observer, wanted)
    assert target.opened[0].speculate
    # No draft session: the target's own prefix alone decides, so the cap is the whole prompt.
    assert target.opened[0].draft_prefix == len(wanted[0].tokens)


# ---- the target -----------------------------------------------------------------------------


def test_target_restarts_mid_stream() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()
    run(target, draft, observer, requests(4, max_tokens=80), (3, target.restart), (8, target.restart))
    assert sum(n for (service, _), n in observer.reopens.items() if service == "target") >= 8
    assert max(key.incarnation for key in target.opens) >= 2
    opens: dict[tuple[int, int], int] = {}
    for item in target.opened:
        key = (item.session.number, item.sampling.seed)
        opens[key] = opens.get(key, 0) + 1
    assert len(opens) == 4, "the seed of a re-open is the first one's"


def test_target_dies_and_comes_back_later() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()

    def die() -> None:
        target.kill()
        asyncio.get_running_loop().call_later(0.1, target.restart)

    run(target, draft, observer, requests(3, max_tokens=60), (3, die))


def test_target_stream_breaks() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()
    run(target, draft, observer, requests(3, max_tokens=80), (3, target.break_stream))
    assert observer.reopens["target", "disconnected"] == 3


def test_release_lost_with_the_stream_is_sent_again() -> None:
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        generation = scheduler.generate(requests(1, max_tokens=300)[0])
        await anext(generation)
        target.delay = draft.delay = 0.05
        await generation.aclose()
        await asyncio.sleep(0.01)  # sent, not arrived
        target.break_stream()
        draft.break_stream()
        target.delay = draft.delay = 0.0
        await asyncio.sleep(0.1)
        assert not target.sessions and not draft.sessions

    run_scheduler(body, target, draft, limits=FAST, observer=observer)


def test_target_hangs_in_a_verify() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()

    def hang() -> None:
        target.hang = True

        def recover() -> None:
            target.hang = False

        asyncio.get_running_loop().call_later(0.2, recover)

    run(target, draft, observer, requests(2, max_tokens=60), (3, hang))
    assert target.resets
    assert observer.reopens["target", "timeout"] >= 2


@pytest.mark.parametrize(
    "fault",
    [
        "preempt",
        Stale("?"),
        CapacityError("pages"),
        Unavailable("going"),
        InternalError("oops"),
        InvalidRequest("no"),
    ],
)
def test_single_verify_fails(fault: SpecBridgeError | str) -> None:
    target, draft = services()
    observer = Recorder()
    seen: set[int] = set()

    def script(verify: Verify) -> SpecBridgeError | str | None:
        # Once for each session, in its third round.
        if verify.session.number not in seen and verify.base > 12:
            seen.add(verify.session.number)
            return fault
        return None

    target.script = script
    run(target, draft, observer, requests(4))
    assert sum(n for (service, _), n in observer.reopens.items() if service == "target") == len(seen) == 4


def test_target_not_ready_is_asked_again() -> None:
    target, draft = services()
    observer = Recorder()
    answers = iter([None, NotReady("wait"), NotReady("wait")])
    target.script = lambda _v: next(answers, None)
    run(target, draft, observer, requests(1))
    assert not [k for k in observer.reopens if k[0] == "target"]


def test_open_retries_after_capacity() -> None:
    target, draft = services()
    observer = Recorder()
    answers = iter([CapacityError("full"), CapacityError("full"), Unavailable("warming")])
    target.open_script = lambda _o: next(answers, None)
    run(target, draft, observer, requests(1))
    assert observer.reopens["target", "capacity"] == 2


@pytest.mark.parametrize("error", [InvalidRequest("bad field"), InternalError("always")])
def test_open_fails_for_good(error: SpecBridgeError) -> None:
    target, draft = services()
    observer = Recorder()
    target.open_script = lambda _o: error

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(type(error)):
            await collect(scheduler, requests(1)[0])
        assert scheduler.running == 0

    run_scheduler(body, target, draft, limits=FAST, observer=observer)
    assert observer.requests[0].error is error
    assert not draft.sessions


def test_target_gone_for_good_is_given_up() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()
    limits = dataclasses.replace(FAST, give_up=0.15)

    async def body(scheduler: Scheduler) -> None:
        task = asyncio.gather(*(collect(scheduler, r) for r in requests(3)), return_exceptions=True)
        while len(observer.rounds) < 3:
            await asyncio.sleep(0.001)
        target.kill()
        draft.kill()
        results = await asyncio.wait_for(task, 30)
        assert all(isinstance(r, Unavailable) for r in results), results
        assert scheduler.running == 0

    run_scheduler(body, target, draft, limits=limits, observer=observer)


@pytest.mark.parametrize("error", [CapacityError("full"), Unavailable("never warm")])
def test_target_that_never_takes_the_session_is_given_up(error: SpecBridgeError) -> None:
    target, draft = services()
    target.open_script = lambda _o: error

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(type(error)):
            await asyncio.wait_for(collect(scheduler, requests(1)[0]), 5.0)
        assert scheduler.running == 0

    run_scheduler(body, target, draft, limits=dataclasses.replace(FAST, give_up=0.1))
    assert not draft.sessions


def test_target_comes_back_while_the_draft_is_at_work() -> None:
    """A round that began before the break must not speak for the session's next incarnation."""
    target, draft = services(drafter=oracle)
    draft.delay = 0.03
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        task = asyncio.create_task(check_texts(scheduler, requests(1, max_tokens=120)))
        while not draft.at_work or len(observer.rounds) < 2:
            await asyncio.sleep(0)
        draft.delay = 0.0
        target.break_stream(back_after=0.0)
        await task

    run_scheduler(body, target, draft, limits=dataclasses.replace(FAST, draft_timeout=1.0), observer=observer)
    assert {k: n for k, n in observer.reopens.items() if k[0] == "target"} == {("target", "disconnected"): 1}


def test_reopens_at_the_draft_are_rate_limited() -> None:
    limiter = RateLimiter(4.0, now=100.0)
    assert [limiter.take(100.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [limiter.take(100.5) for _ in range(3)] == [True, True, False]
    assert [limiter.take(200.0) for _ in range(5)] == [True] * 4 + [False]
    slow = RateLimiter(0.5, now=0.0)
    assert [slow.take(0.0), slow.take(1.0), slow.take(2.0)] == [True, False, True]

    target, draft = services(delay=0.001)
    observer = Recorder()
    limits = dataclasses.replace(FAST, draft_reopens_per_s=1.0)
    run(
        target,
        draft,
        observer,
        requests(4, max_tokens=60),
        (3, draft.kill),
        (6, draft.restart),
        limits=limits,
    )
    assert draft.recaptures <= 2, "re-opened all at once"


def test_another_model_comes_back() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        task = asyncio.create_task(collect(scheduler, requests(1, max_tokens=200)[0]))
        while len(observer.rounds) < 3:
            await asyncio.sleep(0.001)
        target.fingerprint = "another"
        target.restart()
        with pytest.raises(Unavailable, match="another model"):
            await task
        await check_texts(scheduler, requests(1))

    run_scheduler(body, target, draft, limits=FAST, observer=observer)


def test_a_defect_in_a_round_ends_requests_not_the_scheduler() -> None:
    target, draft = services()
    observer = Recorder()

    class Broken(SharedRows):
        calls = 0

        def plan(
            self, candidates: Sequence[Candidate], beside: Beside | None = None, *, others: int = 0
        ) -> Plan:
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("a bug")
            return Plan((0,) * len(candidates))

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(InternalError, match="a bug"):
            await collect(scheduler, requests(1)[0])
        await check_texts(scheduler, requests(2))

    policy = Broken(tree_budget=5, max_verify_rows=12, min_tree=4)
    run_scheduler(body, target, draft, limits=FAST, observer=observer, policy=policy)
    assert not target.sessions


# ---- everything at once ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_faults(seed: int) -> None:
    """A random mixture of every fault above while nine requests run."""
    rng = random.Random(seed)
    target, draft = services(delay=rng.choice([0.0, 0.001, 0.003]), drafter=rng.choice([oracle, random_tree]))
    target.prefill_delay = rng.choice([0.0, 0.005])
    draft.channel_delay = rng.choice([0.0, 0.0, 0.002])
    observer = Recorder()

    def verify_fault(_verify: Verify) -> SpecBridgeError | str | None:
        if rng.random() < 0.02:
            return rng.choice(["preempt", Stale("x"), CapacityError("x"), NotReady("x"), Unavailable("x")])
        return None

    def propose_fault(_propose: Propose) -> SpecBridgeError | None:
        return rng.choice([NotReady("x"), Stale("x"), InternalError("x")]) if rng.random() < 0.05 else None

    def open_fault(_open: TargetOpen) -> SpecBridgeError | None:
        return CapacityError("x") if rng.random() < 0.1 else None

    target.script, draft.script, target.open_script = verify_fault, propose_fault, open_fault
    wanted = [make_request(100 * seed + i, max_tokens=50) for i in range(9)]

    async def chaos() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.005, 0.03))
            event = rng.choice(["draft", "target", "draft_stream", "target_stream", "slow", "forget"])
            if event == "draft":
                draft.kill()
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.05), draft.restart)
            elif event == "target":
                target.kill()
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.03), target.restart)
            elif event == "draft_stream":
                draft.break_stream()
            elif event == "target_stream":
                target.break_stream()
            elif event == "slow":
                draft.delay = rng.choice([0.0, 0.03])
            else:
                draft.forget()

    async def body(scheduler: Scheduler) -> None:
        task = asyncio.create_task(chaos())
        # Arrivals spread over the faults.
        texts = []
        for request in wanted:
            texts.append(asyncio.create_task(collect(scheduler, request)))
            await asyncio.sleep(rng.uniform(0.0, 0.01))
        for request, text in zip(wanted, await asyncio.gather(*texts), strict=True):
            expected = plain(request.tokens, request.stop, request.seed or 0)
            assert (text.tokens, text.finish_reason) == (expected.tokens, expected.finish_reason)
        task.cancel()
        for service in (target, draft):
            if not service.alive:
                service.restart()
        await asyncio.sleep(0.05)
        assert scheduler.running == scheduler.queue_length == 0

    limits = dataclasses.replace(FAST, budget=("fixed", "cost")[seed % 2], cohorts=(1, 2, 0)[seed % 3])
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert not target.sessions and not draft.sessions
    observer.reconcile()


def test_seed_is_drawn_once_and_survives_a_restart() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()
    request = GenerationRequest(
        tokens=(1, 2, 3),
        sampling=SamplingParams(temperature=1.0),
        stop=StopParams(max_tokens=40, ignore_eos=True),
    )

    async def body(scheduler: Scheduler) -> None:
        chaos = asyncio.create_task(at_rounds(observer, (4, target.restart)))
        first = await collect(scheduler, request)
        await chaos
        assert all(e.seed == first.seed for e in first.events)
        assert first.tokens == plain(request.tokens, request.stop, first.seed).tokens
        second = await collect(scheduler, request)
        assert second.seed != first.seed

    run_scheduler(body, target, draft, limits=FAST, observer=observer)
