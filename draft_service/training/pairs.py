"""Pairs of neighbouring tokens in the target's responses, for a drafter's bigram table.

Owns the count. Does not own the file (draft_service.bigrams).
"""

from __future__ import annotations

import numpy as np

from draft_service.bigrams import Pairs
from draft_service.training.shards import Shards
from specbridge.errors import ConfigError


def count_pairs(data: Shards, most: int) -> Pairs:
    """The `most` most frequent pairs whose second token belongs to a response, seen twice or more.

    Raises ConfigError if there is none.
    """
    vocab = data.manifest.vocab_size
    tokens = data.tokens.astype(np.int64)
    owner, answered = data.owners()
    inside = answered[1:] & (owner[1:] == owner[:-1])
    first, second = tokens[:-1][inside], tokens[1:][inside]
    keys, counts = np.unique(first * vocab + second, return_counts=True)
    kept = np.flatnonzero(counts >= 2)
    if not len(kept):
        raise ConfigError("no two tokens follow each other twice in this data: there is too little of it")
    if len(kept) > most:
        kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:most]])
    keys, counts = keys[kept], counts[kept]
    return Pairs(keys // vocab, keys % vocab, counts, np.bincount(first, minlength=vocab))
