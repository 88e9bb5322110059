"""The engine with a scripted channel: order rules, waiting, re-capture, prefixes, laziness, leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from draft_bench import PATIENCE_S, Bench, FakeInfo, key, same, text
from tiny_drafters import VOCAB

from draft_service.ingest import LazyLimits
from draft_service.selfcheck import AcceptanceMonitor
from specbridge.errors import CapacityError, InvalidRequest, NotReady, Stale, Unavailable, Unsupported
from specbridge.rounds import DraftOpen, DraftResultKind, Propose, SamplingParams, SessionKey

Make = Callable[..., Bench]


def test_trees_of_a_growing_session_equal_the_slow_road(bench: Make) -> None:
    b = bench()
    tokens = text(1, 60)
    opened = b.open(1, tokens[:20])
    assert (opened.kind, opened.draft_prefix) == (DraftResultKind.OPENED, 0)
    b.chunk(1, tokens, 0, 16, anchor=False)
    b.chunk(1, tokens, 16, 20)
    for base, following in ((20, 23), (23, 24), (24, 33), (33, 40)):
        result = b.propose(1, tokens, base)
        assert (result.kind, result.base) == (DraftResultKind.PROPOSED, base)
        same(result.tree, b.expected(tokens, base))
        b.chunk(1, tokens, base, following)
    assert b.channel.acks[:2] == [1, 2]
    assert b.count("append_rows_total") == 33


def test_a_proposal_ahead_of_the_context_waits_for_its_rows(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S)
    tokens = text(2, 30)
    b.open(1, tokens[:10])
    b.send(proposes=(Propose(key(1), 10, tokens[10], 8, 9),))
    b.settle()
    assert b.replies.empty()
    b.chunk(1, tokens, 0, 8, anchor=False)
    b.settle()
    assert b.replies.empty()
    b.chunk(1, tokens, 8, 10)
    reply = b.replies.get(timeout=PATIENCE_S)
    same(reply.results[0].tree, b.expected(tokens, 10))
    assert reply.timings is not None and reply.timings.channel_wait_ns > 0 and reply.timings.forward_ns > 0


def test_rows_that_do_not_come_mean_not_ready_and_the_session_lives(bench: Make) -> None:
    b = bench()
    tokens = text(3, 30)
    b.open(1, tokens[:10])
    result = b.propose(1, tokens, 10)
    assert result.kind is DraftResultKind.ERROR and isinstance(result.error, NotReady)
    assert "ends at row 0, base is 10" in str(result.error)
    b.chunk(1, tokens, 0, 10)
    same(b.propose(1, tokens, 10).tree, b.expected(tokens, 10))
    assert b.count("proposals_total", result="not_ready") == 1
    assert b.channel.recaptures == []


def test_behind_unknown_and_old_incarnations_are_stale(bench: Make) -> None:
    b = bench()
    tokens = text(4, 30)
    b.open(1, tokens[:10], session=key(1, 2))
    b.chunk(1, tokens, 0, 10, session=key(1, 2))
    b.send(
        proposes=(
            Propose(key(1, 2), 9, tokens[9], 8, 9),
            Propose(key(1, 1), 10, tokens[10], 8, 9),
            Propose(key(7), 10, tokens[10], 8, 9),
            Propose(key(1, 2), 10, tokens[10], 8, 9),
        )
    )
    results = {(r.session, r.base): r for r in b.results(4)}
    for where in ((key(1, 2), 9), (key(1, 1), 10), (key(7), 10)):
        assert isinstance(results[where].error, Stale), where
    same(results[key(1, 2), 10].tree, b.expected(tokens, 10))
    older = b.open(1, tokens[:10], session=key(1, 1))
    assert isinstance(older.error, Stale)
    assert b.count("sessions") == 1


def test_no_nodes_or_no_depth_is_answered_at_once(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S)
    tokens = text(5, 30)
    b.open(1, tokens[:10])
    for nodes, depth in ((0, 7), (7, 0)):  # the context lacks 10 rows, and nobody needs them
        result = b.propose(1, tokens, 10, nodes, depth)
        assert result.kind is DraftResultKind.PROPOSED and len(result.tree) == 0
    b.chunk(1, tokens, 0, 10)
    assert len(b.propose(1, tokens, 10, 0, 7).tree) == 0
    same(b.propose(1, tokens, 10, 5, 1).tree, b.expected(tokens, 10, 5, 1))


def test_nodes_and_depth_are_capped(bench: Make) -> None:
    b = bench(max_nodes=6, max_length=12)
    tokens = text(5, 30)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    tree = b.propose(1, tokens, 10, 500, 500).tree
    assert len(tree) == 6
    # Position 11 is the last one the session can reach.
    assert max(tree.depths()) == 1
    assert isinstance(b.open(2, text(1, 13)).error, InvalidRequest)


def test_a_late_session_does_not_hold_its_batch(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S)
    one, two = text(6, 30), text(7, 30)
    b.open(1, one[:10])
    b.open(2, two[:12])
    b.chunk(1, one, 0, 10)
    batch = b.send(proposes=(Propose(key(2), 12, two[12], 8, 9), Propose(key(1), 10, one[10], 8, 9)))
    early = b.replies.get(timeout=PATIENCE_S)
    assert early.batch_id == batch and [r.session for r in early.results] == [key(1)]
    same(early.results[0].tree, b.expected(one, 10))
    b.chunk(2, two, 0, 12)
    late = b.replies.get(timeout=PATIENCE_S)
    assert late.batch_id == batch and [r.session for r in late.results] == [key(2)]
    same(late.results[0].tree, b.expected(two, 12))


def test_what_is_ready_together_runs_as_one_pass(bench: Make) -> None:
    b = bench()
    texts = {n: text(n, 40) for n in range(1, 5)}
    for n, tokens in texts.items():
        b.open(n, tokens[: 8 + n])
        b.chunk(n, tokens, 0, 8 + n)
    b.send(proposes=tuple(Propose(key(n), 8 + n, t[8 + n], 4 + n, 9 - n) for n, t in texts.items()))
    for result in b.results(4):
        n = result.session.number
        same(result.tree, b.expected(texts[n], 8 + n, 4 + n, 9 - n))
    assert b.count("pass_sessions_count") == 1 and b.count("pass_sessions_sum") == 4


def test_a_gap_asks_for_recapture_once_and_heals(bench: Make) -> None:
    b = bench()
    tokens = text(8, 60)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    lost = [b.chunk(1, tokens, 13, 15), b.chunk(1, tokens, 15, 16)]
    b.settle()
    assert b.channel.recaptures == [(key(1), 10, "gap")]
    result = b.propose(1, tokens, 16)
    assert isinstance(result.error, NotReady) and "captured again" in str(result.error)
    assert {c.chunk_id for c in lost} <= set(b.channel.acks)
    b.chunk(1, tokens, 10, 14, anchor=False)
    b.chunk(1, tokens, 14, 18)
    same(b.propose(1, tokens, 18).tree, b.expected(tokens, 18))
    assert len(b.channel.recaptures) == 1


def test_rows_the_context_holds_already_are_skipped(bench: Make) -> None:
    b = bench()
    tokens = text(9, 60)
    b.open(1, tokens[:20])
    b.chunk(1, tokens, 0, 20)
    known = b.chunk(1, tokens, 4, 12)
    b.chunk(1, tokens, 18, 23)
    same(b.propose(1, tokens, 23).tree, b.expected(tokens, 23))
    assert b.count("append_rows_total") == 23 and known.chunk_id in b.channel.acks


def test_rows_that_contradict_the_context_start_it_over(bench: Make) -> None:
    b = bench()
    tokens = text(10, 60)
    other = [(t + 1) % VOCAB for t in tokens]
    b.open(1, tokens[:20])
    b.chunk(1, tokens, 0, 20)
    b.chunk(1, other, 10, 22)
    b.settle()
    assert b.channel.recaptures == [(key(1), 0, "gap")]
    b.chunk(1, other, 0, 22)
    same(b.propose(1, other, 22).tree, b.expected(other, 22))


def test_rows_overtaken_in_the_ring_are_never_used(bench: Make) -> None:
    b = bench()
    tokens = text(11, 60)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10, alive=False)
    b.settle()
    assert b.channel.recaptures == [(key(1), 0, "gap")]
    b.chunk(1, tokens, 0, 10)
    same(b.propose(1, tokens, 10).tree, b.expected(tokens, 10))
    late = b.chunk(1, tokens, 10, 12)
    b.settle()
    late.alive = False
    assert isinstance(b.propose(1, tokens, 12).error, NotReady)
    assert b.channel.recaptures[1:] == [(key(1), 10, "gap")]
    assert b.count("append_rows_total") == 10


def test_a_second_session_reuses_whole_pages_of_the_first(bench: Make) -> None:
    b = bench()
    tokens = text(12, 80)
    b.open(1, tokens[:50])
    b.chunk(1, tokens, 0, 50)
    same(b.propose(1, tokens, 50).tree, b.expected(tokens, 50))
    # While the first one lives, and after it.
    assert b.open(2, tokens[:48]).draft_prefix == 32
    assert b.open(3, tokens[:49]).draft_prefix == 48
    assert b.open(4, tokens[:49], cache_salt=b"other").draft_prefix == 0
    b.send(releases=(key(1), key(2), key(3)))
    b.results(3)
    other = tokens[:40] + text(99, 40)
    assert b.open(5, other[:60]).draft_prefix == 32
    b.chunk(5, other, 32, 60)
    same(b.propose(5, other, 60).tree, b.expected(other, 60))
    # The target's own prefix was shorter than the draft's.
    assert b.open(6, other[:61]).draft_prefix == 48
    b.chunk(6, other, 16, 61)
    same(b.propose(6, other, 61).tree, b.expected(other, 61))
    assert b.count("prefix_hit_tokens_total") == 32 + 48 + 32 + 48


def test_rows_nobody_asked_for_are_appended_lazily_and_together(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=12, age_s=1000.0))
    tokens = text(13, 80)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    same(b.propose(1, tokens, 10).tree, b.expected(tokens, 10))
    for base in range(10, 20, 2):
        b.chunk(1, tokens, base, base + 2)
    b.settle()
    assert b.count("append_rows_total") == 10 and b.channel.acks == [1]
    b.chunk(1, tokens, 20, 22)
    b.until(lambda: len(b.channel.acks) == 7)
    assert b.count("append_rows_total") == 22 and b.count("appends_total", trigger="lazy") == 1
    b.chunk(1, tokens, 22, 23)
    same(b.propose(1, tokens, 23).tree, b.expected(tokens, 23))


def test_a_lazy_append_takes_all_sessions_rows_in_one_pass(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=16, age_s=1000.0))
    passes: list[int] = []
    append = b.drafter.append
    b.drafter.append = lambda pages, features, *rest: (  # type: ignore[method-assign]
        passes.append(len(features)),
        append(pages, features, *rest),
    )[1]
    texts = {n: text(40 + n, 40) for n in range(1, 9)}
    for n, tokens in texts.items():
        b.open(n, tokens[:5])
    for n, tokens in texts.items():
        b.chunk(n, tokens, 0, 2)
    b.until(lambda: b.count("append_rows_total") == 16)
    assert passes == [16] and b.count("appends_total", trigger="lazy") == 1
    b.chunk(3, texts[3], 2, 6)
    same(b.propose(3, texts[3], 6).tree, b.expected(texts[3], 6))


def test_old_pending_rows_are_appended_in_the_end(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=1000, age_s=0.02))
    tokens = text(14, 40)
    b.open(1, tokens[:6])
    b.chunk(1, tokens, 0, 6)
    b.until(lambda: b.channel.acks == [1])
    assert b.count("appends_total", trigger="lazy") == 1


def test_prefill_rows_are_appended_at_once(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=1000, age_s=1000.0))
    tokens = text(15, 80)
    b.open(1, tokens[:64])
    b.chunk(1, tokens, 0, 8, anchor=False)
    b.until(lambda: b.channel.acks == [1])
    b.chunk(1, tokens, 8, 64)
    b.until(lambda: b.channel.acks == [1, 2])


def test_a_small_ring_is_not_kept_full(bench: Make) -> None:
    b = bench(attach=False, lazy=LazyLimits(rows=1000, age_s=1000.0))
    b.engine.on_attached(FakeInfo(slots=16))
    tokens = text(16, 40)
    b.open(1, tokens[:3])
    b.chunk(1, tokens, 0, 3)
    b.settle()
    assert b.channel.acks == []
    b.chunk(1, tokens, 3, 5)
    b.until(lambda: b.channel.acks == [1, 2])


def test_rows_that_fill_a_page_are_not_lost_with_the_session(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=1000, age_s=1000.0))
    tokens = text(31, 60)
    b.open(1, tokens[:4])
    for first in range(0, 40, 8):
        b.chunk(1, tokens, first, first + 8)
    b.settle()
    assert b.count("append_rows_total") == 0
    b.send(releases=(key(1),))
    b.results(1)
    assert b.open(2, tokens).draft_prefix == 32
    # Fewer than a page are no use to anybody: no pass for those.
    b.chunk(2, tokens, 32, 40)
    b.send(releases=(key(2),))
    b.results(1)
    assert b.count("appends_total", trigger="close") == 1


def test_release_gives_chunks_back_and_is_idempotent(bench: Make) -> None:
    b = bench(lazy=LazyLimits(rows=1000, age_s=1000.0))
    tokens = text(17, 40)
    b.open(1, tokens[:6])
    chunk = b.chunk(1, tokens, 0, 6)
    b.send(releases=(key(1), key(1), key(55)))
    assert [r.kind for r in b.results(3)] == [DraftResultKind.RELEASED] * 3
    b.until(lambda: b.channel.acks == [chunk.chunk_id])
    late = b.chunk(1, tokens, 6, 8)
    b.until(lambda: late.chunk_id in b.channel.acks)
    assert b.count("chunks_total", fate="unknown") == 1
    assert isinstance(b.propose(1, tokens, 6).error, Stale)


def test_a_late_release_does_not_end_a_newer_incarnation(bench: Make) -> None:
    b = bench()
    tokens = text(18, 40)
    b.open(1, tokens[:6])
    b.open(1, tokens[:9], session=key(1, 1))
    b.send(releases=(key(1),))
    b.results(1)
    b.chunk(1, tokens, 0, 6)  # of the old incarnation
    b.chunk(1, tokens, 0, 9, session=key(1, 1))
    b.send(proposes=(Propose(key(1, 1), 9, tokens[9], 8, 9),))
    same(b.results(1)[0].tree, b.expected(tokens, 9))


def test_detached_means_not_ready_and_attaching_asks_for_all_sessions(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S, lazy=LazyLimits(rows=1000, age_s=1000.0))
    one, two = text(19, 60), text(20, 60)
    b.open(1, one[:40])
    b.open(2, two[:7])
    b.chunk(1, one, 0, 40)
    b.until(lambda: b.count("append_rows_total") == 40)
    b.chunk(1, one, 40, 42)  # pending only
    b.settle()
    b.engine.on_detached("the target went away")
    result = b.propose(1, one, 42)  # not in 20 s: nothing can come
    assert isinstance(result.error, NotReady) and "channel is down" in str(result.error)
    assert b.engine.channel_state.attached is False
    b.engine.on_attached(FakeInfo(transport="shared_memory"))
    b.settle()
    assert b.channel.recaptures == [(key(1), 40, "restart"), (key(2), 0, "restart")]
    assert b.engine.channel_state.transport == "shared_memory"
    b.chunk(1, one, 40, 44)
    same(b.propose(1, one, 44).tree, b.expected(one, 44))


def test_another_target_voids_all_that_came_from_the_old_one(bench: Make) -> None:
    monitor = AcceptanceMonitor(rounds=1, threshold=2.0)
    b = bench(monitor=monitor)
    one, two = text(19, 80), text(20, 80)
    b.open(1, one[:40])
    b.chunk(1, one, 0, 40)
    b.propose(1, one, 40)
    b.chunk(1, one, 40, 42)
    b.open(2, two[:40])
    b.chunk(2, two, 0, 40)
    b.until(lambda: b.count("append_rows_total") >= 80)
    b.send(releases=(key(2),))
    b.results(1)
    b.settle()
    assert monitor.failed and b.count("pages_cached") == 2
    b.engine.on_detached("the target went away")
    b.engine.on_attached(FakeInfo())
    b.engine.on_target_changed()
    b.settle()
    assert b.channel.recaptures[-1] == (key(1), 0, "restart") and b.count("target_changes_total") == 1
    assert not monitor.failed and b.count("pages_cached") == b.count("pages_used") == 0
    assert b.open(3, two[:40]).draft_prefix == 0 and b.open(4, one[:40]).draft_prefix == 0
    # Rows from the old context's end on, asked for before it was known, don't fit any more.
    b.chunk(1, one, 42, 44)
    b.chunk(1, one, 0, 44)
    same(b.propose(1, one, 44).tree, b.expected(one, 44))
    # Nor is a context kept in which rows may be that the target never sent.
    b.engine.on_rows_spoilt("the target wrote over chunks that were being read")
    b.settle()
    assert b.count("rows_spoilt_total") == 1 and b.count("target_changes_total") == 1
    assert b.channel.recaptures[-3:] == [(key(number), 0, "restart") for number in (1, 3, 4)]
    b.chunk(1, one, 0, 44)
    same(b.propose(1, one, 44).tree, b.expected(one, 44))


def test_new_sessions_are_refused_while_draining(bench: Make) -> None:
    b = bench()
    tokens = text(35, 40)
    b.open(1, tokens[:10])
    b.open(2, tokens[:10], session=key(2, 0, b"h" * 16), stream="gone")
    b.engine.stream_closed("gone")
    b.settle()
    assert b.engine.traffic == 1  # nobody waits for those of a lost gateway
    b.engine.drain()
    assert isinstance(b.open(3, tokens[:10]).error, Unavailable)
    b.chunk(1, tokens, 0, 10)
    same(b.propose(1, tokens, 10).tree, b.expected(tokens, 10))
    b.send(releases=(key(1),))
    b.results(1)
    b.settle()
    assert b.engine.traffic == 0


def test_sessions_opened_before_the_first_attach_are_asked_for(bench: Make) -> None:
    b = bench(attach=False)
    tokens = text(21, 40)
    b.open(1, tokens[:10])
    assert isinstance(b.propose(1, tokens, 10).error, NotReady)
    b.engine.on_attached(FakeInfo())
    b.settle()
    assert b.channel.recaptures == [(key(1), 0, "attach")]


def test_open_with_recapture_asks_from_the_cached_prefix_on(bench: Make) -> None:
    b = bench()
    tokens = text(22, 60)
    b.open(1, tokens[:40])
    b.chunk(1, tokens, 0, 40)
    b.until(lambda: b.count("append_rows_total") == 40)
    b.send(releases=(key(1),))
    b.results(1)
    assert b.open(2, tokens[:45], recapture=True, kv_length=44).draft_prefix == 32
    b.settle()
    assert b.channel.recaptures == [(key(2), 32, "restart")]


def test_a_context_that_stays_behind_is_captured_again(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.desk.BEHIND_S", 0.0)
    b = bench(propose_wait_s=0.001)
    tokens = text(23, 40)
    b.open(1, tokens[:10])
    for _ in range(2):
        assert isinstance(b.propose(1, tokens, 10).error, NotReady)
    assert b.channel.recaptures == [(key(1), 0, "gap")]


def test_a_broken_stream_keeps_its_sessions_for_the_lease(bench: Make) -> None:
    b = bench(session_lease_s=0.05)
    tokens = text(24, 40)
    b.open(1, tokens[:10], stream="one")
    b.open(2, tokens[:10], session=key(2, 0, b"h" * 16), stream="two")
    b.engine.stream_closed("two")
    b.until(lambda: b.count("sessions") == 1)
    assert b.count("lease_expiries_total") == 1
    # The first gateway comes back in time, over another stream.
    b.engine.stream_closed("one")
    b.send(releases=(key(77),), stream="three")
    b.results(1)
    b.engine.stream_closed("one")
    time.sleep(0.15)
    b.settle()
    assert b.count("sessions") == 1


def test_a_session_that_a_connected_gateway_does_not_speak_of_is_freed(bench: Make) -> None:
    b = bench(idle_lease_s=0.2)
    b.open(1, text(24, 10))
    b.open(2, text(25, 10))
    end = time.monotonic() + PATIENCE_S
    while b.count("sessions") > 1:
        assert b.propose(2, text(25, 10), 0, nodes=0).error is None and time.monotonic() < end
    b.settle()
    assert isinstance(b.propose(1, text(24, 10), 0, nodes=0).error, Stale)


def test_running_out_of_pages_stops_one_session_only_until_there_are_pages(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_service.ingest.STARVED_RETRY_S", 0.0)
    b = bench(tokens=64)
    one, two = text(25, 80), text(26, 80)
    b.open(1, one[:32])
    b.chunk(1, one, 0, 32)
    b.open(2, two[:30])
    b.chunk(2, two, 0, 30)
    same(b.propose(2, two, 30).tree, b.expected(two, 30))
    b.chunk(2, two, 30, 40)
    result = b.propose(2, two, 40)
    assert isinstance(result.error, NotReady) and "kv tokens" in str(result.error)
    same(b.propose(1, one, 32).tree, b.expected(one, 32))
    b.send(releases=(key(1),))
    b.results(1)
    assert isinstance(b.propose(2, two, 40).error, NotReady)
    session, first, cause = b.channel.recaptures[-1]
    assert (session, cause) == (key(2), "slots")
    b.chunk(2, two, first, 40)
    same(b.propose(2, two, 40).tree, b.expected(two, 40))


def test_sampled_sessions_grow_trees_from_the_targets_noise(bench: Make) -> None:
    b = bench()
    sampling = SamplingParams(temperature=0.8, seed=12345, choice=2)
    tokens = text(27, 60)
    b.open(1, tokens[:10], sampling=sampling)
    b.open(2, tokens[:10])
    for n in (1, 2):
        b.chunk(n, tokens, 0, 10)
    for base, following in ((10, 12), (12, 13), (13, 20)):
        b.send(proposes=tuple(Propose(key(n), base, tokens[base], 8, 9) for n in (1, 2)))
        trees = {r.session.number: r.tree for r in b.results(2)}
        same(trees[1], b.expected(tokens, base, sampling=sampling))
        same(trees[2], b.expected(tokens, base))
        for n in (1, 2):
            b.chunk(n, tokens, base, following)


def test_drafting_ahead_gives_the_same_trees(bench: Make) -> None:
    b = bench(eager=True)
    tokens = text(28, 60)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    same(b.propose(1, tokens, 10).tree, b.expected(tokens, 10))
    for n, (base, following) in enumerate(((10, 12), (12, 13), (13, 20))):
        b.chunk(1, tokens, base, following)
        b.until(lambda n=n: b.count("appends_total", trigger="eager") == n + 1)
        b.settle()
        nodes = (8, 3, 8)[n]
        same(b.propose(1, tokens, following, nodes).tree, b.expected(tokens, following, nodes))
    # The third asked for more than the second, which the tree was grown for.
    assert (
        b.count("eager_drafts_total", fate="used") == 2 and b.count("eager_drafts_total", fate="wasted") == 1
    )


def test_drafting_ahead_stops_at_a_round_without_a_question(bench: Make) -> None:
    b = bench(eager=True, lazy=LazyLimits(rows=1000, age_s=1000.0))
    passes: list[int] = []
    propose = b.proposer.propose
    b.proposer.propose = lambda asks: (passes.extend([len(asks)] * bool(asks)), propose(asks))[1]  # type: ignore[method-assign]
    one, two = text(33, 60), text(34, 60)
    for number, tokens in ((1, one), (2, two)):
        b.open(number, tokens[:10])
        b.chunk(number, tokens, 0, 10)
    b.propose(1, one, 10)
    # The second session is not asked: neither its rows nor the wait for them cost a pass.
    b.chunk(2, two, 10, 12)
    b.chunk(1, one, 10, 12)
    b.until(lambda: b.count("appends_total", trigger="eager") == 1)
    b.settle()
    assert passes == [1, 1]
    # The gateway skips the draft from here on; what was grown in vain was the last.
    for base in (12, 14, 16):
        b.chunk(1, one, base, base + 2)
        b.chunk(2, two, base, base + 2)
        b.settle()
    assert passes == [1, 1] and b.count("eager_drafts_total", fate="wasted") == 1
    assert b.count("appends_total", trigger="eager") == 1
    # Asked again, it is drafted for again.
    same(b.propose(1, one, 18).tree, b.expected(one, 18))
    b.chunk(1, one, 18, 20)
    b.until(lambda: len(passes) == 4)
    same(b.propose(1, one, 20).tree, b.expected(one, 20))
    assert passes == [1, 1, 1, 1] and b.count("eager_drafts_total", fate="used") == 1


def test_an_anchor_that_differs_from_the_announced_one_is_drafted_anew(bench: Make) -> None:
    b = bench(eager=True)
    tokens = text(29, 60)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    b.propose(1, tokens, 10)
    b.chunk(1, tokens, 10, 12)
    b.until(lambda: b.count("appends_total", trigger="eager") == 1)
    other = [*tokens[:12], (tokens[12] + 1) % VOCAB]
    same(b.propose(1, other, 12).tree, b.expected(other, 12))


def test_bad_input_is_named_and_spoils_nothing_else(bench: Make) -> None:
    b = bench(max_sessions=2)
    tokens = text(30, 40)
    good = DraftOpen(key(1), tuple(tokens[:10]), 10, SamplingParams())
    bad = (
        replace(good, session=key(2), tokens=()),
        replace(good, session=key(3), tokens=(1, VOCAB)),
        replace(good, session=key(4), sampling=SamplingParams(temperature=-1.0)),
        replace(good, session=key(5), sampling=SamplingParams(presence_penalty=1.0)),
    )
    b.send(opens=(*bad, good, replace(good, session=key(6)), replace(good, session=key(7))))
    results = {r.session.number: r for r in b.results(7)}
    for number, kind in ((2, InvalidRequest), (3, InvalidRequest), (4, InvalidRequest), (5, Unsupported)):
        assert type(results[number].error) is kind
    assert results[1].kind is results[6].kind is DraftResultKind.OPENED
    assert isinstance(results[7].error, CapacityError)
    b.chunk(1, tokens, 0, 10)
    b.send(
        proposes=(
            Propose(key(1), 10, VOCAB, 4, 4),
            Propose(key(1), 10**6, 1, 4, 4),
            Propose(key(1), 10, 1, 4, 4),
        )
    )
    errors = [r.error for r in b.results(3)]
    assert [type(e) for e in errors if e] == [InvalidRequest, InvalidRequest]


def test_refused_proposals_of_a_batch_are_one_answer(bench: Make) -> None:
    b = bench()
    b.send(proposes=tuple(Propose(key(n), 1, 1, 4, 4) for n in range(100)))
    reply = b.replies.get(timeout=10)
    assert len(reply.results) == 100 and all(isinstance(r.error, Stale) for r in reply.results)


def test_a_session_of_no_gateway_is_refused(bench: Make) -> None:
    b = bench()
    b.send(opens=(DraftOpen(SessionKey(b"short", 1), (1, 2), 2, SamplingParams()),))
    [result] = b.results(1)
    assert isinstance(result.error, InvalidRequest) and "gateway id has 5 bytes" in str(result.error)
    assert b.count("sessions") == 0


def test_what_waits_at_the_end_is_answered(bench: Make) -> None:
    b = bench(propose_wait_s=PATIENCE_S)
    tokens = text(31, 40)
    b.open(1, tokens[:10])
    b.send(proposes=(Propose(key(1), 10, tokens[10], 8, 9),))
    b.settle()
    b.engine.close()
    error = b.results(1)[0].error
    assert isinstance(error, NotReady) and "going down" in str(error)


def test_observed_acceptance_is_counted(bench: Make) -> None:
    b = bench()
    tokens = text(32, 60)
    b.open(1, tokens[:10])
    b.chunk(1, tokens, 0, 10)
    tree = b.propose(1, tokens, 10).tree
    child = next(i for i, parent in enumerate(tree.parents) if parent == 0)
    miss = next(t for t in range(VOCAB) if (child, t) not in set(zip(tree.parents, tree.tokens, strict=True)))
    taken = [*tokens[:11], tree.tokens[0], tree.tokens[child], miss]
    b.chunk(1, taken, 10, 13)
    b.settle()
    assert b.count("acceptance_length_sum") == 3 and b.count("acceptance_length_count") == 1
    assert b.count("accepted_node_probability_count") == 2


def test_the_cost_curve_is_measured_without_touching_sessions(bench: Make) -> None:
    b = bench()
    points = b.proposer.measure((1, 3), context=40, repeats=2)
    assert [(p.rows, p.context) for p in points] == [(6, 40), (18, 40)]
    assert all(p.time_ns > 0 for p in points) and b.cache.pool.used_pages == 0
