"""Rounds in virtual time: a budget policy against services of scripted cost and drafters of known quality.

No scheduler and no clock: `Bench.run` asks the policy what the scheduler would ask it, round after round, and
adds up what the rounds would have taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.budget import Beside, BudgetPolicy, Candidate, Outcome
from gateway.generation import RoundRecord
from specbridge.rounds import CostPoint, DraftInfo, TargetInfo, TargetTimings
from specbridge.tree import EMPTY_TREE, DraftTree

HORIZON = 15


@dataclass(frozen=True)
class Costs:
    """Seconds by size; `known` are the rows that the target has measured at its start.

    harm: what a round with a draft takes longer without that it shows in either wait.
    """

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    overhead: float = 0.001
    noise: float = 0.0
    harm: float = 0.0
    known: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 130)

    def target(self) -> TargetInfo:
        points = tuple(CostPoint(n, 128, round(1e9 * self.verify(n))) for n in self.known)
        return TargetInfo(
            model_id="sim", fingerprint="sim", vocab_size=1000, eos_token_ids=(0,), hidden_size=8,
            num_layers=2, page_size=16, max_length=100_000, tp_size=1, max_sessions=256, max_tree_nodes=64,
            total_pages=0,
            dtype="float32", device="cpu", instance=b"target", verify_cost=points,
        )  # fmt: skip

    def drafter(self) -> DraftInfo:
        points = tuple(CostPoint(16 * n, 256, round(1e9 * self.draft(n))) for n in (1, 2, 4, 8, 16))
        return DraftInfo(
            drafter_id="sim", fingerprint="sim", block_size=16, mask_token_id=1, target_layer_ids=(0,),
            max_nodes=64, vocab_size=1000, instance=b"draft", draft_cost=points,
        )  # fmt: skip


@dataclass(frozen=True)
class Grown:
    """A tree with, for each node, the rank it bets on at its depth."""

    tree: DraftTree
    ranks: tuple[int, ...]
    truth: tuple[tuple[float, ...], ...]
    """By depth: the real probabilities of the ranks."""
    sums: tuple[float, ...] = ()
    """sums[n]: tokens that its first n nodes really bring on average."""

    def outcome(self, nodes: int, rng: random.Random) -> tuple[int, ...]:
        """Accepted nodes of its first `nodes`."""
        children = {(self.tree.parents[i], self.ranks[i]): i for i in range(min(nodes, len(self.ranks)))}
        node, accepted = -1, []
        for shares in self.truth:
            draw, rank = rng.random(), 0
            for rank, share in enumerate(shares):  # noqa: B007
                draw -= share
                if draw < 0:
                    break
            else:
                break
            child = children.get((node, rank))
            if child is None:
                break
            node = child
            accepted.append(child)
        return tuple(accepted)


def grow(rng: random.Random, *, sure: float, honest: float, nodes: int = 64) -> Grown:
    """A DDTree over three candidates a position.

    sure: how peaked its marginals are, 0 to 1; honest: real over claimed probability of each candidate.
    """
    claimed = []
    for _ in range(HORIZON):
        first = min(0.98, max(0.05, rng.gauss(sure, 0.25)))
        second = (1 - first) * rng.uniform(0.3, 0.8)
        claimed.append((first, second, (1 - first - second) * 0.5))
    truth = tuple(tuple(honest * q for q in line) for line in claimed)
    heap: list[tuple[float, int, tuple[int, ...], int]] = [(-math.log(claimed[0][0]), 0, (0,), -1)]
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    ranks: list[int] = []
    serial = 0
    while heap and len(tokens) < nodes:
        cost, _, path, parent = heapq.heappop(heap)
        index, depth, rank = len(tokens), len(path) - 1, path[-1]
        tokens.append(10 * depth + rank)
        parents.append(parent)
        scores.append(-cost)
        ranks.append(rank)
        if rank + 1 < 3:
            serial += 1
            step = math.log(claimed[depth][rank]) - math.log(claimed[depth][rank + 1])
            heapq.heappush(heap, (cost + step, serial, (*path[:-1], rank + 1), parent))
        if depth + 1 < HORIZON:
            serial += 1
            heapq.heappush(heap, (cost - math.log(claimed[depth + 1][0]), serial, (*path, 0), index))
    real: list[float] = []
    depths: list[int] = []
    for parent, rank in zip(parents, ranks, strict=True):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        real.append((1.0 if parent < 0 else real[parent]) * truth[depths[-1]][rank])
    falling = itertools.accumulate(scores, min)
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(falling))
    return Grown(tree, tuple(ranks), truth, tuple(itertools.accumulate(real, initial=0.0)))


@dataclass
class Bench:
    """Trees of one quality, drawn again and again."""

    costs: Costs
    trees: Sequence[Grown]
    seed: int = 0
    behind: list[bool] = field(default_factory=list)

    def fixed_rate(self, sessions: int, nodes: int) -> float:
        """Tokens per second of `nodes` nodes for every session; 0: plain decoding."""
        gain = sum(g.sums[min(nodes, len(g.ranks))] for g in self.trees) / len(self.trees)
        costs = self.costs
        seconds = (
            costs.overhead + costs.verify(sessions * (1 + nodes)) + (costs.draft(sessions) if nodes else 0)
        )
        return sessions * (1 + gain) / seconds

    def best_fixed(self, sessions: int) -> float:
        return max(self.fixed_rate(sessions, n) for n in (0, 1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 24, 32, 48, 64))

    def run(
        self,
        policy: BudgetPolicy,
        sessions: int,
        rounds: int,
        *,
        first: int = 0,
        seen: Callable[[RoundRecord], None] = lambda _record: None,
        beside: Beside | None = None,
    ) -> float:
        """Tokens per second over `rounds` rounds; those before round `first` are not counted.

        The policy sees tokens that were drawn and times with noise; counted are those of its choices without.
        """
        rng = random.Random(self.seed)
        self.behind = [False] * sessions
        tokens = seconds = 0.0
        for number in range(rounds):
            record, real_tokens, real_s = self._round(policy, sessions, rng, beside)
            seen(record)
            if number >= first:
                tokens += real_tokens
                seconds += real_s
        return tokens / seconds

    def _round(
        self,
        policy: BudgetPolicy,
        sessions: int,
        rng: random.Random,
        beside: Beside | None,
    ) -> tuple[RoundRecord, float, float]:
        costs, behind = self.costs, self.behind
        candidates = [Candidate(i, 64, HORIZON, 200, behind=behind[i]) for i in range(sessions)]
        plan = policy.plan(candidates, beside)
        nodes = [0 if late else n for late, n in zip(behind, plan.nodes, strict=True)]
        drafted = sum(1 for n in nodes if n)
        drawn = [rng.choice(self.trees) for _ in candidates]
        expected, probe = plan.expected, plan.probe
        trees: Sequence[DraftTree] = [EMPTY_TREE] * sessions
        if drafted:
            grown = [g.tree.prefix(n) if n else EMPTY_TREE for g, n in zip(drawn, nodes, strict=True)]
            chosen = policy.cut(candidates, plan, grown)
            trees, expected, probe = chosen.trees, chosen.expected, chosen.probe
        outcomes = [
            Outcome(c.number, tree, g.outcome(len(tree), rng))
            for c, tree, g in zip(candidates, trees, drawn, strict=True)
            if tree
        ]
        rows = sessions + sum(map(len, trees))

        def noisy(value: float) -> float:
            return value * math.exp(rng.gauss(0.0, costs.noise)) if costs.noise else value

        draft_s = noisy(costs.draft(drafted)) if drafted else 0.0
        own_s = costs.overhead + (costs.harm if drafted else 0.0)
        verify_s = noisy(costs.verify(rows))
        record = RoundRecord(
            sessions=sessions, speculating=len(outcomes), rows=rows, nodes=rows - sessions,
            tokens=sessions + sum(len(o.accepted) for o in outcomes),
            accepted=sum(len(o.accepted) for o in outcomes), total_s=own_s + draft_s + verify_s,
            draft_wait_s=draft_s, verify_wait_s=verify_s,
            skipped="" if drafted else (plan.skipped or "deferred"),
            target_timings=TargetTimings(rows=rows), drafted=drafted, asked=sum(nodes), context=200,
            expected_tokens=expected.tokens if expected else None,
            expected_s=expected.seconds if expected else None, probe=probe,
            cohorts=1 if beside is None else 2,
        )  # fmt: skip
        policy.observe(record, outcomes)
        self.behind = list(plan.hold) if plan.hold else [False] * sessions
        real_tokens = sessions + sum(g.sums[len(tree)] for g, tree in zip(drawn, trees, strict=True))
        real_s = own_s + costs.verify(rows) + (costs.draft(drafted) if drafted else 0.0)
        return record, real_tokens, real_s
