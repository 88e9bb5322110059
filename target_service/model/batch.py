"""StepInputs: a Step turned into what every layer of the forward shares.

Owns: device copies of ids and positions, rotary rows, and, for devices without the ragged kernels
(device_pass has those), the grouping of segments for attention. Segments are grouped by kind: single rows
together, trees of similar size together (padded by an index gather only where their sizes differ), each
prefill chain alone. The linear layers always see exactly the step's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.attention import AttentionPlan, PagedContext, plan_attention, split_attention
from kernels.rotary import RotaryTables
from target_service.step import Segment, Step


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Segments attended in one call: S sessions with R rows each.

    first_row: the group's rows are [first_row, first_row + S * R) in order, or -1: they are `gather` int64 [S
    * R] (pad rows repeat a row), and the call's output rows `kept` (None: all) belong to step rows `scatter`.
    plans: by window (None: unbounded). verifies: they are trees, or anchors alone.
    """

    sessions: int
    rows: int
    first_row: int
    gather: torch.Tensor | None
    kept: torch.Tensor | None
    scatter: torch.Tensor | None
    plans: Mapping[int | None, AttentionPlan]
    verifies: bool = True


class Attention(Protocol):
    """A pass's attention, the same object for all layers."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """q [n, heads, d], k, v [n, kv_heads, d], pages [pages, page_size, kv_heads, d] -> [n, heads * d]."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """tokens int [n]; cos, sin [n, 1, d]; logit_rows None when every row's logits are wanted in order."""

    rows: int
    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    attention: Attention
    logit_rows: torch.Tensor | None


_NOTHING = torch.empty(0)


class GroupedAttention:
    """Attention group by group."""

    def __init__(self, groups: tuple[AttentionGroup, ...]) -> None:
        self._groups = groups

    def context_rows(self, window: int | None) -> tuple[int, int]:
        """Context rows that a layer of this window loads for the verify rows, and of them those copied."""
        plans = [group.plans[window] for group in self._groups if group.verifies]
        return sum(p.context_rows_read for p in plans), sum(p.context_rows_copied for p in plans)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        n, width = q.shape[0], q.shape[1] * q.shape[2]
        context = PagedContext(k_pages, v_pages, _NOTHING, _NOTHING)
        whole = len(self._groups) == 1
        out = _NOTHING if whole else q.new_empty(n, width)
        for group in self._groups:
            count = group.sessions * group.rows
            if group.gather is None:
                parts = [x.narrow(0, group.first_row, count) for x in (q, k, v)]
            else:
                parts = [x.index_select(0, group.gather) for x in (q, k, v)]
            gq, gk, gv = (x.view(group.sessions, group.rows, x.shape[1], x.shape[2]) for x in parts)
            result = split_attention(gq, gk, gv, context, None, scale=scale, plan=group.plans[window])
            result = result.reshape(count, width)
            if group.kept is not None:
                result = result.index_select(0, group.kept)
            if whole and group.gather is None:
                return result
            if whole:
                out = q.new_empty(n, width)
            if group.scatter is None:
                out.narrow(0, group.first_row, count).copy_(result)
            else:
                out.index_copy_(0, group.scatter, result)
        return out


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a model fixes for all its steps. windows: the distinct windows of its layers. one_part: attention
    reads a session's context in one piece, wherever its pages lie.
    """

    page_size: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    rotary: RotaryTables
    one_part: bool = False


def prepare(step: Step, settings: BatchSettings) -> StepInputs:
    """Everything of a step that no layer should work out again."""
    device = settings.device
    positions = step.positions.to(device)
    cos, sin = settings.rotary.rows(positions)
    rows = step.tokens.numel()
    wanted = step.logit_rows.tolist()
    return StepInputs(
        rows=rows,
        tokens=step.tokens.to(device),
        cos=cos,
        sin=sin,
        attention=GroupedAttention(
            tuple(_group(members, step, settings) for members in _members(step.segments))
        ),
        logit_rows=None if wanted == list(range(rows)) else step.logit_rows.to(device),
    )


def ancestor_masks(segments: Sequence[Segment], rows: int) -> torch.Tensor:
    """bool [S, rows, rows]: row i sees its ancestors and itself; pad rows see themselves only."""
    masks = np.zeros((len(segments), rows, rows), dtype=bool)
    for mask, segment in zip(masks, segments, strict=True):
        for i, parent in enumerate(segment.parents or range(-1, segment.rows - 1)):
            if parent >= 0:
                mask[i] = mask[parent]
            mask[i, i] = True
        for i in range(segment.rows, rows):
            mask[i, i] = True
    return torch.from_numpy(masks)


def _members(segments: Sequence[Segment]) -> list[list[Segment]]:
    groups: dict[object, list[Segment]] = {}
    for number, segment in enumerate(segments):
        if segment.rows == 1 or segment.parents is not None:
            groups.setdefault((segment.rows - 1).bit_length(), []).append(segment)
        else:
            groups[("chain", number)] = [segment]
    return list(groups.values())


def _group(members: list[Segment], step: Step, settings: BatchSettings) -> AttentionGroup:
    rows = max(segment.rows for segment in members)
    sessions = len(members)
    table = torch.zeros(sessions, max(max(len(segment.pages) for segment in members), 1), dtype=torch.int64)
    for s, segment in enumerate(members):
        table[s, : len(segment.pages)] = torch.tensor(segment.pages, dtype=torch.int64)
    lengths = torch.tensor([segment.context_length for segment in members], dtype=torch.int64)
    prefill = all(segment.parents is None for segment in members)
    chain = rows > 1 and prefill
    mask = None if chain or rows == 1 else ancestor_masks(members, rows)
    index = np.stack([np.minimum(np.arange(rows), m.rows - 1) + m.first_row for m in members])
    plans: dict[int | None, AttentionPlan] = {}
    for window in settings.windows:
        new_mask, start = mask, None
        if window is not None:
            positions = step.positions[torch.from_numpy(index)]
            start = positions - window + 1
            if rows > 1 and int((positions.amax(1) - positions.amin(1)).max()) >= window:
                # The window ends inside the pass's own rows.
                visible = mask if mask is not None else ancestor_masks(members, rows)
                new_mask = visible & (positions[:, :, None] - positions[:, None, :] < window)
        plans[window] = plan_attention(
            table,
            lengths,
            new_mask,
            rows=rows,
            page_size=settings.page_size,
            dtype=settings.dtype,
            device=settings.device,
            window_start=start,
            one_part=settings.one_part,
        )
    flat = index.reshape(-1)
    first = int(flat[0])
    if np.array_equal(flat, np.arange(first, first + flat.size)):
        return AttentionGroup(sessions, rows, first, None, None, None, plans, not prefill)
    device = settings.device
    valid = (np.arange(rows)[None] < np.array([m.rows for m in members])[:, None]).reshape(-1)
    kept = None if valid.all() else torch.from_numpy(np.flatnonzero(valid)).to(device)
    gather = torch.from_numpy(flat).to(device)
    scatter = gather if kept is None else gather.index_select(0, kept)
    return AttentionGroup(sessions, rows, -1, gather, kept, scatter, plans, not prefill)
