"""Admission, cancellation, deadlines and accounts (cases.md 2, 12, 14, 47)."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest
from fake_services import EOS, FakeDraft, FakeTarget, linked, oracle, plain, random_tree
from scheduler_harness import Recorder, collect, make_request, run_scheduler

from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.errors import CapacityError, ConfigError, InvalidRequest, Unavailable, Unsupported
from specbridge.rounds import FinishReason, SamplingParams, StopParams

LIMITS = SchedulerLimits(
    tree_budget=16, min_tree=1, max_verify_rows=256, reopen_backoff=0.002, open_timeout=0.2
)


def services(*, delay: float = 0.0) -> tuple[FakeTarget, FakeDraft]:
    target, draft = FakeTarget(delay=delay), FakeDraft(random_tree, delay=delay)
    linked(target, draft)
    return target, draft


# ---- ends -----------------------------------------------------------------------------------


def test_stop_inside_the_budget_wins_over_length() -> None:
    """cases.md 2: block [10, 11, STOP, 20, 21, 22] with max 5 gives three tokens and "stop"."""
    block = [10, 11, 77, 20, 21, 22]
    prompt = (1, 2, 3)
    target = FakeTarget(token=lambda tokens, _seed: block[(len(tokens) - len(prompt)) % len(block)])
    draft = FakeDraft(
        lambda tokens, seed, n, d: oracle_of(block, len(tokens) - len(prompt), min(n, d)), block_size=8
    )
    linked(target, draft)

    async def body(scheduler: Scheduler) -> None:
        request = GenerationRequest(
            tokens=prompt, sampling=SamplingParams(), stop=StopParams(max_tokens=5, stop_token_ids=(77,))
        )
        text = await collect(scheduler, request)
        assert text.tokens == (10, 11, 77)
        assert text.finish_reason is FinishReason.STOP

    run_scheduler(body, target, draft, limits=LIMITS)


def oracle_of(block: list[int], start: int, count: int):  # type: ignore[no-untyped-def]
    from specbridge.tree import DraftTree

    tokens = tuple(block[(start + i) % len(block)] for i in range(count))
    return DraftTree(tokens, tuple(range(-1, count - 1)), tuple(-0.1 * (i + 1) for i in range(count)))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    target, draft = FakeTarget(), FakeDraft(oracle)
    linked(target, draft)

    async def body(scheduler: Scheduler) -> None:
        text = await collect(scheduler, make_request(0, max_tokens=max_tokens, ignore_eos=True))
        assert len(text.tokens) == max_tokens == text.stats.num_output_tokens
        assert text.finish_reason is FinishReason.LENGTH

    run_scheduler(body, target, draft, limits=LIMITS)


def test_min_tokens_and_eos() -> None:
    target, draft = services()

    async def body(scheduler: Scheduler) -> None:
        for i in range(30):
            request = make_request(i, max_tokens=120, min_tokens=i)
            text = await collect(scheduler, request)
            expected = plain(request.tokens, request.stop, request.seed or 0)
            assert (text.tokens, text.finish_reason) == (expected.tokens, expected.finish_reason)
            if text.finish_reason is FinishReason.STOP:
                assert text.tokens[-1] == EOS and len(text.tokens) >= i

    run_scheduler(body, target, draft, limits=LIMITS)


def test_model_length_ends_the_text() -> None:
    target = FakeTarget(max_length=40)
    draft = FakeDraft(oracle)
    linked(target, draft)

    async def body(scheduler: Scheduler) -> None:
        request = make_request(0, max_tokens=37, ignore_eos=True)
        assert len(request.tokens) + 37 == 40
        text = await collect(scheduler, request)
        assert len(text.tokens) == 37 and text.finish_reason is FinishReason.LENGTH
        with pytest.raises(InvalidRequest, match="38.*40") as caught:
            scheduler.generate(make_request(0, max_tokens=38))
        assert caught.value.param == "max_tokens"

    run_scheduler(body, target, draft, limits=LIMITS)


# ---- cancellation ---------------------------------------------------------------------------


def test_no_abort_for_normal_ends_and_one_release_each() -> None:
    """cases.md 14: 100 normal requests count no abort; every session is released once at each service."""
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        for start in range(0, 100, 20):
            await asyncio.gather(
                *(collect(scheduler, make_request(start + i, max_tokens=8)) for i in range(20))
            )

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert len(observer.requests) == 100
    assert not [r for r in observer.requests if r.finish_reason is FinishReason.ABORT]
    for service in (target, draft):
        assert len(service.releases) == 100 and set(service.releases.values()) == {1}
    observer.reconcile()


def test_cancel_counts_what_was_delivered() -> None:
    """cases.md 12: a reader that goes away after five tokens leaves an account of five."""
    target, draft = FakeTarget(), None
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        seen = 0
        async with scheduler.generate(make_request(1, max_tokens=100, ignore_eos=True)) as generation:
            async for event in generation:
                seen += len(event.tokens)
                if seen >= 5:
                    break
        assert scheduler.running == 0

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    (record,) = observer.requests
    assert record.output_tokens == 5 and record.finish_reason is FinishReason.ABORT
    assert target.releases == {1: 1}
    observer.reconcile()


@pytest.mark.parametrize("way", ["cancel", "aclose", "drop", "with"])
def test_every_way_to_leave_releases(way: str) -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        generation = scheduler.generate(make_request(1, max_tokens=400, ignore_eos=True))
        await anext(generation)
        if way == "cancel":
            while True:  # until the reader really waits
                task = asyncio.ensure_future(anext(generation))
                await asyncio.sleep(0)
                if not task.done():
                    break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.02)
        elif way == "aclose":
            await generation.aclose()
            await generation.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(generation)
        elif way == "with":
            with pytest.raises(KeyError):
                async with generation:
                    raise KeyError("the surface failed")
        else:
            del generation
            gc.collect()
            await asyncio.sleep(0.02)
        assert scheduler.running == 0
        await asyncio.sleep(0.02)
        assert not target.sessions and not draft.sessions

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert [r.finish_reason for r in observer.requests] == [FinishReason.ABORT]
    assert target.releases == {1: 1} == draft.releases


def test_cancel_before_the_first_token() -> None:
    """While queued, while the draft opens, while the target prefills."""
    target, draft = services(delay=0.003)
    target.prefill_delay = 0.02
    observer = Recorder()
    limits = SchedulerLimits(max_running=2, max_queue=10)

    async def body(scheduler: Scheduler) -> None:
        for wait in (0.0, 0.001, 0.004, 0.008, 0.015):
            generations = [scheduler.generate(make_request(i)) for i in range(5)]
            assert scheduler.running == 2 and scheduler.queue_length == 3
            await asyncio.sleep(wait)
            for generation in generations:
                await generation.aclose()
            assert scheduler.running == scheduler.queue_length == 0
        await asyncio.sleep(0.05)
        assert not target.sessions and not draft.sessions
        assert all(n == 1 for n in [*target.releases.values(), *draft.releases.values()])
        await collect(scheduler, make_request(3))

    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert len(observer.requests) == 26


def test_cancel_storm() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()
    rng = random.Random(5)

    async def reader(scheduler: Scheduler, i: int) -> None:
        await asyncio.sleep(rng.uniform(0, 0.05))
        task = asyncio.create_task(collect(scheduler, make_request(i, max_tokens=60)))
        await asyncio.sleep(rng.uniform(0, 0.04))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def body(scheduler: Scheduler) -> None:
        await asyncio.gather(*(reader(scheduler, i) for i in range(120)))
        assert scheduler.running == scheduler.queue_length == 0
        await asyncio.sleep(0.03)
        assert not target.sessions and not draft.sessions
        request = make_request(999)
        text = await collect(scheduler, request)
        assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens

    limits = SchedulerLimits(max_running=16, max_queue=200, max_verify_rows=256)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    aborted = [r for r in observer.requests if r.finish_reason is FinishReason.ABORT]
    assert len(observer.requests) == 121 and 0 < len(aborted) < 121
    assert set(target.releases.values()) == {1}
    observer.reconcile()


def test_deadline() -> None:
    target, draft = services(delay=0.005)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        generation = scheduler.generate(make_request(1, max_tokens=400, ignore_eos=True, deadline_s=0.1))
        with pytest.raises(Unavailable, match="deadline of 0.1 s"):
            async for _ in generation:
                pass
        assert scheduler.running == 0
        await asyncio.sleep(0.02)
        assert not target.sessions and not draft.sessions
        # A deadline that is not reached does nothing.
        await collect(scheduler, make_request(1, max_tokens=3, deadline_s=5.0))

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert observer.requests[0].finish_reason is FinishReason.ABORT
    assert isinstance(observer.requests[0].error, Unavailable)


def test_closing_the_scheduler_ends_requests() -> None:
    target, draft = services(delay=0.002)

    async def main() -> None:
        scheduler = Scheduler(target, draft, limits=LIMITS)
        await scheduler.start()
        await scheduler.wait_ready(1.0)
        tasks = [asyncio.create_task(collect(scheduler, make_request(i, max_tokens=300))) for i in range(4)]
        await asyncio.sleep(0.02)
        await scheduler.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
        assert all(isinstance(r, Unavailable) for r in results)
        assert not target.sessions and not draft.sessions
        with pytest.raises(Unavailable):
            scheduler.generate(make_request(1))

    asyncio.run(main())


# ---- admission ------------------------------------------------------------------------------


def test_queue_full() -> None:
    target, draft = services(delay=0.002)
    observer = Recorder()
    limits = SchedulerLimits(max_running=2, max_queue=3)

    async def body(scheduler: Scheduler) -> None:
        tasks = [asyncio.create_task(collect(scheduler, make_request(i))) for i in range(5)]
        await asyncio.sleep(0)
        assert scheduler.running == 2 and scheduler.queue_length == 3
        with pytest.raises(CapacityError, match="queue is full") as caught:
            scheduler.generate(make_request(9))
        assert caught.value.retry_after is not None and caught.value.retry_after >= 1.0
        for i, task in enumerate(tasks):
            request = make_request(i)
            assert (await task).tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
        await collect(scheduler, make_request(9))

    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert len(observer.rejected) == 1 and len(observer.requests) == 6
    assert len(target.releases) == 6


def test_the_target_s_session_limit_holds() -> None:
    target, draft = services()
    target.max_sessions = 2

    async def body(scheduler: Scheduler) -> None:
        await asyncio.gather(*(collect(scheduler, make_request(i)) for i in range(8)))

    observer = Recorder()
    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert max(r.sessions for r in observer.rounds) <= 2
    assert not observer.reopens


def test_new_sessions_join_without_holding_the_others() -> None:
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        first = asyncio.create_task(collect(scheduler, make_request(1, max_tokens=300, ignore_eos=True)))
        while len(observer.rounds) < 3:
            await asyncio.sleep(0.001)
        target.prefill_delay = 0.4
        before = len(observer.rounds)
        await collect(scheduler, make_request(2, max_tokens=1))
        assert len(observer.rounds) > before + 5, "rounds stood still during a prefill"
        target.prefill_delay = 0.0
        await first

    target.delay = draft.delay = 0.001
    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tokens": ()}, "prompt"),
        ({"tokens": (1, 9999)}, "prompt"),
        ({"tokens": (1, 2), "prompt_length": 3}, "prompt_length"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"stop_token_ids": (9999,)}, "stop_token_ids"),
        ({"max_tree_nodes": -1}, "max_tree_nodes"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"tokens": (1, 2, 3), "prompt_length": 1, "max_tokens": 2}, "max_tokens"),
    ],
)
def test_wrong_input(changes: dict[str, object], param: str) -> None:
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(InvalidRequest) as caught:
            scheduler.generate(make_request(1, **changes))
        assert caught.value.param == param
        assert scheduler.running == 0

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert len(observer.rejected) == 1 and not observer.requests


def test_unbuilt_features_are_named() -> None:
    target, draft = services()

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(Unsupported, match="presence_penalty"):
            scheduler.generate(make_request(1, sampling=SamplingParams(presence_penalty=1.0)))

    run_scheduler(body, target, draft, limits=LIMITS)


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    target, draft = services()
    info = target.make_info
    target.make_info = lambda: __import__("dataclasses").replace(info(), total_pages=2)  # type: ignore[method-assign]

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(InvalidRequest, match="KV pages"):
            scheduler.generate(make_request(1, max_tokens=60))

    run_scheduler(body, target, draft, limits=LIMITS)


def test_no_target_yet() -> None:
    target, draft = services()
    target.alive = False

    async def main() -> None:
        scheduler = Scheduler(target, draft, limits=LIMITS)
        await scheduler.start()
        with pytest.raises(Unavailable, match="not there after"):
            await scheduler.wait_ready(0.02)
        with pytest.raises(Unavailable, match="not been reached"):
            scheduler.generate(make_request(1))
        target.restart()
        await scheduler.wait_ready(1.0)
        await collect(scheduler, make_request(1))
        await scheduler.close()

    asyncio.run(main())


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_verify_rows is 0"):
        SchedulerLimits(max_verify_rows=0)
    with pytest.raises(ConfigError, match="tree_budget is -1"):
        SchedulerLimits(tree_budget=-1)


# ---- options --------------------------------------------------------------------------------


def test_request_options_limit_trees() -> None:
    target, draft = services()
    draft.drafter = oracle
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await collect(scheduler, make_request(1, max_tree_nodes=3, max_tokens=60))
        assert max(target.verified_nodes) == 3
        for changes in ({"speculate": False}, {"max_tree_nodes": 0}):
            target.verified_nodes.clear()
            opens = len(draft.opens)
            await collect(scheduler, make_request(2, max_tokens=60, **changes))
            assert max(target.verified_nodes) == 0 and len(draft.opens) == opens

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert not observer.fallbacks


def test_rows_are_shared_and_small_shares_skip_the_draft() -> None:
    target, draft = services()
    draft.drafter = oracle
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        await asyncio.gather(
            *(
                collect(scheduler, make_request(i, max_tokens=60 if i else 400, ignore_eos=True))
                for i in range(8)
            )
        )

    limits = SchedulerLimits(tree_budget=16, max_verify_rows=16, min_tree=4)
    run_scheduler(body, target, draft, limits=limits, observer=observer)
    assert target.most_rows <= 16
    crowded = [r for r in observer.rounds if r.sessions > 3]
    assert crowded and all(r.nodes == 0 and r.draft_wait_s == 0 and r.skipped == "budget" for r in crowded)
    assert any(r.nodes for r in observer.rounds if r.sessions <= 3)


def test_two_cohorts_have_one_batch_each_in_flight() -> None:
    target, draft = services(delay=0.001)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        wanted = [make_request(i, max_tokens=40) for i in range(8)]
        texts = await asyncio.gather(*(collect(scheduler, r) for r in wanted))
        for request, text in zip(wanted, texts, strict=True):
            assert text.tokens == plain(request.tokens, request.stop, request.seed or 0).tokens

    run_scheduler(body, target, draft, limits=SchedulerLimits(cohorts=2), observer=observer)
    assert {r.cohort for r in observer.rounds} == {0, 1}
    assert target.most_in_flight <= 2 and draft.most_in_flight <= 2


# ---- accounts -------------------------------------------------------------------------------


def test_request_statistics_add_up_to_the_counters() -> None:
    """cases.md 47: per request and in all, by position."""
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        texts = await asyncio.gather(*(collect(scheduler, make_request(i, max_tokens=50)) for i in range(9)))
        for text, record in zip(
            texts, sorted(observer.requests, key=lambda r: int(r.request_id[1:])), strict=True
        ):
            assert record.stats == text.stats
            assert text.stats.num_spec_tokens == draft.block_size - 1
            assert len(text.tokens) == text.stats.num_output_tokens

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    observer.reconcile()
    # Before delivery the rounds saw at least as much.
    delivered = sum(s.accepted for d in observer.delivered for s in d.rounds)
    assert sum(r.accepted for r in observer.rounds) == delivered > 0
    assert sum(d.first for d in observer.delivered) == 9


@pytest.mark.parametrize("hold_back", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 5, 9, 14])
def test_stop_string_cuts_the_account(cut: int, hold_back: bool) -> None:
    """The reader ends the text after `cut` tokens: later ones count nowhere."""
    target, draft = FakeTarget(), FakeDraft(oracle)
    linked(target, draft)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        request = make_request(1, max_tokens=100, ignore_eos=True, hold_back=hold_back)
        seen = 0
        async with scheduler.generate(request) as generation:
            async for event in generation:
                # A reader that holds back cuts below what it was handed before.
                seen += len(event.tokens)
                if seen >= cut + (8 if hold_back else 0):
                    stats = generation.stop(output_tokens=cut)
                    break
        assert stats.num_output_tokens == cut
        # The prefill's token, then rounds of 8: accepted never exceeds what was delivered.
        rounds = [min(8, cut - start) for start in range(1, cut, 8)]
        assert stats.num_rounds == len(rounds)
        assert stats.num_accepted_draft_tokens == sum(min(7, n) for n in rounds)
        assert scheduler.running == 0
        (record,) = observer.requests
        assert record.finish_reason is FinishReason.STOP and record.stats == stats

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    observer.reconcile()
    assert target.releases == {1: 1}


def test_stop_after_the_last_event() -> None:
    target, draft = services()
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        generation = scheduler.generate(make_request(1, max_tokens=6, ignore_eos=True))
        events = []
        while not events or events[-1].stats is None:
            events.append(await anext(generation))
        last = len(events[-1].tokens)
        stats = generation.stop(output_tokens=6 - last)
        assert stats.num_output_tokens == 6 - last

    run_scheduler(body, target, draft, limits=LIMITS, observer=observer)
    assert observer.requests[0].output_tokens == observer.requests[0].stats.num_output_tokens < 6
    observer.reconcile()


def test_slow_reader_gets_merged_events() -> None:
    target, draft = services()

    async def body(scheduler: Scheduler) -> None:
        request = make_request(1, max_tokens=60, ignore_eos=True)
        generation = scheduler.generate(request)
        while scheduler.running:
            await asyncio.sleep(0.005)
        events = [event async for event in generation]
        assert len(events) == 1
        assert events[0].tokens == plain(request.tokens, request.stop, request.seed or 0).tokens
        assert events[0].finish_reason is FinishReason.LENGTH

    run_scheduler(body, target, draft, limits=LIMITS)


def test_seed_belongs_to_the_request() -> None:
    with pytest.raises(ValueError, match="GenerationRequest.seed"):
        GenerationRequest(tokens=(1,), sampling=SamplingParams(seed=3), stop=StopParams(max_tokens=1))
