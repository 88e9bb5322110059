"""A step packed into one int32 buffer on the GPU: what a pass reads, at addresses that a CUDA graph can keep.

Owns the buffer's layout, its sizes (Shape) and how the host fills it: one copy a pass. Does not own what is
run over it (device_pass).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.philox import signed_seed
from kernels.ragged import CHAIN, TREE
from target_service.sampling import RowGroup
from target_service.step import NO_SLOT, ChoiceRows, Step

# Few enough that all a load needs have occurred soon, close enough that padding costs little. Trees have
# a power of two of nodes as a rule, and a root: 2^k + 8 rows hold one of them with little waste.
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 72, 96, 136, 160, 192, 264, 320, 384, 448)
_ROWS_STEP = 128  # beyond those
# With prompt chunks among them, rows come in any number: fewer sizes, of the whole and of what gets logits.
_MIXED_ROWS = (8, 16, 32, 64, 96, 136, 192, 264, 320)
_MIXED_LOGITS = (8, 32, 136, 320)
_MIXED_CAPTURED = 1024
_SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# All that follows from a session's most rows is the tile of attention, and the width of the ancestor bitmask.
_LARGEST = (1, 8, 16, 72, 264, 520)
LENT_ROWS, LENT_MORE = 1.5, 128
"""A pass whose own size has no graph yet runs by one of up to so many times its rows, or so many more:
launched piece by piece it takes the host 25 ms, while 128 rows more are a quarter of a plain step."""
_ALIGNED = 4
"""int32 words at whose multiples a buffer's parts begin: kernels are compiled anew for other alignments."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a pass: rows in all, sessions, rows of the largest session, logits rows, pages of the longest
    session. trees: of trees only, each row with its logits."""

    rows: int
    sessions: int
    most_rows: int
    logit_rows: int
    pages: int
    trees: bool

    @property
    def recurs(self) -> bool:
        """Whether the pass is worth capturing: of large prompt chunks there are few, and what they take the
        device hides the launches."""
        return self.trees or self.rows <= _MIXED_CAPTURED

    @property
    def words(self) -> int:
        """int32 words of a packed pass."""
        return sum(map(_aligned, self.parts().values()))

    def parts(self) -> dict[str, int]:
        """int32 words of each part of a buffer, in order."""
        r, k, s = self.rows, self.logit_rows, self.sessions
        return {
            "seeds": 2 * k,
            "temperature": k,
            "choices": k,
            "choice_positions": k,
            "logit_rows": k,
            "tokens": r,
            "positions": r,
            "parents": r,
            "slots": r,
            "row_start": s + 1,
            "lengths": s,
            "kinds": s,
            "first_slot": s,
            "skip": s,
            "page_table": s * self.pages,
        }


def exact_shape(step: Step) -> Shape:
    """A step's own sizes, for one that no bucket holds."""
    return Shape(
        rows=step.tokens.numel(),
        sessions=len(step.segments),
        most_rows=max(segment.rows for segment in step.segments),
        logit_rows=step.logit_rows.numel(),
        pages=max(1, max(len(segment.pages) for segment in step.segments)),
        trees=_only_trees(step),
    )


def bucket(step: Step, pages: int, max_rows: int) -> Shape | None:
    """The sizes to which a step is padded, so that passes and the kernels compiled for them recur; None for
    sizes beyond the buckets. pages: of the longest session that there can be; max_rows: of a pass.
    """
    rows, wanted = step.tokens.numel(), step.logit_rows.numel()
    sessions = _next(_SESSIONS, len(step.segments))
    most = max(segment.rows for segment in step.segments)
    trees = _only_trees(step)
    largest = _next(_LARGEST, most)
    if not trees:  # of prompts
        largest = largest or 1 << (most - 1).bit_length()
        wanted = _padded(_MIXED_LOGITS, wanted) if wanted else 0
        rows += wanted != step.logit_rows.numel()  # a row that padding logits may be of
    if not sessions or not largest or max(rows, sessions) > max_rows:
        return None
    padded = min(max(_padded(_ROWS if trees else _MIXED_ROWS, rows), sessions), max_rows)
    return Shape(padded, sessions, min(largest, padded), padded if trees else wanted, pages, trees)


def cover(shape: Shape, captured: Iterable[Shape]) -> Shape | None:
    """The smallest of `captured` that a pass of trees of `shape` fits into without much waste."""
    if not shape.trees:
        return None
    most = max(int(LENT_ROWS * shape.rows), shape.rows + LENT_MORE)
    fitting = (
        other
        for other in captured
        if other.trees
        and other.pages == shape.pages
        and shape.rows <= other.rows <= most
        and shape.sessions <= other.sessions
        and shape.most_rows <= other.most_rows
    )
    return min(fitting, key=lambda s: (s.rows, s.sessions, s.most_rows), default=None)


def _only_trees(step: Step) -> bool:
    whole = step.logit_rows.numel() == step.tokens.numel()
    return whole and all(segment.parents is not None for segment in step.segments)


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED


