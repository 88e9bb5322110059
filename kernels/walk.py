"""The walk down the verified trees of a pass: which rows are accepted, and how deep each of them is.

Owns the walk on packed rows, for the device's own commit of K/V and hidden states. It knows no stop ids and
no limits: target_service.verify walks again over the same choices with both, and never further. A row
accepted here and not there lies past the length that is committed, where nobody reads.
"""

from __future__ import annotations

import torch

from kernels import cuda
from kernels.ragged import TREE


def walk_rows(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor,
    *,
    most_rows: int,
) -> torch.Tensor:
    """int32 [R]: 0 for an anchor, d for the accepted row of depth d, -1 for any other row and for padding.

    chosen, tokens, parents int32 [R]: the token committed after each row, the token in it, the packed row of
    its parent (-1 for an anchor). row_start int32 [S + 1], kinds int32 [S]: as in kernels.ragged.RaggedBatch.
    Rows of a session that is no TREE are all taken: its path is 0, 1, 2, ... No TREE has more than most_rows
    rows, nor two children of one parent with the same token.
    """
    if cuda.takes(chosen.view(torch.float32)):  # asks by float dtype
        from kernels.cuda import walk as triton_op

        return triton_op.walk_rows(chosen, tokens, parents, row_start, kinds, most_rows=most_rows)
    return walk_rows_reference(chosen, tokens, parents, row_start, kinds)


def walk_rows_reference(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor,
) -> torch.Tensor:
    """walk_rows row by row on the host; reads the tensors back."""
    committed, names, above = chosen.tolist(), tokens.tolist(), parents.tolist()
    starts = row_start.tolist()
    path = [-1] * len(names)
    for first, end, kind in zip(starts[:-1], starts[1:], kinds.tolist(), strict=True):
        for row in range(first, end):
            parent = above[row]
            if kind != TREE:
                path[row] = row - first
            elif parent < 0:
                path[row] = 0
            elif path[parent] >= 0 and committed[parent] == names[row]:
                path[row] = path[parent] + 1
    return torch.tensor(path, dtype=torch.int32, device=chosen.device)
