"""GET /v1/specbridge/budget: what the budget knows and has decided of late, as JSON.

Owns the payload, of which the types of report are parts as they stand. Does not own the numbers (report and
who fills it).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fastapi import FastAPI
from pydantic import BaseModel

from gateway.calibration import CalibrationRow
from gateway.report import CohortReport, Decision, GatewayReport, LoadReport


class CalibrationPayload(BaseModel):
    """Nodes of one class. bin: scores [low, high), natural log, low None: everything below high.

    observed, accepted: fading counts; value: probability of acceptance that is used for them, on average.
    """

    mode: str
    depth: int
    bin: tuple[float | None, float]
    observed: float
    accepted: float
    value: float


class BudgetPayload(BaseModel):
    """Curves: [rows or sessions, context, ms], as expected now.

    marginal_gain: [nodes, expected tokens, expected ms, tokens a second] of every size of the last cut.
    decisions: the latest, newest last.
    """

    policy: str
    cohorts: CohortReport
    sessions: int
    verify_curve: list[tuple[int, int, float]]
    draft_curve: list[tuple[int, int, float]]
    overhead_ms: float | None
    calibration: list[CalibrationPayload]
    concurrency: list[LoadReport]
    marginal_gain: list[tuple[int, float, float, float]]
    decisions: list[Decision]


def budget_payload(report: GatewayReport) -> BudgetPayload:
    """The payload of a report."""
    budget = report.budget
    return BudgetPayload(
        policy=budget.policy,
        cohorts=report.cohorts,
        sessions=report.sessions,
        verify_curve=list(budget.verify_curve),
        draft_curve=list(budget.draft_curve),
        overhead_ms=budget.overhead_ms,
        calibration=[_calibration(row) for row in budget.calibration],
        concurrency=list(budget.loads),
        marginal_gain=[(n, tokens, ms, 1e3 * tokens / ms) for n, tokens, ms in budget.gain],
        decisions=list(report.decisions),
    )


def add_debug_routes(app: FastAPI, report: Callable[[], GatewayReport]) -> None:
    @app.get("/v1/specbridge/budget")
    async def budget() -> BudgetPayload:
        """What the budget knows, and its latest decisions."""
        return budget_payload(report())


def _calibration(row: CalibrationRow) -> CalibrationPayload:
    return CalibrationPayload(
        mode=row.mode.value,
        depth=row.depth,
        bin=(None if math.isinf(row.low) else row.low, row.high),
        observed=row.observed,
        accepted=row.accepted,
        value=row.value,
    )
