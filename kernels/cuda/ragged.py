"""ancestor_words in Triton: every row walks up to its root, at most the tree's depth of dependent loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32  # rows a program


def ancestor_words(
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor | None,
    *,
    words: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """kernels.ragged.ancestor_words on the device."""
    rows, sessions = parents.shape[0], row_start.shape[0] - 1
    if out is None:
        out = torch.empty(rows, words, dtype=torch.int32, device=parents.device)
    _ancestor_words[(triton.cdiv(rows, _ROWS),)](
        parents,
        row_start,
        row_start if kinds is None else kinds,
        out,
        rows,
        sessions,
        words,
        ALL_TREES=kinds is None,
        ROWS=_ROWS,
        SESSIONS=max(64, triton.next_power_of_2(sessions)),
        WORDS=triton.next_power_of_2(words),
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["rows", "sessions", "words"])
def _ancestor_words(
    parents,
    row_start,
    kinds,
    out,
    rows,
    sessions,
    words,
    ALL_TREES: tl.constexpr,
    ROWS: tl.constexpr,
    SESSIONS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, SESSIONS)
    ends = tl.load(row_start + 1 + each, mask=each < sessions, other=2147483647)
    session = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    # A padding row lies behind all ends.
    real = (row < rows) & (session < sessions)
    first = tl.load(row_start + session, mask=real, other=0)
    if not ALL_TREES:
        real = real & (tl.load(kinds + session, mask=real, other=1) == 0)
    column = tl.arange(0, WORDS)
    seen = tl.zeros((ROWS, WORDS), tl.int32)
    at = tl.where(real, row, -1)
    while tl.max(at, 0) >= 0:
        bit = tl.where(at >= 0, at - first, -1)
        own = (column[None, :] == (bit >> 5)[:, None]) & (bit >= 0)[:, None]
        seen |= tl.where(own, (tl.full((ROWS,), 1, tl.int32) << (bit & 31))[:, None], 0)
        parent = tl.load(parents + at, mask=at >= 0, other=-1)
        # A parent comes first; anything else would never end.
        at = tl.where((parent < at) & (parent >= first), parent, -1)
    into = (row[:, None] < rows) & (column[None, :] < words)
    tl.store(out + row[:, None] * words + column[None, :], seen, mask=into)
