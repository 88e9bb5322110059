"""The reduced vocabulary of a drafter: which tokens it may propose, beside a checkpoint in any layout.

    draft_vocabulary.safetensors    draft_vocabulary int32 [n]: the target's ids, the most frequent first

The head is the largest product of a small drafter's pass; a drafter that names the frequent tokens only reads
a part of it. The checkpoint itself stays as it is: who does not know of the file runs the whole head. Tokens
that are left out are never proposed, and cost acceptance, not losslessness.

Owns the file, and cutting a drafter's weights to it. Does not own which tokens are frequent
(draft_service.training.head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from draft_service.drafter_weights import DrafterWeights
from specbridge.checkpoint import VOCABULARY_FILE, replacing
from specbridge.errors import ConfigError

FILE = VOCABULARY_FILE
TENSOR = "draft_vocabulary"
AS_SHIPPED = -1
"""Size that means: what the drafter's folder says, the whole vocabulary if it says nothing."""


def read_vocabulary(folder: Path, *, vocab_size: int, size: int = AS_SHIPPED) -> torch.Tensor | None:
    """The tokens a drafter is to propose, int64 [n] in ascending order; None: all.

    size: AS_SHIPPED, 0 (all), or the number of most frequent ones. Raises ConfigError for a file that is
    damaged or missing though a size is asked for, or lists fewer.
    """
    path = folder / FILE
    if size == 0 or (size == AS_SHIPPED and not path.is_file()):
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        ranked = load_file(path)[TENSOR].to(torch.int64)
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(
            f"--draft-vocabulary {size} needs {path}, which can't be read ({error}); "
            "make it with `specbridge train head`, or use --draft-vocabulary 0"
        ) from None
    if ranked.ndim != 1 or not len(ranked) or len(ranked.unique()) != len(ranked):
        raise ConfigError(f"{path} does not list ids, each once; make it anew with `specbridge train head`")
    if int(ranked.min()) < 0 or int(ranked.max()) >= vocab_size:
        raise ConfigError(
            f"{path} lists ids outside the target's vocabulary of {vocab_size}: of another model?"
        )
    if size > len(ranked):
        raise ConfigError(f"--draft-vocabulary {size} is more than the {len(ranked)} ids that {path} lists")
    kept = ranked if size == AS_SHIPPED else ranked[:size]
    return kept.sort().values


def write_vocabulary(folder: Path, ranked: Sequence[int], notes: Mapping[str, str]) -> Path:
    """Write the file, replacing one that is there. ranked: ids, the most frequent first. notes: metadata."""
    from safetensors.torch import save

    path = folder / FILE
    ids = torch.tensor(list(ranked), dtype=torch.int32)
    with replacing(path) as partial:
        partial.write_bytes(save({TENSOR: ids}, metadata=dict(notes)))
    return path


def cut_to(weights: DrafterWeights, kept: torch.Tensor) -> DrafterWeights:
    """`weights` with the head's rows of the tokens `kept` (int64, ascending) only.

    Of a drafter with a reduced head of its own, those of its rows that are kept. Raises ConfigError if none
    are.
    """
    if weights.target_ids is None:
        return replace(weights, head=weights.head.index_select(0, kept), target_ids=kept)
    rows = torch.isin(weights.target_ids, kept).nonzero().flatten()
    if not len(rows):
        raise ConfigError(f"the drafter's own head names none of the tokens in its {FILE}")
    return replace(
        weights,
        head=weights.head.index_select(0, rows),
        target_ids=weights.target_ids.index_select(0, rows),
    )
