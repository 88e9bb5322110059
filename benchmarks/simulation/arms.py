"""One simulated run: a policy, a load, the costs; what came of it as numbers.

Owns putting scheduler, services and clients together in virtual time, and the summary. Does not own the
sweep over policies and loads (benchmarks.simulate).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation import clock
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.draft import SimDraft
from benchmarks.simulation.load import Clients, Load, Seen
from benchmarks.simulation.target import SimTarget
from benchmarks.simulation.texts import Drafter
from benchmarks.simulation.world import Service, World
from gateway.budget import BudgetPolicy
from gateway.generation import NullObserver, RoundObserver, RoundRecord
from gateway.limits import SchedulerLimits
from gateway.report import Decision, GatewayReport
from gateway.scheduler import Scheduler
from specbridge.errors import ConfigError

MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Policy:
    """plain | tree N (every session's, as large as that whatever it costs) | fixed (the gateway's default)
    | cost; cohorts: 1, 2 or 0 for auto."""

    name: str
    cohorts: int = 1

    @staticmethod
    def parse(text: str, cohorts: int) -> Policy:
        """Raises ConfigError."""
        known = text in ("plain", "fixed", "cost") or (
            text.startswith("tree ") and text.removeprefix("tree ").isdigit()
        )
        if not known:
            raise ConfigError(f"a policy is {text!r}; it must be plain, fixed, cost or 'tree N'")
        return Policy(text, cohorts)

    @property
    def drafts(self) -> bool:
        return self.name != "plain"

    @property
    def label(self) -> str:
        if self.cohorts == 1:
            return self.name
        return f"{self.name}, {'auto' if self.cohorts == 0 else self.cohorts} cohorts"

    def limits(self, costs: Costs) -> SchedulerLimits:
        common: dict[str, Any] = {
            "max_running": costs.max_sessions,
            "max_queue": MANY,
            "max_queue_tokens": 1 << 40,
            "cohorts": self.cohorts,
        }
        if self.name == "fixed":
            return SchedulerLimits(by_device=frozenset({"tree_budget", "max_verify_rows"}), **common)
        if self.name == "cost":
            return SchedulerLimits(budget="cost", tree_budget=costs.max_tree_nodes, **common)
        nodes = int(self.name.removeprefix("tree ")) if self.name != "plain" else 0
        return SchedulerLimits(tree_budget=nodes, min_tree=min(nodes, 1), max_verify_rows=MANY, **common)


class Recorder(NullObserver):
    """Rounds as they end, and who went without a tree."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.fallbacks: Counter[str] = Counter()

    def on_round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def on_fallback(self, cause: str, count: int) -> None:
        self.fallbacks[cause] += count


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run was: requests as clients saw them, rounds, the gateway's report at the end."""

    seen: Sequence[Seen]
    rounds: Sequence[RoundRecord]
    fallbacks: Mapping[str, int]
    report: GatewayReport
    seconds: float
    passes: int
    draft_passes: Mapping[str, int]
    decisions: Sequence[Decision] = field(default=())


def simulate(
    costs: Costs,
    drafter: Drafter,
    policy: Policy,
    load: Load,
    *,
    seed: int = 0,
    eager: bool = True,
    observer: RoundObserver | None = None,
    budget: BudgetPolicy | None = None,
) -> Outcome:
    """Run `load` under `policy`. observer: sees it all, too; budget: its object instead."""
    return clock.run(_run(costs, drafter, policy, load, seed, eager, observer, budget))


async def _run(
    costs: Costs,
    drafter: Drafter,
    policy: Policy,
    load: Load,
    seed: int,
    eager: bool,
    observer: RoundObserver | None,
    budget: BudgetPolicy | None,
) -> Outcome:
    world = World(costs, drafter, seed=seed)
    target = SimTarget(world)
    draft = SimDraft(world, eager=eager) if policy.drafts else None
    if draft is not None:
        target.publish = draft.rows_came
        draft.recapture = target.recapture
    recorder = Recorder()
    scheduler = Scheduler(
        target,
        draft,
        limits=policy.limits(costs),
        policy=budget,
        observer=recorder if observer is None else _Both(recorder, observer),
        clock=world.now,
    )
    await scheduler.start()
    await scheduler.wait_ready(1.0)
    clients = Clients(world, scheduler, load, seed=seed)
    asked = asyncio.create_task(clients.run())
    # An engine never ends by itself: if one does, what it failed with ends the run.
    services: list[Service[Any]] = [target] if draft is None else [target, draft]
    engines = [service.task for service in services if service.task is not None]
    await asyncio.wait([asked, *engines], return_when=asyncio.FIRST_COMPLETED)
    for task in engines:
        if task.done():
            asked.cancel()
            task.result()
    await asked
    report, seconds = scheduler.report(), world.now()
    await scheduler.close()
    return Outcome(
        clients.seen, recorder.rounds, recorder.fallbacks, report, seconds, target.passes,
        draft.passes if draft is not None else {}, report.decisions,
    )  # fmt: skip


