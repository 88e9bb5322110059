"""How many run beside each other: exact over a session's life, and what a newcomer is told to expect."""

from __future__ import annotations

import pytest

from gateway.crowd import FORGET_S, Crowd


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def burst(crowd: Crowd, clock: Clock, sessions: int, first: int, seconds: float = 2.0) -> None:
    """All come within a millisecond, and leave one after the other in the last tenth."""
    for number in range(sessions):
        crowd.enter(first + number)
        clock.now += 0.001 / sessions
    clock.now += seconds
    for number in range(sessions):
        crowd.leave(first + number)
        clock.now += seconds / 10 / sessions


def test_nobody_is_expected_beside_the_first() -> None:
    crowd = Crowd(Clock())
    assert crowd.expected == 0
    crowd.enter(1)
    assert crowd.expected == crowd.size == 1


def test_the_first_of_a_burst_expects_the_last_bursts_company() -> None:
    clock = Clock()
    crowd = Crowd(clock)
    burst(crowd, clock, 8, 0)
    clock.now += 5.0
    crowd.enter(100)
    assert crowd.expected == 8


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_a_steady_load_expects_itself(streams: int) -> None:
    """Whoever ends is followed by another one: never more are expected than there are."""
    clock = Clock()
    crowd = Crowd(clock)
    for number in range(streams):
        crowd.enter(number)
        clock.now += 0.1
    for number in range(streams, 50):
        crowd.leave(number - streams)
        assert crowd.expected <= streams
        clock.now += 0.01
        crowd.enter(number)
        assert crowd.expected == streams
        clock.now += 1.0


def test_a_lone_user_after_a_crowd_is_seen_as_one_soon() -> None:
    clock = Clock()
    crowd = Crowd(clock)
    burst(crowd, clock, 8, 0)
    seen = []
    for number in range(100, 104):
        crowd.enter(number)
        seen.append(crowd.expected)
        clock.now += 1.0
        crowd.leave(number)
    assert seen[0] == 8 and seen == sorted(seen, reverse=True) and seen[2] <= 3 and seen[3] <= 2


def test_after_a_silence_the_past_says_nothing() -> None:
    clock = Clock()
    crowd = Crowd(clock)
    burst(crowd, clock, 8, 0)
    clock.now += FORGET_S + 1
    assert crowd.expected == 0
    crowd.enter(100)
    assert crowd.expected == 1


def test_a_session_that_leaves_as_it_comes_counts_whom_it_saw() -> None:
    crowd = Crowd(Clock())
    crowd.enter(1)
    crowd.enter(2)
    crowd.leave(1)
    crowd.leave(2)
    assert 1 <= crowd.expected <= 2
