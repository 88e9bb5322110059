"""Policies: which budget the settings ask for.

Owns the choice between those of budget and cost_budget, not what they do.
"""

from __future__ import annotations

from gateway.budget import BudgetPolicy, SharedRows
from gateway.cost_budget import MAX_ASKED, CostBudget
from gateway.limits import SchedulerLimits


def policy_for(limits: SchedulerLimits) -> BudgetPolicy:
    """The policy that `limits` ask for."""
    if limits.budget == "cost":
        return CostBudget()
    cohorts = max(1, limits.cohorts)
    return SharedRows(
        tree_budget=limits.tree_budget,
        max_verify_rows=max(1, limits.max_verify_rows // cohorts),
        min_tree=limits.min_tree,
        cohorts=cohorts,
    )


def largest_tree(limits: SchedulerLimits) -> int:
    """Most nodes that a tree may have under `limits`, whatever the services allow."""
    return MAX_ASKED if limits.budget == "cost" and limits.tree_budget else limits.tree_budget
