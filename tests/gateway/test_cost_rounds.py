"""What a round says of costs: a term for each further session of a pass, and which rounds are a measure."""

from __future__ import annotations

import math
import random

import pytest

from gateway.accounts import Calm
from gateway.cost_model import SessionTerm
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


def record(*, drafted: int = 0, prompt: int = 0, queue_s: float = 0.0, cohort: int = 0) -> RoundRecord:
    return RoundRecord(
        sessions=4, speculating=drafted, rows=4 + drafted, nodes=drafted, tokens=4, accepted=0, total_s=0.1,
        verify_wait_s=0.08, drafted=drafted, cohort=cohort,
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
    ]
    calm = Calm()
    assert [calm.judge(r) for r, _ in rounds] == [expected for _, expected in rounds]


def test_where_no_round_is_calm_all_are_judged() -> None:
    calm = Calm()
    judged = [calm.judge(record(drafted=4, prompt=8)) for _ in range(300)]
    assert not any(judged[:50]) and all(judged[200:])
