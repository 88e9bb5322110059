"""Calibration: how often draft nodes of a score, depth and kind of sampling were accepted so far.

Owns the counts and the value of a node that follows from them. A drafter's probabilities are those of tokens
one by one; that a whole path is right they overstate, more so the deeper it is. Does not own which nodes
are verified (cost_budget). Pure: no clock, memory fades with the number of nodes seen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specbridge.tree import DraftTree

MAX_DEPTH = 32
"""Deeper nodes are counted with those of this depth."""
_PROBABILITIES = (
    *(0.97, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.14, 0.1),
    *(0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002),
)
EDGES = tuple(-math.log(p) for p in _PROBABILITIES)
"""Bin i holds the scores in [-EDGES[i], -EDGES[i - 1]); the last one everything below."""
BINS = len(EDGES) + 1
_BOUNDS = (*(-edge for edge in EDGES), -math.inf)
"""The least score of each bin."""
_MEMORY = 2048.0
"""Nodes of a class after which its counts are halved."""


class Mode(StrEnum):
    """How a session's tokens are chosen, and what its draft knows of it.

    Every draft service shares the target's noise with sampled requests, so there is no third kind here.
    """

    GREEDY = "greedy"
    COUPLED = "coupled"
    """Sampled; the draft grew the tree with the noise that the target samples with."""

    @classmethod
    def of(cls, sampled: bool) -> Mode:
        return cls.COUPLED if sampled else cls.GREEDY


@dataclass(slots=True)
class _Count:
    """Nodes seen, those accepted, and the sum of the probabilities the drafter gave them."""

    seen: float = 0.0
    accepted: float = 0.0
    promised: float = 0.0

    def add(self, promised: float, accepted: bool, memory: float) -> None:
        if self.seen >= memory:
            self.seen *= 0.5
            self.accepted *= 0.5
            self.promised *= 0.5
        self.seen += 1.0
        self.accepted += accepted
        self.promised += promised

    def ratio(self, prior: float, weight: float) -> float:
        """Accepted over promised, shrunk towards `prior` as if `weight` acceptances had been promised."""
        return (self.accepted + weight * prior) / (self.promised + weight)


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One class of nodes, for people: scores in [low, high), natural log; value: the mean used for them."""

    mode: Mode
    depth: int
    low: float
    high: float
    observed: float
    accepted: float
    value: float


class _Table:
    """The counts of one mode, and the ratios that follow, renewed for the depths that changed."""

    def __init__(self) -> None:
        self.depths = [_Count() for _ in range(MAX_DEPTH + 1)]
        self.cells = [[_Count() for _ in range(BINS)] for _ in range(MAX_DEPTH + 1)]
        self.ratios = [[1.0] * BINS for _ in range(MAX_DEPTH + 1)]
        self.changed: set[int] = set()


class Calibration:
    """Node -> probability that it is accepted; see the module.

    value = exp(score) * (accepted + w*r) / (promised + w) over the nodes of its (mode, depth, bin), with r
    the same ratio over all bins of the depth, itself shrunk to that over all depths, and that one to 1: the
    posterior mean of a Poisson rate with a Gamma prior. With nothing observed it is exp(score).
    """

    def __init__(self, *, weight: float = 4.0, group_weight: float = 16.0) -> None:
        self._weight = weight
        self._group_weight = group_weight
        self._tables = {mode: _Table() for mode in Mode}

    def values(self, tree: DraftTree, mode: Mode, factor: float = 1.0) -> list[float]:
        """Probabilities of acceptance of `tree`'s nodes, in its order, each at most the one before.

        The running minimum makes any cut by value a prefix of the list, and no node worth more than its
        parent. factor: the session's own acceptance against what was expected of it.
        """
        ratios = self._ratios(mode)
        values: list[float] = []
        least = 1.0
        exp, bound, place = math.exp, _BOUNDS[0], 0
        # One loop, with the depths (the anchor's first) and bins: it runs for every node of a round.
        depths = [0]
        for parent, score in zip(tree.parents, tree.scores, strict=True):
            depth = depths[parent + 1] + 1
            depths.append(depth)
            while score < bound:  # scores fall
                place += 1
                bound = _BOUNDS[place]
            value = exp(score) * ratios[depth if depth < MAX_DEPTH else MAX_DEPTH][place] * factor
            if value < least:
                least = value
            values.append(least)
        return values

    def observe(self, tree: DraftTree, accepted: Sequence[int], mode: Mode) -> None:
        """The outcome of a verified tree: indexes of the accepted nodes."""
        table = self._tables[mode]
        right = set(accepted)
        for i, (depth, score) in enumerate(zip(tree.depths(), tree.scores, strict=True)):
            place = min(depth, MAX_DEPTH)
            promised, hit = math.exp(score), i in right
            table.cells[place][bisect_left(EDGES, -score)].add(promised, hit, _MEMORY)
            table.depths[place].add(promised, hit, 4 * _MEMORY)
            table.changed.add(place)

    def seen(self, mode: Mode, depth: int, score: float) -> float:
        """How many nodes of this class have been verified (fading)."""
        return self._tables[mode].cells[min(depth, MAX_DEPTH)][bisect_left(EDGES, -score)].seen

    def rows(self) -> list[CalibrationRow]:
        """The classes seen so far, by mode, depth and falling score."""
        found = []
        for mode, table in self._tables.items():
            ratios = self._ratios(mode)
            for depth, line in enumerate(table.cells):
                for place, cell in enumerate(line):
                    if not cell.seen:
                        continue
                    found.append(
                        CalibrationRow(
                            mode,
                            depth,
                            low=-EDGES[place] if place < len(EDGES) else -math.inf,
                            high=-EDGES[place - 1] if place else 0.0,
                            observed=cell.seen,
                            accepted=cell.accepted,
                            value=min(1.0, ratios[depth][place] * cell.promised / cell.seen),
                        )
                    )
        return found

    def _ratios(self, mode: Mode) -> list[list[float]]:
        """By depth and bin: what a node's probability is multiplied with."""
        table = self._tables[mode]
        if table.changed:
            overall = _Count()
            for count in table.depths:
                overall.accepted += count.accepted
                overall.promised += count.promised
            prior = overall.ratio(1.0, self._group_weight)
            for depth in table.changed:
                here = table.depths[depth].ratio(prior, self._group_weight)
                table.ratios[depth] = [cell.ratio(here, self._weight) for cell in table.cells[depth]]
            table.changed.clear()
        return table.ratios
