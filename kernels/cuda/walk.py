"""walk_rows in Triton: one program a session, its tree in registers, one reduction a level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ragged import TREE

_TREE = tl.constexpr(TREE)
_BLOCK = 128  # rows at a time where they are only numbered


@triton.jit(do_not_specialize=["sessions", "rows"])
def _walk(
    chosen, tokens, parents, row_start, kinds, path, sessions, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    session = tl.program_id(0)
    first = tl.load(row_start + session)
    if session == sessions:
        row = first + tl.arange(0, BLOCK)
        while first < rows:
            tl.store(path + row, tl.full((BLOCK,), -1, tl.int32), mask=row < rows)
            row += BLOCK
            first += BLOCK
    else:
        end = tl.load(row_start + session + 1)
        if tl.load(kinds + session) == _TREE:
            row = first + tl.arange(0, ROWS)
            inside = row < end
            parent = tl.load(parents + row, mask=inside, other=-1)
            # All choices are compared at once; what is left is to follow the matches down.
            wanted = tl.load(chosen + parent, mask=inside & (parent >= 0), other=-1)
            match = inside & (parent >= 0) & (wanted == tl.load(tokens + row, mask=inside, other=-2))
            result = tl.where(row == first, 0, -1)
            node, depth = first, 0
            while node >= 0:
                depth += 1
                child = tl.min(tl.where(match & (parent == node), row, 2147483647))
                result = tl.where(row == child, depth, result)
                node = tl.where(child < 2147483647, child, -1)
            tl.store(path + row, result, mask=inside)
        else:
            step = tl.arange(0, BLOCK)
            done = 0
            while first + done < end:
                tl.store(path + first + done + step, done + step, mask=first + done + step < end)
                done += BLOCK


def walk_rows(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor,
    *,
    most_rows: int,
) -> torch.Tensor:
    """kernels.walk.walk_rows on the device."""
    rows, sessions = chosen.shape[0], kinds.shape[0]
    path = torch.empty(rows, dtype=torch.int32, device=chosen.device)
    width = max(32, triton.next_power_of_2(most_rows))
    _walk[(sessions + 1,)](
        chosen,
        tokens,
        parents,
        row_start,
        kinds,
        path,
        sessions,
        rows,
        ROWS=width,
        BLOCK=_BLOCK,
        num_warps=1 if width <= 256 else 2,
    )
    return path
