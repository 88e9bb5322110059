"""From requests to figures: percentiles, goodput, ratios, and the rows of the tables.

Owns the arithmetic. Percentiles are over all requests (ITL: over all gaps) of an arm's turns at a load point;
rates are medians over its turns; ratios pair the turns of one repeat. Does not own the times (request.py).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.load.loops import Load, Turn
from benchmarks.load.request import Outcome
from specbridge.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
TIMES = ("ttft", "itl", "tpot", "e2e")
GOALS = ("ttft", "tpot", "e2e")


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the nearest ranks in proportion, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` (milliseconds) → seconds by name. Raises ConfigError."""
    goals = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            seconds = float(limit) / 1000
        except ValueError:
            seconds = math.nan
        if name not in GOALS or not seconds > 0:
            raise ConfigError(
                f"--goodput {word!r} is not NAME:MILLISECONDS, as in ttft:500; names: {', '.join(GOALS)}"
            )
        goals[name] = seconds
    return goals


def meets(outcome: Outcome, goals: dict[str, float]) -> bool:
    """Whether a request ended well and within all limits (one token has no TPOT to miss)."""
    if not outcome.ok:
        return False
    return all((getattr(outcome, name) or 0.0) <= limit for name, limit in goals.items())


def steady_rate(turn: Turn) -> float | None:
    """Output tokens a second while the load was what it is called; None if there was no such time.

    Closed loop: from when each stream's first request shows text until the first stream finds nothing left to
    ask. Open loop: from the first tenth of the arrivals on to the last one. Of a request's tokens each of its
    events with text counts for an equal part.
    """
    if turn.load.streams:
        by_sent = sorted(turn.outcomes, key=lambda o: o.sent)
        start = max((o.first for o in by_sent[: turn.load.streams] if o.ok), default=math.inf)
        last = max((o.sent for o in turn.outcomes), default=0.0)
        end = min((o.ended for o in turn.outcomes if o.ended > last), default=0.0)
    else:
        due = sorted(o.due for o in turn.outcomes)
        start, end = (due[len(due) // 10], due[-1]) if due else (0.0, 0.0)
    if not (turn.complete and end > start):
        return None
    tokens = 0.0
    for o in turn.outcomes:
        if o.ok:
            events = accumulate(o.gaps, initial=o.first)
            tokens += sum(start < at <= end for at in events) * o.completion_tokens / o.chunks
    return tokens / (end - start)


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load point. Times in seconds; NaN or None: there is nothing to say.

    times: percentile by (name, percent). steady: median of steady_rate(). acceptance: tokens per round with a
    tree, bonus included; per_round: tokens per round, plain rounds included; a request's first token is the
    prefill's, of no round. ratio, lowest: tok/s over the first arm's, median and lowest of the pairs. good:
    requests/s within the goals, and their share.
    """

    arm: str
    load: Load
    turns: int
    partial: bool
    requests: int
    errors: dict[str, int]
    refusals: int
    tokens_per_second: float
    steady: float | None
    requests_per_second: float
    ratio: float | None
    lowest: float | None
    times: dict[tuple[str, int], float]
    good: tuple[float, float] | None
    acceptance: float | None
    per_round: float | None
    tokens_per_chunk: float
    prompt_tokens: float
    cached: float
    output_tokens: float
    cpu: float
    late: float
    by_chunks: bool


def figures(
    turns: Sequence[Turn], first: Sequence[Turn], goals: dict[str, float], *, is_first: bool
) -> Figures:
    """Of one arm's measured turns at one load point. first: the first arm's turns there.

    Incomplete turns count only if there is no complete one.
    """
    complete = [turn for turn in turns if turn.complete]
    used = complete or list(turns)
    outcomes = [o for turn in used for o in turn.outcomes]
    ok = [o for o in outcomes if o.ok]
    base = {turn.repeat: turn.tokens_per_second for turn in first if turn.complete}
    ratios = [t.tokens_per_second / base[t.repeat] for t in complete if base.get(t.repeat)]
    ratios = [] if is_first else ratios
    samples: dict[str, list[float]] = {
        "ttft": [o.ttft for o in ok],
        "itl": [gap for o in ok for gap in o.gaps],
        "tpot": [tpot for o in ok if (tpot := o.tpot) is not None],
        "e2e": [o.e2e for o in ok],
    }
    good = None
    if goals:
        met = [sum(meets(o, goals) for o in turn.outcomes) for turn in used]
        rates = [n / turn.seconds for n, turn in zip(met, used, strict=True) if turn.seconds]
        good = (_median(rates), sum(met) / max(1, len(outcomes)))
    tokens = sum(o.completion_tokens for o in ok)
    steps, rounds = sum(o.spec_steps for o in ok), sum(o.rounds for o in ok)
    prompt = sum(o.prompt_tokens for o in ok)
    steady = [rate for t in used if (rate := steady_rate(t)) is not None]
    return Figures(
        arm=used[0].arm,
        load=used[0].load,
        turns=len(used),
        partial=not complete,
        requests=len(outcomes),
        errors=dict(Counter(o.error for o in outcomes if o.error).most_common()),
        refusals=sum(o.refusals for o in outcomes),
        tokens_per_second=_median(t.tokens_per_second for t in used),
        steady=statistics.median(steady) if steady else None,
        requests_per_second=_median(sum(o.ok for o in t.outcomes) / t.seconds for t in used if t.seconds),
        ratio=statistics.median(ratios) if ratios else None,
        lowest=min(ratios, default=None),
        times={(name, p): percentile(samples[name], p) for name in TIMES for p in PERCENTILES},
        good=good,
        acceptance=1 + sum(o.accepted for o in ok) / steps if steps else None,
        per_round=(tokens - len(ok)) / rounds if rounds else None,
        tokens_per_chunk=tokens / max(1, sum(o.chunks for o in ok)),
        prompt_tokens=prompt / max(1, len(ok)),
        cached=sum(o.cached_tokens for o in ok) / max(1, prompt),
        output_tokens=tokens / max(1, len(ok)),
        cpu=max(t.cpu for t in used),
        late=max(t.late for t in used),
        by_chunks=any(not o.usage for o in ok),
    )


def collect(turns: Sequence[Turn], arms: Sequence[str], goals: dict[str, float]) -> list[Figures]:
    """Figures of each load point and arm that has requests, points and arms in their order; no warm-up."""
    measured = [turn for turn in turns if turn.repeat > 0 and turn.outcomes]
    found = []
    for load in dict.fromkeys(turn.load for turn in measured):
        here = {name: [t for t in measured if t.load == load and t.arm == name] for name in arms}
        found += [
            figures(here[name], here[arms[0]], goals, is_first=name == arms[0]) for name in arms if here[name]
        ]
    return found


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


# ---- tables ---------------------------------------------------------------------------------

RATES = (
    "load", "arm", "tok/s", "steady", "ratio", "lowest", "requests/s", "goodput/s", "good %", "accepted",
    "tokens/round", "tokens/chunk", "prompt", "cached %", "output", "requests", "errors",
)  # fmt: skip
LATENCIES = ("load", "arm", *(f"{name.upper()} p{p}" for name in TIMES for p in PERCENTILES))


def rate_row(f: Figures) -> list[Any]:
    """A row under RATES; `-` where there is nothing to say."""
    good = ("-", "-") if f.good is None else (f.good[0], 100 * f.good[1])
    named = ", ".join(f"{count} {kind}" for kind, count in f.errors.items())
    return [
        str(f.load), f.arm + (" (partial)" if f.partial else ""), f.tokens_per_second, _or_dash(f.steady),
        _or_dash(f.ratio), _or_dash(f.lowest), f.requests_per_second, *good, _or_dash(f.acceptance),
        _or_dash(f.per_round), f.tokens_per_chunk, round(f.prompt_tokens), round(100 * f.cached),
        round(f.output_tokens), f.requests, named or "0",
    ]  # fmt: skip


def latency_row(f: Figures) -> list[Any]:
    """A row under LATENCIES, milliseconds."""
    values = [f.times[name, p] for name in TIMES for p in PERCENTILES]
    return [str(f.load), f.arm, *("-" if math.isnan(v) else _ms(v) for v in values)]


def _ms(seconds: float) -> float | int:
    ms = 1000 * seconds
    return round(ms) if ms >= 100 else round(ms, 2)


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value


def warnings(found: Sequence[Figures], limit: float = 0.8) -> list[str]:
    """What makes the figures doubtful, a sentence each."""
    lines = []
    if (cpu := max((f.cpu for f in found), default=0.0)) > limit:
        lines.append(
            f"WARNING: this client used {100 * cpu:.0f} % of a core: it may be what was measured. "
            "Measure fewer streams, or shorter prompts, or from a faster machine."
        )
    late = max((f.late for f in found if f.load.rate), default=0.0)
    if late > 0.05:
        lines.append(
            f"WARNING: requests left up to {1000 * late:.0f} ms late (their times count from when due)"
        )
    lines += [
        f"WARNING: {f.arm} sends no usage: its tokens are its chunks"
        for f in _first_each(found)
        if f.by_chunks
    ]
    for f in found:
        if f.refusals:
            lines.append(f"{f.arm}, {f.load}: {f.refusals} answers of 429")
    return lines


def _first_each(found: Sequence[Figures]) -> list[Figures]:
    return list({f.arm: f for f in reversed(found) if f.by_chunks}.values())
