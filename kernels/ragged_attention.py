"""ragged_attention: the rows of a packed batch over their session's paged context and over each other.

Owns the op's contract, its torch reference and the workspace that the passes of a bucket need. Does not own
tile sizes (kernels.attention_tiles) nor the Triton kernels (kernels/cuda/ragged_attention.py and
attention_work.py).

How the Triton version works. The query rows of a session and the query heads of a key/value head are packed
into one list of rows x heads, cut into tiles of block_m, so that one read of K and V serves a whole tile.
What a tile sees is a line of blocks of block_n keys: the visible context first, then the pass's own rows. A
line is cut into parts, and a work item is one part of one tile. How finely depends on how many tiles there
are and how long their lines, so that few sessions still fill the device and a long session among short ones
does not hold up the rest. `AttentionWorkspace.plan` works the items out on the device, once a pass. Every
layer then launches one program per item and KV head, and a small kernel that joins the parts of tiles which
have more than one, by log-sum-exp. Context blocks take no mask except at a line's ends, tree rows the
ancestor bitmask, chains the row indexes; blocks that nobody in the tile sees are not in its line. The block
where the context ends holds the first of the pass's rows, too: a short line has no block more than it needs.

No size depends on what the tensors hold and nothing is read back: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import cuda
from kernels.attention import PagedContext, split_attention_reference
from kernels.attention_tiles import Tiling, choose_tiling
from kernels.ragged import RaggedBatch, visible_rows

ITEM_FIELDS = 16
"""int32 fields of a work item; kernels/cuda/attention_work.py says which."""

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class Window:
    """What a layer's rows see at most; None: no bound.

    rows: a row at position p sees positions above p - rows, in the context and in the pass, and below
    p + rows (which only a BLOCK has). context: every row sees the last `context` context rows only.
    """

    rows: int | None = None
    context: int | None = None


EVERYTHING = Window()


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """The buffers of a bucket's passes (make_workspace); for one stream at a time.

    items int32 [windows, slots, ITEM_FIELDS]: who computes what, by `plan`. bounds int32 [windows, 2]: the
    windows' sizes. partial fp32 [slots, kv_heads, block_m, d], lse fp32 [slots, kv_heads, block_m]: what
    items of split tiles leave for the merge. tiles: most tiles of a pass. capacity: items that run at the
    same time. splits: whether tiles may be split. merge_early: whether the merge's programs start while the
    last parts are still at work, and wait for them on the device (programmatic dependent launch).
    """

    rows: int
    sessions: int
    most_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tiling: Tiling
    windows: tuple[Window, ...]
    tiles: int
    capacity: int
    splits: bool
    merge_early: bool
    items: torch.Tensor
    bounds: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor

    @property
    def slots(self) -> int:
        return self.items.shape[1]

    def plan(self, batch: RaggedBatch) -> None:
        """Work out the items of a pass: once, before its first layer. Reads row_start and lengths only."""
        self.check(batch)
        if cuda.takes(self.partial):
            from kernels.cuda import attention_work

            attention_work.plan(batch, self)

    def check(self, batch: RaggedBatch) -> None:
        """Raises ValueError if the batch is not of this bucket."""
        if (batch.rows, batch.sessions) != (self.rows, self.sessions) or batch.most_rows > self.most_rows:
            raise ValueError(
                f"the batch has {batch.rows} rows, {batch.sessions} sessions, up to {batch.most_rows} rows "
                f"each; the workspace is for {self.rows}, {self.sessions} and {self.most_rows}"
            )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """tiles: most tiles of a pass. capacity, splits: as in AttentionWorkspace. slots: most work items."""

    tiles: int
    capacity: int
    splits: bool
    slots: int


def make_workspace(
    *,
    rows: int,
    sessions: int,
    most_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    windows: Sequence[Window] = (EVERYTHING,),
    tiling: Tiling | None = None,
    processors: int | None = None,
    scratch: torch.Tensor | None = None,
) -> AttentionWorkspace:
    """Buffers for passes of R = rows rows, S = sessions sessions with up to most_rows rows each.

    windows: the distinct windows of the layers. tiling: instead of the table's. processors: multiprocessors
    to fill (None: the device's). scratch: fp32 memory of at least workspace_floats(...) elements for the
    parts, which buckets may share if their passes do not overlap; None: its own.
    Raises ValueError for pages that don't fit the tiling's blocks of keys.
    """
    device = torch.device(device)
    group = _group(heads, kv_heads)
    if tiling is None:
        tiling = choose_tiling(packed_rows=most_rows * group, head_dim=head_dim, dtype=dtype)
    tiling.check_pages(page_size)
    if processors is None:
        processors = _processors(device)
    sizes = _sizes(rows, sessions, most_rows, group, kv_heads, tiling, processors)
    states = sizes.slots * kv_heads * tiling.block_m if sizes.splits else 0
    if scratch is None:
        scratch = torch.empty(states * (head_dim + 1), dtype=torch.float32, device=device)
    if scratch.numel() < states * (head_dim + 1) or scratch.dtype != torch.float32:
        raise ValueError(
            f"scratch has {scratch.numel()} elements of {scratch.dtype}; this bucket needs "
            f"{states * (head_dim + 1)} of float32"
        )
    flat = scratch.view(-1)
    shape = (sizes.slots if sizes.splits else 0, kv_heads, tiling.block_m)
    bounds = [(w.rows or _UNBOUNDED, w.context if w.context is not None else _UNBOUNDED) for w in windows]
    return AttentionWorkspace(
        rows=rows,
        sessions=sessions,
        most_rows=most_rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        tiling=tiling,
        windows=tuple(windows),
        tiles=sizes.tiles,
        capacity=sizes.capacity,
        splits=sizes.splits,
        merge_early=_launches_early(device),
        items=torch.full((len(windows), sizes.slots, ITEM_FIELDS), -1, dtype=torch.int32, device=device),
        bounds=torch.tensor(bounds, dtype=torch.int32).to(device),
        partial=flat[: states * head_dim].view(*shape, head_dim),
        lse=flat[states * head_dim : states * (head_dim + 1)].view(shape),
    )


def workspace_floats(
    *,
    rows: int,
    sessions: int,
    most_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:
    """Elements of fp32 scratch that make_workspace of the same sizes takes."""
    group = _group(heads, kv_heads)
    tiling = choose_tiling(packed_rows=most_rows * group, head_dim=head_dim, dtype=dtype)
    processors = _processors(torch.device(device))
    sizes = _sizes(rows, sessions, most_rows, group, kv_heads, tiling, processors)
    return sizes.slots * kv_heads * tiling.block_m * (head_dim + 1) if sizes.splits else 0


def _group(heads: int, kv_heads: int) -> int:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    return heads // kv_heads


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launches_early(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _sizes(
    rows: int, sessions: int, most_rows: int, group: int, kv_heads: int, tiling: Tiling, processors: int
) -> _Sizes:
    # The padding rows count as one more session; each session may leave its last tile part empty.
    tiles = rows * group // tiling.block_m + sessions + 1
    capacity = max(1, processors * tiling.resident // kv_heads)
    # One session with tiles enough for several rounds gains nothing from parts.
    splits = sessions > 1 or most_rows * group < 3 * capacity * tiling.block_m
    # What the plan may use beyond one part a tile: programs without an item cost a little each.
    parts = capacity * (2 if sessions > 1 else 1) if splits else 0
    return _Sizes(tiles, capacity, splits, tiles + parts)


def ragged_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: Window = EVERYTHING,
    workspace: AttentionWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of R packed rows; returns [R, H, d] like q (into `out`, contiguous, if given).

    q [R, H, d], k_new, v_new [R, Kv, d]: this pass's rows; may be views with any row and head stride whose
    last dimension is contiguous. k_pages, v_pages [pages, page_size, Kv, d], likewise. H is a multiple of Kv.
    window: one of the workspace's. workspace: of this bucket, planned for this pass; None makes one, which is
    fine outside of graphs. Padding rows give 0.

    A session's rows see its context positions [0, length) and each other as batch.kinds says, both within
    the window.
    """
    if workspace is not None:
        workspace.check(batch)
    if not cuda.takes(q):
        result = ragged_attention_reference(
            q, k_new, v_new, k_pages, v_pages, batch, scale=scale, window=window
        )
        return result if out is None else out.copy_(result)
    from kernels.cuda import ragged_attention as triton_op

    if workspace is None:
        workspace = make_workspace(
            rows=batch.rows,
            sessions=batch.sessions,
            most_rows=batch.most_rows,
            heads=q.shape[1],
            kv_heads=k_new.shape[1],
            head_dim=q.shape[2],
            page_size=k_pages.shape[1],
            dtype=q.dtype,
            device=q.device,
            windows=(window,),
        )
        workspace.plan(batch)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    number = workspace.windows.index(window)
    triton_op.attend(q, k_new, v_new, k_pages, v_pages, batch, workspace, number, scale, out)
    return out


def ragged_attention_reference(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: Window = EVERYTHING,
) -> torch.Tensor:
    """The same session by session, by one masked softmax each, in at least float32. Reads the batch back."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts, lengths = batch.row_start.tolist(), batch.lengths.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        table = batch.page_table[s, : -(-length // k_pages.shape[1])].to(torch.int64)
        position = batch.positions[rows].to(torch.int64)
        mask = visible_rows(batch, s)
        first = torch.zeros_like(position)
        if window.rows is not None:
            mask = mask & ((position[:, None] - position[None, :]).abs() < window.rows)
            first = (position - window.rows + 1).clamp(min=0)
        if window.context is not None:
            first = first.clamp(min=length - window.context)
        out[rows] = split_attention_reference(
            q[None, rows].to(wide),
            k_new[None, rows].to(wide),
            v_new[None, rows].to(wide),
            PagedContext(
                k_pages[table].to(wide),
                v_pages[table].to(wide),
                torch.arange(len(table), device=q.device)[None],
                torch.tensor([length], device=q.device),
            ),
            mask[None],
            scale=scale,
            window_start=first[None],
        )[0].to(q.dtype)
    return out
