"""What a program of ragged attention does with a block of keys: loads it, says who sees it, adds it to a
running softmax.

kernels/cuda/ragged_attention.py calls these. Peaks are to the base 2, with the scale folded in.
"""

from __future__ import annotations

import triton
import triton.language as tl

TREE = tl.constexpr(0)
CHAIN = tl.constexpr(1)
BLOCK = tl.constexpr(2)


@triton.jit
def add_block(q, k, v, acc, peak, total, scale, visible, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys k, v [N, d] more for a tile's running softmax (acc [M, d], peak, total [M])."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet: any finite peak gives it weights of 0, not NaN.
        against = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - against[:, None])
        shrink = tl.exp2(peak - against)
    else:
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def rows_of(packed, kv, first_row, count, GROUP: tl.constexpr):
    """Of packed rows x heads [M]: row within the session, whether there is one, row of the pass, head."""
    local = packed // GROUP
    return local, local < count, (first_row + local).to(tl.int64), kv * GROUP + packed % GROUP


@triton.jit
def load_queries(q_rows, at, live, column, HEAD_DIM: tl.constexpr):
    """[M, WIDTH], zeros where there is none."""
    present = live[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(q_rows + at[:, None] + column[None, :], mask=present, other=0.0)


@triton.jit
def visible(own, local, live, kind, words, first_k, local_k, M: tl.constexpr, N: tl.constexpr):
    """bool [M, N]: which keys rows see: all of the context (local_k < 0), of the session's rows by kind."""
    sees = tree_bits(own, live & (kind == TREE), words, first_k, M, N) != 0
    sees = sees | ((kind == CHAIN) & (local_k[None, :] <= local[:, None])) | (kind == BLOCK)
    return sees | (local_k < 0)[None, :]


@triton.jit
def within_window(position, row_low, position_k, context, key, reach):
    """bool [M, N]: which keys rows' windows reach."""
    gap = position[:, None] - position_k[None, :]
    near = tl.maximum(gap, -gap) < reach
    return tl.where(context[None, :], key[None, :] >= row_low[:, None], near)


@triton.jit
def load_rows(at, column, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[N, WIDTH] at the pointers at [N], zeros past HEAD_DIM."""
    if HEAD_DIM == WIDTH:
        return tl.load(at[:, None] + column[None, :])
    return tl.load(at[:, None] + column[None, :], mask=column[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def page_ids(table, start, block, within, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """[BLOCK_N]: the pages of a block's context rows. start: of the line, a multiple of PAGE."""
    return tl.load(table + (start + block * BLOCK_N + within) // PAGE)


@triton.jit
def load_context(
    base,
    pages,
    block,
    within,
    column,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[BLOCK_N, WIDTH]: a block's context rows out of their pages [BLOCK_N]; zeros past HEAD_DIM. One of PAGE
    and BLOCK_N divides the other (Tiling.check_pages).

    Unless pages are longer than blocks, a thread's rows are at the same place of their pages in every block,
    so that all but the pages' part of their addresses is worked out once, before the loop.
    """
    BLOCKS: tl.constexpr = PAGE // BLOCK_N if PAGE > BLOCK_N else 1  # of a page
    slot = (block % BLOCKS * BLOCK_N + within) % PAGE
    place = base + (slot * SLOT_STRIDE)[:, None] + column[None, :]
    at = place + (pages.to(tl.uint32).to(tl.int64) * PAGE_STRIDE)[:, None]
    if HEAD_DIM == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=column[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def tree_bits(own, tree, words, first_k, M: tl.constexpr, N: tl.constexpr):
    """int32 [M, N]: whether rows, whose words of the ancestor bitmask are at own [M], see the session's rows
    first_k + [0, N). tree [M]: which rows have such words."""
    column = tl.arange(0, N)
    word = first_k >> 5
    bits = tl.zeros((M, N), tl.int32)
    low = tl.load(own + word, mask=tree & (word >= 0) & (word < words), other=0).to(tl.uint32)
    for w in tl.static_range(N // 32):
        at = word + w + 1
        high = tl.load(own + at, mask=tree & (at >= 0) & (at < words), other=0).to(tl.uint32)
        # 32 bits from first_k + 32 w on, out of two words.
        both = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> (first_k & 31).to(tl.uint64)
        bits = tl.where((column // 32 == w)[None, :], both.to(tl.int32)[:, None], bits)
        low = high
    return (bits >> (column % 32)[None, :]) & 1
