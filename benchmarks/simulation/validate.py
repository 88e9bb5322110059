"""Measured bursts and the simulation of the same load, side by side.

Owns what is compared: tokens per second of each arm at each number of streams. The load is that of the
record (requests at a time, prompt rows that no prefix had, output), costs are those recorded in the same
session, and the drafter has one acceptance for all: the level at which trees are accepted as those of the
first tree arm were, over all its bursts. Nothing is set for a single row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.arms import Policy, rate, simulate
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.load import Lengths, Load
from benchmarks.simulation.record import Counted, grouped
from benchmarks.simulation.texts import Drafter
from specbridge.acceptance_model import Curves
from specbridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """tokens a second; tokens per round of a session."""

    arm: str
    streams: int
    measured: float
    simulated: float
    measured_tokens: float
    simulated_tokens: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1.0


def drafter_of(record: Mapping[str, Any], *, block_size: int) -> tuple[Drafter, str]:
    """The drafter whose trees are accepted as often as the record's, and how that was found."""
    trees = [(arm, c) for (arm, _), c in grouped(record).items() if arm.startswith("tree ")]
    if not trees:
        raise ConfigError("the record has no arm 'tree N': how often drafts are accepted is not known")
    arm = trees[0][0]
    nodes = int(arm.removeprefix("tree "))
    counted = [c for name, c in trees if name == arm]
    tokens = sum(c.total("gateway", "gateway_round_tokens_total") for c in counted)
    mean = tokens / sum(c.total("gateway", "gateway_round_sessions_sum") for c in counted)
    return with_tree(nodes, mean, block_size=block_size), f"{mean:.3f} tokens a round with trees of {nodes}"


def with_tree(nodes: int, mean: float, *, block_size: int) -> Drafter:
    """The drafter of the usual family whose trees of `nodes` bring `mean` tokens. Raises ConfigError."""
    depth = block_size - 1
    low, high = 1.01, block_size - 0.01
    for _ in range(30):
        middle = (low + high) / 2
        made = Curves().with_chain(middle, depths=depth).acceptance("measured", depths=depth)
        low, high = (middle, high) if made.tree_length(nodes, depth) < mean else (low, middle)
    return Drafter(made, block_size=block_size)


def compare(record: Mapping[str, Any], costs: Costs, *, repeats: int = 4) -> tuple[list[Row], str]:
    """The table, arm by arm, and a line on the acceptance."""
    drafter, how = drafter_of(record, block_size=costs.block_size)
    rows = [
        _row(arm, streams, counted, costs, drafter, int(record["max_tokens"]), repeats)
        for (arm, streams), counted in sorted(grouped(record).items())
    ]
    return rows, how


def _row(
    arm: str, streams: int, counted: Counted, costs: Costs, drafter: Drafter, output: int, repeats: int
) -> Row:
    tokens = seconds = rounds = sessions = 0.0
    for number, burst in enumerate(counted.bursts):
        one = Counted([burst])
        prompt = max(1, round(one.total("target", "target_prefill_rows_total") / streams))
        size = Lengths.parse(str(prompt))
        load = Load(streams, streams, size, Lengths.parse(str(output)))
        for repeat in range(repeats):
            seed = 1000 * number + repeat
            outcome = simulate(replace(costs, max_length=8192), drafter, Policy(arm), load, seed=seed)
            tokens += sum(sum(seen.tokens[1:]) for seen in outcome.seen)
            seconds += sum(sum(seen.tokens[1:]) for seen in outcome.seen) / rate(outcome)
            rounds += sum(r.tokens for r in outcome.rounds)
            sessions += sum(r.sessions for r in outcome.rounds)
    return Row(arm, streams, counted.rate, tokens / seconds, counted.tokens_per_round, rounds / sessions)


def table_rows(rows: Sequence[Row]) -> list[list[object]]:
    return [
        [
            r.arm,
            r.streams,
            r.measured,
            r.simulated,
            f"{100 * r.error:+.1f}%",
            r.measured_tokens,
            r.simulated_tokens,
        ]
        for r in rows
    ]


HEADER = ("arm", "streams", "measured tok/s", "simulated", "error", "tokens a round", "simulated")
