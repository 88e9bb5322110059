"""The committed token of every row of a pass: temperature, the commit rule's noise, argmax, in one read.

    id = argmax over v of z[v] / T + g(seed, choice, position, v)      ties: the lowest id
    T < 1e-5: argmax of z, without noise

Owns the choice of rows without filters (top-k, top-p, min-p) and without masks, for the whole vocabulary or
for one rank's share of it, and the merge of the ranks' answers. Does not own the filtered choice
(target_service.sampling) nor the noise (kernels.philox).

What is equal between devices. The noise's 32-bit words are, bit for bit, for every device and for every way
to cut the vocabulary; so is everything after them but two fp32 logarithms. The Triton version's g is within 2
ulp of max(|g|, 1) of torch's. Greedy text therefore depends on the logits alone, and sampled text, given
equal logits, differs between a CPU and a GPU only where the best two scores z / T + g lie within some 1e-6 of
each other: about one choice in a million. In all other ways the text is a function of logits, seed, choice
and position, whatever the batch, the split over ranks or the tree that was verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import cuda
from kernels.philox import gumbel_noise

GREEDY_BELOW = 1e-5
"""Temperatures below this take no noise."""

NO_CHOICE = -1
"""The id of a row whose best score is no finite number: its logits hold a NaN, or an infinity won."""


@dataclass(frozen=True, slots=True)
class Choices:
    """best: score of the chosen token, fp32 [...]; not finite where id is NO_CHOICE (NaN if a score is NaN).
    ids: int32 [...].
    """

    best: torch.Tensor
    ids: torch.Tensor


def choose_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    *,
    first_token: int = 0,
) -> Choices:
    """The token that each row commits, among the tokens whose logits are given.

    logits: [rows, vocab] of a float dtype, contiguous within a row. temperature: fp32 [rows]. seeds: int64
    [rows]. positions: int32 [rows], absolute, of the token being chosen. choices: int32 [rows].
    first_token: id of the first column, on a rank that holds a share of the vocabulary. Ids are global.
    """
    if cuda.takes(logits):
        from kernels.cuda import choice as triton_op

        return triton_op.choose_rows(logits, temperature, seeds, positions, choices, first_token=first_token)
    return choose_rows_reference(logits, temperature, seeds, positions, choices, first_token=first_token)


def choose_rows_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    *,
    first_token: int = 0,
) -> Choices:
    """choose_rows in torch operations; keeps fp64 logits in fp64."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    sampled = temperature >= GREEDY_BELOW
    if bool(sampled.any()):
        noise = gumbel_noise(
            seeds, positions, choices, logits.shape[-1], first_token=first_token, device=logits.device
        )
        heat = torch.where(sampled, temperature, 1.0).unsqueeze(1).to(scores.dtype)
        scores = torch.where(sampled.unsqueeze(1), scores / heat + noise, scores)
    # torch's argmax takes the first of equals, and a NaN before any number.
    ids = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(1, ids).squeeze(1).float()
    return Choices(best, _checked(best, (ids.squeeze(1) + first_token).to(torch.int32)))


def merge_choices(best: torch.Tensor, ids: torch.Tensor) -> Choices:
    """The choice of each row among those of several shares of the vocabulary: [shares, rows] -> [rows].

    The highest score wins, the lowest id among equal ones; a NaN in any share leaves no choice.
    """
    if cuda.takes(best):
        from kernels.cuda import choice as triton_op

        return triton_op.merge_choices(best, ids)
    return merge_choices_reference(best, ids)


def merge_choices_reference(best: torch.Tensor, ids: torch.Tensor) -> Choices:
    """merge_choices in torch operations."""
    top = best.amax(dim=0)  # NaN if there is one
    largest = torch.iinfo(torch.int32).max
    winner = torch.where((best == top) & (ids >= 0), ids, largest).amin(dim=0)
    return Choices(top, _checked(top, winner))


def _checked(best: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.where(best.isfinite(), ids, NO_CHOICE)
