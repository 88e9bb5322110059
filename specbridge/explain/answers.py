"""One function a question: from measured rounds to its part of the report, with the answer in words.

Owns the fields of these parts (docs/explain.md lists them) and the judgements in them. Does not own the whole
report (report), how it is shown (text, html), nor the arithmetic (account).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specbridge.clients import Model
from specbridge.explain import account
from specbridge.explain.account import Point, Read
from specbridge.explain.comparisons import Comparison
from specbridge.explain.measure import Burst, Load
from specbridge.explain.rounds import MeanRound, mean_round
from specbridge.explain.words import operations, size
from specbridge.rounds import DraftInfo, TargetInfo

TOLERANCE = 0.05
"""Sums that should agree and differ by more than this are called out."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Bursts by the cap on nodes, 0: plain. fixed: a fixed budget used all of it; else the stack's own budget
    may have used less."""

    bursts: Mapping[int, Sequence[Burst]]
    fixed: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything a report is made of. trees, plain: bursts of the shipped way and without speculation.
    comparisons: what each part gives. target, draft, budget: None where unknown.
    """

    model: Model
    load: Load
    trees: Sequence[Burst]
    plain: Sequence[Burst]
    curve: Curve | None
    comparisons: Sequence[Comparison]
    target: TargetInfo | None = None
    draft: DraftInfo | None = None
    budget: Mapping[str, Any] | None = None
    version: str = ""
    seconds: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)


# ---- bytes ----------------------------------------------------------------------------------------


def reads_of(trees: MeanRound | None, m: Measured) -> tuple[Read, ...]:
    if trees is None or m.target is None:
        return ()
    return account.reads(trees.work, m.target.footprint, m.draft.footprint if m.draft else None)


def bytes_read(trees: MeanRound | None, reads: Sequence[Read], m: Measured) -> dict[str, Any]:
    if trees is None or not reads:
        return {"answer": _unknown(m), "reads": [], "context": None}
    kinds = ("weights", "context_kv", "hidden_states", "copies")
    by_kind = {kind: sum(read.bytes for read in reads if read.kind == kind) for kind in kinds}
    slope = account.context_slope(m.target.verify_cost) if m.target else None
    work = trees.work
    times = account.times_read(work)
    context = {
        "rows": work.context_rows,
        "rows_read": work.context_rows_read,
        "rows_copied": work.context_rows_copied,
        "times_read": times,
        "slope": None if slope is None else {**asdict(slope), "ratio": slope.ratio},
    }
    answer = (
        f"A round reads {size(sum(by_kind.values()))}: {size(by_kind['weights'])} of weights, "
        f"{size(by_kind['context_kv'])} of context K/V and {size(by_kind['hidden_states'])} of hidden "
        f"states. A verify pass reads its context {_times(times)}, for all its rows and heads."
    )
    if work.context_rows_copied and work.context_rows:
        share = work.context_rows_copied / work.context_rows
        answer += f" {share:.0%} of it lay on pages apart and was put together first."
    return {
        "answer": answer,
        "reads": [{**asdict(read), "bytes": read.bytes} for read in reads],
        "by_kind": by_kind,
        "total": sum(by_kind.values()),
        "context": context,
    }


def _times(times: float) -> str:
    if not times:
        return "not at all: there was none"
    return "once" if abs(times - 1) < 0.005 else f"{times:.2f} times"


# ---- candidates -----------------------------------------------------------------------------------


