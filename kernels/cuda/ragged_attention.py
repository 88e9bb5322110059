"""ragged_attention in Triton: the attention of one work item, and the launches of a layer.

kernels/ragged_attention.py has the op's contract and how the pieces fit together; attention_work.py makes the
items, attention_blocks.py is what a program does with a block of keys, attention_merge.py joins parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from kernels.cuda.attention_blocks import (
    CHAIN,
    add_block,
    load_context,
    load_queries,
    load_rows,
    page_ids,
    rows_of,
    visible,
    within_window,
)
from kernels.cuda.attention_merge import merge, store_rows
from kernels.cuda.attention_work import FIELDS

if TYPE_CHECKING:
    from kernels.ragged import RaggedBatch
    from kernels.ragged_attention import AttentionWorkspace

__all__ = ["OutOfResources", "attend"]


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
        *out.stride()[:2],
        batch.page_table.stride(0),
        batch.ancestors.shape[1],
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE=page_size,
        K_PAGE=k_pages.stride(0),
        K_SLOT=k_pages.stride(1),
        K_HEAD=k_pages.stride(2),
        V_PAGE=v_pages.stride(0),
        V_SLOT=v_pages.stride(1),
        V_HEAD=v_pages.stride(2),
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
    merge[(workspace.tiles, kv_heads, tiling.block_m // tiling.merge_rows)](
        out,
        workspace.partial,
        workspace.lse,
        items,
        *out.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        TILE=tiling.block_m,
        ROWS=tiling.merge_rows,
        PARTS=tiling.merge_parts,
        MERGE_EARLY=workspace.merge_early,
        num_warps=4,
        **({"launch_pdl": True} if workspace.merge_early else {}),
    )


@triton.jit(do_not_specialize=["table_width", "words"])
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
    K_PAGE: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
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
    column = tl.arange(0, WIDTH)
    local, live, row, head = rows_of(base + tl.arange(0, BLOCK_M), kv, first_row, count, GROUP)
    q = load_queries(q_rows, row * q_row + head * q_head, live, column, HEAD_DIM)
    # The tile's line: context positions from `start` to length, then the session's rows up to new_end.
    tile_first = base // GROUP
    new_end = count
    if kind == CHAIN:
        new_end = tl.minimum((base + BLOCK_M - 1) // GROUP + 1, count)
    start = 0
    full = 0  # all rows see the context from here on
    if WINDOWED:
        reach = tl.load(bounds)
        oldest = length - tl.load(bounds + 1)
        ahead = 0
        if kind == CHAIN:
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
        own_end = tl.where(kind == CHAIN, (length + tile_first + 1) // BLOCK_N, 0)
        own_end = tl.minimum(tl.maximum(own_end, own), end)

    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    within = tl.arange(0, BLOCK_N)
    table = page_table + session.to(tl.int64) * table_width
    k_context = k_pages + kv * K_HEAD
    v_context = v_pages + kv * V_HEAD
    k_base = k_new + kv * k_head
    v_base = v_new + kv * v_head

    # A block's page ids are loaded an iteration before its rows, so that no load waits for another one.
    pages = tl.zeros((BLOCK_N,), tl.int32)
    if plain < plain_end:
        pages = page_ids(table, start, plain, within, BLOCK_N, PAGE)
    for block in tl.range(plain, plain_end, num_stages=STAGES):
        k = load_context(
            k_context, pages, block, within, column, K_PAGE, K_SLOT, PAGE, BLOCK_N, HEAD_DIM, WIDTH
        )
        v = load_context(
            v_context, pages, block, within, column, V_PAGE, V_SLOT, PAGE, BLOCK_N, HEAD_DIM, WIDTH
        )
        following = tl.minimum(block + 1, plain_end - 1)
        pages = page_ids(table, start, following, within, BLOCK_N, PAGE)
        acc, peak, total = add_block(q, k, v, acc, peak, total, scale, None, False, PRECISION)
    if CHAINS and not WINDOWED:
        for block in tl.range(own, own_end, num_stages=STAGES):
            key = (first_row - length + block * BLOCK_N + within).to(tl.int64)
            k = load_rows(k_base + key * k_row, column, HEAD_DIM, WIDTH)
            v = load_rows(v_base + key * v_row, column, HEAD_DIM, WIDTH)
            acc, peak, total = add_block(q, k, v, acc, peak, total, scale, None, False, PRECISION)
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
        k_at = tl.where(context, k_context + (page * K_PAGE + key % PAGE * K_SLOT), k_base + new * k_row)
        v_at = tl.where(context, v_context + (page * V_PAGE + key % PAGE * V_SLOT), v_base + new * v_row)
        k = load_rows(k_at, column, HEAD_DIM, WIDTH)
        v = load_rows(v_at, column, HEAD_DIM, WIDTH)
        there = local_k < count
        sees = visible(ancestors + row * words, local, live, kind, words, first_k, local_k, BLOCK_M, BLOCK_N)
        sees &= there[None, :]
        if WINDOWED:
            position_k = tl.load(positions + new)
            sees &= within_window(position, row_low, position_k, context, key, reach)
        acc, peak, total = add_block(q, k, v, acc, peak, total, scale, sees, True, PRECISION)
    split = SPLITS and parts > 1
    state = ((number * KV_HEADS + kv) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    into = out + (row * out_row + head * out_head)
    store_rows(into, partial, lse, state, live, acc, peak, total, column, split, HEAD_DIM)
