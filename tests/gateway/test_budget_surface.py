"""What users see and set of the budget: the request's fields, the flags, GET /v1/specbridge/budget."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from budget_sim import Bench, Costs, grow
from pydantic import ValidationError
from surface import Surface, make_surface

from gateway.config import GatewaySettings
from gateway.cost_budget import CostBudget
from gateway.debug import budget_payload
from gateway.report import KEPT_DECISIONS, BudgetReport, CohortReport, Decision, DecisionLog, GatewayReport


@pytest.fixture
def surface() -> Surface:
    return make_surface()


async def post(surface: Surface, **body: Any) -> Any:
    async with surface.client() as client:
        return await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, **body})


@pytest.mark.parametrize(
    ("body", "speculates"),
    [
        ({}, True),
        ({"speculation": "on"}, True),
        ({"speculation": "off"}, False),
        ({"no_speculation": True}, False),
        ({"speculation": "on", "no_speculation": True}, False),
        ({"speculation": None, "no_speculation": False}, True),
    ],
)
async def test_speculation_of_a_request(surface: Surface, body: dict[str, Any], speculates: bool) -> None:
    surface.plays("ab")
    assert (await post(surface, **body)).status_code == 200
    assert surface.scheduler.request.speculate is speculates


async def test_a_wrong_word_is_refused(surface: Surface) -> None:
    refused = await post(surface, speculation="sometimes")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "speculation"


# ---- flags ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "budget", "cohorts"),
    [
        ({}, "fixed", 0),
        ({"budget": "fixed"}, "fixed", 0),
        ({"tree_budget": 8}, "fixed", 0),
        ({"max_verify_rows": 8, "cohorts": "2"}, "fixed", 2),
        ({"min_tree": 1, "budget": "fixed", "cohorts": "1"}, "fixed", 1),
        ({"budget": "cost"}, "cost", 0),
        ({"tree_budget": 0}, "fixed", 0),
        ({"tree_budget": 0, "budget": "cost"}, "cost", 0),
    ],
)
def test_which_budget_the_flags_ask_for(given: dict[str, Any], budget: str, cohorts: int) -> None:
    limits = GatewaySettings(**given).limits()
    assert (limits.budget, limits.cohorts) == (budget, cohorts)
    assert limits.tree_budget == given.get("tree_budget", 5)


@pytest.mark.parametrize("name", ["tree_budget", "max_verify_rows", "min_tree"])
def test_sizes_and_measured_costs_exclude_each_other(name: str) -> None:
    with pytest.raises(ValidationError, match="--" + name.replace("_", "-")):
        GatewaySettings(budget="cost", **{name: 4})


# ---- the payload ----------------------------------------------------------------------------


def decision(number: int, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "time": 1000.0 + number, "cohort": 0, "sessions": 2, "asked": 8, "nodes": 5, "expected_tokens": 4.5,
        "tokens": 4, "expected_ms": 40.0, "observed_ms": 41.0, "skipped": "", "probe": "",
    }  # fmt: skip
    return Decision(**{**values, **changes})


def test_the_log_keeps_the_latest() -> None:
    log = DecisionLog()
    for number in range(KEPT_DECISIONS + 10):
        log.add(decision(number))
    kept = log.latest()
    assert len(kept) == KEPT_DECISIONS
    assert [kept[0].time, kept[-1].time] == [1010.0, 1000.0 + KEPT_DECISIONS + 9]


async def test_the_route_answers_before_any_traffic(surface: Surface) -> None:
    async with surface.client() as client:
        response = await client.get("/v1/specbridge/budget")
    assert response.status_code == 200
    body = response.json()
    assert body["policy"] == "fixed" and body["cohorts"] == {"allowed": "1", "in_use": 1, "reason": "setting"}
    for name in ("verify_curve", "draft_curve", "calibration", "concurrency", "marginal_gain", "decisions"):
        assert body[name] == []


async def test_the_route_wants_the_key() -> None:
    guarded = make_surface(api_key="secret")
    async with guarded.client() as client:
        assert (await client.get("/v1/specbridge/budget")).status_code == 401
        allowed = await client.get("/v1/specbridge/budget", headers={"Authorization": "Bearer secret"})
        assert allowed.status_code == 200


def test_the_payload_of_a_budget_at_work() -> None:
    costs = Costs(lambda rows: 0.01 + 0.0001 * rows, lambda sessions: 0.002)
    policy = CostBudget()
    policy.measured(costs.target(), costs.drafter())
    Bench(costs, [grow(random.Random(i), sure=0.7, honest=0.9) for i in range(20)]).run(policy, 3, 100)
    report = GatewayReport(
        policy.report(), CohortReport("auto", 1, "forecast"), 3, (decision(0, skipped="budget"), decision(1))
    )
    # Strict JSON: no NaN, no infinity.
    body = json.loads(budget_payload(report).model_dump_json())
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["policy"] == "cost" and body["sessions"] == 3
    rows, context, ms = body["verify_curve"][0]
    assert rows == 1 and context > 0 and ms == pytest.approx(10.0, rel=0.1)
    for row in body["calibration"]:
        low, high = row["bin"]
        assert high <= 0.0 and (low is None or low < high)
        assert 0.0 <= row["accepted"] <= row["observed"] and 0.0 <= row["value"] <= 1.0
    assert [row["sessions"] for row in body["concurrency"]] == [3]
    nodes, tokens, ms, rate = body["marginal_gain"][0]
    assert (nodes, tokens) == (0, 3.0) and rate == pytest.approx(1e3 * tokens / ms)
    assert [d["skipped"] for d in body["decisions"]] == ["budget", ""]


def test_a_fixed_budget_expects_nothing() -> None:
    report = GatewayReport(BudgetReport("fixed"), CohortReport("auto", 1, "setting"), 0, (
        decision(0, expected_tokens=None, expected_ms=None),
    ))  # fmt: skip
    (only,) = budget_payload(report).decisions
    assert only.expected_tokens is None and only.expected_ms is None and only.nodes == 5
