"""Which token fills a block's unknown rows: one whose embedding means nothing else to the drafter.

Owns the choice for a target that has no mask token, and what is said about one that was named. Does not own
its use (network).
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from draft_service.training.shards import Shards
from specbridge.checkpoint import read_json
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)


def choose_mask_token(folder: Path, shards: Shards) -> int:
    """A token that the data never uses: the first of the tokenizer's special ones that is, else the last id.

    folder: the target's. Raises ConfigError if the data uses the whole vocabulary.
    """
    used = np.zeros(shards.manifest.vocab_size, bool)
    used[np.unique(shards.tokens)] = True
    free = np.flatnonzero(~used)
    if not len(free):
        raise ConfigError("the data uses every token of the vocabulary: name one with --mask-token-id")
    special: list[int] = []
    if (folder / "tokenizer.json").exists():
        added = read_json(folder / "tokenizer.json").get("added_tokens") or []
        special = [int(token["id"]) for token in added if token.get("special")]
    return min((i for i in special if i < len(used) and not used[i]), default=int(free[-1]))


def check_mask_token(token: int, shards: Shards, *, warn: bool = True) -> None:
    """Raises ConfigError for an id outside the vocabulary; warns of one that the data uses, if told to."""
    vocab = shards.manifest.vocab_size
    if token >= vocab:
        raise ConfigError(f"--mask-token-id is {token}: the target's vocabulary is 0..{vocab - 1}")
    used = int(np.count_nonzero(shards.tokens == token)) if warn else 0
    if used:
        log.warning(
            "--mask-token-id %d is in the data, %d times in %d tokens: a drafter can't tell it from an "
            "unknown row; better name a token that texts never use",
            token, used, len(shards.tokens),
        )  # fmt: skip
