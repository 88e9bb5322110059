"""Triton commit and publish: copies of whole rows, whose programs leave at once where a row is not accepted.

See kernels.commit. Rows are read and written 16 bytes a thread where width and strides are multiples of that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
"""Columns that a program copies at a time."""
_PLANES = 4
"""Planes that a program copies of one row."""
_PUBLISHED = 2048
"""Columns of a published row that a program copies."""


def commit_rows(pages: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor, path: torch.Tensor) -> None:
    """See kernels.commit.commit_rows. Raises ValueError where pages and staged don't fit together."""
    planes, _, width = pages.shape
    if pages.dtype != staged.dtype or (planes, width) != (staged.shape[0], staged.shape[2]):
        raise ValueError(
            f"pages {list(pages.shape)} {pages.dtype} and staged {list(staged.shape)} {staged.dtype} must "
            "have planes, width and dtype in common"
        )
    _need_rows("pages", pages)
    _need_rows("staged", staged)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _commit[(slots.shape[0], triton.cdiv(planes, _PLANES))](
        pages,
        staged,
        slots,
        path,
        planes,
        pages.stride(0),
        pages.stride(1),
        staged.stride(0),
        staged.stride(1),
        WIDTH=width,
        BLOCK=block,
        PLANES=_PLANES,
        num_warps=max(1, min(4, _PLANES * block // 256)),
    )


def publish_rows(
    taps: torch.Tensor,
    ring: torch.Tensor,
    *,
    first_slot: torch.Tensor,
    skip: torch.Tensor,
    row_start: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """See kernels.commit.publish_rows. Raises ValueError where taps and ring differ in width."""
    rows, width = taps.shape
    if width != ring.shape[1]:
        raise ValueError(f"taps have {width} columns, the ring has {ring.shape[1]}")
    _need_rows("taps", taps)
    _need_rows("ring", ring)
    sessions = first_slot.shape[0]
    block = min(_PUBLISHED, triton.next_power_of_2(width))
    _publish[(rows, triton.cdiv(width, block))](
        taps,
        ring,
        first_slot,
        skip,
        row_start,
        path,
        ring.shape[0],
        taps.stride(0),
        ring.stride(0),
        sessions,
        SESSION_BLOCK=max(64, triton.next_power_of_2(sessions)),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )


def _need_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its rows must be contiguous")


@triton.jit(do_not_specialize=["planes"])
def _commit(
    pages,
    staged,
    slots,
    path,
    planes,
    pages_plane,
    pages_slot,
    staged_plane,
    staged_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(path + row) >= 0) & (slot >= 0):
        plane = tl.program_id(1) * PLANES + tl.arange(0, PLANES).to(tl.int64)
        source = staged + row.to(tl.int64) * staged_row + (plane * staged_plane)[:, None]
        target = pages + slot * pages_slot + (plane * pages_plane)[:, None]
        for first in tl.static_range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            live = (plane < planes)[:, None] & (column < WIDTH)[None, :]
            copied = tl.load(source + column[None, :], mask=live)
            tl.store(target + column[None, :], copied, mask=live)


@triton.jit(do_not_specialize=["ring_slots", "sessions"])
def _publish(
    taps,
    ring,
    first_slot,
    skip,
    row_start,
    path,
    ring_slots,
    taps_row,
    ring_slot,
    sessions,
    SESSION_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    step = tl.load(path + row)
    if step >= 0:
        # The row's session: as many as end at or before it. Past the last one: a padding row.
        session = tl.arange(0, SESSION_BLOCK)
        ends = tl.load(row_start + 1 + session, mask=session < sessions, other=0)
        owner = tl.sum(((ends <= row) & (session < sessions)).to(tl.int32), axis=0)
        owned = owner < sessions
        room = tl.load(first_slot + owner, mask=owned, other=-1).to(tl.int64)
        skipped = tl.load(skip + owner, mask=owned, other=0)
        slot = room + step - skipped
        if (room >= 0) & (step >= skipped) & (slot < ring_slots):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            live = column < WIDTH
            copied = tl.load(taps + row.to(tl.int64) * taps_row + column, mask=live)
            tl.store(ring + slot * ring_slot + column, copied.to(ring.dtype.element_ty), mask=live)
