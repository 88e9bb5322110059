"""The commit rule: which token the target commits at a position, given its logits.

    committed(p) = argmax over v of z[v] + g(seed, choice, p, v)

z is fp32: logits, then the min_tokens mask, / T, top-k, top-p, min-p (removed = -inf). Order and meaning are
those of transformers' warpers, except that ties at a cut keep the lower ids, so that exactly the stated
number stays. T < 1e-5 is greedy: argmax of the masked logits, the lowest id wins ties, no noise. The noise g
is kernels.philox's. Nothing here reads a draft tree, so the text can't depend on one.

Owns the choice for a batch of rows with mixed parameters. Does not own the walk (target_service.verify).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.philox import gumbel_noise
from kernels.topk import top_entries
from specbridge.rounds import SamplingParams, TokenLogprobs

NO_CHOICE = -1
"""Stands for the token of a row whose logits are no numbers."""

_FIRST_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How one session chooses its tokens.

    masked_ids (eos and stop ids) can't be chosen at absolute positions below `masked_below` (min_tokens).
    """

    sampling: SamplingParams
    masked_ids: tuple[int, ...] = ()
    masked_below: int = 0


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows [first_row, first_row + len(positions)) of the logits belong to one session.

    positions: absolute index of the token that each row chooses (one past the row's own).
    """

    rule: ChoiceRule
    first_row: int
    positions: Sequence[int]


def choose(logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    """The committed token of every row. logits: fp32 [rows, vocab], not modified. Returns int64 [rows].

    NO_CHOICE for a row with a NaN, or whose best logit is infinite.
    """
    masked = _min_tokens_mask(logits, groups)
    chosen = _choose(masked, groups)
    # A NaN wins every argmax, so the chosen logit tells; one past the vocabulary comes from the filters.
    best = masked.gather(1, chosen.clamp(max=masked.shape[-1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(best.isfinite() & (chosen < masked.shape[-1]), chosen, NO_CHOICE)


def _choose(masked: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    if all(group.rule.sampling.greedy for group in groups):
        return masked.argmax(dim=-1)
    rows: list[int] = []
    params: list[SamplingParams] = []
    noise_of: list[int] = []
    keys: dict[tuple[int, int, int], int] = {}
    for group in groups:
        sampling = group.rule.sampling
        if sampling.greedy:
            continue
        for i, position in enumerate(group.positions):
            # Rows of equal depth share a position, and so one row of noise.
            key = (sampling.seed, position, sampling.choice)
            noise_of.append(keys.setdefault(key, len(keys)))
            rows.append(group.first_row + i)
            params.append(sampling)
    noise = gumbel_noise(
        [key[0] for key in keys],
        [key[1] for key in keys],
        [key[2] for key in keys],
        masked.shape[-1],
        device=masked.device,
    )
    where = torch.tensor([rows, noise_of], device=masked.device)
    sampled = _sample(masked.index_select(0, where[0]), params, noise, where[1])
    if len(rows) == len(masked):
        return sampled
    return masked.argmax(dim=-1).index_copy_(0, where[0], sampled)


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the target's own distribution (before masks, T and filters), natural log.

    logits: fp32 [rows, vocab]; chosen: one id a row; count: 1 for the chosen token alone, n for it and the n
    - 1 best ids.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    picked = log_probs.gather(1, torch.tensor(chosen, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = min(count - 1, logits.shape[-1])
    if best <= 0:
        return tuple(TokenLogprobs(value) for value in picked)
    values, ids = top_entries(log_probs, best, nonpositive=True)
    return tuple(
        TokenLogprobs(value, tuple(row_ids), tuple(row))
        for value, row_ids, row in zip(picked, ids.tolist(), values.tolist(), strict=True)
    )


def _min_tokens_mask(logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    """`logits`, or a copy with the stop ids of rows that are still below min_tokens at -inf."""
    rows: list[int] = []
    columns: list[int] = []
    for group in groups:
        rule = group.rule
        if not rule.masked_ids or group.positions[0] >= rule.masked_below:
            continue
        for i, position in enumerate(group.positions):
            if position < rule.masked_below:
                rows.extend([group.first_row + i] * len(rule.masked_ids))
                columns.extend(rule.masked_ids)
    if not rows:
        return logits
    masked = logits.clone()
    index = torch.tensor([rows, columns], device=logits.device)
    masked[index[0], index[1]] = -torch.inf
    return masked


def _sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], noise: torch.Tensor, noise_of: torch.Tensor
) -> torch.Tensor:
    """logits [rows, vocab], one entry of params a row; noise [keys, vocab]; noise_of int64 [rows] -> int64
    [rows].
    """
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    scores = logits / temperature.unsqueeze(1)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if not filtered:
        return scores.add_(noise.index_select(0, noise_of)).argmax(dim=-1)
    some = torch.tensor(filtered, device=logits.device)
    ids, values, keep = _kept(scores.index_select(0, some), [params[i] for i in filtered])
    own = noise_of.index_select(0, some).unsqueeze(1)
    noisy = torch.where(keep, values + noise[own, ids], -torch.inf)
    # Equal sums in two places: the lowest id, as in the unfiltered rule. Rows that are no numbers: past the
    # last id.
    top = (noisy == noisy.max(dim=-1, keepdim=True).values) & ~values.isnan()
    chosen = torch.where(top, ids, logits.shape[-1]).min(dim=-1).values
    if len(filtered) == len(params):
        return chosen
    return scores.add_(noise.index_select(0, noise_of)).argmax(dim=-1).index_copy_(0, some, chosen)


def _kept(
    scores: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates of each row in (score descending, id ascending) order: ids, scores, and which the filters
    keep. A row that is not finite has NaN scores only.

    Only as many candidates are sorted as the widest filter of the batch can let through.
    """
    vocab = scores.shape[-1]
    device = scores.device
    # fp32 first: the wire carries floats, and in-process callers must get the same cut.
    cuts = torch.tensor(
        [[p.top_k or vocab, p.top_p, p.min_p] for p in params], dtype=torch.float32, device=device
    )
    top_k = cuts[:, :1].clamp(max=float(vocab))
    top_p, min_p = cuts[:, 1:2], cuts[:, 2:3]
    total = scores.logsumexp(dim=-1, keepdim=True)
    count = min(_FIRST_CANDIDATES, vocab)
    while True:
        values, ids = top_entries(scores, count)
        rank = torch.arange(count, device=device).unsqueeze(0)
        keep = rank < top_k
        # Doubles: the sums must not move with `count`, which depends on the other rows.
        wide = values.double()
        head = torch.where(keep, wide, -torch.inf).logsumexp(dim=-1, keepdim=True)
        # Top-p sees the distribution that top-k left: renormalised over the head, if top-k cut inside it.
        probs = (wide - torch.where(top_k <= count, head, total.double())).exp()
        mass = probs.cumsum(dim=-1)
        ratio = (values - values[:, :1]).exp()
        nucleus = (mass - probs < top_p) | (top_p >= 1.0)
        nucleus[:, 0] = True
        closed = (
            (top_k <= count)
            | ((top_p < 1.0) & (top_k >= vocab) & (mass[:, -1:] >= top_p))
            | ((ratio[:, -1:] < min_p) & ((top_k >= vocab) | (top_p >= 1.0)))
        )
        if count == vocab or bool(closed.all()):
            values = torch.where(total.isfinite(), values, torch.nan)
            return ids, values, keep & nucleus & (ratio >= min_p)
        count = min(count * 8, vocab)
