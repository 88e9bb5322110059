"""Where a pass's accepted rows go: K/V from staging into the pages, hidden states into the channel's ring.

Owns the two copies, each one launch for all layers and sessions. Which row is accepted, and where it goes,
comes as tensors on the same device, so nothing here waits for the host (on a GPU); choosing is the services'
matter. `path` int32 [R] gives each packed row its distance from its segment's first row along the accepted
path, and -1 for rejected and padding rows. The Triton versions are in kernels/cuda/commit.py.
"""

from __future__ import annotations

import torch

from kernels import cuda


def commit_rows(
    pages: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor, path: torch.Tensor | None = None
) -> None:
    """pages[:, slots[r]] = staged[:, r] for every row r with slots[r] >= 0 and path[r] >= 0.

    pages [planes, num_slots, width] (K and V of every layer are a plane each; slot = page * page_size +
    offset); staged [planes, at least R, width], of the same dtype, both with contiguous rows; slots, path
    int32 or int64 [R]; path None: all rows are accepted. Slots of accepted rows must be distinct and below
    num_slots.
    """
    if cuda.takes(pages):
        from kernels.cuda import commit as triton_commit

        triton_commit.commit_rows(pages, staged, slots, slots if path is None else path)
        return
    commit_rows_reference(pages, staged, slots, path)


def commit_rows_reference(
    pages: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor, path: torch.Tensor | None = None
) -> None:
    """The same in torch, and what a CPU runs."""
    accepted = slots >= 0 if path is None else (slots >= 0) & (path >= 0)
    rows = accepted.nonzero().view(-1)
    pages.index_copy_(1, slots.index_select(0, rows).long(), staged.index_select(1, rows))


def publish_rows(
    taps: torch.Tensor,
    ring: torch.Tensor,
    *,
    first_slot: torch.Tensor,
    skip: torch.Tensor,
    row_start: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """ring[first_slot[s] + path[r] - skip[s]] = taps[r] for every row r of a session s with room in the ring
    (first_slot[s] >= 0) that is accepted and not among the first skip[s] >= 0 of its path.

    taps [R, width]; ring [ring_slots, width], of any float dtype, both with contiguous rows. All int32 or
    int64: first_slot, skip [S]; row_start [S + 1], rows [row_start[s], row_start[s + 1]) belong to session s,
    those from row_start[S] on to none; path [R]. Slots past the ring's end are left out: a session's
    reservation never wraps around.
    """
    if cuda.takes(taps) and ring.dtype in cuda.DTYPES:
        from kernels.cuda import commit as triton_commit

        publish = triton_commit.publish_rows
    else:
        publish = publish_rows_reference
    publish(taps, ring, first_slot=first_slot, skip=skip, row_start=row_start, path=path)


def publish_rows_reference(
    taps: torch.Tensor,
    ring: torch.Tensor,
    *,
    first_slot: torch.Tensor,
    skip: torch.Tensor,
    row_start: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """The same in torch, and what a CPU runs."""
    numbers = torch.arange(taps.shape[0], dtype=row_start.dtype, device=taps.device)
    owner = torch.searchsorted(row_start[1:], numbers, right=True)
    owned = owner < first_slot.shape[0]
    owner = owner.where(owned, 0)
    room, skipped = first_slot.index_select(0, owner), skip.index_select(0, owner)
    slots = room + path - skipped
    rows = (owned & (room >= 0) & (path >= skipped) & (slots < ring.shape[0])).nonzero().view(-1)
    ring.index_copy_(0, slots.index_select(0, rows).long(), taps.index_select(0, rows).to(ring.dtype))
