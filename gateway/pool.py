"""The pooled cut: how many of all sessions' nodes to verify together, and whose.

Owns the search. Values are probabilities of acceptance, each list falling (calibration); a row more costs
what the cost table says. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import neg, truediv


@dataclass(frozen=True, slots=True)
class Cut:
    """counts[i]: nodes of list i to verify. tokens: expected of the round; seconds: its expected cost."""

    counts: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def nodes(self) -> int:
        return sum(self.counts)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def ranked(values: Sequence[Sequence[float]]) -> list[float]:
    """Values of all nodes of all lists, best first. Lists must not rise."""
    return sorted(chain.from_iterable(values), reverse=True)


def _shares(values: Sequence[Sequence[float]], falling: Sequence[float], nodes: int) -> tuple[int, ...]:
    """How many of the best `nodes` nodes each list has. Of equal values the earlier lists' come first."""
    if not nodes:
        return (0,) * len(values)
    least = falling[nodes - 1]
    counts = [bisect_left(line, -least, key=neg) for line in values]
    left = nodes - sum(counts)
    for place, line in enumerate(values):
        if left <= 0:
            break
        equal = min(left, bisect_right(line, -least, lo=counts[place], key=neg) - counts[place])
        counts[place] += equal
        left -= equal
    return tuple(counts)


def best_cut(
    values: Sequence[Sequence[float]],
    *,
    tokens: float,
    seconds: Sequence[float],
    most: int | None = None,
    least: int = 0,
) -> Cut:
    """The number of nodes with the most expected tokens per second, and each list's share of them.

    tokens      what the round brings without any node (an anchor's bonus token each, and those of the others
                that share its time)
    seconds[n]  cost of the round with n nodes, for n = 0 .. (at least) the number of nodes
    most, least limits of n

    For each n the n best nodes are the best choice (lists fall, so they are prefixes). The rate of every n is
    looked at: costs have stairs, and a dip is no end. Among equals the smallest n wins.
    """
    falling = ranked(values)
    size = len(falling) if most is None else min(len(falling), most)
    least = min(least, size)
    totals = list(accumulate(falling[:size], initial=tokens))
    rates = list(map(truediv, totals, seconds))
    best = rates.index(max(rates[least:]), least)
    return Cut(_shares(values, falling, best), totals[best], seconds[best])


def extended(values: Sequence[Sequence[float]], cut: Cut, extra: int) -> tuple[int, ...]:
    """`cut.counts` with the next `extra` nodes of the pool."""
    falling = ranked(values)
    return _shares(values, falling, min(cut.nodes + extra, len(falling)))


def gain_curve(
    values: Sequence[Sequence[float]], *, tokens: float, seconds: Sequence[float]
) -> list[tuple[int, float, float]]:
    """(nodes, expected tokens, expected seconds) of every size of the pool, for people."""
    falling = ranked(values)
    total, curve = tokens, [(0, tokens, seconds[0])]
    for n, value in enumerate(falling, 1):
        total += value
        curve.append((n, total, seconds[n]))
    return curve


def session_counts(able: int) -> list[int]:
    """How many may be drafted for together: all numbers of few; powers of two from an eighth on, and all."""
    some = range(1, able) if able <= 8 else (n for n in (4, 8, 16, 32, 64, 128) if able <= 8 * n < 8 * able)
    return [*some, able] if able else []
