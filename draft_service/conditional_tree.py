"""Trees whose nodes know the token before theirs: a drafter's marginals, corrected by a bigram table.

A block pass gives the marginal q_d of each depth on its own: at depth 2 it averages over all tokens that may
stand at depth 1, and a tree knows which one does. For a node v at depth d below u:

    score = log_softmax over v of   l_d(v) + (1 - b_d) (z_d(v) - l_d(v)) + c_d [ log p(v|u) - log m_d(v) ]
    m_d(v) = sum over u' of q_{d-1}(u') p(v|u')

l: the served scores, log_softmax(z / T + g); z stands for z / T; p: the table; m: what the table would have
said to somebody who knew u no better than the drafter, so that the correction vanishes where it is sure of u.
b = 1, c = 0 is the tree without conditioning. All sums run over the WIDTH best tokens of a depth.

Owns these scores and the growing of such trees: level by level with static shapes, as evaluation does it, and
best first, one session at a time, which so far only tests run; both give the same list. Order of nodes: score
descending, depth ascending, then the path of candidates' places. Does not own the candidates (kernels.topk),
nor the table (bigrams).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.bigrams import Bigrams
from kernels.topk import places_of, sort_keys
from specbridge.tree import DraftTree

WIDTH = 32
"""Candidates of a depth."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """noise: b; pairs: c; by depth, the last value for all that are deeper. The first c is never used.

    The defaults: near what maximum likelihood of committed tokens finds for sampled and for greedy texts
    (docs/training.md).
    """

    noise: tuple[float, ...] = (1.0, 0.8)
    pairs: tuple[float, ...] = (0.0, 0.6)


@dataclass(frozen=True, slots=True)
class Transitions:
    """ids int64 [sessions, depths, width]: candidates. first fp32 [sessions, width]: scores of depth 1.
    later fp32 [sessions, depths - 1, width, width]: [.., d - 2, i, j], of candidate j of depth d below i of
    depth d - 1. All <= 0, -inf where nothing is possible.
    """

    ids: torch.Tensor
    first: torch.Tensor
    later: torch.Tensor


class Conditioner:
    """A table and a rule, ready for trees of up to `depths` levels on the table's device."""

    def __init__(self, bigrams: Bigrams, depths: int, rule: Conditioning = Conditioning()) -> None:
        self._bigrams = bigrams
        self._noise = by_depth(rule.noise, depths, device=bigrams.device).view(-1, 1)
        self._pairs = by_depth(rule.pairs, depths, device=bigrams.device).view(-1, 1, 1)

    def transitions(self, log_probs: torch.Tensor, beliefs: torch.Tensor, ids: torch.Tensor) -> Transitions:
        """Scores of all steps between candidates.

        log_probs fp32 [sessions, depths, width]: l, best first, -inf for what is no candidate. beliefs: z / T
        of the same tokens, up to a constant a depth. ids int64, likewise.
        """
        depths = ids.shape[1]
        there = log_probs > -math.inf
        noise, pairs = self._noise[:depths], self._pairs[1:depths]
        base = torch.where(there, noise * log_probs + (1.0 - noise) * beliefs, -math.inf)
        sure = torch.where(there, beliefs, -math.inf).softmax(-1).nan_to_num(0.0)
        known = self._bigrams.conditional(ids[:, :-1], ids[:, 1:])
        average = (sure[:, :-1].unsqueeze(-1) * known).sum(2, keepdim=True)
        correction = known.log() - average.clamp(min=1e-30).log()
        later = (base[:, 1:].unsqueeze(2) + pairs * correction).log_softmax(-1)
        # A depth without any candidate has no distribution.
        first = base[:, 0].log_softmax(-1)
        return Transitions(ids, _possible(first), _possible(later))


