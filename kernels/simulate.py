"""Simulated acceptance: the text of a target that knows it, and the marginals of a drafter that guesses it.

    true_tokens          t*(seed, choice, position): the token that a simulated target chooses, whatever the
                         row
    simulated_marginals  logits in which t* has, depth by depth, a rank drawn from recorded tables

Both sides draw from the same counter-based generator, so they agree without talking, on any device and in
any batch: Philox4x32-10 (kernels.philox) with key = seed and counter (stream, position, choice, 1); the last
word sets these draws apart from the noise, which has 0 there.

    stream 0, position p      word 0: t*(p) = word * vocab >> 32    word 1: class of the round with base p
    stream d, position b + d  word 0: rank of t* at depth d of a round with base b    word 1: other names

Every threshold is an integer, so draws do not depend on a device's arithmetic. Static shapes and no host
sync: capturable in a CUDA graph. Does not own the tables' meaning (specbridge.acceptance) nor where the
services use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import cuda
from kernels.philox import philox4x32_10, signed_seed

SIMULATION_WORD = 1
"""Fourth word of the counter."""
_MASK = 0xFFFFFFFF
_TILT = 1e-5
"""Log-probability that each rank gives up, so that equal ranks keep their order in fp32."""
_STEPS = 64
_NEGLIGIBLE = 1e-4
"""Probability below which it is of no matter which token comes first."""

Table = Sequence[Sequence[Sequence[float]]]
"""[classes][depths][ranks] of probabilities."""


@dataclass(frozen=True, slots=True)
class MarginalTables:
    """An acceptance file on a device; made by `marginal_tables`.

    class_ends int64 [classes - 1], hit_ends, miss_ends int64 [classes, depths, ranks]: cumulative probability
    in units of 2^-32. log_probs fp32 [classes, depths, ranks]; tail fp32 [classes, depths]: log-probability
    of each token that is no candidate. steps int64 [64]: strides through the vocabulary, coprime to its size.
    folded: largest mass that was too much for the tail and left out (0 unless the vocabulary is small).
    """

    class_ends: torch.Tensor
    hit_ends: torch.Tensor
    miss_ends: torch.Tensor
    log_probs: torch.Tensor
    tail: torch.Tensor
    steps: torch.Tensor
    vocab_size: int
    folded: float = 0.0

    @property
    def depths(self) -> int:
        return int(self.tail.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.log_probs.shape[2])


def marginal_tables(
    weights: Sequence[float],
    true: Table,
    after_miss: Table,
    draft: Table,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> MarginalTables:
    """Tables of a drafter over `vocab_size` ids. Ranks that do not fit the vocabulary are cut off.

    draft rows must not rise with the rank. Raises ValueError for a vocabulary of fewer than 2 ids.
    """
    if vocab_size < 2:
        raise ValueError(f"a vocabulary of {vocab_size} leaves nothing to guess; at least 2 ids are needed")
    ranks = min(len(draft[0][0]), vocab_size - 1)
    believed = torch.tensor(draft, dtype=torch.float64)[..., :ranks]
    rest = (1.0 - believed.sum(-1)).clamp_min(1e-9) / (vocab_size - ranks)
    # No token outside the candidates may outrank one of them that matters.
    last = (believed[..., -1] * 0.99).clamp_min(_NEGLIGIBLE)
    tail = torch.minimum(rest, last)
    folded = float(((rest - tail) * (vocab_size - ranks)).max())
    log_probs = believed.clamp_min(1e-12).log() - _TILT * torch.arange(ranks, dtype=torch.float64)

    def ends(table: Table) -> torch.Tensor:
        sums = torch.tensor(table, dtype=torch.float64)[..., :ranks].cumsum(-1)
        return (sums * 2.0**32).round().to(torch.int64)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device).contiguous()

    shares = torch.tensor(weights, dtype=torch.float64)
    class_ends = ((shares / shares.sum()).cumsum(0)[:-1] * 2.0**32).round().to(torch.int64)
    return MarginalTables(
        class_ends=place(class_ends),
        hit_ends=place(ends(true)),
        miss_ends=place(ends(after_miss)),
        log_probs=place(log_probs.float()),
        tail=place((tail.log() - _TILT * ranks).float()),
        steps=place(torch.tensor(_strides(vocab_size), dtype=torch.int64)),
        vocab_size=vocab_size,
        folded=folded,
    )


def pack_rows(
    rows: Sequence[tuple[int, int, int]], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(seed, position, choice) of each row as three int64 tensors on `device`, moved as one.

    Seeds may be unsigned: they are taken in two's complement.
    """
    packed = [(signed_seed(seed), position, choice) for seed, position, choice in rows]
    columns = torch.tensor(packed, dtype=torch.int64).reshape(-1, 3).T.contiguous().to(device)
    return columns[0], columns[1], columns[2]


