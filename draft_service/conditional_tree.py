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
from draft_service.host_marginals import Best, best_tokens
from kernels.conditional_tree import (
    Steps,
    Weights,
    best_first,
    pack_conditional_trees,
    step_scores,
    steps_of,
)
from kernels.marginals import top_candidates
from kernels.topk import places_of, sort_keys
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
        temperature: float,
        noise: Sequence[torch.Tensor] | None = None,
        *,
        budget: int,
        top_k: int | None = None,
        head_ids: torch.Tensor | None = None,
    ) -> DraftTree:
        """One session's tree of at most `budget` nodes, as deep as there are rows.

        logits: fp32 [depths, columns] on the CPU, before temperature. noise: the target's own of these rows,
        fp32 [columns] each. Greedy (T < 1e-5) takes neither. top_k: most children of a node. head_ids: int64
        [columns], the columns' tokens; None: their numbers.
        """
        if self._host is None:
            raise ValueError(
                f"the table is on {self._table.keys.device}; trees of the host need it on the CPU"
            )
        tokens = None if head_ids is None else head_ids.numpy()
        greedy = temperature < GREEDY_BELOW
        marginals = _Marginals(
            logits.numpy(),
            1.0 if greedy else temperature,
            None if greedy or noise is None else [row.numpy() for row in noise],
            tokens,
        )
        rows = _HostRows(self._host, self._weights, marginals)
        most = min(logits.shape[1], WIDTH, top_k or budget)
        tree = best_first(rows.row, marginals.names, budget=budget, depths=len(logits), most=most)
        return DraftTree(tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores))


class _Marginals:
    """Candidates of each depth, from those rows of logits that a tree asks for: a tree of a few nodes rarely
    has a node of each depth that it may have.
    """

    def __init__(
        self, logits: np.ndarray, heat: float, noise: list[np.ndarray] | None, tokens: np.ndarray | None
    ) -> None:
        self._logits, self._heat, self._noise, self._tokens = logits, heat, noise, tokens
        self.names: list[list[int]] = []
        """Tokens of each depth's candidates, of the depths asked for so far."""
        self._found: list[tuple[Best, np.ndarray]] = []

    def __call__(self, d: int) -> tuple[Best, np.ndarray]:
        """Candidates of depth d + 1 and their tokens, int64."""
        while len(self._found) <= d:
            at = len(self._found)
            noise = None if self._noise is None else self._noise[at]
            best = best_tokens(self._logits[at], WIDTH, heat=self._heat, noise=noise)
            ids = best.columns if self._tokens is None else self._tokens[best.columns]
            self._found.append((best, ids))
            self.names.append(ids.tolist())
        return self._found[d]


class _HostTable:
    """The table as numpy arrays, which for a row at a time cost less than torch's calls."""

    def __init__(self, bigrams: Bigrams) -> None:
        table = bigrams.table
        keys, self._found = table.keys.numpy(), table.counts.numpy()
        self._vocab = table.vocab_size
        # Half the bytes, where they do, to miss the caches with.
        self._keys = keys.astype(np.uint32) if self._vocab**2 <= 1 << 32 else keys
        self.shares = table.shares.numpy()
        self.weights = table.totals.numpy() + np.float32(table.prior)

    def counts(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """before, after int64 [I], [J] -> fp32 [I, J]: how often after followed before."""
        # In ascending order, neighbours are looked for in the same places.
        rows, columns = np.argsort(before), np.argsort(after)
        wanted = (before[rows, None] * self._vocab + after[columns]).ravel().astype(self._keys.dtype)
        at = self._keys.searchsorted(wanted)
        np.minimum(at, len(self._keys) - 1, out=at)
        known = (self._keys[at] == wanted).nonzero()[0]
        sorted_counts = np.zeros(len(wanted), np.float32)
        sorted_counts[known] = self._found[at[known]]
        found = np.empty((len(before), len(after)), np.float32)
        found[rows[:, None], columns] = sorted_counts.reshape(found.shape)
        return found


class _HostRows:
    """kernels.conditional_tree.steps_of of one session, row by row.

    In a row u is the same: the denominator of p(v|u) changes nothing about its log_softmax, nor does what all
    candidates' scores have in common.
    """

    def __init__(self, table: _HostTable, weights: Weights, marginals: _Marginals) -> None:
        self._table, self._marginals = table, marginals
        self._noise, self._pairs = weights.noise.numpy(), weights.pairs.numpy()
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
        best, _ = self._marginals(d)
        b = self._noise[d]
        return best.scores if b == 1.0 else b * best.scores + (1 - b) * best.beliefs

    def _of_depth(self, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What rows have in common [width]; counts [width, width] and shares [width], for each row."""
        (above, before), (_, after) = self._marginals(d - 1), self._marginals(d)
        counts, shares = self._table.counts(before, after), self._table.shares[after]
        sure = np.exp(above.beliefs - above.beliefs.max())
        sure /= sure.sum() * self._table.weights[before]
        average = sure @ counts + sure.sum() * shares
        return self._base(d) - self._pairs[d] * np.log(np.maximum(average, np.float32(1e-30))), counts, shares


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    """fp32, of finite scores, of which there may be none."""
    if not len(scores):
        return scores
    shifted = scores - scores.max()
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
