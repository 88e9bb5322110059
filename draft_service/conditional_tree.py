"""Trees whose nodes know the token before theirs: a drafter's marginals, corrected by a bigram table.

A block pass gives the marginal q_d of each depth on its own: at depth 2 it averages over all tokens that may
stand at depth 1, and a tree knows which one does. The formula is kernels.conditional_tree's; its terms:

    b l + (1 - b) z                   the noise says which token the target will choose, but by logits that
                                      the drafter knows less well the deeper it is
    c [ log p(v|u) - log m(v) ]       what the pair says; m is what the table would have said to somebody who
                                      knew u no better than the drafter, so that where it is sure of u nothing
                                      is corrected

b = 1, c = 0 is the tree without conditioning.

Owns the rule's numbers and the ways to grow such trees: for a device's batch (all launches, nothing read
back), best first for one session on the host, with only those rows of scores that nodes need, and level by
level for evaluation, which wants many texts' trees at once. All give the same list, up to rounding. Does not
own the candidates (kernels.marginals, kernels.topk), the formula, nor the table (bigrams).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.bigrams import Bigrams
from kernels.conditional_tree import (
    Steps,
    Weights,
    best_first,
    pack_conditional_trees,
    step_scores,
    steps_of,
)
from kernels.marginals import top_candidates
from kernels.topk import places_of, sort_keys, top_entries
from specbridge.rounds import GREEDY_BELOW
from specbridge.tree import DraftTree

WIDTH = 32
"""Candidates of a depth."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """noise: b; pairs: c; by depth, the last value for all that are deeper. The first c is never used.

    The defaults: docs/training.md says what they were chosen by.
    """

    noise: tuple[float, ...] = (1.0, 0.8)
    pairs: tuple[float, ...] = (0.0, 0.6)


class Conditioner:
    """A table and a rule, ready for trees of up to `depths` levels on the table's device."""

    def __init__(self, bigrams: Bigrams, depths: int, rule: Conditioning = Conditioning()) -> None:
        self._table = bigrams.table
        self._weights = Weights(
            by_depth(rule.noise, depths, device=bigrams.device),
            by_depth(rule.pairs, depths, device=bigrams.device),
        )
        self._host = _HostTable(bigrams) if bigrams.device.type == "cpu" else None

    def steps(self, log_probs: torch.Tensor, beliefs: torch.Tensor, ids: torch.Tensor) -> Steps:
        """Scores of all steps: kernels.conditional_tree.steps_of by this table and rule."""
        return steps_of(log_probs, beliefs, ids, self._table, self._weights)

    def grow(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        choices: torch.Tensor,
        bases: torch.Tensor,
        budgets: torch.Tensor,
        depth_limits: torch.Tensor,
        *,
        nodes: int,
        top_k: int | None = None,
    ) -> torch.Tensor:
        """Packed trees, as kernels.tree.grow_trees gives them of the same arguments. top_k: most children of
        a node.
        """
        candidates = top_candidates(
            logits, temperature, seeds, choices, bases, depth_limits, width=min(WIDTH, logits.shape[-1])
        )
        steps = step_scores(candidates, logits, temperature, self._table, self._weights)
        return pack_conditional_trees(steps, budgets, depth_limits, nodes=nodes, most_children=top_k)

    def host_tree(
        self,
        logits: torch.Tensor,
        log_probs: torch.Tensor,
        temperature: float,
        *,
        budget: int,
        top_k: int | None = None,
        head_ids: torch.Tensor | None = None,
    ) -> DraftTree:
        """One session's tree of at most `budget` nodes, as deep as there are rows.

        logits, log_probs: fp32 [depths, columns] on the CPU: before, and after temperature and noise.
        top_k: most children of a node. head_ids: int64 [columns], the columns' tokens; None: their numbers.
        """
        if self._host is None:
            raise ValueError(
                f"the table is on {self._table.keys.device}; trees of the host need it on the CPU"
            )
        best, columns = top_entries(log_probs, min(WIDTH, log_probs.shape[-1]), nonpositive=True)
        ids = columns.numpy() if head_ids is None else head_ids.numpy()[columns.numpy()]
        beliefs = logits.gather(-1, columns)
        if temperature >= GREEDY_BELOW:
            beliefs = beliefs / temperature
        rows = _HostRows(self._host, self._weights, best.numpy(), beliefs.numpy(), ids)
        most = min(ids.shape[1], top_k or budget)
        tree = best_first(rows.row, ids.tolist(), budget=budget, depths=len(ids), most=most)
        return DraftTree(tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores))


