"""One step's contents: which rows go into a forward pass, and the bookkeeping of request batches.

Owns the packing of verify trees, prompt chunks and re-captures into a Step, and the padding of deterministic
mode. Does not own what is taken into a step (target_service.engine) nor what becomes of its output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specbridge.errors import SpecBridgeError
from specbridge.rounds import SessionKey, TargetReply, TargetResult, TargetResultKind, TargetTimings, Verify
from target_service.capture import Reserved
from target_service.sampling import RowGroup
from target_service.session import Reply, Session
from target_service.step import NO_SLOT, RingSpan, Segment, Step
from target_service.verify import TreeRows, slots


@dataclass(slots=True, eq=False)
class Batch:
    """The verifies of one request; answered in one reply when the last is done. Times: ns of perf_counter."""

    batch_id: int
    reply: Reply
    received: int
    results: list[TargetResult | None]
    missing: int
    queue_ns: int = 0
    forward_ns: int = 0
    commit_ns: int = 0
    rows: int = 0
    prefill_rows: int = 0
    cold: bool = False
    started: bool = False

    def put(self, index: int, result: TargetResult) -> None:
        assert self.results[index] is None
        self.results[index] = result
        self.missing -= 1

    def start(self, now: int) -> None:
        """The first forward with rows of this batch begins."""
        if not self.started:
            self.started = True
            self.queue_ns = now - self.received

    def build_reply(self) -> TargetReply:
        assert not self.missing
        timings = TargetTimings(
            queue_ns=self.queue_ns,
            forward_ns=self.forward_ns,
            commit_ns=self.commit_ns,
            rows=self.rows,
            prefill_rows=self.prefill_rows,
            service_ns=time.perf_counter_ns() - self.received,
            cold=self.cold,
        )
        return TargetReply(self.batch_id, tuple(r for r in self.results if r is not None), timings)


@dataclass(slots=True, eq=False)
class VerifyItem:
    """One verify, from its arrival to its result. rows, first_row, logit_row, reserved belong to its step."""

    batch: Batch
    index: int
    verify: Verify
    session: Session | None = None
    rows: TreeRows | None = None
    reserved: Reserved | None = None
    first_row: int = 0
    logit_row: int = 0


@dataclass(slots=True, eq=False)
class ChainItem:
    """Rows [first, first + count) of one session's tokens: a prompt chunk, or a re-capture.

    final: the chunk ends the prefill; its last row chooses the first token.
    """

    session: Session
    first: int
    count: int
    final: bool = False
    reserved: Reserved | None = None
    first_row: int = 0
    logit_row: int = 0


@dataclass(slots=True)
class StepPlan:
    """What one forward pass runs. held_back: rows to run again found no room beside the verifies."""

    verifies: list[VerifyItem] = field(default_factory=list)
    prefills: list[ChainItem] = field(default_factory=list)
    recaptures: list[ChainItem] = field(default_factory=list)
    held_back: bool = False

    def __bool__(self) -> bool:
        return bool(self.verifies or self.prefills or self.recaptures)

    @property
    def verify_rows(self) -> int:
        return sum(len(item.verify.tree) + 1 for item in self.verifies)

    @property
    def captures(self) -> bool:
        """Whether the pass writes to the ring."""
        chains = (*self.prefills, *self.recaptures)
        return any(i.reserved is not None for i in self.verifies) or any(
            i.reserved is not None for i in chains
        )

    def sessions(self) -> list[Session]:
        chains = [item.session for item in (*self.prefills, *self.recaptures)]
        return [item.session for item in self.verifies if item.session is not None] + chains


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """padding: scratch rows at the end of the pass."""

    step: Step
    padding: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Fixed row counts of deterministic mode; 0: no padding."""

    verify: int = 0
    prefill: int = 0


def build_step(plan: StepPlan, *, buckets: Buckets, max_position: int, page_size: int) -> BuiltStep:
    """Pack `plan` into one Step and note in its items where their rows went.

    With buckets, the plan must hold a single item; its segment is padded with rows that nothing sees.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    targets: list[int] = []
    groups: list[RowGroup] = []
    padding = 0
    for item in plan.verifies:
        session, rows = item.session, item.rows
        assert session is not None and rows is not None
        item.first_row, item.logit_row = len(tokens), len(logit_rows)
        count = len(rows.tokens)
        groups.append(RowGroup(session.rule, item.logit_row, [p + 1 for p in rows.positions]))
        tokens += rows.tokens
        positions += rows.positions
        by_depth = slots(session.table.pages, page_size, session.kv_length, rows.depth + 1)
        targets += [by_depth[position - session.kv_length] for position in rows.positions]
        parents = rows.parents
        if buckets.verify:
            padding = buckets.verify - count
            tokens += [0] * padding
            positions += [min(session.kv_length + 1, max_position)] * padding
            targets += [NO_SLOT] * padding
            parents += (0,) * padding
        segments.append(
            Segment(
                item.first_row,
                count + padding,
                session.kv_length,
                tuple(session.table.pages),
                parents,
                _ring_span(item.reserved, session.kv_length),
                padding,
            )
        )
        logit_rows += range(item.first_row, len(tokens))
    for number, chain in enumerate((*plan.prefills, *plan.recaptures)):
        session = chain.session
        chain.first_row = len(tokens)
        end = chain.first + chain.count
        tokens += session.tokens[chain.first : end]
        positions += range(chain.first, end)
        if number < len(plan.prefills):
            targets += slots(session.table.pages, page_size, chain.first, chain.count)
        else:  # these rows' K/V are in pages already, and others may be reading them
            targets += [NO_SLOT] * chain.count
        extra = max(buckets.prefill - chain.count, 0)
        if extra:
            padding = extra
            tokens += [0] * extra
            positions += [min(p, max_position) for p in range(end, end + extra)]
            targets += [NO_SLOT] * extra
        segments.append(
            Segment(
                chain.first_row,
                chain.count + extra,
                chain.first,
                tuple(session.table.pages),
                ring=_ring_span(chain.reserved, chain.first),
                padding=extra,
            )
        )
        if chain.final:
            chain.logit_row = len(logit_rows)
            logit_rows.append(chain.first_row + chain.count - 1)
            groups.append(RowGroup(session.rule, chain.logit_row, [end]))
    step = Step(
        tokens=_int64(tokens),
        positions=_int64(positions),
        segments=tuple(segments),
        logit_rows=_int64(logit_rows),
        slots=_int64(targets),
        groups=tuple(groups),
        read_logits=any(session.want_logprobs for session in plan.sessions()),
    )
    return BuiltStep(step, padding)


def _int64(values: Sequence[int]) -> torch.Tensor:
    """As torch.tensor does it, in a third of its time for a tree's rows."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _ring_span(reserved: Reserved | None, first: int) -> RingSpan | None:
    """Where rows from position `first` on are captured."""
    if reserved is None:
        return None
    return RingSpan(reserved.handle.first_slot + reserved.offset, reserved.first - first)


def error_result(item: VerifyItem, error: SpecBridgeError) -> TargetResult:
    """One verify's error."""
    return TargetResult(
        item.verify.session,
        TargetResultKind.ERROR,
        base=item.verify.base,
        error=error,
        draft_has_context=False,
    )


def failed_result(key: SessionKey, error: SpecBridgeError) -> TargetResult:
    """A session's end by an error."""
    return TargetResult(key, TargetResultKind.ERROR, error=error, draft_has_context=False)


def preempted_result(key: SessionKey) -> TargetResult:
    """A session's end for want of pages; it may be opened again."""
    return TargetResult(key, TargetResultKind.PREEMPTED, draft_has_context=False)
