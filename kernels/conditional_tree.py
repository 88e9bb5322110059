"""Trees whose nodes know the token before theirs: a drafter's candidates, corrected by a table of pairs.

For a candidate v at depth d below a candidate u of depth d - 1:

    score = log_softmax over v of   b_d l_d(v) + (1 - b_d) z_d(v) + c_d [ log p(v|u) - log m_d(v) ]
    p(v|u) = (n(u, v) + share(v)) / (n(u) + prior)        n: the table's counts
    m_d(v) = sum over u' of q_{d-1}(u') p(v|u')           q: softmax of z

l: log-probabilities with the target's noise, as kernels.marginals ranks them; z: the same without it. All
sums run over a depth's candidates. Why: draft_service.conditional_tree, which also has the rule's numbers.

Order of nodes: score descending, depth ascending, index of the parent, then turn: a node's place among its
siblings by step score, ties by the candidate's rank. A score is fp32(parent's score + step).

Owns these scores and the growing of packed trees (kernels.tree) from them, for a batch of sessions. Does not
own candidates (kernels.marginals) nor the table's file.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels import cuda
from kernels.choice import GREEDY_BELOW
from kernels.marginals import Candidates
from kernels.tree import MOST_NODES, TreeLists

MOST_WIDE = 32
"""Candidates of a depth, at most."""


@dataclass(frozen=True, slots=True)
class PairTable:
    """keys int64 [pairs], ascending: first * vocab + second. counts fp32 [pairs]. totals, shares fp32
    [vocab]: n(u), and prior * p(v), above 0.
    """

    keys: torch.Tensor
    counts: torch.Tensor
    totals: torch.Tensor
    shares: torch.Tensor
    prior: float

    @property
    def vocab_size(self) -> int:
        return len(self.totals)


@dataclass(frozen=True, slots=True)
class Weights:
    """noise: b, pairs: c, both fp32 [depths]. The first c is never used."""

    noise: torch.Tensor
    pairs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """ids int32 or int64 [sessions, depths, width]: candidates. scores fp32 [sessions, depths, width, width]:
    [s, d - 1, i, j], of candidate j of depth d below candidate i of depth d - 1; all rows of depth 1 are the
    same. None above 0, -inf where nothing is possible.
    """

    ids: torch.Tensor
    scores: torch.Tensor


def conditional(table: PairTable, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """before int64 [..., I], after int64 [..., J] -> fp32 [..., I, J]: p(after | before), above 0."""
    first, second = before.unsqueeze(-1), after.unsqueeze(-2)
    wanted = first * table.vocab_size + second
    at = torch.searchsorted(table.keys, wanted).clamp_(max=len(table.keys) - 1)
    count = torch.where(table.keys[at] == wanted, table.counts[at], 0.0)
    return (count + table.shares[second]) / (table.totals[first] + table.prior)


def step_scores(
    candidates: Candidates,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    table: PairTable,
    weights: Weights,
) -> Steps:
    """Scores of all steps between candidates.

    candidates: as top_candidates ranks them, -inf for what is none. logits [sessions, depths, vocab] of a
    float dtype, contiguous, and temperature fp32 [sessions]: those that they were ranked from.
    Raises ValueError for more than MOST_WIDE candidates.
    """
    if candidates.ids.shape[2] > MOST_WIDE:
        raise ValueError(f"{candidates.ids.shape[2]} candidates a depth: at most {MOST_WIDE} are possible")
    if cuda.takes(logits):
        from kernels.cuda import conditional_tree as triton_op

        return triton_op.step_scores(candidates, logits, temperature, table, weights)
    return step_scores_reference(candidates, logits, temperature, table, weights)


def step_scores_reference(
    candidates: Candidates,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    table: PairTable,
    weights: Weights,
) -> Steps:
    """step_scores in torch operations."""
    heat = torch.where(temperature >= GREEDY_BELOW, temperature, 1.0).view(-1, 1, 1)
    ids = candidates.ids.to(torch.int64)
    return steps_of(candidates.log_probs, logits.gather(-1, ids).float() / heat, ids, table, weights)


def steps_of(
    log_probs: torch.Tensor, beliefs: torch.Tensor, ids: torch.Tensor, table: PairTable, weights: Weights
) -> Steps:
    """log_probs: l, beliefs: z up to a constant a depth, fp32; ids int64; all [sessions, depths, width]."""
    depths, width = ids.shape[1:]
    there = log_probs > -math.inf
    noise, pairs = weights.noise[:depths].view(-1, 1), weights.pairs[1:depths].view(-1, 1, 1)
    base = torch.where(there, noise * log_probs + (1.0 - noise) * beliefs, -math.inf)
    sure = torch.where(there, beliefs, -math.inf).softmax(-1).nan_to_num(0.0)
    known = conditional(table, ids[:, :-1], ids[:, 1:])
    average = (sure[:, :-1].unsqueeze(-1) * known).sum(2, keepdim=True)
    correction = known.log() - average.clamp(min=1e-30).log()
    scores = base.unsqueeze(2).expand(-1, -1, width, -1).clone()
    scores[:, 1:] += pairs * correction
    # A depth without any candidate has no distribution. (torch would make a finite number of -inf, too.)
    return Steps(ids, scores.log_softmax(-1).nan_to_num(nan=-math.inf, neginf=-math.inf))


def pack_conditional_trees(
    steps: Steps,
    budgets: torch.Tensor,
    depth_limits: torch.Tensor,
    *,
    nodes: int,
    most_children: int | None = None,
) -> torch.Tensor:
    """Packed trees int32 [sessions, 3, nodes] of the best prefixes.

    budgets, depth_limits int32 [sessions], nodes: as in kernels.tree. most_children: of any node.
    Raises ValueError unless 1 <= nodes <= 256.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"trees of {nodes} nodes are not grown here; use 1 to {MOST_NODES}")
    most = min(steps.ids.shape[2], most_children or nodes)
    if cuda.takes(steps.scores):
        from kernels.cuda import conditional_tree as triton_op

        return triton_op.pack_conditional_trees(steps, budgets, depth_limits, nodes=nodes, most=most)
    return pack_conditional_trees_reference(steps, budgets, depth_limits, nodes=nodes, most=most)


