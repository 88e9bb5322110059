"""Accounts: what rounds of a load were expected to bring and what they brought.

Owns the numbers that the cost budget keeps of each load and of all together, and which rounds count. Does
not own what is made of them (cost_budget, steering). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.budget import Expected
from gateway.cost_model import prefill_rows, queue_s
from gateway.generation import RoundRecord

_FADE = 0.97
"""A round counts this much of the one after it."""
_ROUNDS = 4.0
_TOKENS = 100.0
"""Ratios are shrunk to 1 as if so much had gone as expected: a round's time says more than its luck."""


@dataclass(slots=True)
class Account:
    """Rounds of one kind at one load: tokens and seconds, observed and as expected of them; fading sums."""

    tokens: float = 0.0
    seconds: float = 0.0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: float, seconds: float, expected: Expected) -> None:
        # One stalled round says nothing about the next.
        seconds = min(seconds, 4.0 * expected.seconds)
        self.tokens = _FADE * self.tokens + tokens
        self.seconds = _FADE * self.seconds + seconds
        self.expected_tokens = _FADE * self.expected_tokens + expected.tokens
        self.expected_seconds = _FADE * self.expected_seconds + expected.seconds
        self.rounds = _FADE * self.rounds + 1.0

    def against(self, others: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
        """(tokens, seconds) observed over expected, shrunk to what they are elsewhere."""
        if not self.rounds:
            return others
        tokens, more = others[0] * _TOKENS, _ROUNDS * self.expected_seconds / self.rounds
        return (
            (self.tokens + tokens) / (self.expected_tokens + _TOKENS),
            (self.seconds + others[1] * more) / (self.expected_seconds + more),
        )

    @property
    def rate(self) -> float | None:
        """Observed tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def expected_rate(self) -> float | None:
        return self.expected_tokens / self.expected_seconds if self.expected_seconds > 0 else None


class Calm:
    """Tells rounds that took what rounds of their kind take from those that something else made longer.

    That is a prompt in the pass, whose chunk is as large as the rounds beside it are long, or one that ran
    while the draft was waited for; a draft that had the rows of a prompt, of a session that has just come or
    of plain rounds to append first; and a plain round that shares the machine with trees that the draft drew
    ahead and nobody will ask for. Where hardly any round with so many sessions (an octave of them) is calm,
    all are judged: that is what rounds are like there.
    """

    _FADE, _FEW, _QUEUED = 0.98, 0.1, 0.1

    def __init__(self) -> None:
        self._before: dict[int, RoundRecord] = {}
        self._shares: dict[int, float] = {}
        self.alone = True
        """Whether nothing made the round judged last longer, whatever rounds are like there."""

    def judge(self, record: RoundRecord) -> bool:
        """Once a round, in their order."""
        before, self._before[record.cohort] = self._before.get(record.cohort), record
        queued = record.cohorts == 1 and queue_s(record) > self._QUEUED * record.verify_wait_s
        alone = not prefill_rows(record) and not queued
        if before is not None:
            # Drafting, the rows of the round before are the draft's to append.
            joined = record.sessions > before.sessions
            alone = alone and not (record.drafted and (joined or prefill_rows(before)))
            alone = alone and bool(record.drafted) == bool(before.drafted)
        self.alone = alone
        octave = record.sessions.bit_length()
        share = self._FADE * self._shares.get(octave, 1.0) + (1 - self._FADE) * alone
        self._shares[octave] = share
        return alone or share < self._FEW


@dataclass(slots=True)
class Both:
    """Plain and drafting rounds."""

    plain: Account = field(default_factory=Account)
    drafting: Account = field(default_factory=Account)

    def of(self, drafting: bool) -> Account:
        return self.drafting if drafting else self.plain

    def bias(self, others: Both) -> float:
        """Observed over expected rate of drafting, against the same of plain decoding; where there is little,
        what it is in `others`."""
        found = []
        for here, there in ((self.drafting, others.drafting), (self.plain, others.plain)):
            tokens, seconds = here.against(there.against())
            found.append(tokens / seconds)
        return found[0] / found[1]


@dataclass(frozen=True, slots=True)
class Found:
    """An average best round: tokens, seconds, and the nodes that nine of ten of its trees did with."""

    tokens: float
    seconds: float
    size: int


@dataclass(frozen=True, slots=True)
class Best:
    """The best drafting round of a load: how many are drafted for, nodes of a large tree, its gain."""

    drafted: int
    size: int
    gain: float


@dataclass(slots=True)
class LoadState:
    """What rounds of one load have shown; `best`, found with `able` sessions, holds until round `until`.

    forecast: gain of the best rounds found so far, each with other trees, fading; gain: corrected.
    informed: the last search was no rough one; known: trees that it could choose from.
    pending: numbers of sessions that the search under way has yet to look at; found: its best so far.
    """

    best: Best | None = None
    forecast: float = 0.0
    informed: bool = False
    known: int = -1
    until: int = 0
    able: int = 0
    pending: list[int] = field(default_factory=list)
    found: Best | None = None
    gain: float | None = None
    rounds: Both = field(default_factory=Both)
