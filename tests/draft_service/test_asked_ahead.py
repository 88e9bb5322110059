"""Proposals asked for while their round is verified: answered once its rows have come."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from draft_bench import PATIENCE_S, Bench, FakeChunk, FakeInfo, key, same, text

from specbridge.errors import NotReady
from specbridge.rounds import DraftReply, DraftResultKind, Propose

Make = Callable[..., Bench]


def ask_ahead(b: Bench, base: int, *numbers: int, nodes: int = 8, depth: int = 9) -> int:
    return b.send(proposes=tuple(Propose(key(n), base, 0, nodes, depth, on_arrival=True) for n in numbers))


def quiet(b: Bench) -> bool:
    """Nothing is answered, with all done that was queued, and looked at."""
    b.engine.call(b.engine._desk.serve)  # settle alone comes before the turn's own look
    b.settle()
    return b.replies.empty()


def begin(b: Bench, number: int, tokens: list[int], base: int = 10) -> None:
    b.open(number, tokens[:base])
    b.chunk(number, tokens, 0, base)
    same(b.propose(number, tokens, base).tree, b.expected(tokens, base))


def reply_of(b: Bench) -> DraftReply:
    return b.replies.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("eager", [True, False])
def test_the_answer_is_for_where_the_rows_ended(bench: Make, eager: bool) -> None:
    b = bench(eager=eager)
    tokens = text(41, 60)
    begin(b, 1, tokens)
    for base, following in ((10, 12), (12, 13), (13, 20)):
        batch = ask_ahead(b, base, 1)
        assert quiet(b)
        b.chunk(1, tokens, base, following)
        reply = reply_of(b)
        (result,) = reply.results
        assert (reply.batch_id, result.kind) == (batch, DraftResultKind.PROPOSED)
        assert (result.base, result.anchor) == (following, tokens[following])
        same(result.tree, b.expected(tokens, following))
    # What was asked for in time is not begun without a question as well.
    assert b.count("appends_total", trigger="eager") == 0


def test_rows_that_came_before_the_question_answer_it_at_once(bench: Make) -> None:
    b = bench()
    tokens = text(42, 60)
    begin(b, 1, tokens)
    b.chunk(1, tokens, 10, 13)
    b.settle()
    ask_ahead(b, 10, 1)
    (result,) = b.results(1)
    assert result.base == 13
    same(result.tree, b.expected(tokens, 13))


def test_a_round_s_sessions_are_one_pass_and_one_reply(bench: Make) -> None:
    b = bench()
    one, two = text(43, 60), text(44, 60)
    begin(b, 1, one)
    begin(b, 2, two)
    ask_ahead(b, 10, 1, 2)
    b.settle()
    before = b.count("pass_sessions_count")
    b.engine.call(lambda: (b.chunk(1, one, 10, 12), b.chunk(2, two, 10, 15)))  # type: ignore[arg-type, return-value]
    trees = {r.session.number: r for r in reply_of(b).results}
    assert {n: r.base for n, r in trees.items()} == {1: 12, 2: 15}
    same(trees[1].tree, b.expected(one, 12))
    same(trees[2].tree, b.expected(two, 15))
    assert b.count("pass_sessions_count") == before + 1


def test_time_before_the_rows_is_not_the_services(bench: Make) -> None:
    b = bench()
    tokens = text(45, 60)
    begin(b, 1, tokens)
    asked = time.perf_counter_ns()
    ask_ahead(b, 10, 1)
    b.settle()
    time.sleep(0.2)
    b.chunk(1, tokens, 10, 12)
    timings = reply_of(b).timings
    assert timings is not None and timings.forward_ns > 0 and timings.queue_ns == 0
    assert time.perf_counter_ns() - asked - timings.service_ns >= 200_000_000
    assert timings.service_ns >= timings.channel_wait_ns + timings.append_ns + timings.forward_ns


def test_the_next_question_or_a_release_takes_it_back(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S)
    tokens = text(46, 60)
    begin(b, 1, tokens)
    ask_ahead(b, 10, 1)
    b.send(proposes=(Propose(key(1), 12, tokens[12], 8, 9),))
    assert quiet(b)
    b.chunk(1, tokens, 10, 12)
    same(b.results(1)[0].tree, b.expected(tokens, 12))
    assert quiet(b)  # one question, one answer
    ask_ahead(b, 12, 1)
    b.send(releases=(key(1),))
    (released,) = b.results(1)
    assert released.kind is DraftResultKind.RELEASED and quiet(b)


def test_asked_again_after_the_answer_it_makes_no_second_pass(bench: Make) -> None:
    b = bench()
    tokens = text(47, 60)
    begin(b, 1, tokens)
    ask_ahead(b, 10, 1)
    b.chunk(1, tokens, 10, 12)
    (first,) = b.results(1)
    before = b.count("pass_sessions_count")
    again = b.propose(1, tokens, 12)
    assert (again.tree, again.base, again.anchor) == (first.tree, 12, tokens[12])
    assert b.count("pass_sessions_count") == before
    # Another anchor is another question.
    other = [*tokens[:12], (tokens[12] + 1) % 50]
    same(b.propose(1, other, 12).tree, b.expected(other, 12))


def test_it_holds_up_nobody_else(bench: Make) -> None:
    b = bench(eager=True)
    one, two = text(48, 60), text(49, 60)
    begin(b, 1, one)
    begin(b, 2, two)
    ask_ahead(b, 10, 1)
    b.chunk(2, two, 10, 12)
    same(b.propose(2, two, 12).tree, b.expected(two, 12))
    assert quiet(b)
    b.chunk(1, one, 10, 11)
    same(b.results(1)[0].tree, b.expected(one, 11))


def test_a_channel_that_breaks_answers_it(bench: Make) -> None:
    b = bench()
    tokens = text(50, 60)
    begin(b, 1, tokens)
    ask_ahead(b, 10, 1)
    assert quiet(b)
    b.engine.on_detached("the test")
    (result,) = b.results(1)
    assert isinstance(result.error, NotReady) and "channel is down" in str(result.error)
    b.engine.on_attached(FakeInfo())
    b.settle()
    assert b.channel.recaptures[-1][0] == key(1)


def test_a_closing_service_answers_it(bench: Make) -> None:
    b = bench()
    tokens = text(51, 60)
    begin(b, 1, tokens)
    ask_ahead(b, 10, 1)
    b.engine.close()
    (result,) = b.results(1)
    assert isinstance(result.error, NotReady)


def test_nobody_is_waited_for_once_all_are_taken_back(bench: Make) -> None:
    """While one's rows are here and wait for the other's, both sessions end."""
    b = bench()
    one, two = text(52, 60), text(53, 60)
    begin(b, 1, one)
    begin(b, 2, two)
    ask_ahead(b, 10, 1, 2)
    b.settle()
    desk = b.engine._desk
    b.chunk(1, one, 10, 12)
    b.engine.call(desk.serve)
    b.send(releases=(key(1), key(2)))
    assert {r.kind for r in b.results(2)} == {DraftResultKind.RELEASED}
    b.settle()
    assert desk.waiting == 0 and desk.next_deadline() is None


def test_rows_that_follow_while_others_are_waited_for_are_no_error(bench: Make) -> None:
    b = bench()
    one, two = text(54, 60), text(55, 60)
    begin(b, 1, one)
    begin(b, 2, two)
    ask_ahead(b, 10, 1, 2)
    b.settle()

    def come() -> None:
        engine = b.engine
        for first, stop in ((10, 12), (12, 13)):
            chunk = FakeChunk(
                next(b.ids), key(1), first, stop - first, tuple(one[first:stop]), one[stop],
                b.states(one[:stop], b.drafter.config.feature_size)[first:],
            )  # fmt: skip
            engine._take_chunk(chunk)
            engine._desk.serve()

    b.engine.call(come)
    (result,) = b.results(1)
    assert (result.kind, result.base, result.anchor) == (DraftResultKind.PROPOSED, 13, one[13])
    same(result.tree, b.expected(one, 13))


def test_a_question_that_waits_keeps_no_session_alive(bench: Make) -> None:
    b = bench(idle_lease_s=0.2)
    begin(b, 1, text(56, 60))
    ask_ahead(b, 10, 1)
    b.until(lambda: len(b.engine._sessions) == 0)
    assert b.engine._desk.waiting == 0
