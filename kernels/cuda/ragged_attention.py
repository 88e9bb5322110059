"""ragged_attention in Triton: the attention of one work item, and the merge of parts.

kernels/ragged_attention.py has the op's contract and how the pieces fit together; attention_work.py makes the
items. All log-sum-exps here are to the base 2, with the scale folded in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from kernels.cuda.attention_work import FIELDS

if TYPE_CHECKING:
    from kernels.ragged import RaggedBatch
    from kernels.ragged_attention import AttentionWorkspace

__all__ = ["OutOfResources", "attend"]

_TREE = tl.constexpr(0)
_CHAIN = tl.constexpr(1)
_BLOCK = tl.constexpr(2)


def attend(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: RaggedBatch,
    workspace: AttentionWorkspace,
    number: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """kernels.ragged_attention.ragged_attention into out, under window `number` of the workspace."""
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = k_new.shape[1], k_pages.shape[1]
    made_for = (workspace.heads, workspace.kv_heads, workspace.head_dim, workspace.page_size)
    if (heads, kv_heads, head_dim, page_size) != made_for:
        raise ValueError(
            f"{heads} heads, {kv_heads} KV heads, head_dim {head_dim}, page_size {page_size} do not fit the "
            f"workspace's {made_for}"
        )
    for name, x in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_pages", k_pages), ("v_pages", v_pages)):
        if x.stride(-1) != 1 or x.dtype != q.dtype:
            raise ValueError(f"{name} must have a contiguous last dimension and q's dtype {q.dtype}")
    tiling, window = workspace.tiling, workspace.windows[number]
    items = workspace.items[number]
    width = max(16, triton.next_power_of_2(head_dim))
    _attend[(workspace.slots * kv_heads,)](
        q,
        k_new,
        v_new,
        k_pages,
        v_pages,
        out,
        workspace.partial,
        workspace.lse,
        items,
        workspace.bounds[number],
        batch.page_table,
        batch.positions,
        batch.ancestors,
        batch.kinds,
        batch.sessions,
        *q.stride()[:2],
        *k_new.stride()[:2],
        *v_new.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        *out.stride()[:2],
        batch.page_table.stride(0),
        batch.ancestors.shape[1],
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE=page_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        STAGES=tiling.num_stages,
        WINDOWED=window.rows is not None or window.context is not None,
        CHAINS=batch.chains,
        SPLITS=workspace.splits,
        MERGE_EARLY=workspace.merge_early,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if not workspace.splits:
        return
    _merge[(workspace.tiles, kv_heads, tiling.block_m // tiling.merge_rows)](
        out,
        workspace.partial,
        workspace.lse,
        items,
        *out.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_M=tiling.block_m,
        ROWS=tiling.merge_rows,
        PARTS=tiling.merge_parts,
        MERGE_EARLY=workspace.merge_early,
        num_warps=4,
        **({"launch_pdl": True} if workspace.merge_early else {}),
    )


@triton.jit
def _add_block(q, k, v, acc, peak, total, scale, visible, MASKED: tl.constexpr, PRECISION: tl.constexpr):
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
def _load_rows(at, column, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[N, WIDTH] at the pointers at [N], zeros past HEAD_DIM."""
    if HEAD_DIM == WIDTH:
        return tl.load(at[:, None] + column[None, :])
    return tl.load(at[:, None] + column[None, :], mask=column[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def _tree_bits(own, tree, words, first_k, M: tl.constexpr, N: tl.constexpr):
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


@triton.jit
def _attend(
    q_rows,
    k_new,
    v_new,
    k_pages,
    v_pages,
    out,
    partial,
    lse,
    items,
    bounds,
    page_table,
    positions,
    ancestors,
    kinds,
    sessions,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    kp_page,
    kp_slot,
    kp_head,
    vp_page,
    vp_slot,
    vp_head,
    out_row,
    out_head,
    table_width,
    words,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHAINS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE_EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if SPLITS and MERGE_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbours are the heads of an item, then the tiles of the same keys: items that there are come first.
    kv = tl.program_id(0) % KV_HEADS
    number = tl.program_id(0) // KV_HEADS
    # All loads before the first branch, so that they are under way together.
    item = items + number * FIELDS
    session = tl.load(item)
    tile = tl.load(item + 1)
    begin = tl.load(item + 2)
    blocks = tl.load(item + 3)
    parts = tl.load(item + 5)
    first_row = tl.load(item + 7)
    count = tl.load(item + 8)
    length = tl.load(item + 9)
    # Not in the item: layers of one pass may differ in it. Padding rows are of no session.
    kind = tl.load(kinds + session, mask=(session >= 0) & (session < sessions), other=0)
    if session < 0:
        return
    base = tile * BLOCK_M
    packed = base + tl.arange(0, BLOCK_M)
    local = packed // GROUP
    live = local < count
    row = (first_row + local).to(tl.int64)
    head = kv * GROUP + packed % GROUP
    column = tl.arange(0, WIDTH)
    present = live[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_rows + (row * q_row + head * q_head)[:, None] + column[None, :], mask=present, other=0.0)

    # The tile's line: context positions from `start` to length, then the session's rows up to new_end.
    tile_first = base // GROUP
    new_end = count
    if kind == _CHAIN:
        new_end = tl.minimum((base + BLOCK_M - 1) // GROUP + 1, count)
    start = 0
    full = 0  # all rows see the context from here on
    if WINDOWED:
        reach = tl.load(bounds)
        oldest = length - tl.load(bounds + 1)
        ahead = 0
        if kind == _CHAIN:
            ahead = tile_first
        # Under a window that hides the context, a chain's line may start among its own rows.
        low = tl.maximum(length + ahead - reach + 1, 0)
        start = tl.maximum(low, tl.minimum(oldest, length)) // PAGE * PAGE
        position = tl.load(positions + row, mask=live, other=0)
        row_low = tl.maximum(position - reach + 1, oldest)
        full = tl.max(tl.where(live, row_low, 0), 0)
    end = tl.minimum(begin + blocks, (length + new_end - start + BLOCK_N - 1) // BLOCK_N)
    end = tl.maximum(end, begin)
    # Blocks that need no mask: of context, and of a chain's rows that come before all of the tile's.
    plain = tl.minimum(tl.maximum((tl.maximum(full - start, 0) + BLOCK_N - 1) // BLOCK_N, begin), end)
    plain_end = tl.minimum(tl.maximum(tl.maximum(length - start, 0) // BLOCK_N, plain), end)
    own = plain_end
    own_end = plain_end
    if CHAINS and not WINDOWED:
        own = tl.minimum(tl.maximum((length + BLOCK_N - 1) // BLOCK_N, plain_end), end)
        own_end = tl.where(kind == _CHAIN, (length + tile_first + 1) // BLOCK_N, 0)
        own_end = tl.minimum(tl.maximum(own_end, own), end)

    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    within = tl.arange(0, BLOCK_N)
    table = page_table + session.to(tl.int64) * table_width
    k_context = k_pages + kv * kp_head
    v_context = v_pages + kv * vp_head
    k_base = k_new + kv * k_head
    v_base = v_new + kv * v_head

    # Triton halves the stages of a loop whose loads depend on loads: page ids are fetched ahead of rows.
    PAGED_STAGES: tl.constexpr = 2 * STAGES - 1
    for block in tl.range(plain, plain_end, num_stages=PAGED_STAGES):
        key = start + block * BLOCK_N + within
        page = tl.load(table + key // PAGE).to(tl.int64)
        k = _load_rows(k_context + (page * kp_page + key % PAGE * kp_slot), column, HEAD_DIM, WIDTH)
        v = _load_rows(v_context + (page * vp_page + key % PAGE * vp_slot), column, HEAD_DIM, WIDTH)
        acc, peak, total = _add_block(q, k, v, acc, peak, total, scale, None, False, PRECISION)
    if CHAINS and not WINDOWED:
        for block in tl.range(own, own_end, num_stages=STAGES):
            key = (first_row - length + block * BLOCK_N + within).to(tl.int64)
            k = _load_rows(k_base + key * k_row, column, HEAD_DIM, WIDTH)
            v = _load_rows(v_base + key * v_row, column, HEAD_DIM, WIDTH)
            acc, peak, total = _add_block(q, k, v, acc, peak, total, scale, None, False, PRECISION)
    # All other blocks of the part. One may hold the end of the context and the first of the rows.
    for i in tl.range(0, end - begin - (plain_end - plain) - (own_end - own), num_stages=STAGES):
        block = begin + i
        block += tl.where(block >= plain, plain_end - plain, 0)
        block += tl.where(block >= own, own_end - own, 0)
        first_k = start + block * BLOCK_N - length
        local_k = first_k + within
        context = local_k < 0
        key = tl.where(context, length + local_k, 0)
        page = tl.load(table + key // PAGE, mask=context, other=0).to(tl.int64)
        new = (first_row + tl.minimum(tl.maximum(local_k, 0), count - 1)).to(tl.int64)
        k_at = tl.where(context, k_context + (page * kp_page + key % PAGE * kp_slot), k_base + new * k_row)
        v_at = tl.where(context, v_context + (page * vp_page + key % PAGE * vp_slot), v_base + new * v_row)
        k = _load_rows(k_at, column, HEAD_DIM, WIDTH)
        v = _load_rows(v_at, column, HEAD_DIM, WIDTH)
        sees = (
            _tree_bits(ancestors + row * words, live & (kind == _TREE), words, first_k, BLOCK_M, BLOCK_N) != 0
        )
        sees = sees | ((kind == _CHAIN) & (local_k[None, :] <= local[:, None])) | (kind == _BLOCK)
        sees = (sees | context[None, :]) & (local_k < count)[None, :]
        if WINDOWED:
            gap = position[:, None] - tl.load(positions + new)[None, :]
            near = tl.maximum(gap, -gap) < reach
            sees = sees & tl.where(context[None, :], key[None, :] >= row_low[:, None], near)
        acc, peak, total = _add_block(q, k, v, acc, peak, total, scale, sees, True, PRECISION)

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS and parts > 1:
        state = ((number * KV_HEADS + kv) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
        tl.store(partial + state[:, None] * HEAD_DIM + column[None, :], result, mask=present)
        tl.store(lse + state, tl.where(total > 0.0, peak + tl.log2(total), float("-inf")), mask=live)
    else:
        into = out + (row * out_row + head * out_head)[:, None] + column[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=present)


@triton.jit
def _merge(
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
    BLOCK_M: tl.constexpr,
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
    packed = tile * BLOCK_M + in_tile
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
        state = (at * KV_HEADS + kv).to(tl.int64) * BLOCK_M + in_tile[:, None]
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
