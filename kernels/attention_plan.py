"""AttentionPlan: what all layers of one pass of split_attention share.

Owns: how each session's pages are read (in place or gathered), which sessions are computed together, masks
and window bounds, and which of the three ways of kernels.attention is taken. Computes no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_FLASH_ROWS = 32  # packed query rows per head from which flash beats plain products (measured, 2 cores, AVX2)
_TILE_SCORES = 1 << 22  # scores of one tile of sessions, per KV head
_LONG_RUN = 8  # pages in a row from which reading in place beats copying


@dataclass(frozen=True, slots=True)
class Part:
    """Context rows that one product reads: `count` rows from slot `start`, or from row `start` of gathered
    `pages`."""

    column: int
    start: int
    count: int
    pages: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Sessions whose scores share a table; `sessions` is None for all of them in order."""

    sessions: torch.Tensor | None
    parts: tuple[tuple[Part, ...], ...]
    width: int
    context_bias: torch.Tensor | None  # [s, R, width], 0 or -inf: window bounds and padding
    new_mask: torch.Tensor | None  # [s, R, R], None when every row sees every row


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of one pass share. Made by plan_attention; opaque to callers."""

    mode: str
    sessions: int
    rows: int
    causal: bool
    tiles: tuple[Tile, ...] = ()
    table: torch.Tensor | None = None  # joint: [S, P] on the device
    joint_mask: torch.Tensor | None = None  # joint: [S, 1, R, P * page_size + R]
    _kept: dict[object, Any] = field(default_factory=dict)

    @property
    def context_rows_read(self) -> int:
        """Context rows that one layer loads from the pages, a session's once for all its rows and heads."""
        if self.joint_mask is not None:
            return self.sessions * (self.joint_mask.shape[-1] - self.rows)
        return sum(part.count for part in self._parts())

    @property
    def context_rows_copied(self) -> int:
        """Of them, rows whose pages lie apart and are put together first."""
        if self.joint_mask is not None:
            return self.context_rows_read
        return sum(part.count for part in self._parts() if part.pages is not None)

    def _parts(self) -> Iterator[Part]:
        for tile in self.tiles:
            for parts in tile.parts:
                yield from parts

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, made in the pass's first layer and kept for the further ones."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found


def causal_mask(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [rows, rows]: row i sees rows 0..i."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def plan_attention(
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    rows: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    window_start: torch.Tensor | None = None,
    one_part: bool = False,
) -> AttentionPlan:
    """Plan one pass of S sessions with R rows each; reuse it for every layer with the same window.

    page_table int64 [S, P], lengths int64 [S]; mask bool [S, R, R] (True = row i sees row j; every row must
    see itself) or None for a plain causal chain; window_start int64 [S, R] or None: context positions below
    it are hidden from that row. dtype, device: those of the queries. one_part: gather each session's pages
    into one product, so that not even rounding depends on which pages they are.
    """
    device = torch.device(device)
    sessions = page_table.shape[0]
    causal = mask is None
    if mask is not None and rows == 1:
        mask = None  # a row always sees itself
    if device.type != "cpu":
        return plan_joint(page_table, lengths, mask, rows, page_size, device, window_start, causal)
    wide = dtype in (torch.float32, torch.float64)
    small = wide and rows <= _FLASH_ROWS * 4 and not (causal and rows > _FLASH_ROWS)
    if causal and rows > 1 and small:
        mask = causal_mask(rows).expand(sessions, rows, rows)
    if mask is not None and bool(mask.all()):
        mask, causal = None, False
    sizes: list[int] = lengths.tolist()
    starts = [0] * sessions if window_start is None else window_start.amin(1).clamp_(min=0).tolist()
    table = page_table.cpu()
    parts = [
        _context_parts(table[s], starts[s], sizes[s], page_size, one_part=one_part) for s in range(sessions)
    ]
    tiles = []
    for members in _tile_members(
        [max(n - a, 0) for n, a in zip(sizes, starts, strict=True)], rows, alone=not small
    ):
        index = None if len(members) == sessions else torch.tensor(members, dtype=torch.int64)
        chosen = tuple(parts[s] for s in members)
        width = max((p[-1].column + p[-1].count for p in chosen if p), default=0)
        bias = None
        if window_start is not None and width:
            bias = _context_bias(
                chosen, window_start[members], [table[s] for s in members], width, page_size, dtype
            )
        tiles.append(Tile(index, chosen, width, bias, mask if mask is None or index is None else mask[index]))
    return AttentionPlan("small" if small else "flash", sessions, rows, causal and rows > 1, tuple(tiles))


