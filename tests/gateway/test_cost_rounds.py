"""What a round says of costs: a term for each further session of a pass, and which rounds are a measure."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from gateway.accounts import Calm
from gateway.cost_budget import CostBudget
from gateway.cost_model import CostModel, SessionTerm
from gateway.generation import RoundRecord
from specbridge.rounds import TargetTimings


def test_sessions_and_rows_are_told_apart() -> None:
    """Four sessions of a row take 30 ms more than one of four rows; all is 10% slower than measured."""
    term, rng = SessionTerm(), random.Random(2)

    def measured(rows: int) -> float:
        return 0.034 + 0.002 * (rows - 1)

    for _ in range(200):
        sessions = rng.choice((1, 2, 4, 8))
        rows = sessions * rng.choice((1, 1, 3, 6))
        seconds = (1.1 * measured(rows) + 0.010 * (sessions - 1)) * math.exp(rng.gauss(0, 0.05))
        term.observe(sessions - 1, seconds, measured(rows))
    assert term.seconds == pytest.approx(0.010, rel=0.15)


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.4])
def test_a_machine_that_is_slower_for_one_session_has_no_dearer_sessions(slower: float) -> None:
    term = SessionTerm()
    for rows in range(1, 60):
        term.observe(0, slower * (0.03 + 0.001 * rows), 0.03 + 0.001 * rows)
    assert term.seconds == 0.0


def test_what_plain_rounds_of_several_take_longer_is_laid_to_their_number() -> None:
    """A curve was measured with one session: three rounds of eight tell what seven more take."""
    term = SessionTerm()
    for _ in range(3):
        term.observe(7, 0.124, 0.054)
    assert term.seconds == pytest.approx(0.010, rel=0.1)


def record(
    *, drafted: int = 0, prompt: int = 0, queue_s: float = 0.0, cohort: int = 0, sessions: int = 4,
    total_s: float = 0.1, draft_wait_s: float = 0.0, verify_wait_s: float = 0.08,
) -> RoundRecord:  # fmt: skip
    return RoundRecord(
        sessions=sessions, speculating=drafted, rows=sessions + drafted, nodes=drafted, tokens=sessions,
        accepted=0, total_s=total_s, draft_wait_s=draft_wait_s, verify_wait_s=verify_wait_s, drafted=drafted,
        cohort=cohort,
        target_timings=TargetTimings(prefill_rows=prompt, queue_ns=round(1e9 * queue_s)),
    )  # fmt: skip


def test_what_a_prompt_or_a_change_made_longer_is_not_calm() -> None:
    rounds = [
        (record(), True),
        (record(), True),
        (record(prompt=8), False),
        (record(), True),  # plain: the prompt's rows are the draft's affair
        (record(drafted=4), False),  # it appends what plain rounds held back
        (record(drafted=4), True),
        (record(drafted=4, queue_s=0.03), False),  # a prompt ran while the draft was waited for
        (record(drafted=4, prompt=8), False),
        (record(drafted=4), False),  # the prompt's rows come before the next trees
        (record(drafted=4), True),
        (record(cohort=1), True),  # another cohort has its own round before
        (record(), False),  # the draft draws ahead for what nobody asks
        (record(), True),
        (record(sessions=5), True),
        (record(drafted=4, sessions=5), False),
        (record(drafted=4, sessions=5), True),
        (record(drafted=4, sessions=6), False),  # who has just come brings a prompt's rows to the draft
        (record(drafted=4, sessions=6), True),
        (record(drafted=4, sessions=5), True),
    ]
    calm = Calm()
    assert [calm.judge(r) for r, _ in rounds] == [expected for _, expected in rounds]


def test_where_no_round_is_calm_all_are_judged() -> None:
    calm = Calm()
    judged = [calm.judge(record(drafted=4, prompt=8)) for _ in range(300)]
    assert not any(judged[:50]) and all(judged[200:])


def test_where_no_round_is_calm_others_are() -> None:
    """A burst that begins with few sessions and prompts says nothing of the rounds of many after it."""
    calm = Calm()
    for _ in range(300):
        calm.judge(record(drafted=4, prompt=8))
    assert calm.judge(record(drafted=4, prompt=8)) and not calm.alone
    assert not calm.judge(record(drafted=16, prompt=8, sessions=16))


def test_what_a_prompt_adds_is_not_laid_to_rows_of_trees() -> None:
    """A chunk of 8 rows adds 50 ms, 12 rows of trees and sessions hardly anything."""
    costs = CostModel()
    for _ in range(40):
        costs.observe(record(verify_wait_s=0.010))
        costs.observe(record(prompt=8, verify_wait_s=0.060), calm=False, alone=False)
    usual = costs.seconds(4, 0, 8)
    assert usual[8] == pytest.approx(usual[0], abs=0.005)
    more = costs.of(record(prompt=8)) - costs.of(record())
    assert more == pytest.approx(0.050, rel=0.05)


def test_a_gateway_that_takes_no_time_is_seen() -> None:
    """Also of plain rounds while all are drafted for, or they would seem dearer than they are."""
    costs = CostModel()
    assert costs.overhead(64) > 0.003
    for _ in range(5):
        costs.observe(record(sessions=64, drafted=64, total_s=0.1, draft_wait_s=0.02, verify_wait_s=0.08))
    assert costs.overhead(64) < 0.001


def test_a_draft_that_was_held_up_is_no_dearer() -> None:
    costs = CostModel()
    for _ in range(20):
        costs.observe(record(drafted=4, draft_wait_s=0.02))
    before = costs.draft_points()
    for _ in range(20):
        costs.observe(record(drafted=4, draft_wait_s=0.2), calm=True, alone=False)
    assert costs.draft_points() == before


def test_a_pass_before_its_graph_is_there_says_nothing_of_costs() -> None:
    """On a GPU the first two passes of a size take several times as long as all later ones."""

    def after(cold: bool) -> list[float]:
        policy = CostBudget()
        usual = policy.costs.seconds(4, 4, 64)
        for _ in range(8):
            timings = TargetTimings(rows=68, cold=cold)
            slow = replace(record(drafted=4, verify_wait_s=0.9), rows=68, nodes=64, target_timings=timings)
            policy.observe(slow, ())
        assert usual[64] < 0.1
        return [later / before for later, before in zip(policy.costs.seconds(4, 4, 64), usual, strict=True)]

    assert after(cold=True) == [1.0] * 65
    assert max(after(cold=False)) > 3.0