def grow_levels(steps: Transitions, limits: torch.Tensor, nodes: int) -> torch.Tensor:
    """The best `nodes` prefixes of each session, at most limits [sessions] deep, level by level.

    Returns int32 [sessions, 3, n], n <= nodes: tokens, parents (-1: the anchor), bits of scores; places that
    hold no node come last, with token and parent -1.
    """
    sessions, depths, width = steps.ids.shape
    beyond = (torch.arange(depths, device=limits.device) >= limits.unsqueeze(1)).unsqueeze(-1)
    score = steps.first.masked_fill(beyond[:, 0], -math.inf)
    rank = torch.arange(width, device=score.device).expand(sessions, width)
    scores, tokens = [score], [steps.ids[:, 0]]
    parents, starts = [torch.full_like(steps.ids[:, 0], -1)], [0]
    for level in range(1, depths):
        above = score.shape[1]
        kept = min(nodes, above * width)
        step = steps.later[:, level - 1].gather(1, rank.unsqueeze(-1).expand(-1, -1, width))
        candidates = (score.unsqueeze(2) + step).masked_fill(beyond[:, level].unsqueeze(1), -math.inf)
        candidates = candidates.flatten(1)
        keys = sort_keys(candidates, nonpositive=True).topk(kept, dim=-1, largest=False).values
        # In the order of their paths, so that places among the next level's candidates have it again.
        place = places_of(keys).sort(dim=-1).values
        score, rank = candidates.gather(1, place), place % width
        starts.append(starts[-1] + above)
        parents.append(place // width + starts[-2])
        scores.append(score)
        tokens.append(steps.ids[:, level].gather(1, rank))
    flat = torch.cat(scores, dim=1)
    total = flat.shape[1]
    keys = sort_keys(flat, nonpositive=True).topk(min(nodes, total), dim=-1, largest=False).values
    order = places_of(keys)
    position = torch.full((sessions, total + 1), -1, dtype=torch.int64, device=flat.device)
    position.scatter_(1, order, torch.arange(order.shape[1], device=flat.device).expand_as(order))
    up = torch.cat(parents, dim=1).gather(1, order)
    up = position.gather(1, torch.where(up < 0, total, up))  # the spare last column: the anchor
    token = torch.cat(tokens, dim=1).gather(1, order)
    best = flat.gather(1, order)
    nothing = best == -math.inf
    bits = best.view(torch.int32).to(torch.int64)
    return torch.stack((token.masked_fill(nothing, -1), up.masked_fill(nothing, -1), bits), dim=1).to(
        torch.int32
    )


def grow_heap(steps: Transitions, session: int, budget: int, max_depth: int) -> DraftTree:
    """The same list for one session, best first, on the host."""
    ids = steps.ids[session].tolist()
    first, later = steps.first[session].cpu().numpy(), steps.later[session].cpu().numpy()
    orders: dict[tuple[int, int], tuple[np.ndarray, list[int]]] = {}

    def children(depth: int, rank: int) -> tuple[np.ndarray, list[int]]:
        """Scores of the candidates of `depth` below candidate `rank`, and their places, best first."""
        if (depth, rank) not in orders:
            row = first if depth == 1 else later[depth - 2, rank]
            orders[depth, rank] = row, np.argsort(-row, kind="stable").tolist()
        return orders[depth, rank]

    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, int, tuple[int, ...], int, int]] = []

    def push(parent: int, path: tuple[int, ...], turn: int) -> None:
        """The child of `parent` (whose places are `path`) that is its turn-th best."""
        row, order = children(len(path) + 1, path[-1] if path else 0)
        if turn < len(order):
            above = np.float32(scores[parent]) if parent >= 0 else np.float32(0.0)
            score = above + row[order[turn]]
            if score > -math.inf:
                heapq.heappush(heap, (-float(score), len(path) + 1, (*path, order[turn]), parent, turn))

    depths = min(max_depth, len(ids))
    if budget > 0 and depths > 0:
        push(-1, (), 0)
    while heap and len(tokens) < budget:
        negative, depth, path, parent, turn = heapq.heappop(heap)
        tokens.append(ids[depth - 1][path[-1]])
        parents.append(parent)
        scores.append(-negative)
        push(parent, path[:-1], turn + 1)
        if depth < depths:
            push(len(tokens) - 1, path, 0)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def _possible(scores: torch.Tensor) -> torch.Tensor:
    """-inf for NaN; torch would make a finite number of -inf, too."""
    return scores.nan_to_num(nan=-math.inf, neginf=-math.inf)


def by_depth(
    values: Sequence[float], depths: int, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[depths], the last value repeated."""
    row = [*values[:depths], *[values[-1]] * (depths - len(values))]
    return torch.tensor(row, dtype=dtype, device=device)
