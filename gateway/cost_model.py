"""The cost model: what a round is expected to take.

Owns the curves of verifying, drafting and the rest of a round, where they begin (what the services measured)
and which parts of a round move them. Does not own what is decided with them (cost_budget). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.budget import Beside, Expected
from gateway.cost_curves import CostCurve, Point
from gateway.generation import RoundRecord
from specbridge.rounds import DraftInfo, TargetInfo


class CostModel:
    """Seconds of rounds; see the module.

    context: committed tokens of a session, on average, of the rounds asked about. A verify pass reads those
    of all its sessions, which is how its curve counts them.
    """

    def __init__(self) -> None:
        self.context = 128
        self.has_draft = False
        self._verify = CostCurve(_UNKNOWN_VERIFY)
        self._draft = CostCurve(_UNKNOWN_DRAFT)
        # Apart, so that what a draft costs besides its wait is not held against plain decoding.
        self._overhead = {drafting: CostCurve(_UNKNOWN_OVERHEAD) for drafting in (False, True)}
        self._target: bytes | None = None
        self._drafter: bytes | None = None

    def measured(self, target: TargetInfo, draft: DraftInfo | None) -> bool:
        """Begin anew with what a service says that was not here before; whether there is such a one."""
        news = False
        if target.instance != self._target:
            self._target, news = target.instance, True
            self._verify = CostCurve(
                [Point(p.rows, p.context, p.time_ns / 1e9) for p in target.verify_cost] or _UNKNOWN_VERIFY
            )
        if draft is not None and draft.instance != self._drafter:
            self._drafter, self.has_draft, news = draft.instance, True, True
            block = max(1, draft.block_size)
            self._draft = CostCurve(
                [Point(max(1, round(p.rows / block)), p.context, p.time_ns / 1e9) for p in draft.draft_cost]
                or _UNKNOWN_DRAFT
            )
        return news

    def observe(self, record: RoundRecord) -> None:
        """What a round took. Rounds with prompt rows, or without an answer, say nothing of its parts."""
        if not record.tokens or _prefill_rows(record):
            return
        self._verify.observe(record.rows, record.context * record.sessions, verify_seconds(record))
        self._draft.observe(record.drafted, record.context, record.draft_wait_s)
        self._overhead[record.drafted > 0].observe(record.sessions, 0, record.gateway_s)

    def seconds(self, sessions: int, drafted: int, nodes: int, beside: Beside | None = None) -> list[float]:
        """Expected seconds of a round of `sessions`, `drafted` of them drafted for, by nodes 0 .. `nodes`.

        With another cohort beside it the target's passes follow each other: a round is no shorter than both.
        """
        fixed = self._overhead[drafted > 0].seconds(sessions, 0) + self._draft.seconds(drafted, self.context)
        verify = self._verify.table(sessions, sessions + nodes, self.context * sessions)[: nodes + 1]
        if beside is None:
            return [fixed + seconds for seconds in verify]
        other = beside.verify_s
        return [seconds + (fixed if fixed > other else other) for seconds in verify]

    def paired(self, sessions: int, drafted: int, nodes: int, cohorts: int) -> list[float]:
        """`seconds`, of one of `cohorts` alike: with two, both verify on the same target in a period."""
        alone = self.seconds(sessions, drafted, nodes)
        if cohorts == 1:
            return alone
        verify = self._verify.table(sessions, sessions + nodes, self.context * sessions)
        return [max(own, 2.0 * passes) for own, passes in zip(alone, verify, strict=False)]

    def plain(self, sessions: int, beside: Beside | None = None) -> Expected:
        """A round without the draft."""
        return Expected(float(sessions), self.seconds(sessions, 0, 0, beside)[0])

    def of(self, record: RoundRecord) -> float:
        """Expected seconds of a round as it went, prompt rows included."""
        rows = record.rows + _prefill_rows(record)
        return (
            self._overhead[record.drafted > 0].seconds(record.sessions, 0)
            + self._draft.seconds(record.drafted, record.context)
            + self._verify.seconds(rows, record.context * record.sessions)
        )

    def capture(self, rows: int) -> float:
        """Seconds that the target takes to run `rows` committed rows of one session again."""
        return self._verify.seconds(rows, rows)

    def overhead(self, sessions: int) -> float:
        """Seconds of a plain round outside of the services' waits."""
        return self._overhead[False].seconds(sessions, 0)

    def verify_points(self, sessions: int) -> tuple[tuple[int, int, float], ...]:
        """(rows, context, ms), for people."""
        context = self.context * sessions
        sizes = sorted({*self._verify.measured_sizes, sessions})
        return _curve(self._verify.points(sizes, context))

    def draft_points(self) -> tuple[tuple[int, int, float], ...]:
        """(sessions, context, ms), for people."""
        return _curve(self._draft.points(self._draft.measured_sizes, self.context))


def verify_seconds(record: RoundRecord) -> float:
    """Of a round's verify pass, seen from here: without the time that it stood in the target's queue."""
    return max(0.0, record.verify_wait_s - _queue_s(record))


def own_seconds(record: RoundRecord) -> float:
    """Of a round, without what another cohort or a prompt made it wait in the target's queue."""
    return max(0.0, record.total_s - _queue_s(record))


def _queue_s(record: RoundRecord) -> float:
    return record.target_timings.queue_ns / 1e9 if record.target_timings is not None else 0.0


def _prefill_rows(record: RoundRecord) -> int:
    return record.target_timings.prefill_rows if record.target_timings is not None else 0


def _curve(points: Sequence[Point]) -> tuple[tuple[int, int, float], ...]:
    return tuple((point.size, point.context, 1e3 * point.seconds) for point in points)


# Where a service has not measured: shapes only, the rounds give the scale.
_UNKNOWN_VERIFY = (Point(1, 0, 0.010), Point(64, 0, 0.014), Point(256, 0, 0.030))
_UNKNOWN_DRAFT = (Point(1, 0, 0.002), Point(64, 0, 0.006))
_UNKNOWN_OVERHEAD = (Point(1, 0, 0.0015), Point(64, 0, 0.0045))
