"""The ring's bookkeeping: spans never overlap, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specbridge.channel.ring import MAX_GENERATION, Ring, Span

SLOTS = 24


class RingMachine(RuleBasedStateMachine):
    """Against a plain set of occupied slots."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(SLOTS)
        self.live: list[Span] = []
        self.generations: set[int] = set()

    def occupied(self) -> list[int]:
        return [slot for span in self.live for slot in range(span.first, span.first + span.count)]

    @rule(count=st.integers(1, SLOTS + 2))
    def reserve(self, count: int) -> None:
        taken = set(self.occupied())
        fits = any(taken.isdisjoint(range(s, s + count)) for s in range(SLOTS - count + 1))
        span = self.ring.reserve(count)
        assert (span is not None) == fits
        if span is not None:
            assert span.count == count and taken.isdisjoint(range(span.first, span.first + count))
            assert span.generation not in self.generations and span.generation > 0
            self.generations.add(span.generation)
            self.live.append(span)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        old = self.live[at]
        new = self.ring.trim(old, data.draw(st.integers(1, old.count)))
        assert (new.first, new.generation) == (old.first, old.generation)
        if new.count < old.count:
            with pytest.raises(ValueError, match="not live"):
                self.ring.free(old)
        self.live[at] = new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        span = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.ring.free(span)
        with pytest.raises(ValueError, match="not live"):
            self.ring.free(span)

    @invariant()
    def slots_add_up(self) -> None:
        assert self.ring.used == len(self.occupied()) and self.ring.live == len(self.live)

    def teardown(self) -> None:
        for span in self.live:
            self.ring.free(span)
        whole = self.ring.reserve(SLOTS)
        assert whole is not None and whole.first == 0


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRing = RingMachine.TestCase


def test_a_held_chunk_blocks_only_its_own_slots() -> None:
    ring = Ring(10)
    held = ring.reserve(2)
    for _ in range(100):
        span = ring.reserve(8)
        assert span is not None
        ring.free(span)
    assert held is not None and ring.used == 2


def test_generations_wrap_without_zero() -> None:
    ring = Ring(1)
    ring._generation = MAX_GENERATION - 1
    seen = []
    for _ in range(3):
        span = ring.reserve(1)
        assert span is not None
        seen.append(span.generation)
        ring.free(span)
    assert seen == [MAX_GENERATION, 1, 2]


def test_a_closed_ring_gives_nothing() -> None:
    ring = Ring(4)
    span = ring.reserve(2)
    assert span is not None
    ring.close()
    assert ring.reserve(1) is None
    ring.free(span)
    assert ring.used == 0


@pytest.mark.parametrize("count", [0, -1])
def test_nonsense_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Ring(count)
    with pytest.raises(ValueError, match="at least 1"):
        Ring(3).reserve(count)