def candidates(trees: MeanRound | None, plain: MeanRound | None, m: Measured) -> dict[str, Any]:
    if trees is None:
        return {"answer": _unknown(m), "points": [], "steps": [], "chosen": None, "expected": []}
    curve = m.curve.bursts if m.curve is not None else {}
    means = [plain, trees] if not curve else [mean_round(bursts) for bursts in curve.values()]
    points = _distinct([mean.point for mean in means if mean is not None])
    steps = account.marginal(points)
    chosen = trees.point
    best = max(points, key=lambda point: point.tokens_per_s)
    expected = [list(row) for row in (m.budget or {}).get("marginal_gain") or []]
    found: dict[str, Any] = {
        "points": [{**asdict(p), "tokens_per_s": p.tokens_per_s} for p in points],
        "steps": [asdict(step) for step in steps],
        "fixed_budget": m.curve is not None and m.curve.fixed,
        "chosen": {**asdict(chosen), "tokens_per_s": chosen.tokens_per_s, "budget": m.model.tree_budget},
        "best_measured": {"nodes": best.nodes, "tokens_per_s": best.tokens_per_s},
        "expected": expected,
    }
    words = []
    if m.target is not None and plain is not None:
        row = m.target.footprint.products_per_row
        found["products_per_row"] = row
        words.append(
            f"A candidate costs {operations(2 * row)} floating-point operations, as many as a token of plain "
            "decoding."
        )
    if plain is not None and chosen.nodes > 0:
        more = chosen.verify_s / plain.point.verify_s - 1 if plain.point.verify_s else 0.0
        words.append(
            f"With {chosen.nodes:.1f} candidates a verify pass takes {_percent(more)} than without, and a "
            f"round commits {chosen.tokens:.2f} tokens instead of {plain.point.tokens:.2f}."
        )
    elif not chosen.nodes:
        words.append("The budget chose to decode plainly here.")
    if len(points) > 2:
        words.append(
            f"Of the sizes tried, {best.nodes:.0f} nodes gave the most tokens per second "
            f"({best.tokens_per_s:.1f}); the budget used {chosen.nodes:.1f} and gave "
            f"{chosen.tokens_per_s:.1f}."
        )
        after = next((step for step in steps if step.first >= best.nodes), None)
        if after is not None:
            words.append(
                f"From there to {after.last:.0f} nodes each adds {after.tokens:.3f} tokens and "
                f"{after.seconds * 1e3:.2f} ms a round, which does not pay."
            )
    found["answer"] = " ".join(words) or "No round had a tree."
    return found


def _distinct(points: Sequence[Point]) -> list[Point]:
    """In order of nodes; of points with all but the same nodes the last one given."""
    kept: dict[float, Point] = {}
    for point in points:
        kept[round(point.nodes, 1)] = point
    return [kept[nodes] for nodes in sorted(kept)]


# ---- the round ------------------------------------------------------------------------------------


def round_time(
    trees: MeanRound | None, plain: MeanRound | None, reads: Sequence[Read], m: Measured
) -> dict[str, Any]:
    if trees is None:
        return {"answer": _unknown(m), "stages": [], "checks": []}
    floors = {
        "verify": account.floor(reads, "target", m.target.footprint.copy_bytes_per_s if m.target else 0),
        "draft": account.floor(reads, "draft", m.draft.footprint.copy_bytes_per_s if m.draft else 0),
    }
    stages = [
        {"stage": stage, "seconds": seconds, "floor_s": floors.get(stage)}
        for stage, seconds in trees.stages.items()
    ]
    known = [value for value in floors.values() if value is not None]
    floor = sum(known) if known and floors["verify"] is not None else None
    waits = trees.stages["draft"] + trees.stages["channel_wait"] + trees.stages["verify"]
    checks = [
        _check("the stages add up to the round", trees.stage_sum, trees.seconds),
        _check("target's and draft's own clocks, against their stages", trees.services_s, waits),
        _check("the clients' time per round, against the round", trees.client_s, trees.seconds),
    ]
    slowest = max(trees.stages, key=lambda stage: trees.stages[stage])
    answer = (
        f"A round takes {trees.seconds * 1e3:.1f} ms; the {slowest.replace('_', ' ')} stage has "
        f"{trees.stages[slowest] / trees.seconds:.0%} of it."
    )
    if floor:
        answer += (
            f" Its bytes alone need {floor * 1e3:.1f} ms: it takes {trees.seconds / floor:.2f} times that."
        )
    else:
        answer += " Its floor is not known: no copy rate was measured."
    return {
        "answer": answer,
        "seconds": trees.seconds,
        "plain_seconds": plain.seconds if plain else None,
        "sessions": trees.sessions,
        "tokens": trees.tokens,
        "stages": stages,
        "draft_parts": trees.draft_parts,
        "verify_queue_s": trees.verify_queue_s,
        "floor_s": floor,
        "checks": checks,
    }


