"""Simulated acceptance in Triton: one launch for the text, two for a batch of marginals.

Owns the launches; what is drawn, and from which words, is kernels.simulate's: results are equal bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.simulate import MarginalTables

_ROWS = 128
_FILL = 4096


@triton.jit
def _text(words, vocab):
    """Token ids of first words: the high half of word * vocab."""
    return ((words.to(tl.uint64) * vocab) >> 32).to(tl.int64)


@triton.jit
def _class_of(seed, base, choice, class_ends, CLASSES: tl.constexpr, WIDTH: tl.constexpr):
    """Class of the round with this base: how many class ends its word has reached."""
    lanes = tl.arange(0, WIDTH)
    zero = tl.zeros_like(lanes)
    _, word, _, _ = tl.philox(seed, zero, zero + base, zero + choice, zero + 1)
    inside = lanes < CLASSES - 1
    ends = tl.load(class_ends + lanes, mask=inside, other=0)
    return tl.sum(((word.to(tl.int64) >= ends) & inside).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["count"])
def _true_tokens(seeds, positions, choices, out, count, vocab, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
    choice = tl.load(choices + row, mask=inside, other=0).to(tl.int32)
    zero = tl.zeros_like(position)
    word, _, _, _ = tl.philox(seed, zero, position, choice, zero + 1)
    tl.store(out + row, _text(word, vocab), mask=inside)


@triton.jit
def _fill_tails(
    logits, seeds, bases, choices, class_ends, tail, depth, depths, vocab,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    session = row // depth
    base = tl.load(bases + session).to(tl.int32)
    choice = tl.load(choices + session).to(tl.int32)
    kind = _class_of(tl.load(seeds + session), base, choice, class_ends, CLASSES, WIDTH)
    value = tl.load(tail + kind * depths + row % depth)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * vocab + place
    tl.store(logits + at, tl.zeros([BLOCK], tl.float32) + value, mask=place < vocab)


@triton.jit
def _name_candidates(
    logits, seeds, bases, choices, class_ends, hit_ends, miss_ends, log_probs, steps, depth, depths, vocab,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    session = tl.program_id(0)
    seed = tl.load(seeds + session)
    base = tl.load(bases + session).to(tl.int32)
    choice = tl.load(choices + session).to(tl.int32)
    kind = _class_of(seed, base, choice, class_ends, CLASSES, WIDTH)
    level = tl.arange(0, LEVELS)
    inside = level < depth
    zero = tl.zeros_like(level)
    position = zero + base + 1 + level
    word, _, _, _ = tl.philox(seed, zero, position, zero + choice, zero + 1)
    true = _text(word, vocab)
    drawn, other, _, _ = tl.philox(seed, level + 1, position, zero + choice, zero + 1)
    drawn = drawn.to(tl.int64)
    rows = (kind * depths + level) * RANKS
    hit, missed = zero, zero
    for rank in range(RANKS):
        hit += (drawn >= tl.load(hit_ends + rows + rank, mask=inside, other=0)).to(tl.int32)
        missed += (drawn >= tl.load(miss_ends + rows + rank, mask=inside, other=0)).to(tl.int32)
    miss = ((hit > 0) & inside).to(tl.int32)
    before = tl.cumsum(miss, axis=0) - miss
    rank_of_true = tl.where(before == 0, hit, missed).to(tl.int64)
    stride = tl.load(steps + (other & 63).to(tl.int32))
    out = logits + (session.to(tl.int64) * depth + level) * vocab
    for rank in range(RANKS):
        # A multiple of the vocabulary on top: the remainder of a negative number is negative.
        name = (true + stride * (rank - rank_of_true) + vocab.to(tl.int64) * (RANKS + 1)) % vocab
        tl.store(out + name, tl.load(log_probs + rows + rank, mask=inside, other=0.0), mask=inside)


def true_tokens(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """See kernels.simulate.true_tokens."""
    out = torch.empty(len(seeds), dtype=torch.int64, device=seeds.device)
    if len(seeds):
        _true_tokens[(triton.cdiv(len(seeds), _ROWS),)](
            seeds, positions, choices, out, len(seeds), vocab_size, ROWS=_ROWS
        )
    return out


def simulated_marginals(
    logits: torch.Tensor,
    tables: MarginalTables,
    seeds: torch.Tensor,
    bases: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """See kernels.simulate.simulated_marginals; logits contiguous."""
    sessions, depth, vocab = logits.shape
    if not sessions or not depth:
        return logits
    classes = len(tables.class_ends) + 1
    width = triton.next_power_of_2(max(classes, 2))
    _fill_tails[(sessions * depth, triton.cdiv(vocab, _FILL))](
        logits, seeds, bases, choices, tables.class_ends, tables.tail, depth, tables.depths, vocab,
        CLASSES=classes, WIDTH=width, BLOCK=_FILL,
    )  # fmt: skip
    _name_candidates[(sessions,)](
        logits, seeds, bases, choices, tables.class_ends, tables.hit_ends, tables.miss_ends, tables.log_probs,
        tables.steps, depth, tables.depths, vocab,
        CLASSES=classes, WIDTH=width, RANKS=tables.ranks, LEVELS=triton.next_power_of_2(max(depth, 2)),
    )  # fmt: skip
    return logits
