"""Policies: which budget the settings ask for.

Owns the choice between those of budget and cost_budget, not what they do.
"""

from __future__ import annotations

from gateway.budget import BudgetPolicy, SharedRows
from gateway.cost_budget import MAX_ASKED, CostBudget
from gateway.limits import SchedulerLimits
from specbridge.rounds import TargetInfo


def policy_for(limits: SchedulerLimits) -> BudgetPolicy:
    """The policy that `limits` ask for."""
    if limits.budget == "cost":
        return CostBudget()
    return SharedRows(
        tree_budget=limits.tree_budget,
        max_verify_rows=limits.max_verify_rows,
        min_tree=limits.min_tree,
        rows_before=limits.rows_before,
    )


def largest_tree(limits: SchedulerLimits, target: TargetInfo | None) -> int:
    """Most nodes that a tree may have under `limits` in front of `target` (None: not met yet), whatever the
    services allow.
    """
    if limits.budget == "cost" and limits.tree_budget:
        return MAX_ASKED
    return limits.tree_budget if target is None else limits.rows_before(target).tree_budget
