"""Which token follows which, in the target's own text: a small table beside a drafter's checkpoint.

    draft_bigrams.safetensors
        bigram_rows    uint16 [vocab]   kept pairs that begin with each token (uint32 where ids need it)
        bigram_after   uint16 [pairs]   their second tokens, ascending within a row (uint32 where ids need it)
        bigram_counts  uint8  [pairs]   how often, as 12 log2 of it, rounded
        bigram_totals  uint8  [vocab]   how often each token was followed by any, likewise; 0: once or never

A block's marginals do not know the tokens between; a tree's node does (conditional_tree), and this table is
what its knowing is worth: p(v | u) = (n(u, v) + k p(v)) / (n(u) + k), k = PRIOR.

Owns the file. Does not own lookups (kernels.conditional_tree) nor counting (draft_service.training.pairs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.conditional_tree import PairTable
from specbridge.checkpoint import BIGRAMS_FILE, replacing
from specbridge.errors import ConfigError

FILE = BIGRAMS_FILE
TENSORS = ("bigram_rows", "bigram_after", "bigram_counts", "bigram_totals")
PRIOR = 60.0
"""Weight of the unconditional distribution, in occurrences."""
_STEPS = 12.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """first, second: ids of kept pairs, sorted by both; counts of each; totals [vocab]: of each first token,
    dropped pairs included."""

    first: np.ndarray
    second: np.ndarray
    counts: np.ndarray
    totals: np.ndarray


class Bigrams:
    """The table on a device, for lookups that a CUDA graph can hold."""

    def __init__(self, pairs: Pairs, device: torch.device | str) -> None:
        vocab = len(pairs.totals)
        self.device = torch.device(device)
        if not len(pairs.first):
            raise ConfigError(f"{FILE} holds no pair")

        def put(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        totals = pairs.totals.astype(np.float64)
        self.table = PairTable(
            keys=put(pairs.first.astype(np.int64) * vocab + pairs.second, torch.int64),
            counts=put(pairs.counts, torch.float32),
            totals=put(totals, torch.float32),
            shares=put(PRIOR * (totals + 0.1) / (totals + 0.1).sum(), torch.float32),
            prior=PRIOR,
        )

    def __len__(self) -> int:
        """Pairs."""
        return len(self.table.keys)


def read_bigrams(folder: Path, *, vocab_size: int, device: torch.device | str) -> Bigrams | None:
    """The table in a drafter's folder; None if there is none. Raises ConfigError for one that is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
        rows, after, counts, totals = (found[name] for name in TENSORS)
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}); make it anew with `specbridge train bigrams`"
        ) from None
    if len(rows) != vocab_size or len(totals) != vocab_size:
        raise ConfigError(f"{path} is for {len(rows)} tokens, the target has {vocab_size}: of another model?")
    if rows.sum(dtype=np.int64) != len(after) or len(after) != len(counts):
        raise ConfigError(f"{path} contradicts itself; make it anew with `specbridge train bigrams`")
    if len(after) and int(after.max()) >= vocab_size:
        raise ConfigError(f"{path} names token {int(after.max())} of {vocab_size}: of another model?")
    first = np.repeat(np.arange(vocab_size), rows)
    after = after.astype(np.int64)
    if np.any(np.diff(first * vocab_size + after) <= 0):
        raise ConfigError(f"{path} is not in order; make it anew with `specbridge train bigrams`")
    return Bigrams(Pairs(first, after, _widened(counts), _widened(totals)), device)


def write_bigrams(folder: Path, pairs: Pairs, notes: Mapping[str, str]) -> Path:
    """Write the file, replacing one that is there. notes: metadata."""
    from safetensors.numpy import save

    vocab = len(pairs.totals)
    path = folder / FILE
    rows = np.bincount(pairs.first, minlength=vocab)
    arrays = {
        "bigram_rows": rows.astype(np.uint16 if rows.max() < 1 << 16 else np.uint32),
        "bigram_after": pairs.second.astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
        "bigram_counts": _narrowed(pairs.counts),
        "bigram_totals": _narrowed(pairs.totals),
    }
    with replacing(path) as partial:
        partial.write_bytes(save(arrays, metadata=dict(notes)))
    return path


def _narrowed(counts: np.ndarray) -> np.ndarray:
    exact = _STEPS * np.log2(np.maximum(counts, 1).astype(np.float64))
    return np.minimum(np.rint(exact), 255).astype(np.uint8)


def _widened(steps: np.ndarray) -> np.ndarray:
    return np.exp2(steps.astype(np.float64) / _STEPS)