class _HostTable:
    """The table as numpy arrays, which for a row at a time cost less than torch's calls."""

    def __init__(self, bigrams: Bigrams) -> None:
        table = bigrams.table
        self._keys, self._found = table.keys.numpy(), table.counts.numpy()
        self._vocab = table.vocab_size
        self.shares = table.shares.numpy()
        self.weights = table.totals.numpy() + np.float32(table.prior)

    def counts(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """before, after int64 [I], [J] -> fp32 [I, J]: how often after followed before."""
        wanted = (before[:, None] * self._vocab + after).ravel()
        at = np.searchsorted(self._keys, wanted)
        np.minimum(at, len(self._keys) - 1, out=at)
        return (self._found[at] * (self._keys[at] == wanted)).reshape(len(before), -1)


class _HostRows:
    """kernels.conditional_tree.steps_of of one session, row by row; log_probs, beliefs, ids: [depths, width].

    In a row u is the same: the denominator of p(v|u) changes nothing about its log_softmax.
    """

    def __init__(
        self, table: _HostTable, weights: Weights, log_probs: np.ndarray, beliefs: np.ndarray, ids: np.ndarray
    ) -> None:
        self._table, self._ids = table, ids
        self._noise, self._pairs = weights.noise.numpy(), weights.pairs.numpy()
        self._log_probs = log_probs
        self._beliefs = np.where(log_probs > -math.inf, beliefs, np.float32(-math.inf))
        self._shared: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def row(self, depth: int, place: int) -> np.ndarray:
        """Scores of the candidates of `depth` (from 1) below candidate `place` of the depth before."""
        if depth == 1:
            return _log_softmax(self._base(0))
        shared = self._shared.get(depth)
        if shared is None:
            shared = self._shared[depth] = self._of_depth(depth - 1)
        base, counts, shares = shared
        return _log_softmax(base + self._pairs[depth - 1] * np.log(counts[place] + shares))

    def _base(self, d: int) -> np.ndarray:
        log_probs, beliefs, b = self._log_probs[d], self._beliefs[d], self._noise[d]
        there = beliefs > -math.inf
        mixed = b * np.where(there, log_probs, 0) + (1 - b) * np.where(there, beliefs, 0)
        return np.where(there, mixed, np.float32(-math.inf))

    def _of_depth(self, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What rows have in common [width]; counts [width, width] and shares [width], for each row."""
        before, after = self._ids[d - 1], self._ids[d]
        counts, shares = self._table.counts(before, after), self._table.shares[after]
        beliefs = self._beliefs[d - 1]
        sure = np.exp(beliefs - beliefs.max())
        sure /= sure.sum() * self._table.weights[before]
        average = sure @ counts + sure.sum() * shares
        return self._base(d) - self._pairs[d] * np.log(np.maximum(average, np.float32(1e-30))), counts, shares


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    """fp32; of a row with nothing possible: -inf."""
    best = scores.max()
    if not best > -math.inf:
        return np.full(len(scores), -math.inf, np.float32)
    shifted = scores - best
    return shifted - np.log(np.exp(shifted).sum())


def grow_levels(
    steps: Steps, limits: torch.Tensor, nodes: int, most_children: int | None = None
) -> torch.Tensor:
    """The best `nodes` prefixes of each session, at most limits [sessions] deep, level by level.

    Returns int32 [sessions, 3, n], n <= nodes: tokens, parents (-1: the anchor), bits of scores; places that
    hold no node come last, with token and parent -1.
    """
    sessions, depths, width = steps.ids.shape
    most = min(width, most_children or nodes)
    beyond = (torch.arange(depths, device=limits.device) >= limits.unsqueeze(1)).unsqueeze(-1)
    # Children in their turns: among equal scores of nodes the turn decides, not the candidate's place.
    turns, places = steps.scores.sort(dim=-1, descending=True, stable=True)
    turns, places = turns[..., :most], places[..., :most]
    score = torch.zeros(sessions, 1, device=turns.device)
    place = torch.zeros(sessions, 1, dtype=torch.int64, device=turns.device)
    scores: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    parents: list[torch.Tensor] = []
    start = -1  # of the level above among all; the anchor's is before the first
    for level in range(depths):
        above = score.shape[1]
        kept = min(nodes, above * most)
        rows = place.unsqueeze(-1).expand(-1, -1, most)
        found = score.unsqueeze(2) + turns[:, level].gather(1, rows)
        found = found.masked_fill(beyond[:, level].unsqueeze(1), -math.inf).flatten(1)
        # Stored in their order: that of the next level's places then is by parent, and by turn.
        keys = sort_keys(found, nonpositive=True).topk(kept, dim=-1, largest=False).values
        best = places_of(keys)
        score = found.gather(1, best)
        place = places[:, level].gather(1, rows).flatten(1).gather(1, best)
        parents.append(best // most + start)
        start += above
        scores.append(score)
        tokens.append(steps.ids[:, level].to(torch.int64).gather(1, place))
    flat = torch.cat(scores, dim=1)
    total = flat.shape[1]
    keys = sort_keys(flat, nonpositive=True).topk(min(nodes, total), dim=-1, largest=False).values
    order = places_of(keys)
    position = torch.full((sessions, total + 1), -1, dtype=torch.int64, device=flat.device)
    position.scatter_(1, order, torch.arange(order.shape[1], device=flat.device).expand_as(order))
    up = torch.cat(parents, dim=1).gather(1, order)
    up = position.gather(1, torch.where(up < 0, total, up))  # the spare last column: the anchor
    token = torch.cat(tokens, dim=1).gather(1, order)
    kept_scores = flat.gather(1, order)
    nothing = kept_scores == -math.inf
    bits = kept_scores.view(torch.int32).to(torch.int64)
    return torch.stack((token.masked_fill(nothing, -1), up.masked_fill(nothing, -1), bits), dim=1).to(
        torch.int32
    )


def by_depth(
    values: Sequence[float], depths: int, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[depths], the last value repeated."""
    row = [*values[:depths], *[values[-1]] * (depths - len(values))]
    return torch.tensor(row, dtype=dtype, device=device)
