"""The best tokens of one position on the CPU: for a row at a time, when a tree asks for it.

Order: score descending, then column ascending, as kernels.topk has it; that one serves batches and devices,
and for a single row of thousands torch's calls cost more than the work. Scores are not normalised over the
row: who takes these tokens compares them with each other only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_GROUP = 64


class Best(NamedTuple):
    """columns int64 [n], best first; scores (z / T + g, less the best one's) and beliefs (z / T) fp32 [n]."""

    columns: np.ndarray
    scores: np.ndarray
    beliefs: np.ndarray


def best_tokens(logits: np.ndarray, k: int, *, heat: float = 1.0, noise: np.ndarray | None = None) -> Best:
    """The `k` best columns, or all of probability above zero if there are fewer; none of a row with NaN
    or an infinite one.

    logits: z, fp32 [columns]. heat: T, above 0. noise: g, fp32 [columns], finite.
    """
    scores = logits if heat == 1.0 else logits * np.float32(1.0 / heat)
    if noise is not None:
        scores = scores + noise
    columns = (scores >= _reached_by(scores, k)).nonzero()[0]
    found = scores[columns]
    order = np.argsort(-found, kind="stable")[:k]
    found = found[order]
    if found.size and not found[-1] > -math.inf:
        order = order[found > -math.inf]
        found = found[: len(order)]
    columns = columns[order]
    beliefs = logits[columns] if heat == 1.0 else logits[columns] * np.float32(1.0 / heat)
    return Best(columns, found - found[:1], beliefs)


def _reached_by(scores: np.ndarray, k: int) -> np.float32:
    """A score that at least `k` columns reach, and few more: the k-th best maximum of groups of columns.

    NaN, which no score reaches, if NaN or an infinite one is among them: such a row has no distribution.
    """
    groups = len(scores) // _GROUP
    if groups <= k:
        return np.float32(-math.inf if scores.max() < math.inf else math.nan)
    # Columns `groups` apart are together: so numpy takes maxima of whole rows, not within each.
    best: np.ndarray = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    rest = scores[groups * _GROUP :].max(initial=-math.inf)
    if not (best.max() < math.inf and rest < math.inf):
        return np.float32(math.nan)
    return np.float32(np.partition(best, groups - k)[groups - k])