def _context_parts(
    pages: torch.Tensor, start: int, length: int, page_size: int, *, one_part: bool
) -> tuple[Part, ...]:
    """How to read context positions [start, length): runs of neighbouring pages in place, the rest
    gathered; with `one_part`, all of them gathered."""
    if length <= start:
        return ()
    first = start // page_size
    if one_part:
        chosen = pages[first : -(-length // page_size)].contiguous()
        return (Part(0, start - first * page_size, length - start, chosen),)
    ids: list[int] = pages[first : -(-length // page_size)].tolist()
    runs: list[list[int]] = []  # [index of the first page, pages]
    for i, page in enumerate(ids):
        if runs and page == ids[i - 1] + 1:
            runs[-1][1] += 1
        else:
            runs.append([i, 1])
    parts: list[Part] = []
    column = 0

    def add(first_page: int, num_pages: int, *, copy: bool) -> None:
        nonlocal column
        begin = max(start, (first + first_page) * page_size)
        end = min(length, (first + first_page + num_pages) * page_size)
        offset = begin - (first + first_page) * page_size
        chosen = pages[first + first_page : first + first_page + num_pages].contiguous() if copy else None
        parts.append(
            Part(column, offset if copy else ids[first_page] * page_size + offset, end - begin, chosen)
        )
        column += end - begin

    loose: list[int] | None = None  # pages gathered together: consecutive short runs
    in_place = len(runs) <= 2
    for first_page, num_pages in runs:
        if in_place or num_pages >= _LONG_RUN:
            if loose:
                add(loose[0], loose[1], copy=True)
                loose = None
            add(first_page, num_pages, copy=False)
        elif loose:
            loose[1] += num_pages
        else:
            loose = [first_page, num_pages]
    if loose:
        add(loose[0], loose[1], copy=True)
    return tuple(parts)


def _tile_members(widths: list[int], rows: int, *, alone: bool) -> list[list[int]]:
    """Sessions of each tile. Tables are padded to the widest member, so very unequal sessions are kept
    apart."""
    count = len(widths)
    if alone:
        return [[s] for s in range(count)]
    if count == 1 or (
        2 * sum(widths) + 256 * count >= count * max(widths) and count * rows * max(widths) <= _TILE_SCORES
    ):
        return [list(range(count))]
    tiles: list[list[int]] = []
    for s in sorted(range(count), key=widths.__getitem__, reverse=True):
        widest = widths[tiles[-1][0]] if tiles else 0
        if tiles and 2 * widths[s] + 256 >= widest and (len(tiles[-1]) + 1) * rows * widest <= _TILE_SCORES:
            tiles[-1].append(s)
        else:
            tiles.append([s])
    return tiles


def _context_bias(
    parts: Sequence[Sequence[Part]],
    window_start: torch.Tensor,
    tables: Sequence[torch.Tensor],
    width: int,
    page_size: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """[s, R, width]: -inf where a row's window ends before a column, and in padding; None if nothing is
    hidden."""
    sessions, rows = window_start.shape
    bias = torch.full((sessions, rows, width), float("-inf"), dtype=dtype)
    hidden = False
    for s, pieces in enumerate(parts):
        start = max(int(window_start[s].min()), 0)  # the parts cover [start, length) in order of position
        count = pieces[-1].column + pieces[-1].count if pieces else 0
        visible = torch.arange(start, start + count)[None] >= window_start[s][:, None].cpu()
        bias[s, :, :count].masked_fill_(visible, 0.0)
        hidden |= not bool(visible.all())
    return bias if hidden else None


def plan_joint(
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    rows: int,
    page_size: int,
    device: torch.device,
    window_start: torch.Tensor | None,
    causal: bool,
) -> AttentionPlan:
    sessions = page_table.shape[0]
    lengths = lengths.to(device)
    table = page_table.to(device)[:, : -(-int(lengths.max()) // page_size)].clamp(min=0)
    positions = torch.arange(table.shape[1] * page_size, device=device)
    visible = (positions < lengths[:, None])[:, None].expand(sessions, rows, -1)
    if window_start is not None:
        visible = visible & (positions >= window_start.to(device)[:, :, None])
    new = mask.to(device) if mask is not None else causal_mask(rows, device).expand(sessions, rows, rows)
    joint = torch.cat((visible, new), -1).unsqueeze(1)
    return AttentionPlan("joint", sessions, rows, causal and rows > 1, table=table, joint_mask=joint)