def pack_conditional_trees_reference(
    steps: Steps, budgets: torch.Tensor, depth_limits: torch.Tensor, *, nodes: int, most: int
) -> torch.Tensor:
    """pack_conditional_trees by a heap on the host; reads the steps back."""
    ids, scores = steps.ids.tolist(), steps.scores.cpu().numpy()
    packed = np.full((len(ids), 3, nodes), -1, np.int32)
    packed[:, 2] = np.float32(-math.inf).view(np.int32)
    for s, (budget, limit) in enumerate(zip(budgets.tolist(), depth_limits.tolist(), strict=True)):
        rows = scores[s]
        tree = best_first(
            lambda depth, place, rows=rows: rows[depth - 1, place],
            ids[s],
            budget=min(budget, nodes),
            depths=min(limit, len(ids[s])),
            most=most,
        )
        count = len(tree.tokens)
        packed[s, 0, :count], packed[s, 1, :count] = tree.tokens, tree.parents
        packed[s, 2, :count] = np.array(tree.scores, np.float32).view(np.int32)
    return torch.from_numpy(packed).to(steps.scores.device)


def best_first(
    row: Callable[[int, int], np.ndarray], ids: list[list[int]], *, budget: int, depths: int, most: int
) -> TreeLists:
    """The best `budget` prefixes of one session, by a heap.

    row(depth, place): step scores fp32 [width] of the candidates of `depth` below candidate `place` of the
    depth before (0 for the anchor); asked for nodes that get children only. ids: of each depth's candidates,
    read after the depth's first row. most: children of a node.
    """
    tree = TreeLists([], [], [])
    # -score, depth, parent, turn; then what siblings have in common: places and scores, both by turn.
    frontier: list[tuple[float, int, int, int, list[int], list[float]]] = []
    orders: dict[tuple[int, int], tuple[list[int], np.ndarray]] = {}

    def offer(parent: int, depth: int, place: int, above: float) -> None:
        """The first of the children, at `depth`, of a node that is candidate `place`."""
        found = orders.get((depth, place))
        if found is None:
            steps = row(depth, place)
            best = np.argsort(-steps, kind="stable")[:most]
            found = orders[depth, place] = best.tolist(), steps[best]
        scores = (np.float32(above) + found[1]).tolist()
        if scores and scores[0] > -math.inf:
            heapq.heappush(frontier, (-scores[0], depth, parent, 0, found[0], scores))

    if budget > 0 and depths > 0:
        offer(-1, 1, 0, 0.0)
    while frontier:
        negative, depth, parent, turn, places, scores = heapq.heappop(frontier)
        tree.tokens.append(ids[depth - 1][places[turn]])
        tree.parents.append(parent)
        tree.scores.append(-negative)
        if len(tree.tokens) >= budget:
            break
        if turn + 1 < len(places) and scores[turn + 1] > -math.inf:
            heapq.heappush(frontier, (-scores[turn + 1], depth, parent, turn + 1, places, scores))
        if depth < depths:
            offer(len(tree.tokens) - 1, depth + 1, places[turn], -negative)
    return tree