def choice_rows(groups: Sequence[RowGroup]) -> ChoiceRows | None:
    """The rules row by row; None if a filter or a mask is among them."""
    for group in groups:
        sampling, rule = group.rule.sampling, group.rule
        filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0
        if (filtered and not sampling.greedy) or (
            rule.masked_ids and min(group.positions) < rule.masked_below
        ):
            return None
    # A group's rows differ in their positions alone: its columns are filled, not listed.
    rows = np.empty((4, sum(len(group.positions) for group in groups)), dtype=np.int64)
    start = 0
    for group in groups:
        sampling, end = group.rule.sampling, start + len(group.positions)
        rows[0, start:end] = np.float32(sampling.temperature).view(np.int32)
        rows[1, start:end] = signed_seed(sampling.seed)
        rows[2, start:end] = group.positions
        rows[3, start:end] = sampling.choice
        start = end
    return ChoiceRows(*torch.from_numpy(rows))


@dataclass(frozen=True, slots=True)
class Packed:
    """Views of one buffer, int32 unless said otherwise; sizes as in Shape (R rows, K logits rows, S
    sessions).

    seeds int64, temperature fp32, choices, choice_positions, logit_rows [K]; tokens, positions, parents,
    slots
    [R]; row_start [S + 1]; lengths, kinds, first_slot, skip [S]; page_table [S, pages].
    arrays: the same by name, for the host, if they are in its memory.
    """

    shape: Shape
    buffer: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    choices: torch.Tensor
    choice_positions: torch.Tensor
    logit_rows: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor
    slots: torch.Tensor
    row_start: torch.Tensor
    lengths: torch.Tensor
    kinds: torch.Tensor
    first_slot: torch.Tensor
    skip: torch.Tensor
    page_table: torch.Tensor
    arrays: dict[str, np.ndarray]


def views(buffer: torch.Tensor, shape: Shape) -> Packed:
    """`buffer` int32 [shape.words]."""
    parts, start = {}, 0
    for name, size in shape.parts().items():
        parts[name] = buffer[start : start + size]
        start += _aligned(size)
    parts["seeds"] = parts["seeds"].view(torch.int64)
    parts["temperature"] = parts["temperature"].view(torch.float32)
    parts["page_table"] = parts["page_table"].view(shape.sessions, shape.pages)
    arrays = {name: part.numpy() for name, part in parts.items()} if buffer.device.type == "cpu" else {}
    return Packed(shape=shape, buffer=buffer, arrays=arrays, **parts)


def fill(host: Packed, step: Step, *, num_slots: int) -> int:
    """Write `step` into a buffer in host memory; returns how many of its words a copy has to carry.

    Rows and sessions beyond the step's are padding: in no session, without context, never committed.
    num_slots: slots of the ring, to check where segments write.
    """
    shape, array = host.shape, host.arrays
    count, wanted, segments = step.tokens.numel(), step.logit_rows.numel(), step.segments
    words = host.buffer.numpy()
    table_start = words.size - _aligned(shape.sessions * shape.pages)
    words[:table_start] = 0
    array["tokens"][:count] = step.tokens.numpy()
    array["positions"][:count] = step.positions.numpy()
    array["parents"][:] = -1
    array["slots"][:] = NO_SLOT
    if step.slots is not None:
        array["slots"][:count] = step.slots.numpy()
    array["logit_rows"][:wanted] = step.logit_rows.numpy()
    array["logit_rows"][wanted:] = shape.rows - 1
    first_slot, table = array["first_slot"], array["page_table"]
    first_slot[:] = -1
    array["kinds"][:] = CHAIN
    end = 0
    for s, segment in enumerate(segments):
        first, rows = segment.first_row, segment.rows
        end = first + rows - segment.padding
        array["row_start"][s + 1] = end
        array["lengths"][s] = segment.context_length
        if segment.parents is not None:
            array["kinds"][s] = TREE
            parents = array["parents"][first:end]
            parents[:] = segment.parents[: end - first]
            if first:
                parents[parents >= 0] += first
        else:
            array["parents"][first + 1 : end] = np.arange(first, end - 1)
        if segment.ring is not None:
            assert segment.ring.first_slot < num_slots
            first_slot[s], array["skip"][s] = segment.ring.first_slot, segment.ring.skip
        table[s, : len(segment.pages)] = segment.pages
    array["row_start"][len(segments) + 1 :] = end
    if step.rows_choice is not None:
        chosen = step.rows_choice.seeds.numel()
        array["seeds"][:chosen] = step.rows_choice.seeds.numpy()
        array["temperature"].view(np.int32)[:chosen] = step.rows_choice.temperature.numpy()
        array["choice_positions"][:chosen] = step.rows_choice.positions.numpy()
        array["choices"][:chosen] = step.rows_choice.choices.numpy()
    last = len(segments) - 1
    return table_start + last * shape.pages + len(segments[last].pages)


def _padded(sizes: Sequence[int], least: int) -> int:
    """The smallest of `sizes` that is at least `least`; beyond them a multiple of _ROWS_STEP."""
    return _next(sizes, least) or -(-least // _ROWS_STEP) * _ROWS_STEP


def _next(sizes: Sequence[int], least: int) -> int:
    """The smallest of the sorted `sizes` that is at least `least`; 0 if there is none."""
    at = bisect_left(sizes, least)
    return sizes[at] if at < len(sizes) else 0
