"""How the parts of a tile of ragged attention are left by their programs, and joined.

kernels/cuda/ragged_attention.py stores and launches; kernels/ragged_attention.py has what the buffers are.
All log-sum-exps are to the base 2, with the scale folded in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.attention_work import FIELDS


@triton.jit
def store_rows(into, partial, lse, state, live, acc, peak, total, column, split, HEAD_DIM: tl.constexpr):
    """A tile's rows: as a part's state if it has several, else as the result."""
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    present = live[:, None] & (column < HEAD_DIM)[None, :]
    if split:
        tl.store(partial + state[:, None] * HEAD_DIM + column[None, :], result, mask=present)
        tl.store(lse + state, tl.where(total > 0.0, peak + tl.log2(total), float("-inf")), mask=live)
    else:
        tl.store(into[:, None] + column[None, :], result.to(into.dtype.element_ty), mask=present)


@triton.jit
def merge(
    out,
    partial,
    lse,
    items,
    out_row,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MERGE_EARLY: tl.constexpr,
):
    number = tl.program_id(0)  # the tiles' first parts are the first items
    item = items + number * FIELDS
    session = tl.load(item)
    tile = tl.load(item + 1)
    place = tl.load(item + 4)
    parts = tl.load(item + 5)
    second = tl.load(item + 6)
    first_row = tl.load(item + 7)
    count = tl.load(item + 8)
    stride = tl.load(item + 10)
    if MERGE_EARLY:
        # In every program: whoever comes after this kernel relies on the one before being over.
        tl.extra.cuda.gdc_wait()
    if (session < 0) | (place != 0) | (parts <= 1):
        return
    kv = tl.program_id(1)
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    packed = tile * TILE + in_tile
    live = packed // GROUP < count
    if tl.max(live.to(tl.int32), 0) == 0:
        return
    column = tl.arange(0, WIDTH)
    inside = column < HEAD_DIM
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, parts, PARTS):
        # [ROWS, PARTS]: Triton gives each row to a warp, so that sums over parts stay within threads.
        part = (start + tl.arange(0, PARTS))[None, :]
        at = tl.where(part == 0, number, second + (part - 1) * stride)
        state = (at * KV_HEADS + kv).to(tl.int64) * TILE + in_tile[:, None]
        valid = live[:, None] & (part < parts)
        share = tl.load(lse + state, mask=valid, other=float("-inf"))
        # A part without keys stored zeros.
        into = partial + state[:, :, None] * HEAD_DIM + column[None, None, :]
        result = tl.load(into, mask=valid[:, :, None] & inside[None, None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(share, 1))
        against = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(share - against[:, None])
        shrink = tl.exp2(peak - against)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * result, 1)
        total = total * shrink + tl.sum(weight, 1)
        peak = higher
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    row = (first_row + packed // GROUP).to(tl.int64)
    head = kv * GROUP + packed % GROUP
    into = out + (row * out_row + head * out_head)[:, None] + column[None, :]
    tl.store(into, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
