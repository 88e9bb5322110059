"""The cost budget in virtual time: never much worse than the best fixed setting, at any load, whatever the
drafter is worth. Pure: budget_sim asks it what the scheduler would.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import pytest
from budget_sim import HORIZON, Bench, Costs, Grown, grow

from gateway.budget import Beside, BudgetPolicy, Candidate, SharedRows
from gateway.calibration import Mode
from gateway.cost_budget import EXPLORE, CostBudget
from gateway.generation import RoundRecord
from gateway.limits import SchedulerLimits
from gateway.policies import largest_tree, policy_for
from gateway.steering import Load
from specbridge.tree import EMPTY_TREE, DraftTree

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024)


def cpu_verify(rows: int) -> float:
    """Blocks of 6 rows: the second costs nearly half as much as the first (the built-in model)."""
    return 0.036 * (1 + 0.03 * rows + 0.45 * ((rows - 1) // 6))


def gpu_verify(rows: int) -> float:
    """Captured graph sizes; flat until arithmetic outweighs reading the weights."""
    bucket = next((size for size in _BUCKETS if size >= rows), rows)
    return 0.0048 * max(1.0 + bucket / 500, bucket / 260)


CPU = Costs(cpu_verify, lambda sessions: 0.004 + 0.010 * sessions, overhead=0.003, noise=0.05)
GPU = Costs(
    gpu_verify,
    lambda sessions: 0.0015 + 0.00005 * sessions,
    overhead=0.002,
    noise=0.05,
    known=(*Costs.known, 160, 192, 256, 320, 384, 448, 512, 640),
)
MACHINES = {"cpu": CPU, "gpu": GPU}
DRAFTERS = {"good": (0.85, 0.97), "overconfident": (0.6, 0.8), "poor": (0.25, 0.5)}


@functools.cache
def trees(drafter: str) -> tuple[Grown, ...]:
    rng = random.Random(1)
    sure, honest = DRAFTERS[drafter]
    return tuple(grow(rng, sure=sure, honest=honest) for _ in range(150))


def bench(machine: str, drafter: str, seed: int = 0) -> Bench:
    return Bench(MACHINES[machine], trees(drafter), seed)


def budget(costs: Costs) -> CostBudget:
    policy = CostBudget()
    policy.measured(costs.target(), costs.drafter())
    return policy


@pytest.mark.parametrize("sessions", [1, 4, 32, 128])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_close_to_the_best_fixed_setting_at_every_load(machine: str, drafter: str, sessions: int) -> None:
    """Against the best of 15 sizes of tree and plain decoding, picked with full knowledge."""
    run = bench(machine, drafter)
    rounds, first = (320, 160) if sessions < 32 else (100, 60)
    rate = run.run(budget(run.costs), sessions, rounds, first=first)
    assert rate >= 0.96 * run.best_fixed(sessions)
    assert rate >= 0.98 * run.fixed_rate(sessions, 0)


def test_the_comparison_can_fail() -> None:
    """A fixed setting meant for one stream is far off at 128."""
    run = bench("gpu", "overconfident")
    fixed = SharedRows(tree_budget=16, max_verify_rows=100_000, min_tree=1)
    assert run.run(fixed, 1, 200) >= 0.8 * run.best_fixed(1)
    assert run.run(fixed, 128, 20) < 0.7 * run.best_fixed(128)


def test_a_load_that_comes_and_goes() -> None:
    """One service life: what is learned at one load serves the next, and speculation comes back at once."""
    run = bench("gpu", "overconfident")
    policy = budget(run.costs)
    run.run(policy, 1, 150)
    seen: list[RoundRecord] = []
    assert run.run(policy, 128, 120, first=30) >= 0.98 * run.fixed_rate(128, 0)
    assert run.run(policy, 1, 60, seen=seen.append) >= 0.9 * run.best_fixed(1)
    assert sum(1 for record in seen if record.drafted) >= 54


@pytest.mark.parametrize("lie", [0.4, 2.5])
def test_measurement_beats_a_wrong_curve(lie: float) -> None:
    """The draft takes 2.5 times as long as it said at its start, or 0.4 times."""
    honest = bench("cpu", "overconfident")
    costs = Costs(cpu_verify, lambda sessions: lie * CPU.draft(sessions), overhead=CPU.overhead, noise=0.05)
    policy = CostBudget()
    policy.measured(costs.target(), CPU.drafter())
    run = Bench(costs, honest.trees)
    assert run.run(policy, 2, 800, first=400) >= 0.965 * max(run.best_fixed(2), run.fixed_rate(2, 0))


def test_a_draft_that_harms_the_target_is_found_out() -> None:
    """Its costs look fine, but rounds with it take longer than their parts: only measurement shows that."""
    run = bench("gpu", "poor")
    assert run.best_fixed(4) > 1.1 * run.fixed_rate(4, 0)  # it would pay without the harm
    harmed = Bench(dataclasses.replace(GPU, harm=0.004), run.trees)
    assert harmed.run(budget(GPU), 4, 600, first=300) >= 0.97 * run.fixed_rate(4, 0)


@pytest.mark.parametrize("machine", MACHINES)
def test_expectations_are_true_on_average(machine: str) -> None:
    run = bench(machine, "overconfident")
    seen: list[RoundRecord] = []
    run.run(budget(run.costs), 2, 400, seen=seen.append)
    late = [record for record in seen[100:] if record.drafted]
    expected = sum(record.expected_tokens or 0.0 for record in late)
    assert sum(record.tokens for record in late) == pytest.approx(expected, rel=0.1)
    expected_s = sum(record.expected_s or 0.0 for record in late)
    assert sum(record.total_s for record in late) == pytest.approx(expected_s, rel=0.05)


def test_nothing_stays_unknown() -> None:
    """Some rounds verify more than pays; they are marked, and few."""
    run = bench("gpu", "good")
    seen: list[RoundRecord] = []
    run.run(budget(run.costs), 16, 4 * EXPLORE, seen=seen.append)
    explored = [record for record in seen if record.probe == "explore"]
    assert 2 <= len(explored) <= 4
    usual = sorted(record.nodes for record in seen if record.drafted and not record.probe)
    assert all(record.nodes > usual[len(usual) // 2] for record in explored)


# ---- the interface --------------------------------------------------------------------------


def candidates(*most: int, depth: int = HORIZON, sampled: bool = False) -> list[Candidate]:
    return [Candidate(i, n, depth, 100, sampled=sampled) for i, n in enumerate(most)]


def test_caps_of_sessions_hold() -> None:
    policy = budget(GPU)
    plan = policy.plan(candidates(64, 3, 0, 1))
    assert plan.drafts and plan.nodes[1] <= 3 and plan.nodes[2] == 0 and plan.nodes[3] <= 1
    assert policy.plan(candidates(0, 0)) == policy.plan(candidates(0, 0))
    nobody = policy.plan(candidates(0, 0))
    assert not nobody.drafts and nobody.skipped == "" and not any(nobody.hold)
    assert not policy.plan(candidates(5, 5, depth=0)).drafts
    assert not policy.plan([]).drafts


def test_cuts_are_prefixes_and_empty_trees_stay_empty() -> None:
    policy = budget(GPU)
    rng = random.Random(5)
    for size in (1, 2, 3, 5, 9, 20, 60):
        some = candidates(*([64] * size))
        plan = policy.plan(some)
        grown = [
            rng.choice(trees("poor")).tree.prefix(n) if rng.random() < 0.8 else EMPTY_TREE for n in plan.nodes
        ]
        chosen = policy.cut(some, plan, grown)
        assert len(chosen.trees) == size
        for before, after in zip(grown, chosen.trees, strict=True):
            assert after == before.prefix(len(after))
        assert chosen.expected is not None
        assert size <= chosen.expected.tokens <= size + sum(map(len, chosen.trees))
    lone = candidates(64)
    empty = policy.cut(lone, policy.plan(lone), [EMPTY_TREE])
    assert empty.trees == (EMPTY_TREE,) and empty.expected is not None and empty.expected.tokens == 1.0


def test_a_tree_that_brings_nothing_is_not_verified() -> None:
    policy = budget(CPU)
    lone = candidates(64)
    hopeless = DraftTree((1, 2), (-1, 0), (-9.0, -20.0))
    assert policy.cut(lone, policy.plan(lone), [hopeless]).trees == (EMPTY_TREE,)


def test_few_of_many_are_drafted_for_when_drafts_are_dear() -> None:
    """Rows left over in a block of six are worth one draft, not four; the others' rows may wait."""
    run = bench("cpu", "good")
    policy = budget(Costs(cpu_verify, lambda n: 0.008 * n, overhead=0.001))
    found = Bench(Costs(cpu_verify, lambda n: 0.008 * n, overhead=0.001), run.trees)
    rate = found.run(policy, 4, 400, first=200)
    assert rate > 1.01 * found.best_fixed(4) >= 1.01 * found.fixed_rate(4, 0)
    plans = (policy.plan([Candidate(i, 64, HORIZON, 200) for i in range(4)]) for _ in range(3))
    plan = next(plan for plan in plans if plan.drafts)  # it may be amid a probe
    asked = [n > 0 for n in plan.nodes]
    assert 1 <= sum(asked) < 4
    assert list(plan.hold) == [not one for one in asked]


