"""From what a running stack was measured to do (real.py) to costs.

Owns the arithmetic, stage by stage; nothing is fitted to a throughput. Of what a round takes outside of the
services (rounds without the draft, one line over the number of sessions) half of the fixed part counts as
messages under way and half as the gateway thread's work: both wait for each other, so only with two cohorts
does it matter which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.costs import Costs, Curve, Points, Worker
from specbridge.errors import ConfigError

LEAST_PASSES = 4
ALONE = 1.1
"""Passes for each round, up to which bursts count as free of prompts."""

NICE_5 = 335 / 1024
"""Share of a thread at nice 5 against one at 0: the weights of Linux's scheduler."""


@dataclass(frozen=True, slots=True)
class Line:
    """at + slope * x, neither below 0."""

    at: float
    slope: float

    @staticmethod
    def through(points: Sequence[tuple[float, float]]) -> Line:
        """Least squares; a line that would fall, or begin below 0, is flat, or begins at 0."""
        n = len(points)
        if not n:
            return Line(0.0, 0.0)
        mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
        spread = sum((x - mx) ** 2 for x, _ in points)
        slope = sum((x - mx) * (y - my) for x, y in points) / spread if spread > 0 else 0.0
        if slope <= 0:
            return Line(my, 0.0)
        if my - slope * mx < 0:
            return Line(0.0, my / mx)
        return Line(my - slope * mx, slope)


class Counted:
    """What the services counted over some bursts."""

    def __init__(self, bursts: Sequence[Mapping[str, Any]]) -> None:
        self.bursts = bursts
        self.rounds = self.total("gateway", "gateway_round_seconds_count")
        if not self.rounds:
            raise ConfigError("the record holds no round of the gateway: its /metrics were not found")

    def total(self, service: str, name: str, **labels: str) -> float:
        wanted = {f"{key}={value}" for key, value in labels.items()}
        found = 0.0
        for burst in self.bursts:
            for series, value in burst["counted"][service].items():
                known, *has = series.split("|")
                if known == f"specbridge_{name}" and wanted.issubset(has):
                    found += value
        return found

    def per_round(self, service: str, name: str, **labels: str) -> float:
        return self.total(service, name, **labels) / self.rounds

    @property
    def sessions(self) -> float:
        return self.per_round("gateway", "gateway_round_sessions_sum")

    @property
    def events(self) -> float:
        """A round's: each session has one."""
        return self.sessions

    @property
    def outside_ms(self) -> float:
        """Of a round, outside of the services."""
        stages = (
            self.per_round("gateway", "gateway_round_stage_seconds_total", stage=stage)
            for stage in ("rpc", "gateway")
        )
        return 1e3 * sum(stages)

    def cpu_ms(self, who: str) -> float:
        return 1e3 * sum(burst["cpu_s"].get(who, 0.0) for burst in self.bursts) / self.rounds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return float(sum(b["tokens"] for b in self.bursts) / sum(b["seconds"] for b in self.bursts))

    @property
    def tokens_per_round(self) -> float:
        return self.total("gateway", "gateway_round_tokens_total") / (self.rounds * self.sessions)


