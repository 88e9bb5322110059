"""What the gateway tells of its budget decisions: plain data for GET /v1/specbridge/budget.

Owns the types and the ring of the latest decisions. Decision, LoadReport and CohortReport are answered as
they stand: fields may be added to them, none goes. Does not own the deciding (cost_budget, cohorts) nor the
route (debug). Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.calibration import CalibrationRow

KEPT_DECISIONS = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """One round. time: unix seconds at its end. expected_*: None where the policy expected nothing.

    asked, nodes: nodes asked of the draft, and verified. skipped: why the draft was not asked. probe:
    "plain", "draft" or "explore" for a round that was run to learn.
    """

    time: float
    cohort: int
    sessions: int
    asked: int
    nodes: int
    expected_tokens: float | None
    tokens: int
    expected_ms: float | None
    observed_ms: float
    skipped: str
    probe: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load that has been met. gain: throughput of drafting over plain decoding, as it is believed now."""

    sessions: int
    cohorts: int
    drafting: bool
    gain: float | None
    plain_tokens_per_s: float | None
    drafting_tokens_per_s: float | None
    next_probe_rounds: int


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What a policy knows. Curves: (rows or sessions, context, ms); gain: (nodes, tokens, ms) of the last
    cut."""

    policy: str
    verify_curve: tuple[tuple[int, int, float], ...] = ()
    draft_curve: tuple[tuple[int, int, float], ...] = ()
    overhead_ms: float | None = None
    calibration: tuple[CalibrationRow, ...] = ()
    loads: tuple[LoadReport, ...] = ()
    gain: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CohortReport:
    """allowed: "auto", "1" or "2"."""

    allowed: str
    in_use: int
    reason: str


class DecisionLog:
    """The latest decisions, oldest first."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=KEPT_DECISIONS)

    def add(self, decision: Decision) -> None:
        self._ring.append(decision)

    def latest(self) -> tuple[Decision, ...]:
        return tuple(self._ring)


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Everything of the payload."""

    budget: BudgetReport
    cohorts: CohortReport
    sessions: int
    decisions: tuple[Decision, ...] = ()
