"""Simulated acceptance on the target's side: the choice of a row is the text that both services know.

Owns where the commit rule's outcome is overridden. The real choice is computed first and its cost kept: only
its outcome is replaced, so rows whose logits are no numbers still fail. Sampling parameters and min_tokens do
not touch a simulated text. Does not own the text (kernels.simulate) nor the draft's side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.simulate import pack_rows, true_tokens
from target_service.sampling import NO_CHOICE, RowGroup


def simulated_choices(chosen: torch.Tensor, groups: Sequence[RowGroup], vocab_size: int) -> torch.Tensor:
    """chosen: what `sampling.choose` gave for these groups, int64 [rows]. Returns int64 [rows]."""
    rows = [
        (group.rule.sampling.seed, position, group.rule.sampling.choice)
        for group in groups
        for position in group.positions
    ]
    tokens = true_tokens(*pack_rows(rows, chosen.device), vocab_size)
    return torch.where(chosen == NO_CHOICE, chosen, tokens)
