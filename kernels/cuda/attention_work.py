"""The work items of ragged attention, made on the device: which program computes what in this pass.

kernels/ragged_attention.py says what an item is for; kernels/cuda/ragged_attention.py reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.ragged import RaggedBatch
    from kernels.ragged_attention import AttentionWorkspace

# A work item, int32 [16]: session (-1: nothing to do; the number of sessions: padding rows), tile within the
# session, first block and number of blocks of its part, part, parts of the tile, item of the tile's second
# part, first row and rows of the session, its length, its tiles (the item of the third part lies so
# far behind the second's, and so on). First come all tiles' first parts: merging has a program for each.
FIELDS = tl.constexpr(16)
_PROGRAM_ITEMS = 32  # items a planning program writes
_FEW_SESSIONS = 64  # up to so many, all passes share one compiled kernel
# Sizes of a pass and its tiles: as constants they would have the kernel compiled anew while streams wait.
_VARYING = ["rows", "sessions", "slots", "capacity", "part_cost", "block_m", "block_n", "min_blocks"]


def plan(batch: RaggedBatch, workspace: AttentionWorkspace) -> None:
    """Fill workspace.items for this batch."""
    windows, slots = workspace.items.shape[:2]
    tiling = workspace.tiling
    _plan[(triton.cdiv(slots, _PROGRAM_ITEMS), windows)](
        batch.row_start,
        batch.lengths,
        workspace.items,
        workspace.bounds,
        batch.rows,
        batch.sessions,
        slots,
        workspace.capacity,
        tiling.part_cost,
        tiling.block_m,
        tiling.block_n,
        tiling.min_blocks,
        GROUP=workspace.heads // workspace.kv_heads,
        PAGE=workspace.page_size,
        SPLITS=workspace.splits,
        SESSIONS=max(_FEW_SESSIONS, triton.next_power_of_2(batch.sessions + 1)),
        ITEMS=_PROGRAM_ITEMS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=_VARYING)
def _plan(
    row_start,
    lengths,
    items,
    bounds,
    rows,
    sessions,
    slots,
    capacity,
    part_cost,
    block_m,
    block_n,
    min_blocks,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SESSIONS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    variant = tl.program_id(1)
    reach = tl.load(bounds + 2 * variant)
    context = tl.load(bounds + 2 * variant + 1)
    # Session number `sessions` is the padding rows: tiles without keys, which write zeros.
    s = tl.arange(0, SESSIONS)
    first = tl.load(row_start + s, mask=s <= sessions, other=rows)
    end = tl.load(row_start + 1 + s, mask=s < sessions, other=rows)
    length = tl.load(lengths + s, mask=s < sessions, other=0)
    count = end - first
    low = tl.maximum(tl.maximum(length - reach + 1, length - context), 0)
    low = low // PAGE * PAGE
    # At least what any tile of the session sees; parts past a tile's own end do nothing.
    line = (length - low + count + block_n - 1) // block_n
    line = tl.where(s < sessions, line, 0)
    tiles = (count * GROUP + block_m - 1) // block_m
    if SPLITS:
        # How many blocks a part has: the number that ends first, of parts that fill the device once to four
        # times, and of somewhat longer ones, whose number may divide the tiles better. Parts of the first
        # kind always fit the slots, which are the tiles and at least the capacity.
        total = tl.sum(tiles * line, 0)
        k = tl.arange(0, 32)
        rounds = k // 8 + 1
        size = (total + capacity * rounds - 1) // (capacity * rounds)
        size = tl.maximum((size * (8 + k % 8) + 7) // 8, min_blocks)
        each = tl.maximum((line[None, :] + size[:, None] - 1) // size[:, None], 1)
        number = tl.sum(each * tiles[None, :], 1)
        cost = (number + capacity - 1) // capacity * (size + part_cost)
        cost = tl.where(number > slots, 2147483647, cost)
        size = tl.max(tl.where(cost == tl.min(cost, 0), size, 0), 0)
        parts = tl.maximum((line + size - 1) // size, 1)
    else:
        parts = tl.full((SESSIONS,), 1, tl.int32)
    blocks = (line + parts - 1) // parts
    after = tl.cumsum(tiles, 0)
    all_tiles = tl.sum(tiles, 0)
    later = tiles * (parts - 1)
    later_after = all_tiles + tl.cumsum(later, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    opens = item < all_tiles
    ends = tl.where(opens[:, None], after[None, :], later_after[None, :])
    session = tl.sum((ends <= item[:, None]).to(tl.int32), 1)
    own = session[:, None] == s[None, :]
    there = session <= sessions
    own_tiles = tl.maximum(_of(own, tiles), 1)
    own_blocks = _of(own, blocks)
    second = _of(own, later_after - later)
    rank = tl.where(opens, item - _of(own, after - tiles), item - second)
    part = tl.where(opens, 0, 1 + rank // own_tiles)
    rank = rank % own_tiles
    into = items + (variant * slots + item) * FIELDS
    write = item < slots
    tl.store(into, tl.where(there, session, -1), mask=write)
    # The last tiles of a chain have the longest lines: they start first.
    tl.store(into + 1, own_tiles - 1 - rank, mask=write)
    tl.store(into + 2, part * own_blocks, mask=write)
    tl.store(into + 3, own_blocks, mask=write)
    tl.store(into + 4, part, mask=write)
    tl.store(into + 5, _of(own, parts), mask=write)
    tl.store(into + 6, second + rank, mask=write)
    tl.store(into + 7, _of(own, first), mask=write)
    tl.store(into + 8, _of(own, count), mask=write)
    tl.store(into + 9, _of(own, length), mask=write)
    tl.store(into + 10, own_tiles, mask=write)


@triton.jit
def _of(own, values):
    """The values [S] of the sessions that own [I, S] picks."""
    return tl.sum(tl.where(own, values[None, :], 0), 1)
