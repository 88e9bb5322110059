"""The loss of predicted rows, through the frozen head, without ever holding all logits.

The total is the sum over rows of weight times loss (kernels.token_loss has the losses). A row's weight is
exp(-(k - 1) / gamma) at depth k of its block, 0 past the end of its response; with `reach` r above 0 it is
also multiplied by the r-th power of the probability that the drafter gives the block's tokens before it,
since a deep row is of use only where all before it were right. (That factor is taken as a constant.)

The head is frozen, so the gradient stops at the hidden states: it is computed along with the loss, chunk by
chunk, from logits that are dropped at once. Owns this and the rows' weights. Does not own where rows come
from (network) nor the passes over the vocabulary (kernels.token_loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.token_loss import Logits, LossTerms, row_losses, write_gradient

CHUNK_ELEMENTS = 1 << 27
"""Logits of a chunk: 256 MiB in bfloat16."""


@dataclass(frozen=True, slots=True)
class Objective:
    """terms: what is summed per row. horizon: rows of a block. reach: see the module; needs the term ce."""

    terms: LossTerms
    horizon: int
    reach: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole blocks' rows to predict, n = blocks * horizon: hidden [n, hidden] of the drafter (with gradient),
    labels int64 [n], weights [n] of the master dtype. teacher [n, hidden]: the target's final states there,
    if a term distils. seed int64 [1]: of a coupled term's noise."""

    hidden: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    teacher: torch.Tensor | None = None
    seed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """total: the weighted sum, with a gradient. rows [n]: each row's loss before its weight; weights [n]: the
    weights that were taken."""

    total: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor


def decay(horizon: int, gamma: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for depths k = 1..horizon."""
    return torch.exp(-torch.arange(horizon, dtype=dtype, device=device) / gamma)


def head_loss(rows: Rows, head: torch.Tensor, objective: Objective) -> Losses:
    """head [vocab, hidden], frozen."""
    return Losses(*_HeadLoss.apply(rows.hidden, head, rows, objective))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, rows: Rows, objective: Objective
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad = torch.empty_like(hidden)
        losses, weights = torch.empty_like(rows.weights), torch.empty_like(rows.weights)
        terms = objective.terms
        blocks = max(1, CHUNK_ELEMENTS // (head.shape[0] * objective.horizon))
        size = blocks * objective.horizon
        for at in range(0, len(hidden), size):
            part = slice(at, at + size)
            logits = Logits(
                hidden[part] @ head.T,
                rows.teacher[part] @ head.T if terms.distils and rows.teacher is not None else None,
                rows.labels[part],
                rows.seed,
                first_row=at,
            )
            found = row_losses(logits, terms)
            weights[part] = rows.weights[part]
            if objective.reach:
                weights[part] *= _reached(found.certainty, objective)
            losses[part] = found.loss
            torch.mm(write_gradient(logits, terms, found, weights[part]), head, out=grad[part])
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(losses, weights)
        return (losses * weights).sum(), losses, weights

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_total.to(grad.dtype), None, None, None


def _reached(certainty: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Probability that a block's rows before this one are all right, to the power of reach, [n]."""
    blocks = certainty.view(-1, objective.horizon)
    before = torch.cat((torch.ones_like(blocks[:, :1]), blocks[:, :-1]), 1).cumprod(1)
    return before.pow_(objective.reach).flatten()