def test_plain_rounds_hold_rows_back_unless_they_are_a_probe() -> None:
    policy = budget(CPU)
    plans = [policy.plan(candidates(*[64] * 64)) for _ in range(60)]
    plain = [plan for plan in plans if not plan.drafts]
    assert plain and all(plan.skipped == "budget" and all(plan.hold) for plan in plain)
    drafting = budget(GPU)
    plans = [drafting.plan(candidates(64)) for _ in range(60)]
    probes = [plan for plan in plans if not plan.drafts]
    assert probes and all(plan.probe == "plain" and not any(plan.hold) for plan in probes)


def test_a_cohort_beside_makes_the_draft_free_and_verifying_dear() -> None:
    """While the other cohort is verified longer than a draft takes, one waits for the target in any case."""
    policy = budget(Costs(gpu_verify, lambda n: 0.006, overhead=0.001))
    some = candidates(*[64] * 8)
    alone, paired = policy.plan(some), policy.plan(some, Beside(tokens=30.0, verify_s=0.02))
    assert alone.beside is None and paired.beside is not None
    grown = [trees("good")[i].tree for i in range(8)]
    first = policy.cut(some, alone, grown).expected
    second = policy.cut(some, paired, grown).expected
    assert first is not None and second is not None
    assert second.seconds >= 0.02 + gpu_verify(8) * 0.9


