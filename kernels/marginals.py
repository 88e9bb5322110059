"""The drafter's marginals as a tree build takes them: each position's best tokens, by log-probability.

    log_probs = log_softmax(logits / T + g)       g: the target's own noise, for sampled sessions only
    order       log-probability descending, then token id ascending: a rank is a place in this order

Owns the scores and their selection, for a batch of sessions. Does not own the noise (kernels.philox), the
order of tree nodes (kernels.tree) nor the drafter's forward.

The order is exact: of the fp32 log-probabilities that are returned, ties included, no token is missing or out
of its place. Between devices log-probabilities differ by rounding, so trees may; text does not depend on
trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels import cuda
from kernels.choice import GREEDY_BELOW
from kernels.philox import gumbel_noise
from kernels.topk import top_entries

MOST_CANDIDATES = 256
"""Largest `width` of top_candidates."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """log_probs fp32, ids int32, both [sessions, depths, width], best first.

    Past the last token of probability above zero log-probabilities are -inf (NaN in a row whose logits hold
    one), and so they are, with id 0, in all rows at and past a session's depth limit.
    """

    log_probs: torch.Tensor
    ids: torch.Tensor


def top_candidates(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    bases: torch.Tensor,
    depth_limits: torch.Tensor,
    *,
    width: int,
) -> Candidates:
    """The `width` best tokens of each session and depth.

    logits: [sessions, depths, vocab] of a float dtype, contiguous; row d (from 0) is for the token at
    position bases + d + 1. temperature fp32, seeds int64, choices, bases, depth_limits int32, all [sessions];
    T < 1e-5 takes neither T nor noise, as the commit rule does. Raises ValueError unless 1 <= width <=
    min(vocab, 256).
    """
    if not 1 <= width <= min(logits.shape[-1], MOST_CANDIDATES):
        raise ValueError(
            f"{width} candidates of {logits.shape[-1]} tokens asked for; use 1 to "
            f"{min(logits.shape[-1], MOST_CANDIDATES)}"
        )
    if cuda.takes(logits):
        from kernels.cuda import marginals as triton_op

        return triton_op.top_candidates(logits, temperature, seeds, choices, bases, depth_limits, width=width)
    return top_candidates_reference(logits, temperature, seeds, choices, bases, depth_limits, width=width)


def top_candidates_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    bases: torch.Tensor,
    depth_limits: torch.Tensor,
    *,
    width: int,
) -> Candidates:
    """top_candidates in torch operations; fp64 logits stay fp64 up to their log-probabilities."""
    sessions, depths, vocab = logits.shape
    scores = logits if logits.dtype == torch.float64 else logits.float()
    depth = torch.arange(depths, device=logits.device)
    sampled = temperature >= GREEDY_BELOW
    if bool(sampled.any()):
        noise = gumbel_noise(
            seeds.repeat_interleave(depths),
            (bases.unsqueeze(1) + depth + 1).flatten(),
            choices.repeat_interleave(depths),
            vocab,
            device=logits.device,
        ).view(sessions, depths, vocab)
        heat = torch.where(sampled, temperature, 1.0).view(-1, 1, 1).to(scores.dtype)
        scores = torch.where(sampled.view(-1, 1, 1), scores / heat + noise, scores)
    log_probs, ids = top_entries(scores.log_softmax(dim=-1).float(), width, nonpositive=True)
    beyond = (depth >= depth_limits.unsqueeze(1)).unsqueeze(2)
    return Candidates(log_probs.masked_fill(beyond, -math.inf), ids.to(torch.int32).masked_fill(beyond, 0))