def true_tokens(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """t* of each row. seeds int64 [n] (two's complement), positions and choices int32 or int64 [n], all on
    one device; positions are of the token being chosen. Returns int64 [n], ids in [0, vocab_size).
    """
    if cuda.takes(torch.empty(0, device=seeds.device)):  # asks by float dtype
        from kernels.cuda import simulate as triton_op

        return triton_op.true_tokens(seeds, positions, choices, vocab_size)
    return true_tokens_reference(seeds, positions, choices, vocab_size)


def true_tokens_reference(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`true_tokens` in torch ops, any device."""
    return _words(seeds, torch.zeros_like(seeds), positions, choices)[..., 0] * vocab_size >> 32


def draw_rounds(
    tables: MarginalTables, seeds: torch.Tensor, bases: torch.Tensor, choices: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Class of each round, int64 [sessions], and rank of its true tokens, int64 [sessions, depth].

    A rank equal to tables.ranks means: not among the candidates. seeds, bases, choices as in
    `simulated_marginals`.
    """
    seeds, bases, choices = (t.to(torch.int64) for t in (seeds, bases, choices))
    own = _words(seeds, torch.zeros_like(seeds), bases, choices)[:, 1]
    kind = (own.unsqueeze(1) >= tables.class_ends).sum(1)
    streams = torch.arange(1, depth + 1, device=seeds.device)
    words = _words(seeds.unsqueeze(1), streams, bases.unsqueeze(1) + streams, choices.unsqueeze(1))
    return kind, _ranks(tables, kind, words[..., 0])


def simulated_marginals(
    logits: torch.Tensor,
    tables: MarginalTables,
    seeds: torch.Tensor,
    bases: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """Overwrite a drafter's logits with the simulated ones, and return them.

    logits: fp32 [sessions, depth, vocab], row d - 1 the marginal of position base + d; at most tables.depths.
    seeds int64 [sessions]; bases (position of the anchor) and choices int32 or int64 [sessions]. Its
    log-softmax has draft[class][d - 1][r] at the candidate of rank r, whichever ids those are; t* is the
    candidate of the rank drawn, or none of them.
    """
    if cuda.takes(logits) and logits.is_contiguous():
        from kernels.cuda import simulate as triton_op

        return triton_op.simulated_marginals(logits, tables, seeds, bases, choices)
    return simulated_marginals_reference(logits, tables, seeds, bases, choices)


def simulated_marginals_reference(
    logits: torch.Tensor,
    tables: MarginalTables,
    seeds: torch.Tensor,
    bases: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """`simulated_marginals` in torch ops, any device."""
    depth = logits.shape[1]
    seeds, bases, choices = (t.to(torch.int64) for t in (seeds, bases, choices))
    own = _words(seeds, torch.zeros_like(seeds), bases, choices)[:, 1]
    kind = (own.unsqueeze(1) >= tables.class_ends).sum(1)
    streams = torch.arange(1, depth + 1, device=seeds.device)
    positions = bases.unsqueeze(1) + streams
    true = true_tokens_reference(
        seeds.unsqueeze(1).expand_as(positions), positions, choices.unsqueeze(1), tables.vocab_size
    )
    words = _words(seeds.unsqueeze(1), streams, positions, choices.unsqueeze(1))
    ranks = _ranks(tables, kind, words[..., 0])
    stride = tables.steps[words[..., 1] & (_STEPS - 1)]
    # Strides are coprime to the vocabulary's size, so the names of different ranks differ.
    away = torch.arange(tables.ranks, device=seeds.device) - ranks.unsqueeze(2)
    ids = (true.unsqueeze(2) + stride.unsqueeze(2) * away) % tables.vocab_size
    logits.copy_(tables.tail[:, :depth].index_select(0, kind).unsqueeze(2).expand_as(logits))
    return logits.scatter_(2, ids, tables.log_probs[:, :depth].index_select(0, kind))


def _ranks(tables: MarginalTables, kind: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """words int64 [sessions, depth] -> ranks, with the other table from the first miss on."""
    depth = words.shape[1]

    def drawn(ends: torch.Tensor) -> torch.Tensor:
        return (words.unsqueeze(2) >= ends[:, :depth].index_select(0, kind)).sum(2)

    hit, missed = drawn(tables.hit_ends), drawn(tables.miss_ends)
    misses = (hit > 0).to(torch.int64).cumsum(1)
    before = misses - (hit > 0).to(torch.int64)  # misses at smaller depths
    return torch.where(before == 0, hit, missed)


def _words(
    seeds: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """int64 [..., 4] of the arguments' common shape."""
    counter = (stream, positions.to(torch.int64) & _MASK, choices.to(torch.int64) & _MASK)
    fourth = torch.full_like(stream, SIMULATION_WORD)
    return philox4x32_10((*counter, fourth), (seeds & _MASK, (seeds >> 32) & _MASK))


def _strides(vocab_size: int) -> list[int]:
    """Strides coprime to the size, spread over it (multiples of the golden section)."""
    found = []
    for i in range(1, _STEPS + 1):
        step = int(vocab_size * (i * 0.6180339887498949 % 1.0)) or 1
        while math.gcd(step, vocab_size) != 1:
            step += 1
        found.append(step % vocab_size or 1)
    return found
