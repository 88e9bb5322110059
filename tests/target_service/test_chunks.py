"""Prompt chunks beside running streams: how large they are, whose they are, and that neither side starves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_target import GATEWAY, PROMPT, TOY_LIMITS, Client, Start, expected, open_request

from specbridge.rounds import CostPoint, SessionKey, StopParams, TargetResultKind, Verify
from target_service.chunks import LEAST, ChunkPolicy, Curve, PassTimes
from target_service.planner import shares
from target_service.step import Step

MS = 1_000_000
# A verify pass: 10 ms and 0.1 ms a row. A prompt row: 0.1 ms, and 1 ms more for 10,000 tokens before it.
VERIFY = [CostPoint(rows, 64, int((10 + 0.1 * rows) * MS)) for rows in (1, 8, 64, 128)]
PREFILL = [CostPoint(rows, 64, int((10 + 0.1 * rows) * MS)) for rows in (8, 32, 128)]
LONG = CostPoint(128, 64 + 10_000, int((10 + 12.8 + 128) * MS))


def policy(*, goal_ms: float = 0.0, most: int = 128) -> ChunkPolicy:
    chosen = ChunkPolicy(most=most, smallest=16, goal_s=goal_ms / 1000)
    chosen.times = PassTimes(VERIFY, [*PREFILL, LONG])
    return chosen


def rows(chosen: ChunkPolicy, verify_rows: int, **changes: Any) -> int:
    return chosen.rows(
        **{"verify_rows": verify_rows, "waited_s": 0.0, "running": True, "context": 0, **changes}
    )


def test_a_curve_goes_through_its_points_and_never_down() -> None:
    curve = Curve([(1, 1.0), (4, 4.0), (8, 3.0), (16, 5.0)])
    assert [curve(n) for n in (1, 2, 4, 8, 12, 24)] == pytest.approx([1.0, 2.0, 4.0, 4.0, 4.5, 6.0])
    assert Curve([(1, 2.0)])(100) == 2.0


def test_without_streams_or_measurements_the_chunk_is_the_largest() -> None:
    assert rows(policy(), 0, running=False) == 128
    assert rows(ChunkPolicy(most=128, smallest=16, goal_s=0.001), 8) == 128


@pytest.mark.parametrize("goal_ms", [0.0, 15.0, 17.0, 25.0, 1000.0])
@pytest.mark.parametrize("verify_rows", [1, 8, 64])
def test_the_pass_with_the_chunk_keeps_the_goal(goal_ms: float, verify_rows: int) -> None:
    chosen = policy(goal_ms=goal_ms)
    assert chosen.times is not None
    goal = goal_ms / 1000 or 2 * (0.01 + 0.0001 * verify_rows)
    assert chosen.goal_s(verify_rows) == pytest.approx(goal)
    for waited, context in ((0.0, 0), (0.002, 0), (0.0, 10_000)):
        count = rows(chosen, verify_rows, waited_s=waited, context=context)
        fits = 0.01 + 0.0001 * (verify_rows + count) + count * context * 1e-7 + waited <= goal + 1e-9
        assert count in range(0, 129, 16) and (fits or count == 0)
        larger = count + 16
        if larger <= 128:  # and no larger one would have
            assert 0.01 + 0.0001 * (verify_rows + larger) + larger * context * 1e-7 + waited > goal - 1e-9


def test_a_pass_of_its_own_leaves_time_for_the_round_that_comes_during_it() -> None:
    chosen = policy(goal_ms=25)
    chosen.observe(verify_rows=8, rows=0, context=0, seconds=0.0108, waiting=False)
    # 25 ms less a round of 10.8: 14.2 for the chunk, of which 10 are there whatever it holds.
    assert rows(chosen, 0) == 32
    assert rows(policy(goal_ms=1), 0) == 0


def test_under_a_goal_that_no_chunk_keeps_every_second_pass_has_the_smallest() -> None:
    chosen = policy(goal_ms=1)
    taken = []
    for _ in range(6):
        taken.append(rows(chosen, 8))
        chosen.observe(verify_rows=8, rows=taken[-1], context=0, seconds=0.011, waiting=True)
    assert taken == [0, 16, 0, 16, 0, 16]


def test_estimates_follow_what_passes_really_take() -> None:
    times = PassTimes(VERIFY, PREFILL)
    for _ in range(60):
        times.observe(8, 32, 0, 3 * 0.014)
        times.observe(8, 0, 0, 2 * 0.0108)
    assert times.mixed(8, 32, 0) == pytest.approx(3 * 0.014, rel=0.01)
    assert times.plain(8) == pytest.approx(2 * 0.0108, rel=0.01)
    # A size that was not seen goes by the nearest one.
    assert times.mixed(8, 128, 0) == pytest.approx(3 * 0.0236, rel=0.01)
    times = PassTimes(VERIFY, PREFILL)
    times.observe(8, 32, 0, 1e-9)
    assert times.mixed(8, 32, 0) == pytest.approx(LEAST * 0.014)


# ---- whose rows they are ------------------------------------------------------------------------

prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(0, 299)), min_size=1, max_size=8
)


@given(prompts, st.integers(0, 256))
def test_rows_are_shared_fairly(found: list[tuple[int, int, int]], count: int) -> None:
    sessions: list[Any] = [
        SimpleNamespace(priority=priority, num_tokens=tokens, kv_length=min(done, tokens - 1), number=i)
        for i, (priority, tokens, done) in enumerate(sorted(found, key=lambda item: item[0]))
    ]
    given_rows = {id(s): n for s, n in _shares(sessions, count)}
    missing = {id(s): s.num_tokens - s.kv_length for s in sessions}
    assert sum(given_rows.values()) == min(count, sum(missing.values()))
    assert all(0 < n <= missing[key] for key, n in given_rows.items())
    first = sessions[0]
    assert given_rows.get(id(first), 0) >= min(missing[id(first)], count // 2)
    for s in sessions:
        if given_rows.get(id(s), 0) < missing[id(s)]:  # nobody less urgent gets anything then
            assert not [t for t in sessions if t.priority > s.priority and id(t) in given_rows]


class _Hashable(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def _shares(sessions: list[Any], count: int) -> list[tuple[Any, int]]:
    made = [_Hashable(**vars(s)) for s in sessions]
    back = {id(m): s for m, s in zip(made, sessions, strict=True)}
    return [(back[id(m)], n) for m, n in shares(made, count).items()]  # type: ignore[arg-type]


# ---- the engine ---------------------------------------------------------------------------------

LIMITS = replace(TOY_LIMITS, num_pages=256, prefill_chunk=128)


@pytest.fixture
def mixed(start: Start) -> Iterator[tuple[Any, Any, Client]]:
    """An engine that believes in passes a thousand times as long as VERIFY and PREFILL say, whatever they
    really take: so the time that its thread is held up is nothing.
    """
    runner, engine, client = start(LIMITS)
    slow = [
        [replace(point, time_ns=1000 * point.time_ns) for point in points] for points in (VERIFY, PREFILL)
    ]
    engine._stepper.planner.set_times(*slow)
    times = engine._stepper.planner._chunks.times
    assert times is not None
    times.observe = lambda *_: None  # type: ignore[method-assign]
    yield runner, engine, client


def test_a_long_prompt_beside_a_stream_runs_in_chunks_that_keep_the_goal(
    mixed: tuple[Any, Any, Client],
) -> None:
    runner, _, client = mixed
    stop = StopParams(60)
    stream = client.open(open_request(1, PROMPT, stop=stop))
    key, text, kv = stream.session, list(stream.tokens), stream.kv_length
    long = [random.Random(5).randrange(12) for _ in range(390)]
    runner.steps.clear()
    client.send(opens=[open_request(2, long, max_tokens=2)], verifies=[Verify(key, kv)])
    first = None
    while not len(text) >= 60:
        reply = client.wait(lambda r: r.timings is not None)
        (result,) = reply.results
        text += result.tokens
        kv = result.kv_length
        if not result.finish_reason:
            client.send(verifies=[Verify(key, kv)])
    assert text == expected(runner, PROMPT, stop=stop)[0]
    first = client.result(SessionKey(GATEWAY, 2), TargetResultKind.FIRST)
    assert list(first.tokens) == expected(runner, long)[0][:1]
    # 2 x 10.1 s: room for 96 prompt rows beside a round, for none in a pass of their own.
    chunks = [(_rows(step, tree=True), _rows(step, tree=False)) for step in runner.steps]
    assert [prompt for _, prompt in chunks if prompt] == [96, 96, 96, 96, 6]
    assert all(verify == 1 for verify, _ in chunks)


def test_a_prompt_that_follows_the_last_stream_s_end_is_not_held_up(mixed: tuple[Any, Any, Client]) -> None:
    """No stream is left that its chunks could hold up, however lately one had a token."""
    runner, _, client = mixed
    client.open(open_request(1, PROMPT, max_tokens=1))
    runner.steps.clear()
    long = [random.Random(5).randrange(12) for _ in range(390)]
    first = client.open(open_request(2, long))
    assert list(first.tokens) == expected(runner, long)[0][:1]
    assert [_rows(step, tree=False) for step in runner.steps] == [128, 128, 128, 6]


def test_short_prompts_do_not_wait_for_a_long_one_nor_it_for_ever(start: Start) -> None:
    """A stream of newcomers takes half of the rows at most."""
    runner, engine, client = start(LIMITS)
    gate = _Gate(runner)
    long = [random.Random(5).randrange(12) for _ in range(390)]
    client.send(opens=[open_request(1, long)])
    client.send(opens=[open_request(n, [n % 12] * 64) for n in range(2, 22)])
    gate.open()
    done = [client.result(SessionKey(GATEWAY, n), TargetResultKind.FIRST) for n in (1, *range(2, 22))]
    assert [list(f.tokens) for f in done[1:]] == [
        expected(runner, [n % 12] * 64)[0][:1] for n in range(2, 22)
    ]
    ends = [n for step in runner.steps for n in _ends(step)]
    place = ends.index(390)
    # 390 rows at 64 a pass: seven passes, in which the short ones get the other 64 rows each.
    assert 4 <= place <= 8, ends
    assert engine.num_sessions == 21


def _rows(step: Step, *, tree: bool) -> int:
    return sum(s.rows for s in step.segments if (s.parents is not None) == tree)


def _ends(step: Step) -> list[int]:
    """Lengths of the prompts that this step completes."""
    last = set(step.logit_rows.tolist())
    return [s.context_length + s.rows for s in step.segments if s.first_row + s.rows - 1 in last]


class _Gate:
    """Holds the first forward until `open`, so that all requests are there when the next is planned."""

    def __init__(self, runner: Any) -> None:
        import threading

        self._event = threading.Event()
        runner.before_forward = lambda step: self._event.wait(20) and None

    def open(self) -> None:
        self._event.set()
