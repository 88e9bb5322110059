"""The arithmetic of a round: bytes it reads, the least time that takes, what a node buys, what ranks would.

Pure functions of counts and sizes: no I/O, no clock, nothing measured here. Bytes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbridge.rounds import CostPoint, Footprint


@dataclass(frozen=True, slots=True)
class Work:
    """What a round does, the mean over measured rounds.

    context_rows: committed rows of its sessions, each once; context_rows_read: those that attention loads, of
    which context_rows_copied are put together first.
    committed: rows committed, whose hidden states go to the draft, of hidden_row_bytes each. draft_passes: of
    the drafter's block pass, draft_context_rows in each; appends: passes that extend its context.
    """

    rows: float
    committed: float
    context_rows: float
    context_rows_read: float
    context_rows_copied: float = 0.0
    hidden_row_bytes: float = 0.0
    draft_passes: float = 0.0
    draft_context_rows: float = 0.0
    appends: float = 0.0


@dataclass(frozen=True, slots=True)
class Read:
    """One thing that a round reads; size x times = bytes.

    kind: weights, context_kv, hidden_states, or copies, which a floor leaves out: they need not be.
    """

    service: str
    kind: str
    what: str
    size: float
    times: float

    @property
    def bytes(self) -> float:
        return self.size * self.times


def reads(work: Work, target: Footprint, draft: Footprint | None) -> tuple[Read, ...]:
    """What a round reads of the memory of both services; of one rank, if the target has several."""
    found = [
        Read("target", "weights", "weights, one verify pass", target.weight_bytes, 1.0),
        Read(
            "target",
            "context_kv",
            f"context K/V, rows of {target.kv_bytes_per_token:,} bytes",
            work.context_rows * target.kv_bytes_per_token,
            times_read(work),
        ),
    ]
    if work.context_rows_copied:
        size = work.context_rows_copied * target.kv_bytes_per_token
        found.append(Read("target", "copies", "context K/V again, put together", size, 1.0))
    if draft is not None and work.draft_passes:
        found += [
            Read("draft", "weights", "weights, block passes", draft.weight_bytes, work.draft_passes),
            Read("draft", "weights", "weights, context appends", draft.append_weight_bytes, work.appends),
            Read(
                "draft",
                "context_kv",
                f"context K/V, rows of {draft.kv_bytes_per_token:,} bytes",
                work.draft_context_rows * draft.kv_bytes_per_token,
                work.draft_passes,
            ),
            Read(
                "draft",
                "hidden_states",
                f"hidden states, rows of {work.hidden_row_bytes:,.0f} bytes",
                work.hidden_row_bytes,
                work.committed,
            ),
        ]
    return tuple(found)


def times_read(work: Work) -> float:
    """How often a verify pass reads its context: 1 if all rows and heads share a read; 0 without context."""
    return work.context_rows_read / work.context_rows if work.context_rows else 0.0


def floor(found: Sequence[Read], service: str, copy_bytes_per_s: float) -> float | None:
    """The least time in which `service` can read its bytes, at a copy's rate; None if that is unknown."""
    if copy_bytes_per_s <= 0:
        return None
    counted = (read.bytes for read in found if read.service == service and read.kind != "copies")
    return sum(counted) / copy_bytes_per_s


