"""choose_rows and merge_choices in Triton.

The vocabulary is cut over programs, so that one row keeps the whole device reading; each leaves its best
(score, id), and one more small launch, the same that merges ranks, picks the row's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.choice import GREEDY_BELOW, NO_CHOICE, Choices
from kernels.cuda.noise import UNFUSED, gumbel_of, philox_words

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NO_CHOICE = tl.constexpr(NO_CHOICE)
_LARGEST_ID = tl.constexpr(2**31 - 1)
_STAGES = tl.constexpr(4)  # blocks on their way at a time

_BLOCK = 2048  # tokens a program reads at a time: 32 bytes of bf16 a thread
_SMALL_BLOCK = 1024  # the same where there would be too few programs
_PROGRAMS = 1024  # enough to fill the device several times over


@triton.jit
def _store_best(scores, ids, values_out, ids_out, at):
    """Of a block of (score, id): the highest score, then the lowest id. A NaN leaves no choice."""
    nans = tl.sum((scores != scores).to(tl.int32))
    scores = tl.where(scores != scores, -float("inf"), scores)
    best = tl.max(scores)
    lowest = tl.min(tl.where(scores == best, ids, _LARGEST_ID))
    finite = (best > -float("inf")) & (best < float("inf")) & (nans == 0)
    tl.store(values_out + at, tl.where(nans > 0, float("nan"), best))
    tl.store(ids_out + at, tl.where(finite, lowest, _NO_CHOICE))


@triton.jit(do_not_specialize=["rows", "blocks"])
def _choose(
    logits,
    row_stride,
    temperature,
    seeds,
    positions,
    choices,
    values_out,
    ids_out,
    rows,
    vocab,
    first_token,
    blocks,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split, row = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * row_stride
    heat = tl.load(temperature + row)
    scores = tl.full((BLOCK,), -float("inf"), tl.float32)
    ids = tl.full((BLOCK,), _LARGEST_ID, tl.int32)
    # Columns are counted from SKIP before the first, where a quadruple of the noise begins.
    span = blocks * BLOCK  # of whole blocks, so that loads are known to be aligned
    start = split * span - SKIP
    if heat < _GREEDY_BELOW:
        for offset in tl.range(0, span, BLOCK, num_stages=_STAGES):
            column = start + offset + tl.arange(0, BLOCK)
            z = tl.load(base + column, mask=(column >= 0) & (column < vocab), other=-float("inf"))
            z = z.to(tl.float32)
            take = (z > scores) | (z != z)  # a NaN stays: nothing is greater
            scores, ids = tl.where(take, z, scores), tl.where(take, column, ids)
    else:
        seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
        for offset in range(0, span, BLOCK):
            column = start + offset + tl.arange(0, BLOCK)
            z = tl.load(base + column, mask=(column >= 0) & (column < vocab), other=-float("inf"))
            quads = (first_token + start + offset) // 4 + tl.arange(0, BLOCK // 4)
            z = tl.div_rn(z.to(tl.float32), heat) + gumbel_of(philox_words(seed, position, choice, quads))
            take = (z > scores) | (z != z)
            scores, ids = tl.where(take, z, scores), tl.where(take, column, ids)
    ids = tl.where(ids == _LARGEST_ID, ids, ids + first_token)
    _store_best(scores, ids, values_out, ids_out, split * rows + row)


@triton.jit(do_not_specialize=["shares", "rows"])
def _merge(values, ids, values_out, ids_out, shares, rows, SHARES: tl.constexpr):
    row = tl.program_id(0)
    share = tl.arange(0, SHARES)
    at = share * rows + row
    scores = tl.load(values + at, mask=share < shares, other=-float("inf"))
    names = tl.load(ids + at, mask=share < shares, other=_NO_CHOICE)
    names = tl.where(names < 0, _LARGEST_ID, names)
    _store_best(scores, names, values_out, ids_out, row)


def choose_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    *,
    first_token: int,
) -> Choices:
    """kernels.choice.choose_rows on the device, in two launches."""
    rows, vocab = logits.shape
    skip = first_token % 4
    block = _BLOCK if rows * triton.cdiv(vocab, _BLOCK) >= _PROGRAMS else _SMALL_BLOCK
    blocks = triton.cdiv(vocab + skip, block)
    splits = max(1, min(blocks, _PROGRAMS // max(rows, 1)))
    each = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, each)
    values = torch.empty(splits, rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(splits, rows, dtype=torch.int32, device=logits.device)
    if rows:
        _choose[(splits, rows)](
            logits,
            logits.stride(0),
            temperature,
            seeds,
            positions,
            choices,
            values,
            ids,
            rows,
            vocab,
            first_token,
            each,
            SKIP=skip,
            BLOCK=block,
            **UNFUSED,
        )
    return Choices(values[0], ids[0]) if splits == 1 else merge_choices(values, ids)


def merge_choices(best: torch.Tensor, ids: torch.Tensor) -> Choices:
    """kernels.choice.merge_choices on the device."""
    shares, rows = best.shape
    values_out = torch.empty(rows, dtype=torch.float32, device=best.device)
    ids_out = torch.empty(rows, dtype=torch.int32, device=best.device)
    if rows:
        _merge[(rows,)](
            best.contiguous(),
            ids.contiguous(),
            values_out,
            ids_out,
            shares,
            rows,
            SHARES=triton.next_power_of_2(shares),
            num_warps=1,
        )
    return Choices(values_out, ids_out)