class _Both:
    """An observer made of two."""

    def __init__(self, *observers: RoundObserver) -> None:
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(observer, name) for observer in self._observers]

        def call(*arguments: Any) -> None:
            for each in calls:
                each(*arguments)

        return call


def steady(outcome: Outcome, skip: float) -> tuple[float, float]:
    """(first, last) second that counts: after the first `skip` of all tokens, until the last request begins
    to have no follower. A burst counts as a whole."""
    times = sorted((t, n) for seen in outcome.seen for t, n in zip(seen.times, seen.tokens, strict=True))
    total = sum(n for _, n in times)
    passed, first = 0, 0.0
    for at, count in times:
        passed += count
        if passed > skip * total:
            first = at
            break
    return first, max(seen.asked for seen in outcome.seen)


def rate(outcome: Outcome, *, skip: float = 0.1) -> float:
    """Tokens a second in the steady part; of a load without one, from the first tokens of all to the last,
    each request's first event left out (as specbridge.explain measures bursts)."""
    first, last = steady(outcome, skip)
    if last > first:
        counted = sum(
            n
            for seen in outcome.seen
            for t, n in zip(seen.times, seen.tokens, strict=True)
            if first < t <= last
        )
        return counted / (last - first)
    tokens = sum(sum(seen.tokens[1:]) for seen in outcome.seen)
    begun = min(seen.times[0] for seen in outcome.seen)
    seconds = max(seen.times[-1] for seen in outcome.seen) - begun
    return tokens / seconds if seconds else 0.0


def summary(outcome: Outcome, *, skip: float = 0.1) -> dict[str, Any]:
    """The figures of one run. Times in ms unless named otherwise; shares are of rounds."""
    seen = [s for s in outcome.seen if s.times]
    rounds = [r for r in outcome.rounds if r.tokens]
    count = max(1, len(rounds))
    trees = [r for r in rounds if r.nodes]
    drafted = sum(r.speculating for r in trees)
    return {
        "tokens_per_s": rate(outcome, skip=skip),
        "requests": len(seen),
        "rejected": sum(1 for s in outcome.seen if s.rejected),
        "seconds": outcome.seconds,
        "rounds": len(rounds),
        "sessions": sum(r.sessions for r in rounds) / count,
        "tokens_per_round": sum(r.tokens for r in rounds) / max(1, sum(r.sessions for r in rounds)),
        "acceptance_length": 1.0 + sum(r.accepted for r in trees) / drafted if drafted else 1.0,
        "nodes_per_session": sum(r.nodes for r in rounds) / max(1, sum(r.sessions for r in rounds)),
        "drafting_share": len(trees) / count,
        "two_cohorts_share": sum(1 for r in rounds if r.cohorts == 2) / count,
        "ttft": _percentiles([1e3 * s.ttft for s in seen]),
        "itl": _percentiles([1e3 * gap for s in seen for gap in s.itls]),
        "tpot": _percentiles([1e3 * s.tpot for s in seen if len(s.times) > 1]),
        "stages": {
            "round": 1e3 * sum(r.total_s for r in rounds) / count,
            "turn_wait": 1e3 * sum(r.turn_wait_s for r in rounds) / count,
            "draft": 1e3 * sum(r.draft_wait_s for r in rounds) / count,
            "verify": 1e3 * sum(r.verify_wait_s for r in rounds) / count,
            "target_queue": 1e3 * sum(_queue_s(r) for r in rounds) / count,
            "rpc": 1e3 * sum(r.rpc_s for r in rounds) / count,
            "gateway": 1e3 * sum(r.gateway_s for r in rounds) / count,
        },
        "skipped": dict(sorted(Counter(r.skipped for r in rounds if r.skipped).items())),
        "probes": dict(sorted(Counter(r.probe for r in rounds if r.probe).items())),
        "fallbacks": dict(sorted(outcome.fallbacks.items())),
        "target_passes": outcome.passes,
        "draft_passes": dict(sorted(outcome.draft_passes.items())),
    }


def _queue_s(record: RoundRecord) -> float:
    return record.target_timings.queue_ns / 1e9 if record.target_timings is not None else 0.0


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in (50, 95, 99)}
