"""The cost model: what a round is expected to take.

Owns the curves of verifying, drafting and the rest of a round, where they begin (what the services measured)
and which parts of a round move them. A verify pass costs by its rows, and something more for each session
beyond the first: services measure their curves with one. Does not own what is decided with them
(cost_budget). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.budget import Beside, Expected
from gateway.cost_curves import CostCurve
from gateway.cost_grid import Point
from gateway.generation import RoundRecord
from specbridge.rounds import DraftInfo, TargetInfo

_CHUNK_WEIGHT = 0.05
"""Of the latest pass, in what prompts add to passes."""


class CostModel:
    """Seconds of rounds; see the module.

    context: committed tokens of a session, on average, of the rounds asked about. A verify pass reads those
    of all its sessions, which is how its curve counts them.
    """

    def __init__(self) -> None:
        self.context = 128
        self.has_draft = False
        self._verify = CostCurve(_UNKNOWN_VERIFY)
        self._prompt = CostCurve(_UNKNOWN_PROMPT)
        self._session = SessionTerm()
        self.chunk_s = 0.0
        """What prompts added to the latest passes, on average, those without one included."""
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
            shortest = min((p.context for p in target.verify_cost), default=0)
            self._prompt = CostCurve(
                [Point(p.rows, 0, p.time_ns / 1e9) for p in target.verify_cost if p.context == shortest]
                or _UNKNOWN_PROMPT
            )
            self._session = SessionTerm()
        if draft is not None and draft.instance != self._drafter:
            self._drafter, self.has_draft, news = draft.instance, True, True
            block = max(1, draft.block_size)
            self._draft = CostCurve(
                [Point(max(1, round(p.rows / block)), p.context, p.time_ns / 1e9) for p in draft.draft_cost]
                or _UNKNOWN_DRAFT
            )
        return news

    def observe(self, record: RoundRecord, *, calm: bool = True, alone: bool = True) -> None:
        """What a round took. One without an answer says nothing.

        calm: nothing made it longer than rounds like it are; if not, its waits are no more than bounds.
        alone: nothing made it longer than it is by itself (accounts.Calm).
        """
        if not record.tokens:
            return
        # Hardly any is an observation, too: else what is assumed of it would stand for ever.
        overhead, plain = max(record.gateway_s, 1e-6), self._overhead[False]
        # A plain round has no more of it than a drafting one; while all is drafted for, none is seen.
        if record.drafted and overhead < plain.seconds(record.sessions, 0):
            plain.observe(record.sessions, 0, overhead)
        self._overhead[record.drafted > 0].observe(record.sessions, 0, overhead)
        if alone or record.draft_wait_s < self._draft.seconds(record.drafted, record.context):
            self._draft.observe(record.drafted, record.context, record.draft_wait_s)
        rows, context, further = record.rows, record.context * record.sessions, record.sessions - 1
        seconds, prompt = verify_seconds(record), prefill_rows(record)
        self.chunk_s += _CHUNK_WEIGHT * (self._prompt.seconds(prompt, 0) - self.chunk_s)
        if prompt and not calm:
            # Laid to the verify curve, chunks beside few streams would make trees of many rows dear.
            usual = self._verify.seconds(rows, context) + self._session.seconds * further
            self._prompt.observe(prompt, 0, max(seconds - usual, 1e-6))
        elif calm or record.drafted:
            seconds -= self._prompt.seconds(prompt, 0)
            self._session.observe(further, seconds, self._verify.measured(rows, context))
            self._verify.observe(rows, context, seconds - self._session.seconds * further)

    def seconds(self, sessions: int, drafted: int, nodes: int, beside: Beside | None = None) -> list[float]:
        """Expected seconds of a round of `sessions`, `drafted` of them drafted for, by nodes 0 .. `nodes`.

        With another cohort beside it the target's passes follow each other: a round is no shorter than both.
        """
        fixed = self._overhead[drafted > 0].seconds(sessions, 0) + self._draft.seconds(drafted, self.context)
        if beside is not None:
            fixed = max(fixed, beside.verify_s)
        return self._passes(sessions, nodes, fixed)

    def _passes(self, sessions: int, nodes: int, more: float = 0.0) -> list[float]:
        """Of a verify pass and `more` seconds, by nodes 0 .. `nodes`; with as much of prompts as of late: the
        more tokens a round brings, the fewer rounds pay for a chunk."""
        more += self._session.seconds * (sessions - 1) + self.chunk_s
        table = self._verify.table(sessions, sessions + nodes, self.context * sessions)
        return [more + seconds for seconds in table]

    def paired(self, sessions: int, drafted: int, nodes: int, cohorts: int) -> list[float]:
        """`seconds`, of one of `cohorts` alike: with two, both verify on the same target in a period."""
        alone = self.seconds(sessions, drafted, nodes)
        if cohorts == 1:
            return alone
        passes = self._passes(sessions, nodes)
        return [max(own, 2.0 * verify) for own, verify in zip(alone, passes, strict=True)]

    def plain(self, sessions: int, beside: Beside | None = None) -> Expected:
        """A round without the draft."""
        return Expected(float(sessions), self.seconds(sessions, 0, 0, beside)[0])

    def of(self, record: RoundRecord) -> float:
        """Expected seconds of a round as it went."""
        return (
            self._overhead[record.drafted > 0].seconds(record.sessions, 0)
            + self._draft.seconds(record.drafted, record.context)
            + self._verify.seconds(record.rows, record.context * record.sessions)
            + self._prompt.seconds(prefill_rows(record), 0)
            + self._session.seconds * (record.sessions - 1)
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

    @property
    def session_seconds(self) -> float:
        """What each session beyond the first adds to a verify pass, besides its rows."""
        return self._session.seconds

    def draft_points(self) -> tuple[tuple[int, int, float], ...]:
        """(sessions, context, ms), for people."""
        return _curve(self._draft.points(self._draft.measured_sizes, self.context))


class SessionTerm:
    """Seconds that each session beyond the first adds to a pass; see the module.

    Least squares with a prior and a fading memory, of observed over measured seconds:
    1 + a + b * (further sessions) * (a single row's seconds) / (measured seconds). `a` is what the machine
    takes otherwise than measured whatever the sessions are. Its prior is narrow: a curve was measured with
    one session, so what rounds of several take longer is laid to their number.
    """

    _FADE = 0.98
    _PRIOR = (40.0, 1.0)
    """Weights of a = 0 and b = 0, in rounds."""

    def __init__(self) -> None:
        self._unit = 0.0
        # Fading sums over rounds of (1, x, x * x), and of (y, x * y).
        self._squares = [0.0, 0.0, 0.0]
        self._products = [0.0, 0.0]
        self.seconds = 0.0

    def observe(self, further: int, seconds: float, measured: float) -> None:
        """A pass with `further` sessions took so long; the curve as measured says `measured` of its rows."""
        if not self._unit:
            self._unit = measured
        # One stalled pass says nothing about the next.
        more = min(seconds / measured, 8.0) - 1.0
        x = further * self._unit / measured
        fade, (ones, cross, squares), (first, second) = self._FADE, self._squares, self._products
        self._squares = [fade * ones + 1.0, fade * cross + x, fade * squares + x * x]
        self._products = [fade * first + more, fade * second + x * more]
        (ones, cross, squares), (first, second) = self._squares, self._products
        ones, squares = ones + self._PRIOR[0], squares + self._PRIOR[1]
        slope = (ones * second - cross * first) / (ones * squares - cross * cross)
        self.seconds = max(0.0, slope) * self._unit


def verify_seconds(record: RoundRecord) -> float:
    """Of a round's verify pass, seen from here: without the time that it stood in the target's queue."""
    return max(0.0, record.verify_wait_s - queue_s(record))


def own_seconds(record: RoundRecord) -> float:
    """Of a round, without what another cohort or a prompt made it wait in the target's queue."""
    return max(0.0, record.total_s - queue_s(record))


def queue_s(record: RoundRecord) -> float:
    """Seconds that a round's rows stood behind another pass."""
    return record.target_timings.queue_ns / 1e9 if record.target_timings is not None else 0.0


def prefill_rows(record: RoundRecord) -> int:
    """Prompt rows that shared a round's passes."""
    return record.target_timings.prefill_rows if record.target_timings is not None else 0


def _curve(points: Sequence[Point]) -> tuple[tuple[int, int, float], ...]:
    return tuple((point.size, point.context, 1e3 * point.seconds) for point in points)


# Where a service has not measured: shapes only, the rounds give the scale.
_UNKNOWN_VERIFY = (Point(1, 0, 0.010), Point(64, 0, 0.014), Point(256, 0, 0.030))
_UNKNOWN_PROMPT = _UNKNOWN_VERIFY
_UNKNOWN_DRAFT = (Point(1, 0, 0.002), Point(64, 0, 0.006))
_UNKNOWN_OVERHEAD = (Point(1, 0, 0.0015), Point(64, 0, 0.0045))
