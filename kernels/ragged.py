"""Ragged packed batches: the rows of many sessions in one list, described by int32 tensors on the device.

Owns the batch type that the GPU ops of a pass share, how a host packs one, and `ancestor_words`, which turns
parents into the bitmask that attention reads. It owns no buffers between passes and no attention.

All sizes are static (a bucket's): R rows, S sessions, P pages a session, W words a row. What varies from pass
to pass is only what the tensors hold, so a pass over them can be captured in a CUDA graph. Rows of session s
are [row_start[s], row_start[s + 1]); empty sessions and rows from row_start[S] on are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import cuda

TREE, CHAIN, BLOCK = 0, 1, 2
"""Which rows of its own session a row sees, besides the context:

TREE    its ancestors and itself, by the bitmask
CHAIN   the rows before it and itself: a prefill chunk, a causal block, a single row
BLOCK   all of them: a bidirectional block
"""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """A pass over R packed rows of S sessions; all tensors int32 on one device.

    row_start [S + 1]: first row of each session, and the end of the last.
    lengths [S]: committed context rows, in positions [0, length).
    page_table [S, P]: ids of a session's pages in order; entries past its length are not read.
    positions [R]: absolute. A session's first row is at position `length`, none is before it.
    kinds [S]: TREE, CHAIN or BLOCK.
    ancestors [R, W]: bit j of a TREE row r: r sees row row_start[s] + j (see ancestor_words). May be narrower
        than most_rows asks for if the larger sessions are no trees.
    most_rows: no session has more rows (T). chains: whether a CHAIN of many rows may be among the sessions;
        only a hint about speed.
    """

    row_start: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor
    kinds: torch.Tensor
    ancestors: torch.Tensor
    most_rows: int
    chains: bool = False

    @property
    def rows(self) -> int:
        return self.positions.shape[0]

    @property
    def sessions(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class RaggedSegment:
    """One session of a batch to pack. rows, length: of the pass and of its context; pages: ids in order.

    parents: within the segment, -1 for the first row, parents[i] < i; None: each row's is the one before it.
    A row's position is `length` plus its depth.
    """

    rows: int
    length: int
    pages: Sequence[int]
    kind: int = CHAIN
    parents: Sequence[int] | None = None


def pack_ragged(
    segments: Sequence[RaggedSegment],
    *,
    rows: int | None = None,
    sessions: int | None = None,
    most_rows: int | None = None,
    pages: int | None = None,
    device: torch.device | str = "cpu",
) -> RaggedBatch:
    """A batch of `segments`, padded to the sizes given (default: what they need). Raises ValueError if they
    don't fit."""
    total = sum(segment.rows for segment in segments)
    widest = max((segment.rows for segment in segments), default=0)
    deepest = max((len(segment.pages) for segment in segments), default=0)
    rows = total if rows is None else rows
    sessions = len(segments) if sessions is None else sessions
    most_rows = max(widest, 1) if most_rows is None else most_rows
    pages = max(deepest, 1) if pages is None else pages
    if total > rows or len(segments) > sessions or widest > most_rows or deepest > pages:
        raise ValueError(
            f"{len(segments)} segments with {total} rows, {widest} in the largest, and {deepest} pages "
            f"do not fit a batch of {sessions} sessions, {rows} rows, {most_rows} a session, {pages} pages"
        )
    starts = [0]
    positions, parents = [0] * rows, [-1] * rows
    for segment in segments:
        first = starts[-1]
        starts.append(first + segment.rows)
        depths: list[int] = []
        for i in range(segment.rows):
            parent = i - 1 if segment.parents is None else segment.parents[i]
            depths.append(0 if parent < 0 else depths[parent] + 1)
            positions[first + i] = segment.length + depths[i]
            parents[first + i] = first + parent if parent >= 0 else -1
    padding = sessions - len(segments)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    table = torch.zeros(sessions, pages, dtype=torch.int32)
    for s, segment in enumerate(segments):
        table[s, : len(segment.pages)] = torch.tensor(segment.pages, dtype=torch.int32)
    row_start = ints(starts + starts[-1:] * padding)
    kinds = ints([segment.kind for segment in segments] + [CHAIN] * padding)
    tree_rows = max((segment.rows for segment in segments if segment.kind == TREE), default=1)
    return RaggedBatch(
        row_start=row_start,
        lengths=ints([segment.length for segment in segments] + [0] * padding),
        page_table=table.to(device),
        positions=ints(positions),
        kinds=kinds,
        ancestors=ancestor_words(ints(parents), row_start, kinds, words=-(-tree_rows // 32)),
        most_rows=most_rows,
        chains=any(segment.kind == CHAIN and segment.rows > 1 for segment in segments),
    )


def ancestor_words(
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor | None = None,
    *,
    words: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ancestor bitmask int32 [R, words]: bit j of row r = r sees row row_start[s] + j of its session s.

    parents int32 [R]: packed row of each row's parent, -1 for a first row; a parent comes before its
    children, in the same session. A row sees itself and what its parent sees. Padding rows, and rows of
    sessions whose kind (int32 [S]; None: all TREE) is not TREE, get 0: nobody reads their bits. A tree has at
    most 32 * words rows.
    """
    if cuda.takes(_like(parents)):
        from kernels.cuda import ragged as triton_op

        return triton_op.ancestor_words(parents, row_start, kinds, words=words, out=out)
    return ancestor_words_reference(parents, row_start, kinds, words=words, out=out)


def ancestor_words_reference(
    parents: torch.Tensor,
    row_start: torch.Tensor,
    kinds: torch.Tensor | None = None,
    *,
    words: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """ancestor_words row by row on the host; reads the tensors back."""
    starts = row_start.tolist()
    rules = [TREE] * (len(starts) - 1) if kinds is None else kinds.tolist()
    above = parents.tolist()
    seen = [0] * len(above)  # as Python integers, of any width
    for first, end, rule in zip(starts[:-1], starts[1:], rules, strict=True):
        if rule != TREE:
            continue
        for row in range(first, end):
            seen[row] = 1 << (row - first)
            if above[row] >= 0:
                seen[row] |= seen[above[row]]
    chunks = [[(bits >> (32 * w)) & 0xFFFFFFFF for w in range(words)] for bits in seen]
    mask = torch.tensor(chunks, dtype=torch.int64).reshape(len(above), words)
    mask = torch.where(mask >= 1 << 31, mask - (1 << 32), mask).to(torch.int32).to(parents.device)
    return mask if out is None else out.copy_(mask)


def visible_rows(batch: RaggedBatch, session: int) -> torch.Tensor:
    """bool [n, n] of a session with n rows: row i sees row j. Reads tensors back: for references."""
    first, end = batch.row_start[session : session + 2].tolist()
    n = end - first
    kind = int(batch.kinds[session])
    if kind == BLOCK:
        return torch.ones(n, n, dtype=torch.bool, device=batch.kinds.device)
    if kind == CHAIN:
        return torch.ones(n, n, dtype=torch.bool, device=batch.kinds.device).tril()
    index = torch.arange(n, device=batch.kinds.device)
    words = batch.ancestors[first:end].index_select(1, index // 32)
    return (words >> (index % 32).to(torch.int32)) & 1 != 0


def _like(ints: torch.Tensor) -> torch.Tensor:
    """A tensor of a dtype that kernels take, on the same device: `cuda.takes` asks about float tensors."""
    return ints.view(torch.float32)