def test_two_cohorts_are_forecast_to_pay_where_the_draft_is_hidden() -> None:
    slow_draft = Costs(gpu_verify, lambda n: 0.004, overhead=0.003, known=GPU.known)
    policy = budget(slow_draft)
    run = Bench(slow_draft, trees("good"))
    run.run(policy, 32, 40)
    one, two = policy.throughput(32, 1), policy.throughput(32, 2)
    assert one is not None and two is not None and two > 1.05 * one
    # Plain decoding on a machine where each pass reads all weights: never.
    alone = CostBudget()
    alone.measured(GPU.target(), None)
    one, two = alone.throughput(32, 1), alone.throughput(32, 2)
    assert one is not None and two is not None and two < one


def test_another_target_is_another_machine() -> None:
    policy = budget(CPU)
    run = bench("cpu", "good")
    run.run(policy, 1, 100)
    before = policy.report()
    policy.measured(CPU.target(), CPU.drafter())  # the same processes, connected again
    assert policy.report().verify_curve == before.verify_curve
    policy.measured(CPU.target(), None)  # the draft has gone: what it cost is still known
    assert policy.report().draft_curve == before.draft_curve
    slow = Costs(lambda n: 10 * cpu_verify(n), CPU.draft)
    other = slow.target()
    policy.measured(dataclasses.replace(other, instance=b"another"), CPU.drafter())
    after = policy.report()
    assert after.verify_curve[0][2] > 5 * before.verify_curve[0][2]
    assert after.calibration == before.calibration


def test_services_that_measured_nothing_are_learned_from_rounds() -> None:
    bare = Costs(cpu_verify, CPU.draft, overhead=0.003, noise=0.02, known=())
    policy = CostBudget()
    policy.measured(bare.target(), dataclasses.replace(bare.drafter(), draft_cost=()))
    run = Bench(bare, trees("good"))
    assert run.run(policy, 1, 600, first=300) >= 0.93 * run.best_fixed(1)
    assert run.run(policy, 32, 400, first=200) >= 0.97 * run.fixed_rate(32, 0)


def test_sampled_and_greedy_sessions_are_calibrated_apart() -> None:
    policy = budget(GPU)
    for sampled in (False, True):
        some = candidates(8, sampled=sampled)
        for _ in range(30):
            plan = policy.plan(some)
            policy.cut(some, plan, [trees("good")[0].tree.prefix(n) for n in plan.nodes])
    assert policy.forecast.known(Mode.GREEDY) and policy.forecast.known(Mode.COUPLED)


def test_the_report_tells_all() -> None:
    run = bench("gpu", "good")
    policy = budget(run.costs)
    run.run(policy, 4, 200)
    report = policy.report()
    assert report.policy == "cost"
    rows = [point[0] for point in report.verify_curve]
    assert rows == sorted(rows) and rows[0] == 1
    assert all(math.isfinite(ms) and ms > 0 for _, _, ms in (*report.verify_curve, *report.draft_curve))
    assert report.overhead_ms == pytest.approx(2.0, rel=0.1)
    assert report.calibration and all(0.0 <= row.value <= 1.0 for row in report.calibration)
    (load,) = report.loads
    assert (load.sessions, load.cohorts, load.drafting) == (4, 1, True)
    assert load.gain is not None and load.gain > 1.5
    assert load.drafting_tokens_per_s is not None and load.plain_tokens_per_s is not None
    assert load.drafting_tokens_per_s > 1.5 * load.plain_tokens_per_s
    assert report.gain[0][:2] == (0, 4.0)
    assert policy.steering.loads() == [Load(4)]


def test_which_policy_the_limits_ask_for() -> None:
    assert isinstance(policy_for(SchedulerLimits(budget="cost")), CostBudget)
    fixed: BudgetPolicy = policy_for(SchedulerLimits(max_verify_rows=12, cohorts=2))
    assert isinstance(fixed, SharedRows) and fixed.max_verify_rows == 12
    assert policy_for(SchedulerLimits(cohorts=0)).report().policy == "fixed"
    assert largest_tree(SchedulerLimits(tree_budget=5), None) == 5
    assert largest_tree(SchedulerLimits(budget="cost", tree_budget=0), None) == 0
    assert largest_tree(SchedulerLimits(budget="cost"), None) == 64
