"""Which tokens a reduced head keeps: those the target's responses consist of, the most frequent first.

Owns the count. Does not own the file that lists them (draft_service.draft_vocabulary).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draft_service.training.shards import Shards
from specbridge.errors import ConfigError

_HELD_OUT = 10  # every tenth response tells how well the others' tokens cover it


@dataclass(frozen=True, slots=True)
class Ranked:
    """ids: the `size` most frequent, best first; ids that never occur come last, in their own order.

    coverage: share of the tokens of responses that were not counted, a tenth of all, that ids hold.
    """

    ids: tuple[int, ...]
    coverage: float


def rank_tokens(data: Shards, size: int) -> Ranked:
    """Prompts are not counted: a drafter never proposes theirs. Raises ConfigError for an impossible size."""
    vocab = data.manifest.vocab_size
    if not 1 <= size <= vocab:
        raise ConfigError(f"--size {size} is not between 1 and the target's {vocab} tokens")
    owner, answered = data.owners()
    held = owner % _HELD_OUT == _HELD_OUT - 1
    counted = np.bincount(data.tokens[answered & ~held], minlength=vocab)
    held_out = np.bincount(data.tokens[answered & held], minlength=vocab)
    ids = np.argsort(-counted, kind="stable")[:size]
    total = held_out.sum()
    coverage = float(held_out[ids].sum() / total) if total else float("nan")
    return Ranked(tuple(ids.tolist()), coverage)
