"""What a part gives: the same requests with it and without it, in turns, pair by pair.

Owns the statistics of pairs and the verdict. Does not own what was switched (switches) nor the bursts
(measure).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbridge.explain.measure import Burst
from specbridge.explain.rounds import mean_round

FEWEST_PAIRS = 4
"""Fewer decide nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """on, off: bursts with the part and without, aligned; empty if not measured: `missing` says why."""

    key: str
    title: str
    without: str
    on: Sequence[Burst] = ()
    off: Sequence[Burst] = ()
    missing: str = ""

    def ratios(self) -> list[float]:
        """Rate with over rate without, of each pair that has both."""
        return [a.rate / b.rate for a, b in zip(self.on, self.off, strict=True) if a.rate and b.rate]


def verdict(ratios: Sequence[float]) -> str:
    """gives, costs or open: on which side of 1 the pairs are, all but one in eight of them; missing without
    any.

    Of pairs that part by chance alone, 4 of 4 lie on one given side in 6 % of all cases, 7 of 8 in 4 %.
    """
    if len(ratios) < FEWEST_PAIRS:
        return "open" if ratios else "missing"
    ordered = sorted(ratios)
    spare = len(ordered) // 8
    if ordered[spare] > 1:
        return "gives"
    return "costs" if ordered[-1 - spare] < 1 else "open"


def comparison_json(one: Comparison) -> dict[str, Any]:
    """The report's entry. ratio: the median over pairs; low, high: the extremes of all pairs."""
    ratios = one.ratios()
    entry: dict[str, Any] = {
        "key": one.key,
        "title": one.title,
        "without": one.without,
        "pairs": len(ratios),
        "ratio": statistics.median(ratios) if ratios else None,
        "low": min(ratios, default=None),
        "high": max(ratios, default=None),
        "verdict": verdict(ratios),
        "same_text": None,
        "missing": one.missing,
        "on": _side(one.on),
        "off": _side(one.off),
    }
    if ratios:
        entry["same_text"] = all(a.texts == b.texts for a, b in zip(one.on, one.off, strict=True))
    return entry


def _side(bursts: Sequence[Burst]) -> dict[str, Any] | None:
    if not bursts:
        return None
    seconds = sum(burst.seconds for burst in bursts)
    mean = mean_round(bursts)
    return {
        "tokens_per_s": sum(burst.tokens for burst in bursts) / seconds if seconds else 0.0,
        "round_s": mean.seconds if mean else None,
        "tokens_per_round": mean.point.tokens if mean else None,
        "nodes": mean.point.nodes if mean else None,
    }


def drift(bursts: Sequence[Burst], groups: int) -> float | None:
    """How much the rate of one and the same request differed between repeats: largest less smallest over
    their mean, the median over requests. None with one repeat. groups: bursts of a repeat.
    """
    spreads = []
    for place in range(min(groups, len(bursts))):
        rates = [burst.rate for burst in bursts[place::groups] if burst.rate]
        if len(rates) > 1:
            spreads.append((max(rates) - min(rates)) / statistics.mean(rates))
    return statistics.median(spreads) if spreads else None
