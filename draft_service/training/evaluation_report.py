"""Tables of replayed rounds: acceptance lengths with their uncertainty, by prompt set, and depth by depth.

Acceptance length = tokens committed / rounds, both summed over all texts, bonus included. Its ± is half the
95% interval of a bootstrap over prompts (Efron 1979: prompts are drawn with replacement, 1,000 times).
Owns these sums and their two forms, JSON and text. Does not own the replay (evaluation).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draft_service.training.evaluation import CHAIN, Rounds

ALL = "all"
DRAWS = 1000


@dataclass(slots=True)
class Tally:
    """Rounds of one drafter, setting and size over the texts of one group."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    depths: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def add(self, found: Rounds) -> None:
        self.tokens.append(found.committed)
        self.rounds.append(len(found.accepted))
        if found.accepted:
            counts = np.bincount(found.accepted)
            size = max(len(counts), len(self.depths))
            self.depths = np.pad(self.depths, (0, size - len(self.depths)))
            self.depths[: len(counts)] += counts

    @property
    def mean(self) -> float:
        """Tokens a round; NaN without rounds."""
        rounds = sum(self.rounds)
        return sum(self.tokens) / rounds if rounds else float("nan")

    def half_width(self, seed: int = 0) -> float:
        """Half of the 95% interval of `mean`."""
        tokens, rounds = np.asarray(self.tokens, float), np.asarray(self.rounds, float)
        if len(tokens) < 2 or not rounds.sum():
            return float("nan")
        drawn = np.random.default_rng(seed).integers(len(tokens), size=(DRAWS, len(tokens)))
        sums = rounds[drawn].sum(1)
        means = tokens[drawn].sum(1)[sums > 0] / sums[sums > 0]
        low, high = np.percentile(means, (2.5, 97.5))
        return float(high - low) / 2

    def histogram(self) -> list[int]:
        """Rounds that accepted 0, 1, 2, … tokens."""
        return [int(n) for n in self.depths]

    def reached(self) -> list[float]:
        """Of the rounds that accepted the token of depth d - 1, the share that accepted d's, too; d = 1, …"""
        at_least = self.depths[::-1].cumsum()[::-1]
        return [float(b / a) for a, b in zip(at_least[:-1], at_least[1:], strict=True) if a]


@dataclass(slots=True)
class Report:
    """Tallies by (drafter, setting, group, nodes)."""

    nodes: tuple[int, ...]
    tallies: dict[tuple[str, str, str, int], Tally] = field(default_factory=dict)

    def add(self, drafter: str, setting: str, group: str, found: Mapping[int, Rounds]) -> None:
        """Rounds of one text, by size."""
        for nodes, rounds in found.items():
            for name in dict.fromkeys((group, ALL)):
                self.tallies.setdefault((drafter, setting, name, nodes), Tally()).add(rounds)

    def table(self) -> str:
        """Acceptance lengths: a row for each drafter, setting and group."""
        header = ["drafter", "setting", "prompts", *(size_name(n) for n in self.nodes)]
        return markdown(header, self.rows())

    def rows(self) -> list[list[str]]:
        """Drafter, setting, group, then the acceptance length of each size, ± at the first and the last."""
        made = []
        known = list(dict.fromkeys(key[:3] for key in self.tallies))
        # Settings in turn, so that drafters stand below each other; each one's total last.
        settings, groups = (list(dict.fromkeys(key[i] for key in known)) for i in (1, 2))
        known.sort(key=lambda key: (settings.index(key[1]), key[2] == ALL, groups.index(key[2])))
        for drafter, setting, group in known:
            cells = []
            for place, nodes in enumerate(self.nodes):
                tally = self.tallies[drafter, setting, group, nodes]
                width = f" ±{tally.half_width():.2f}" if place in (0, len(self.nodes) - 1) else ""
                cells.append(f"{tally.mean:.2f}{width}")
            made.append([drafter, setting, group, *cells])
        return made

    def depth_table(self, nodes: Iterable[int]) -> str:
        """Of the rounds that accepted depth d - 1, the share that accepted d, over all prompts."""
        made = []
        for size in nodes:
            for (drafter, setting, group, own), tally in self.tallies.items():
                if group == ALL and own == size:
                    cells = [f"{share:.2f}" for share in tally.reached()]
                    made.append([drafter, setting, size_name(size), *cells])
        deepest = max((len(row) for row in made), default=3) - 3
        header = ["drafter", "setting", "size", *(f"depth {d}" for d in range(1, deepest + 1))]
        return markdown(header, made)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "drafter": drafter,
                "setting": setting,
                "prompts": group,
                "nodes": nodes,
                "acceptance_length": round(tally.mean, 4),
                "half_width_95": round(tally.half_width(), 4),
                "texts": len(tally.rounds),
                "rounds": sum(tally.rounds),
                "tokens": sum(tally.tokens),
                "histogram": tally.histogram(),
            }
            for (drafter, setting, group, nodes), tally in self.tallies.items()
        ]


def size_name(nodes: int) -> str:
    return "chain" if nodes == CHAIN else f"tree {nodes}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; rows that are shorter than the longest are filled up."""
    width = max(len(row) for row in (header, *rows))
    lines = [[*row, *[""] * (width - len(row))] for row in (header, *rows)]
    texts = ["| " + " | ".join(row) + " |" for row in lines]
    return "\n".join([texts[0], "|" + "---|" * width, *texts[1:]])
