"""Step: one forward pass, described so that every tensor-parallel rank can run it.

A step is a packed list of rows (tokens). Rows belong to segments, one per session: a *chain* segment is a
prefill chunk (row i sees rows 0..i), a *tree* segment is the anchor plus draft nodes (row i sees its
ancestors and itself). Every segment's rows also see its session's committed context [0, context_length).
No row touches a page during the forward; `Commit` says which rows' K/V are written where afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first_row, first_row + rows) of a step; they sit at the absolute positions given in
    Step.positions.

    pages: ids of the session's KV pages in order, enough to cover context_length.
    parents: None for a chain; else parent row of each row *within the segment*, -1 for row 0 (the anchor),
    parents[i] < i. The ancestor relation follows from it.
    """

    first_row: int
    rows: int
    context_length: int
    pages: tuple[int, ...]
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """tokens, positions: int64 [rows], on the CPU. logit_rows: int64 [k], rows whose logits are wanted,
    in order."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What rank 0 gets back.

    logits: fp32 [k, vocab] for Step.logit_rows. taps: [rows, num_taps * hidden] in the activation dtype,
    the concatenated outputs of the captured layers, or None when nothing is captured.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Copy staged K/V of `rows` (of the latest step) into pages: slot = page * page_size + offset.
    int64 [n] each."""

    rows: torch.Tensor
    slots: torch.Tensor
