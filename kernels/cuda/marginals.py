"""top_candidates in Triton: two launches, and no scores tensor.

`_scan` reads the logits once. It leaves the best score of every block of neighbouring tokens, and the parts
of the softmax's denominator. The `width` blocks with the best maxima (ties: the lower block) hold all
winners, so `_select`, one program a row, picks those blocks, computes their scores again (the same
operations, so the same bits) and selects among them.

Both selections are by magnitude, the bits of |log-probability| as an integer, which is smallest for the best:
find the cut by bisection, keep what is better and the first of what ties at the cut, in order of place.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.choice import GREEDY_BELOW
from kernels.cuda.noise import UNFUSED, gumbel_of, philox_words
from kernels.marginals import Candidates

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NAN = tl.constexpr(0x7F800001)
_NOTHING = tl.constexpr(0x7FFFFFFF)  # the magnitude of a place that holds no token: after all others

_CHUNK = 4096  # tokens a program of _scan reads
_RANKED_AT_ONCE = tl.constexpr(32)


@triton.jit
def _noisy(z, heat, seed, position, choice, quads):
    """Scores of tokens 4 q .. 4 q + 3 for each q of quads [m, n]; z: their logits, fp32 [m, 4 n]."""
    return tl.div_rn(z, heat) + gumbel_of(philox_words(seed, position, choice, quads))


@triton.jit
def _magnitudes(scores, top, log_sum):
    log_probs = (scores - top) - log_sum
    bits = log_probs.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(log_probs == log_probs, bits, _NAN)


@triton.jit
def _kept(magnitudes, count):
    """Flags of the `count` smallest of a block, at ties the first places."""
    low = tl.min(magnitudes)
    high = tl.max(magnitudes)
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum((magnitudes <= middle).to(tl.int32))
        # At exactly `count` the search may end: nothing ties at such a cut, or all that does is kept.
        low = tl.where(reached < count, middle + 1, tl.where(reached == count, middle, low))
        high = tl.where(reached < count, high, middle)
    better = magnitudes < low
    tied = magnitudes == low
    room = count - tl.sum(better.to(tl.int32))
    return better | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))


@triton.jit
def _scan(
    logits,
    temperature,
    seeds,
    choices,
    bases,
    depth_limits,
    block_best,
    chunk_best,
    chunk_sum,
    depths,
    vocab,
    blocks,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1)
    session, depth = row // depths, row % depths
    if depth < tl.load(depth_limits + session):
        tiles: tl.constexpr = CHUNK // BLOCK
        block = chunk * tiles + tl.arange(0, tiles)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        scores = tl.load(
            logits + row.to(tl.int64) * vocab + token, mask=token < vocab, other=-float("inf")
        ).to(tl.float32)
        heat = tl.load(temperature + session)
        if heat >= _GREEDY_BELOW:
            quads = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
            position = tl.load(bases + session) + depth + 1
            scores = _noisy(
                scores, heat, tl.load(seeds + session), position, tl.load(choices + session), quads
            )
        best = tl.max(scores, axis=1)
        tl.store(block_best + row.to(tl.int64) * blocks + block, best, mask=block < blocks)
        top = tl.max(best)
        # An all-empty chunk adds nothing; a NaN makes the sum, and so the row, NaN.
        shift = tl.where(top == -float("inf"), 0.0, top)
        tl.store(chunk_best + row * chunks + chunk, top)
        tl.store(chunk_sum + row * chunks + chunk, tl.sum(tl.sum(tl.exp(scores - shift), axis=1)))


@triton.jit
def _select(
    logits,
    temperature,
    seeds,
    choices,
    bases,
    depth_limits,
    block_best,
    chunk_best,
    chunk_sum,
    scratch,
    log_probs_out,
    ids_out,
    depths,
    vocab,
    blocks,
    chunks,
    width,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    session, depth = row // depths, row % depths
    rank = tl.arange(0, WIDTH)
    out = row * width + rank
    if depth < tl.load(depth_limits + session):
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(chunk_best + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
        sums = tl.load(chunk_sum + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        top = tl.max(tops)
        log_sum = tl.log(tl.sum(sums * tl.exp(tops - top)))

        block = tl.arange(0, BLOCKS)
        maxima = tl.load(
            block_best + row.to(tl.int64) * blocks + block, mask=block < blocks, other=-float("inf")
        )
        magnitudes = tl.where(block < blocks, _magnitudes(maxima, top, log_sum), _NOTHING)
        keep = _kept(magnitudes, width)
        own = scratch + row.to(tl.int64) * 2 * WIDTH
        tl.store(own + tl.cumsum(keep.to(tl.int32), 0) - 1, block, mask=keep)
        tl.debug_barrier()
        block = tl.load(own + rank, mask=rank < width, other=blocks)

        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (block[:, None] < blocks) & (token < vocab)
        scores = tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=-float("inf")).to(
            tl.float32
        )
        heat = tl.load(temperature + session)
        if heat >= _GREEDY_BELOW:
            quads = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
            position = tl.load(bases + session) + depth + 1
            scores = _noisy(
                scores, heat, tl.load(seeds + session), position, tl.load(choices + session), quads
            )
        magnitudes = tl.where(inside, _magnitudes(scores, top, log_sum), _NOTHING)
        magnitudes = tl.reshape(magnitudes, (WIDTH * BLOCK,))
        token = tl.reshape(token, (WIDTH * BLOCK,))
        keep = _kept(magnitudes, width)
        place = tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all have read the blocks
        tl.store(own + place, magnitudes, mask=keep)
        tl.store(own + WIDTH + place, token, mask=keep)
        tl.debug_barrier()

        # The winners, in the order of their ids, are ranked by counting those before each.
        mine = tl.load(own + rank, mask=rank < width, other=_NOTHING)
        before = tl.zeros((WIDTH,), tl.int32)
        for start in range(0, WIDTH, _RANKED_AT_ONCE):
            other = start + tl.arange(0, _RANKED_AT_ONCE)
            theirs = tl.load(own + other, mask=other < width, other=_NOTHING)
            first = (theirs[None, :] < mine[:, None]) | (
                (theirs[None, :] == mine[:, None]) & (other[None, :] < rank[:, None])
            )
            before += tl.sum(first.to(tl.int32), axis=1)
        out = row * width + before
        sign = tl.where(mine == 0, 0, -2147483648)
        tl.store(log_probs_out + out, (mine | sign).to(tl.float32, bitcast=True), mask=rank < width)
        tl.store(ids_out + out, tl.load(own + WIDTH + rank, mask=rank < width), mask=rank < width)
    else:
        tl.store(log_probs_out + out, tl.full((WIDTH,), -float("inf"), tl.float32), mask=rank < width)
        tl.store(ids_out + out, tl.zeros((WIDTH,), tl.int32), mask=rank < width)


def block_size(vocab: int, width: int) -> int:
    """Tokens a block: about as many candidates among the chosen blocks as there are blocks."""
    return min(max(triton.next_power_of_2(math.isqrt(vocab // width) or 1), 16), 128)


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
    """kernels.marginals.top_candidates on the device."""
    sessions, depths, vocab = logits.shape
    rows, device = sessions * depths, logits.device
    logits = logits.contiguous()
    padded = max(triton.next_power_of_2(width), _RANKED_AT_ONCE.value)
    size = block_size(vocab, width)
    blocks, chunks = triton.cdiv(vocab, size), triton.cdiv(vocab, _CHUNK)
    block_best = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    chunk_best = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    chunk_sum = torch.empty_like(chunk_best)
    scratch = torch.empty(rows, 2, padded, dtype=torch.int32, device=device)
    log_probs = torch.empty(sessions, depths, width, dtype=torch.float32, device=device)
    ids = torch.empty(sessions, depths, width, dtype=torch.int32, device=device)
    if not rows:
        return Candidates(log_probs, ids)
    inputs = (logits, temperature, seeds, choices, bases, depth_limits, block_best, chunk_best, chunk_sum)
    _scan[(chunks, rows)](
        *inputs, depths, vocab, blocks, chunks, CHUNK=_CHUNK, BLOCK=size, num_warps=8, **UNFUSED
    )
    _select[(rows,)](
        *inputs,
        scratch,
        log_probs,
        ids,
        depths,
        vocab,
        blocks,
        chunks,
        width,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCKS=max(triton.next_power_of_2(blocks), padded),
        BLOCK=size,
        WIDTH=padded,
        num_warps=16 if padded * size >= 8192 else 8,
        **UNFUSED,
    )
    return Candidates(log_probs, ids)
