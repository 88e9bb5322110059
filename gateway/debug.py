"""GET /v1/specbridge/budget: what the budget knows and has decided of late, as JSON.

Owns the payload. Fields may be added to it, none goes. Does not own the numbers (report and who fills it).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fastapi import FastAPI
from pydantic import BaseModel

from gateway.calibration import CalibrationRow
from gateway.report import GatewayReport, LoadReport


class CohortsPayload(BaseModel):
    """allowed: "auto", "1" or "2"."""

    allowed: str
    in_use: int
    reason: str


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


class LoadPayload(BaseModel):
    """A number of sessions in a round. gain: tokens a second of drafting over plain decoding, as believed."""

    sessions: int
    cohorts: int
    drafting: bool
    gain: float | None
    plain_tokens_per_s: float | None
    drafting_tokens_per_s: float | None
    next_probe_rounds: int


class DecisionPayload(BaseModel):
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


class BudgetPayload(BaseModel):
    """Curves: [rows or sessions, context, ms], as expected now.

    marginal_gain: [nodes, expected tokens, expected ms, tokens a second] of every size of the last cut.
    decisions: the latest, newest last.
    """

    policy: str
    cohorts: CohortsPayload
    sessions: int
    verify_curve: list[tuple[int, int, float]]
    draft_curve: list[tuple[int, int, float]]
    overhead_ms: float | None
    calibration: list[CalibrationPayload]
    concurrency: list[LoadPayload]
    marginal_gain: list[tuple[int, float, float, float]]
    decisions: list[DecisionPayload]


def budget_payload(report: GatewayReport) -> BudgetPayload:
    """The payload of a report."""
    budget = report.budget
    return BudgetPayload(
        policy=budget.policy,
        cohorts=CohortsPayload(
            allowed=report.cohorts.allowed, in_use=report.cohorts.in_use, reason=report.cohorts.reason
        ),
        sessions=report.sessions,
        verify_curve=list(budget.verify_curve),
        draft_curve=list(budget.draft_curve),
        overhead_ms=budget.overhead_ms,
        calibration=[_calibration(row) for row in budget.calibration],
        concurrency=[_load(load) for load in budget.loads],
        marginal_gain=[(n, tokens, ms, 1e3 * tokens / ms) for n, tokens, ms in budget.gain],
        decisions=[
            DecisionPayload(**{name: getattr(one, name) for name in DecisionPayload.model_fields})
            for one in report.decisions
        ],
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


def _load(load: LoadReport) -> LoadPayload:
    return LoadPayload(**{name: getattr(load, name) for name in LoadPayload.model_fields})