def _check(what: str, found: float, expected: float) -> dict[str, Any]:
    ratio = found / expected if expected else 0.0
    return {
        "what": what,
        "found_s": found,
        "expected_s": expected,
        "ratio": ratio,
        "agrees": abs(ratio - 1) <= TOLERANCE,
    }


# ---- ranks ----------------------------------------------------------------------------------------

ASSUMPTIONS = (
    "each rank's memory is its own and as fast as this one's",
    "what a verify pass takes beyond its floor stays as it is",
    "a pass has two all-reduces a layer and one gather of the choices",
    "weights are split evenly; K/V as far as there are key/value heads",
)


def more_ranks(trees: MeanRound | None, m: Measured) -> dict[str, Any]:
    unknown = {
        "answer": "Not known: this needs the target's description, a copy rate, a round above its floor.",
        "estimates": [],
    }
    if trees is None or m.target is None:
        return unknown
    target = m.target
    verify = trees.stages["verify"]
    estimates = account.more_ranks(
        target.footprint,
        tp_size=target.tp_size,
        num_layers=target.num_layers,
        context_rows_read=trees.work.context_rows_read,
        round_s=trees.seconds,
    )
    if not estimates:
        return unknown
    floor = account.floor(reads_of(trees, m), "target", target.footprint.copy_bytes_per_s) or 0.0
    first = estimates[0]
    if target.device == "cpu":
        answer = (
            "No, not on this machine: ranks on one CPU share its memory and its cores, so that a rank's "
            f"bytes fall and their time does not. With a memory each, {first.ranks} ranks would save at most "
            f"{first.saved_s * 1e3:.1f} of {verify * 1e3:.1f} ms, less {first.collectives} collectives."
        )
    else:
        more = " more than now" if target.tp_size > 1 else ""
        answer = (
            f"{first.ranks} ranks would save at most {first.saved_s * 1e3:.2f} ms of a verify pass of "
            f"{verify * 1e3:.2f} ms, whose floor is {floor * 1e3:.2f} ms: a round at most "
            f"{first.best_ratio:.2f} times as fast. It helps if each of a pass's {first.collectives} "
            f"collectives takes less than {first.break_even_s * 1e6:.0f} µs{more}."
        )
    if trees.collective_s:
        answer += f" Collectives take {trees.collective_s * 1e3:.2f} ms of a pass now."
    return {
        "answer": answer,
        "tp_size": target.tp_size,
        "verify_s": verify,
        "floor_s": floor,
        "collective_s": trees.collective_s,
        "assumptions": list(ASSUMPTIONS),
        "estimates": [asdict(estimate) for estimate in estimates],
    }


# ---- parts ---------------------------------------------------------------------------------------


def parts_answer(comparisons: Sequence[Mapping[str, Any]]) -> str:
    told = [one for one in comparisons if one["ratio"] is not None]
    if not told:
        return "Nothing was switched off."
    words = [f"{one['title']}: {one['ratio']:.2f}" for one in told if one["verdict"] != "open"]
    rest = [one["title"] for one in told if one["verdict"] == "open"]
    answer = "Tokens per second with it over without: " + "; ".join(words) + "." if words else ""
    if rest:
        answer += f" Undecided by these pairs: {'; '.join(rest)}."
    return answer.strip()


def _unknown(m: Measured) -> str:
    return (
        "Not known: the gateway's and the target's /metrics and GetInfo are needed; give --run-dir, or the "
        "addresses one by one."
    )


def _percent(more: float) -> str:
    return f"{more:.0%} longer" if more >= 0 else f"{-more:.0%} less"
