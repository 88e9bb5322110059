"""Accounts: what rounds of a load were expected to bring and what they brought.

Owns the numbers that the cost budget keeps of each load. Does not own what is made of them (cost_budget,
steering). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.budget import Expected

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

    @property
    def bias(self) -> float:
        """Observed over expected rate."""
        if not self.rounds:
            return 1.0
        more = _ROUNDS * self.expected_seconds / self.rounds
        tokens = (self.tokens + _TOKENS) / (self.expected_tokens + _TOKENS)
        return tokens * (self.expected_seconds + more) / (self.seconds + more)

    @property
    def rate(self) -> float | None:
        """Observed tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def expected_rate(self) -> float | None:
        return self.expected_tokens / self.expected_seconds if self.expected_seconds > 0 else None


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
    """What rounds of one load have shown; `best`, found with so many able sessions, for `fresh` more rounds.

    forecast: gain of the best rounds found so far, each with other trees, fading; gain: corrected.
    """

    best: Best | None = None
    forecast: float = 0.0
    informed: bool = False
    fresh: int = 0
    able: int = 0
    gain: float | None = None
    plain: Account = field(default_factory=Account)
    drafting: Account = field(default_factory=Account)
