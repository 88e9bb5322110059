"""Step: one pass of the model, described so that every tensor-parallel rank can run it.

A step is a packed list of rows (tokens). Rows belong to segments, one per session: a *chain* segment is a
prefill chunk (row i sees rows 0..i), a *tree* segment is the anchor plus draft nodes (row i sees its
ancestors and itself). Every segment's rows also see its session's committed context [0, context_length).

A step is run whole: forward, choice, walk, commit. Which rows are accepted is known on the device only when
the walk is done, so the step says beforehand where each row goes *if* it is: `slots` for its K/V, `ring` for
its hidden states. No row touches a page before the walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from target_service.sampling import RowGroup

EAGER, CAPTURE, REPLAY, LENT = 0, 1, 2, 3
"""How a GPU runs a step: operation by operation, the same while it is captured in a CUDA graph, by the graph
captured earlier, or by one that was captured for somewhat larger steps. All ranks do the same (NCCL asks for
it), so rank 0 says which.
"""
NO_SLOT = -1
"""Stands in Step.slots for a row that is never committed: padding, and rows that are run again."""


@dataclass(frozen=True, slots=True)
class RingSpan:
    """Where hidden states of a segment go: its i-th committed row to ring slot first_slot + i - skip, for
    i >=
    skip."""

    first_slot: int
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first_row, first_row + rows) of a step; they sit at the absolute positions given in
    Step.positions.

    pages: ids of the session's KV pages in order, enough to cover context_length.
    parents: None for a chain; else parent row of each row *within the segment*, -1 for row 0 (the anchor),
    parents[i] < i. The ancestor relation follows from it. ring: None if its rows are not captured. padding:
    rows at its end that stand for nothing; only the last segment of a step may have some.
    """

    first_row: int
    rows: int
    context_length: int
    pages: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    ring: RingSpan | None = None
    padding: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """The commit rule of each logits row whose token is chosen, without filters and masks; int64 [n] each.

    temperature holds fp32 bits, positions those of the tokens being chosen, seeds two's complement.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """tokens, positions: int64 [rows], on the CPU. logit_rows: int64 [k], rows whose logits are wanted,
    in order.

    groups: how rows [0, n) of the k logits choose their tokens, in order; the others choose nothing. Rank 0's
    matter, like the segments' `ring`. slots: int64 [rows], the cache slot (page * page_size + offset) of each
    row if it is committed, or NO_SLOT; None: no row is. A chain's rows are all committed, a tree's as far as
    the choices walk.

    read_logits: somebody reads StepOutput.logits. warms: run beforehand, so that passes of its size have a
    graph of their own. mode, lender, rows_choice: filled in by ModelShard.plan for all ranks. lender: mode
    LENT, by whose graph: rows, sessions, rows of the largest session. rows_choice None: rank 0 chooses from
    the whole logits.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
    slots: torch.Tensor | None = None
    groups: tuple[RowGroup, ...] = ()
    read_logits: bool = True
    warms: bool = False
    mode: int = EAGER
    lender: tuple[int, int, int] = (0, 0, 0)
    rows_choice: ChoiceRows | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What rank 0 gets back.

    choices: the committed token of each row of the groups, NO_CHOICE where the logits are no numbers. logits:
    fp32 [k, vocab] for Step.logit_rows, or [0, vocab] if nobody reads them. taps: [rows, num_taps * hidden]
    in the activation dtype, the concatenated outputs of the captured layers, or None when nothing is
    captured. Both tensors may be overwritten by the next step.

    read_back: the host has waited for all that a device was told for the step, the writing of the ring
    included.

    context_rows: committed rows that the verify segments attend to, each session's once, mean over layers;
    context_rows_read: rows whose K and V attention loads from the pages for it, by how it was planned. Their
    ratio says how often the context is read. context_rows_copied: of these, put together first, since their
    pages lie apart.

    cold: steps like this one will be replayed from a graph, this one was not yet: its time is no measure.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None
    choices: tuple[int, ...] = ()
    context_rows: float = 0.0
    context_rows_read: float = 0.0
    context_rows_copied: float = 0.0
    cold: bool = False
    read_back: bool = False


def visible_context(length: int, windows: Mapping[int | None, int]) -> float:
    """Committed rows that an anchor behind `length` of them attends to, the mean over layers. windows: how
    many layers there are of each sliding window (None: unbounded).
    """
    seen = sum(count * (length if w is None else min(length, w - 1)) for w, count in windows.items())
    return seen / sum(windows.values())
