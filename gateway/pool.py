"""The pooled cut: how many of all sessions' nodes to verify together, and whose.

Owns the search. Values are probabilities of acceptance, each list falling (calibration); a row more costs
what the cost table says. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def ranked(values: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
    """All nodes of all lists, best first: whose each is, and its value.

    Lists must not rise. Equal values keep their order, so that the first n of a pool are a prefix of each
    list.
    """
    flat = [value for line in values for value in line]
    owners = [i for i, line in enumerate(values) for _ in line]
    order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)
    return [owners[place] for place in order], [flat[place] for place in order]


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
    owners, falling = ranked(values)
    size = len(falling) if most is None else min(len(falling), most)
    least = min(least, size)
    total = tokens
    best, best_total, best_rate = 0, tokens, tokens / seconds[0] if not least else 0.0
    for n in range(1, size + 1):
        total += falling[n - 1]
        rate = total / seconds[n]
        if rate > best_rate and n >= least:
            best, best_total, best_rate = n, total, rate
    counts = [0] * len(values)
    for owner in owners[:best]:
        counts[owner] += 1
    return Cut(tuple(counts), best_total, seconds[best])


def extended(values: Sequence[Sequence[float]], cut: Cut, extra: int) -> tuple[int, ...]:
    """`cut.counts` with the next `extra` nodes of the pool."""
    owners, _ = ranked(values)
    counts = list(cut.counts)
    for owner in owners[cut.nodes : cut.nodes + extra]:
        counts[owner] += 1
    return tuple(counts)


def gain_curve(
    values: Sequence[Sequence[float]], *, tokens: float, seconds: Sequence[float]
) -> list[tuple[int, float, float]]:
    """(nodes, expected tokens, expected seconds) of every size of the pool, for people."""
    _, falling = ranked(values)
    total, curve = tokens, [(0, tokens, seconds[0])]
    for n, value in enumerate(falling, 1):
        total += value
        curve.append((n, total, seconds[n]))
    return curve