# ---- candidates -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """Rounds with trees of so many nodes (a mean). tokens: of a round of a session; round_s, verify_s,
    draft_s.
    """

    nodes: float
    tokens: float
    round_s: float
    verify_s: float
    draft_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.round_s if self.round_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """From one point to the next larger one, per node: tokens gained, seconds spent; pays: the rate rose."""

    first: float
    last: float
    tokens: float
    seconds: float
    pays: bool


def marginal(points: Sequence[Point]) -> tuple[Step, ...]:
    """What each further node bought, between points in order of their nodes."""
    ordered = sorted(points, key=lambda point: point.nodes)
    steps = []
    for low, high in zip(ordered, ordered[1:], strict=False):
        more = high.nodes - low.nodes
        if more > 0:
            steps.append(
                Step(
                    low.nodes,
                    high.nodes,
                    (high.tokens - low.tokens) / more,
                    (high.round_s - low.round_s) / more,
                    high.tokens_per_s > low.tokens_per_s,
                )
            )
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Slope:
    """Measured time per context row of passes of one row and of `rows` rows, between two contexts. Seconds.

    ratio near 1: the rows share one read; near `rows`: each reads for itself. Attention's arithmetic grows
    with the rows, too, so that on a CPU it lies between.
    """

    rows: int
    contexts: tuple[int, int]
    alone_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        return self.together_s / self.alone_s if self.alone_s > 0 else 0.0


def context_slope(curve: Sequence[CostPoint]) -> Slope | None:
    """From a verify-cost curve; None unless one and several rows were run at two contexts, and differ."""
    times = {(point.rows, point.context): point.time_ns / 1e9 for point in curve}
    contexts = sorted({point.context for point in curve})
    if len(contexts) < 2 or contexts[-1] < 2 * contexts[0]:
        return None
    low, high = contexts[0], contexts[-1]
    both = [
        rows for rows in sorted({p.rows for p in curve}) if (rows, low) in times and (rows, high) in times
    ]
    if len(both) < 2 or both[0] != 1:
        return None

    def per_row(rows: int) -> float:
        return (times[rows, high] - times[rows, low]) / (high - low)

    # A tree of usual size: more rows are bound by arithmetic, which is another question.
    rows = max((r for r in both if r <= 8), default=both[-1])
    if rows == 1:
        rows = both[1]
    alone, together = per_row(1), per_row(rows)
    # Of short contexts on a busy machine the difference is noise, and may be below nothing.
    return Slope(rows, (low, high), alone, together) if alone > 0 and together > 0 else None


# ---- more ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranks:
    """A target on so many ranks, estimated: bytes of a rank, its floor, and what that saves of a verify pass.

    collectives: of a pass. break_even_s: what each of them may take (or, if there are ranks already, take
    longer) before nothing is saved. best_ratio: round now / round then if they took no time.
    """

    ranks: int
    weight_bytes: float
    context_bytes: float
    floor_s: float
    saved_s: float
    collectives: int
    break_even_s: float
    best_ratio: float


def more_ranks(
    target: Footprint,
    *,
    tp_size: int,
    num_layers: int,
    context_rows_read: float,
    round_s: float,
    most: int = 8,
) -> tuple[Ranks, ...]:
    """Doublings of the ranks up to `most`. Weights are split evenly; key/value heads as far as there are
    some.

    Assumes that each rank's memory is its own and as fast as this one's, that what a pass takes beyond its
    floor stays, and two all-reduces a layer and one gather of the choices.
    """
    rate, heads = target.copy_bytes_per_s, max(1, target.num_kv_heads)
    if rate <= 0 or round_s <= 0:
        return ()
    context = context_rows_read * target.kv_bytes_per_token
    now = (target.weight_bytes + context) / rate
    found = []
    for ranks in (2 * tp_size, 4 * tp_size, 8 * tp_size):
        if ranks > max(most, 2 * tp_size):
            break
        weights = target.weight_bytes * tp_size / ranks
        kept = context * min(tp_size, heads) / min(ranks, heads)
        floor_s = (weights + kept) / rate
        saved = now - floor_s
        collectives = 2 * num_layers + 1
        left = round_s - saved
        if left <= 0:  # the round is faster than its floor: there is nothing to estimate from
            break
        found.append(
            Ranks(
                ranks=ranks,
                weight_bytes=weights,
                context_bytes=kept,
                floor_s=floor_s,
                saved_s=saved,
                collectives=collectives,
                break_even_s=saved / collectives,
                best_ratio=round_s / left,
            )
        )
    return tuple(found)