def grouped(record: Mapping[str, Any]) -> dict[tuple[str, int], Counted]:
    """By (arm, streams)."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for burst in record["bursts"]:
        found.setdefault((burst["arm"], burst["streams"]), []).append(burst)
    return {key: Counted(bursts) for key, bursts in found.items()}


def costs_of(record: Mapping[str, Any]) -> Costs:
    """Costs of the stack that `record` is of. Raises ConfigError without a plain arm."""
    arms = grouped(record)
    plain = [counted for (arm, _), counted in arms.items() if arm == "plain"]
    if not plain:
        raise ConfigError("the record has no plain arm: what a round takes besides its passes is not known")
    drafting = [counted for (arm, _), counted in arms.items() if arm != "plain"]
    outside = Line.through([(c.sessions, c.outside_ms) for c in plain])
    own = Line.through([(c.events, c.cpu_ms("gateway")) for c in plain])
    client = Line.through([(c.events, c.cpu_ms("client")) for c in plain])
    batch, session = outside.at / 4, outside.slope / 2
    verify: Points = tuple((int(r), int(c), float(ms)) for r, c, ms in record["target"]["verify"])
    prompt = Line.through([(rows, ms) for rows, _, ms in record["prefill"]])
    one = min(ms for rows, _, ms in verify if rows == 1)
    commit = Line.through([(c.sessions, 1e3 * _commit_s(c)) for c in plain])
    device = str(record["target"]["device"])
    cores = float(record["provenance"]["cores"])
    draft = record["draft"]
    block = int(draft["block_size"]) if draft else 8
    made = Costs(
        name=f"{record['target']['model']} on {device}",
        source={
            "measured": True,
            "provenance": record["provenance"],
            "flags": record.get("flags", []),
            "how": "the target's curve as it reports it, the draft's at the level that its passes had in the "
            "bursts, the rest from counters over bursts: see benchmarks/simulation/record.py",
        },
        verify=verify,
        draft=_draft_curve(record, drafting),
        reported={"draft": _reported_draft(record)},
        append=_appends(drafting),
        prefill=tuple((rows, 128, one + (rows - 1) * prompt.slope) for rows in (8, 32, 128)),
        session_ms=_session_ms(arms, verify),
        channel_ms=outside.at / 4,
        commit_ms=commit.at,
        commit_session_ms=commit.slope,
        hop_ms=outside.at / 4,
        gateway_batch_ms=batch,
        gateway_session_ms=session,
        gateway_event_ms=max(0.0, own.slope + own.at - 2 * (batch + session)),
        client_event_ms=client.slope + client.at,
        request_ms=max(0.0, prompt.at + prompt.slope - one),
        device=device,
        block_size=block,
        max_tree_nodes=int(record["target"]["max_tree_nodes"]),
        max_verify_rows=max(256, 8 * (int(record["target"]["max_tree_nodes"]) + 1)),
        max_length=int(record["target"]["max_length"]),
        prefill_chunk=128 if device == "cpu" else 1024,
        propose_wait_ms=20.0 if device == "cpu" else 3.0,
        **_placement(device, cores),
    )
    return made


def _session_ms(arms: Mapping[tuple[str, int], Counted], verify: Points) -> float:
    """What a further session adds to a pass, beyond what its rows do: of plain rounds that ran nearly without
    prompts beside them, all together."""
    curve, context = Curve(verify), verify[0][1]
    more = sessions = 0.0
    for (arm, streams), counted in arms.items():
        for burst in counted.bursts if arm == "plain" and streams > 1 else ():
            one = Counted([burst])
            passes = one.total("target", "target_step_rows_count")
            if not 0 < passes <= ALONE * one.rounds:
                continue
            rows = one.total("target", "target_step_rows_sum") / passes
            forward = 1e3 * one.total("target", "target_forward_seconds_sum")
            more += forward - passes * curve(round(rows), context)
            sessions += passes * (one.sessions - 1)
    return max(0.0, more / sessions) if sessions else 0.0


def _placement(device: str, cores: float) -> dict[str, Any]:
    if device == "cpu":
        return {
            "pools": {"cores": cores},
            "workers": {
                "target": Worker("cores", demand=cores),
                "draft": Worker("cores", demand=cores, weight=NICE_5),
                "gateway": Worker("cores"),
                "client": Worker("cores"),
            },
        }
    return {"pools": {"target": 1.0, "draft": 1.0, "host": cores}}


def _commit_s(counted: Counted) -> float:
    return counted.per_round("target", "target_commit_seconds_sum")


def _reported_draft(record: Mapping[str, Any]) -> Points:
    draft = record["draft"]
    if not draft:
        return ()
    block = int(draft["block_size"])
    return tuple(
        (max(1, int(rows) // block), int(context), float(ms)) for rows, context, ms in draft["draft"]
    )


def _draft_curve(record: Mapping[str, Any], arms: Sequence[Counted]) -> Points:
    """The draft's own curve, times what passes under load took over what it says of them: beside a target
    that warms up on the same cores a draft measures several times too much."""
    points = _reported_draft(record)
    if not points:
        return ()
    curve, seen, told = Curve(points), 0.0, 0.0
    for counted in arms:
        passes = counted.total("draft", "draft_pass_sessions_count")
        if passes >= LEAST_PASSES:
            sessions = counted.total("draft", "draft_pass_sessions_sum") / passes
            low = int(sessions)
            share = sessions - low
            context = points[0][1]
            told += passes * ((1 - share) * curve(low, context) + share * curve(low + 1, context))
            for stage in ("forward", "tree"):
                seen += 1e3 * counted.total("draft", "draft_stage_seconds_sum", stage=stage)
    factor = seen / told if told else 1.0
    return tuple((sessions, context, round(ms * factor, 4)) for sessions, context, ms in points)


def _appends(arms: Sequence[Counted]) -> Points:
    """One pass of rows to the draft's context: of the mean size, and what it took."""
    found: list[tuple[float, float]] = []
    for counted in arms:
        asked = counted.total("draft", "draft_appends_total", trigger="propose")
        passes = counted.total("draft", "draft_appends_total")
        if asked >= LEAST_PASSES:
            rows = counted.total("draft", "draft_append_rows_total") / passes
            seconds = counted.total("draft", "draft_stage_seconds_sum", stage="append")
            found.append((rows, 1e3 * seconds / asked))
    if not found:
        return ()
    line = Line.through(found)
    return tuple((rows, 0, line.at + rows * line.slope) for rows in (1, 64))


def say(costs: Costs) -> str:
    """The small numbers, in one line."""
    numbers: list[tuple[str, Callable[[Costs], float]]] = [
        ("hop", lambda c: c.hop_ms),
        ("gateway a batch", lambda c: c.gateway_batch_ms),
        ("a session", lambda c: c.gateway_session_ms),
        ("an event", lambda c: c.gateway_event_ms),
        ("client", lambda c: c.client_event_ms),
        ("commit", lambda c: c.commit_ms),
        ("request", lambda c: c.request_ms),
    ]
    return ", ".join(f"{name} {read(costs):.2f}" for name, read in numbers) + " ms"
