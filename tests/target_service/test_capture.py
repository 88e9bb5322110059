"""Hidden-state capture: the draft's context has no gaps, whatever ring, draft and text do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from fake_sink import FakeSink
from prometheus_client import CollectorRegistry
from toy_target import (
    GATEWAY,
    TOY_LIMITS,
    Client,
    ToyRunner,
    chain_tree,
    kv_of,
    make_engine,
    open_request,
    random_tree,
    reference,
)

from specbridge.errors import InvalidRequest
from specbridge.rounds import CostPoint, SessionKey, StopParams, TargetResultKind, Verify
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.capture import Capture
from target_service.config import Limits
from target_service.engine import Engine
from target_service.metrics import TargetMetrics

PROMPT = [random.Random(0).randrange(12) for _ in range(37)]
KEY = SessionKey(GATEWAY, 1)


class World:
    """An engine with a channel that ends in a FakeSink."""

    def __init__(self, limits: Limits = TOY_LIMITS, *, slots: int = 256, attach: bool = True) -> None:
        self.runner = ToyRunner(num_pages=limits.num_pages)
        self.engine: Engine = make_engine(self.runner, limits)
        self.sink = FakeSink(slots=slots)
        self.sink.attached = attach
        self.engine.connect_channel(self.sink)
        self.engine.start()
        self.client = Client(self.engine)
        if attach:
            self.attach()

    def attach(self) -> None:
        layout = self.engine.prepare_taps((1, 3), False)
        assert layout.row_width == self.sink.width and layout.dtype == "float32"
        self.sink.attached = True
        self.engine.channel_attached("inline", "test")

    def detach(self) -> None:
        self.sink.attached = False
        self.engine.channel_detached("test")

    def value(self, name: str, **labels: str) -> float:
        return self.engine._metrics.registry.get_sample_value(f"specbridge_target_{name}", labels) or 0.0

    def check(self, text: list[int], *, key: SessionKey = KEY, start: int = 0, upto: int) -> None:
        """The draft was sent exactly rows [start, upto) of `text`, with the right hidden states."""
        context = self.sink.context_of(key, start)
        assert context == text[start:upto]
        rows = torch.cat([c.rows for c in self.sink.chunks if c.session == key])
        total, sums = 0, []
        for position, token in enumerate(text[:upto]):
            total += kv_of(token, position)
            sums.append([float(token), float(position), float(total % 65536)])
        assert rows[:, :3].tolist() == sums[start:]


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def build(*args: object, **kwargs: object) -> World:
        made.append(World(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for each in made:
        each.engine.close()
        assert not each.sink.open, "a reservation was neither published nor cancelled"


def expected(world: World, prompt: list[int] = PROMPT, tokens: int = 20) -> list[int]:
    from specbridge.rounds import SamplingParams

    return reference(world.runner.logits_after, prompt, sampling=SamplingParams(), stop=StopParams(tokens))[0]


@pytest.mark.parametrize("read_back", [False, True])
def test_the_channel_is_told_what_the_pass_says_of_its_rows(
    world: Callable[..., World], read_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    run = w.runner.run
    monkeypatch.setattr(w.runner, "run", lambda step: replace(run(step), read_back=read_back))
    w.client.generate(open_request(1, PROMPT))
    assert set(w.sink.read_back) == {read_back}


def test_every_committed_row_is_published_once_in_order_with_its_states(world: Callable[..., World]) -> None:
    w = world()
    rng = random.Random(1)
    got = w.client.generate(
        open_request(1, PROMPT), lambda text, depth: random_tree(rng, nodes=30, depth=depth, vocab=12)
    )
    text = [*PROMPT, *got.tokens]
    rows = len(w.sink.context_of(KEY))
    # All rows but the last token's: nothing ran on it, unless it was an accepted node itself.
    assert rows in (len(text) - 1, len(text))
    w.check(text, upto=rows)


def test_answers_leave_before_rows_are_announced_and_those_before_the_next_step(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is asked two hops after the answer: what is announced meanwhile costs a round nothing."""
    w = world()
    order: list[str] = []
    publish, run, receive = w.sink.publish, w.runner.run, w.client.sink

    def told(what: str, then: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: (order.append(what), then(*args, **kwargs))[1]

    monkeypatch.setattr(w.sink, "publish", told("rows", publish))
    monkeypatch.setattr(w.runner, "run", told("step", run))
    w.client.sink = told("answer", receive)  # type: ignore[assignment]
    w.client.generate(open_request(1, PROMPT, max_tokens=4))
    assert order[-10:] == [*["step", "answer", "rows"] * 3, "answer"]  # the last of the session's release


def test_anchors_come_with_the_last_prompt_chunk_and_each_round_but_not_at_the_end(
    world: Callable[..., World],
) -> None:
    w = world()
    output = expected(w)
    w.client.generate(
        open_request(1, PROMPT), lambda t, d: chain_tree(output[len(t) - len(PROMPT) :][: min(d, 4)])
    )
    anchors = [(c.first_position + len(c.tokens), c.anchor) for c in w.sink.chunks]
    text = [*PROMPT, *output]
    for end, anchor in anchors[:-1]:
        assert anchor == (text[end] if end >= len(PROMPT) else None)
    assert anchors[-1][1] is None


def test_reuse_keeps_to_what_the_draft_holds_and_capture_starts_there(world: Callable[..., World]) -> None:
    w = world()
    w.client.generate(open_request(1, PROMPT))
    for number, (draft_prefix, cached) in enumerate(
        [(0, 0), (16, 16), (20, 16), (32, 32), (37, 32)], start=2
    ):
        key = SessionKey(GATEWAY, number)
        first = w.client.open(open_request(number, PROMPT, draft_prefix=draft_prefix))
        assert first.cached_tokens == cached
        assert first.draft_has_context
        w.check(PROMPT, key=key, start=draft_prefix, upto=len(PROMPT)) if draft_prefix < 37 else None
        w.sink.ack()


def test_without_speculation_the_own_prefix_counts_alone_and_nothing_is_published(
    world: Callable[..., World],
) -> None:
    w = world()
    w.client.generate(open_request(1, PROMPT))
    before = len(w.sink.chunks)
    first = w.client.open(open_request(2, PROMPT, speculate=False))
    assert first.cached_tokens == 32 and not first.draft_has_context
    assert len(w.sink.chunks) == before


def test_without_a_draft_the_own_prefix_counts_alone(world: Callable[..., World]) -> None:
    w = world(attach=False)
    w.client.generate(open_request(1, PROMPT))
    first = w.client.open(open_request(2, PROMPT))
    assert first.cached_tokens == 32 and not first.draft_has_context


def test_a_full_ring_suspends_the_session_and_the_target_recaptures_by_itself(
    world: Callable[..., World],
) -> None:
    w = world()
    output = expected(w, tokens=40)
    first = w.client.open(open_request(1, PROMPT, max_tokens=40))
    w.sink.ack()
    w.sink.hold = True
    kv, text = first.kv_length, [*PROMPT, *first.tokens]
    for _ in range(5):
        (result,) = w.client.verify([Verify(KEY, kv, EMPTY_TREE)]).results
        assert not result.draft_has_context
        kv, text = result.kv_length, [*text, *result.tokens]
    assert w.value("captures_suspended_total") == 1
    w.sink.hold = False
    deadline = time.monotonic() + 30
    while not result.draft_has_context and time.monotonic() < deadline:
        (result,) = w.client.verify([Verify(KEY, kv, EMPTY_TREE)]).results
        kv, text = result.kv_length, [*text, *result.tokens]
        time.sleep(0.01)
    assert result.draft_has_context
    assert text[len(PROMPT) :] == output[: len(text) - len(PROMPT)]
    w.check(text, upto=kv)
    assert w.value("recaptures_total", cause="slots") == 1
    # And it follows on.
    (result,) = w.client.verify([Verify(KEY, kv, chain_tree([0, 1]))]).results
    assert result.draft_has_context
    w.check([*text, *result.tokens], upto=result.kv_length)


def test_one_session_s_full_ring_does_not_hold_another(world: Callable[..., World]) -> None:
    w = world(slots=40)
    first = w.client.open(open_request(1, PROMPT))
    # 37 of 40 slots are taken; a tree of depth 7 needs 8, a plain round 1.
    w.client.open(open_request(2, PROMPT, speculate=False))
    tree = chain_tree([1] * 7)
    reply = w.client.verify([Verify(KEY, first.kv_length, tree), Verify(SessionKey(GATEWAY, 2), 37, tree)])
    assert [r.kind for r in reply.results] == [TargetResultKind.VERIFIED] * 2
    assert not reply.results[0].draft_has_context


def test_a_prompt_chunk_waits_for_slots_only_so_long(world: Callable[..., World]) -> None:
    w = world(replace(TOY_LIMITS, capture_wait=0.15))
    w.sink.hold = True
    begin = time.monotonic()
    first = w.client.open(open_request(1, PROMPT))
    assert time.monotonic() - begin >= 0.15
    assert not first.draft_has_context
    assert w.sink.chunks == []
    w.sink.hold = False
    deadline = time.monotonic() + 30
    while len(w.sink.context_of(KEY)) < len(PROMPT) and time.monotonic() < deadline:
        time.sleep(0.01)
    w.check(PROMPT, upto=len(PROMPT))
    assert w.sink.chunks[-1].anchor == first.tokens[0]


def test_slots_that_free_up_in_time_let_the_chunk_go_on(world: Callable[..., World]) -> None:
    w = world(replace(TOY_LIMITS, capture_wait=20.0))
    w.sink.hold = True
    w.client.send(opens=[open_request(1, PROMPT)])
    w.client.result(KEY, TargetResultKind.OPENED)
    time.sleep(0.05)
    w.sink.hold = False
    assert w.client.result(KEY, TargetResultKind.FIRST).draft_has_context
    w.check(PROMPT, upto=len(PROMPT))


def test_a_ring_smaller_than_a_chunk_still_works(world: Callable[..., World]) -> None:
    w = world(slots=10)
    w.client.send(opens=[open_request(1, PROMPT)])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any(
        r.kind is TargetResultKind.FIRST for reply in w.client.replies for r in reply.results
    ):
        w.sink.ack()
        time.sleep(0.002)
    assert w.client.result(KEY, TargetResultKind.FIRST).draft_has_context
    assert all(len(c.tokens) <= 10 for c in w.sink.chunks)
    w.check(PROMPT, upto=len(PROMPT))


def test_a_draft_that_attaches_late_gets_what_it_asks_for(world: Callable[..., World]) -> None:
    w = world(attach=False)
    first = w.client.open(open_request(1, PROMPT))
    (result,) = w.client.verify([Verify(KEY, first.kv_length)]).results
    assert not result.draft_has_context
    w.attach()
    w.engine.request_recapture(KEY, 0, "attach")
    kv, text = result.kv_length, [*PROMPT, *first.tokens, *result.tokens]
    deadline = time.monotonic() + 30
    while not result.draft_has_context and time.monotonic() < deadline:
        (result,) = w.client.verify([Verify(KEY, kv)]).results
        kv, text = result.kv_length, [*text, *result.tokens]
    assert result.draft_has_context
    w.check(text, upto=kv)
    assert w.value("recaptures_total", cause="attach") == 1
    assert text[len(PROMPT) :] == expected(w)[: len(text) - len(PROMPT)]


def test_a_session_that_the_draft_does_not_have_is_captured_once_it_asks(world: Callable[..., World]) -> None:
    w = world()
    w.client.generate(open_request(1, PROMPT))
    sent = len(w.sink.chunks)
    key = SessionKey(GATEWAY, 2)
    first = w.client.open(open_request(2, PROMPT, draft_prefix=len(PROMPT), draft_absent=True))
    (result,) = w.client.verify([Verify(key, first.kv_length)]).results
    assert first.cached_tokens == 32 and not result.draft_has_context and len(w.sink.chunks) == sent
    w.engine.request_recapture(key, 0, "attach")
    kv, text = result.kv_length, [*PROMPT, *first.tokens, *result.tokens]
    deadline = time.monotonic() + 30
    while not result.draft_has_context and time.monotonic() < deadline:
        (result,) = w.client.verify([Verify(key, kv)]).results
        kv, text = result.kv_length, [*text, *result.tokens]
    assert result.draft_has_context
    w.check(text, key=key, upto=kv)
    assert text[len(PROMPT) :] == expected(w)[: len(text) - len(PROMPT)]


def test_rows_to_run_again_come_however_tight_the_goal_for_the_streams(world: Callable[..., World]) -> None:
    """As prompts do: with every other pass of the streams at the latest, or a session that was spared the
    draft would decode plainly to its end.
    """
    w = world()
    w.engine._stepper.planner.set_times(
        [CostPoint(1, 0, 1000), CostPoint(64, 0, 1000)], [CostPoint(16, 0, 10**15)]
    )
    first = w.client.open(open_request(1, PROMPT, draft_prefix=len(PROMPT), draft_absent=True))
    w.engine.request_recapture(KEY, 0, "attach")
    kv, had = first.kv_length, []
    while len(had) < 12:
        (result,) = w.client.verify([Verify(KEY, kv)]).results
        kv = result.kv_length
        had.append(result.draft_has_context)
    assert had[-1] and not had[1]  # in more than one part: there was no room for all


def test_recapture_reads_pages_and_writes_none(world: Callable[..., World]) -> None:
    w = world()
    w.client.open(open_request(1, PROMPT))
    before = list(w.runner.slots)
    w.sink.chunks.clear()
    w.engine.request_recapture(KEY, 5, "gap")
    deadline = time.monotonic() + 30
    while len(w.sink.context_of(KEY, 5)) < 32 and time.monotonic() < deadline:
        time.sleep(0.01)
    w.check(PROMPT, start=5, upto=len(PROMPT))
    assert w.runner.slots == before


def test_a_detached_draft_stops_capture_and_a_new_one_starts_from_nothing(
    world: Callable[..., World],
) -> None:
    w = world()
    first = w.client.open(open_request(1, PROMPT))
    w.detach()
    (result,) = w.client.verify([Verify(KEY, first.kv_length)]).results
    assert not result.draft_has_context
    w.attach()
    (result,) = w.client.verify([Verify(KEY, result.kv_length)]).results
    assert not result.draft_has_context, "the new draft knows nothing of this session"
    chunks = len(w.sink.chunks)
    second = w.client.open(open_request(2, PROMPT))
    assert second.draft_has_context
    assert {c.session.number for c in w.sink.chunks[chunks:]} == {2}


def test_recapture_near_the_end_is_skipped(world: Callable[..., World]) -> None:
    w = world(attach=False)
    first = w.client.open(open_request(1, PROMPT, max_tokens=4))
    w.attach()
    w.engine.request_recapture(KEY, 0, "attach")
    (result,) = w.client.verify([Verify(KEY, first.kv_length)]).results
    assert not result.draft_has_context
    assert w.sink.chunks == []
    assert w.value("recaptures_skipped_total") == 1


def test_requests_that_make_no_sense_change_nothing(world: Callable[..., World]) -> None:
    w = world()
    first = w.client.open(open_request(1, PROMPT))
    w.engine.request_recapture(SessionKey(GATEWAY, 5), 0, "gap")
    w.engine.request_recapture(KEY, 99, "gap")
    (result,) = w.client.verify([Verify(KEY, first.kv_length)]).results
    assert result.draft_has_context
    w.check([*PROMPT, *first.tokens], upto=result.kv_length)


@pytest.mark.parametrize("ids", [(), (1, 1), (-1,), (6,)])
def test_taps_that_do_not_exist_are_refused(world: Callable[..., World], ids: tuple[int, ...]) -> None:
    w = world()
    with pytest.raises(InvalidRequest):
        w.engine.prepare_taps(ids, False)


def test_under_a_ring_that_comes_and_goes_the_context_never_has_a_gap(world: Callable[..., World]) -> None:
    w = world(slots=24)
    rng = random.Random(5)
    keys = {n: SessionKey(GATEWAY, n) for n in range(3)}
    prompts = {n: [rng.randrange(12) for _ in range(20 + n)] for n in keys}
    w.client.send(opens=[open_request(n, prompts[n], max_tokens=200) for n in keys])
    kv: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    deadline = time.monotonic() + 20
    while len(kv) < 3 and time.monotonic() < deadline:
        for n in set(keys) - set(kv):
            if any(
                r.kind is TargetResultKind.FIRST and r.session == keys[n]
                for reply in w.client.replies
                for r in reply.results
            ):
                first = w.client.result(keys[n], TargetResultKind.FIRST)
                kv[n], texts[n] = first.kv_length, [*prompts[n], *first.tokens]
        w.sink.ack()
        time.sleep(0.002)
    for _ in range(60):
        w.sink.hold = rng.random() < 0.3
        if rng.random() < 0.5:
            w.sink.ack()
        trees = {n: rng.choice([EMPTY_TREE, random_tree(rng, nodes=5, depth=4, vocab=12)]) for n in keys}
        reply = w.client.verify([Verify(keys[n], kv[n], trees[n]) for n in keys])
        for n, result in zip(keys, reply.results, strict=True):
            assert result.error is None
            texts[n] += result.tokens
            kv[n] = result.kv_length
            if result.draft_has_context:
                assert len(w.sink.context_of(keys[n])) == kv[n]
    for n in keys:
        sent = len(w.sink.context_of(keys[n]))
        w.check(texts[n], key=keys[n], upto=sent)
        want = expected(w, prompts[n], tokens=200)
        assert texts[n][len(prompts[n]) :] == want[: len(texts[n]) - len(prompts[n])]


def test_unused_rows_of_a_reservation_go_back(world: Callable[..., World]) -> None:
    w = world()
    first = w.client.open(open_request(1, PROMPT))
    used = w.sink.used
    wrong = DraftTree((99 % 12,), (-1,), (-1.0,))
    (result,) = w.client.verify([Verify(KEY, first.kv_length, chain_tree([*wrong.tokens, 1, 2, 3]))]).results
    assert w.sink.used == used + len(result.accepted) + 1


def test_a_suspension_does_not_lift_the_pause_between_recaptures() -> None:
    """A ring that is full again at once must not make the target re-capture without end."""
    sink = FakeSink()
    capture = Capture(TargetMetrics(CollectorRegistry()), slots=256, recapture_interval=5.0)
    capture.connect(sink)
    capture.attached([])
    session = capture.open(speculate=True, draft_prefix=10)

    def missing(kv_length: int, now: float) -> int:
        return capture.recapture_rows(session, kv_length=kv_length, remaining=99, now=now)

    capture.suspend(session, "slots")
    assert missing(20, now=100.0) == 10
    reserved = capture.reserve_recapture(session, 10, now=100.0)
    capture.publish(
        session,
        reserved,
        key=KEY,
        first=10,
        tokens=[0] * 10,
        anchor=3,
    )
    capture.recaptured(session, kv_length=20, rows=10, now=100.0)
    assert session.following
    capture.suspend(session, "slots")
    assert [missing(30, now=now) for now in (100.1, 104.9, 105.0)] == [0, 0, 10]
