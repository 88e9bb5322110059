"""Covering arrays: few combinations in which every two values of different factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of one value a factor that cover all pairs. Deterministic, greedy, near the smallest."""
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        chosen = dict(min(missing))
        for name in range(len(names)):
            if name in chosen:
                continue

            values = range(len(factors[names[name]]))
            gains = [_gain((name, value), chosen, missing) for value in values]
            chosen[name] = max(values, key=gains.__getitem__)
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        rows.append({names[i]: factors[names[i]][value] for i, value in sorted(chosen.items())})
    return rows


def _gain(new: tuple[int, int], chosen: Mapping[int, int], missing: set[Any]) -> tuple[int, int]:
    """Missing pairs that `new` completes; then how many others still want it."""
    completed = sum(tuple(sorted((new, old))) in missing for old in chosen.items())
    return completed, sum(new in pair for pair in missing)
