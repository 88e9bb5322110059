"""DDTree: the most probable prefixes under the drafter's per-position marginals, best first.

Equal ordered lists come from the best-first heap (`build_tree_heap`, the reference) and from `build_trees`,
which selects tokens in torch without sorting the vocabulary. It then runs the heap on the selected tokens or,
for large batches on an accelerator, goes level by level with static shapes and one readback (so that a CUDA
graph can capture it); on a CPU a torch call costs more than a heap step, and it always takes the heap. Also
owns how a request's noise enters the marginals. Does not own the tree type (specbridge.tree), the noise
itself (kernels.philox) or the drafter's forward.

Order of nodes: score descending, depth ascending, then the path of ranks lexicographically. A token's rank
is its place among the position's best K, by log-probability descending, then token id ascending. A node's
score is fp32(parent's score + its own log-probability), so a parent never scores below its child and every
prefix of the list is a tree. Tokens of probability zero (-inf, or NaN) are never nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch

from kernels.topk import places_of, sort_keys, top_entries
from specbridge.rounds import GREEDY_BELOW
from specbridge.tree import EMPTY_TREE, DraftTree

LEVEL_WISE_FROM = 1024
"""Sessions x nodes from which the level-wise way pays on an accelerator. On an H200, uncaptured, it took
about 5 ms at any size (kernel launches), the heap 1.1 ms for 1 x 64, 3.4 ms for 8 x 64 and 6.5 ms for 32 x
64."""

_INFINITE = 0x7F800000


def noisy_log_probs(
    logits: torch.Tensor, temperature: float = 0.0, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """The scores a tree is grown from: log-softmax of logits / T + noise, per position.

    logits: [..., vocab] of any float dtype, or log-probabilities (a shift per position changes nothing).
    noise: fp32 [..., vocab], the target's own Gumbel noise for these positions, or None.
    Greedy (T < 1e-5) takes neither T nor noise, as the commit rule does. Returns fp32 [..., vocab].
    """
    scores = logits.float()
    if temperature >= GREEDY_BELOW:
        scores = scores / temperature if noise is None else torch.add(noise, scores, alpha=1.0 / temperature)
    return torch.log_softmax(scores, dim=-1)


def build_trees_from_logits(
    logits: torch.Tensor,
    budgets: Sequence[int],
    *,
    max_depths: Sequence[int],
    top_k: int | None = None,
    temperatures: Sequence[float] | None = None,
    noise: Sequence[torch.Tensor | None] | None = None,
) -> list[DraftTree]:
    """One tree a session from the drafter's logits [sessions, horizon, vocab].

    temperatures, noise: one entry a session (noise [horizon, vocab] or None); left out, all are greedy.
    The other arguments are those of `build_trees`.
    """
    heat = temperatures if temperatures is not None else [0.0] * len(logits)
    draws = noise if noise is not None else [None] * len(logits)
    if not len(heat) == len(draws) == len(logits):
        raise ValueError(
            f"{len(heat)} temperatures, {len(draws)} noises for {len(logits)} sessions: give one each"
        )
    if logits.device.type == "cpu":
        # One session at a time: its rows stay in the cache, and what has no budget or no depth costs nothing.
        trees: list[DraftTree] = []
        for row, budget, depth, t, g in zip(logits, budgets, max_depths, heat, draws, strict=True):
            used = max(0, min(depth, len(row))) if budget > 0 else 0
            scores = noisy_log_probs(row[:used], t, None if g is None else g[:used])
            trees += build_trees(scores.unsqueeze(0), [budget], max_depths=[used], top_k=top_k)
        return trees
    if all(t < GREEDY_BELOW for t in heat):
        scores = noisy_log_probs(logits)
    else:
        scores = torch.stack(
            [noisy_log_probs(row, t, g) for row, t, g in zip(logits, heat, draws, strict=True)]
        )
    return build_trees(scores, budgets, max_depths=max_depths, top_k=top_k)


def build_trees(
    scores: torch.Tensor,
    budgets: Sequence[int],
    *,
    max_depths: Sequence[int],
    top_k: int | None = None,
    level_wise: bool | None = None,
) -> list[DraftTree]:
    """The `budgets[s]` most probable prefixes of each session s, at most `max_depths[s]` deep.

    scores: fp32 [sessions, horizon, vocab], log-softmax rows (all <= 0). top_k: most tokens a position
    may offer; None: as many as the budget can use. level_wise: force one of the two ways of building;
    None: by device and size. Raises ValueError unless there are as many budgets and depths as sessions.
    """
    sessions, horizon, vocab = scores.shape
    if not len(budgets) == len(max_depths) == sessions:
        raise ValueError(
            f"{len(budgets)} budgets, {len(max_depths)} depths for {sessions} sessions: give one each"
        )
    depths = [max(0, min(depth, horizon)) for depth in max_depths]
    nodes = max((b for b, depth in zip(budgets, depths, strict=True) if depth), default=0)
    levels = max((depth for b, depth in zip(budgets, depths, strict=True) if b > 0), default=0)
    if nodes <= 0 or levels == 0:
        return [EMPTY_TREE] * sessions
    width = min(nodes, vocab, top_k or vocab)
    log_probs, ids = top_entries(scores[:, :levels], width, nonpositive=True)
    if level_wise is None:
        level_wise = scores.device.type != "cpu" and sessions * nodes >= LEVEL_WISE_FROM
    if not level_wise:
        values, names = log_probs.cpu().numpy(), ids.tolist()
        return [_heap(values[s], names[s], budgets[s], depths[s]) for s in range(sessions)]
    if min(depths) < levels:
        limit = torch.tensor(depths).to(scores.device).view(-1, 1, 1)
        beyond = torch.arange(levels, device=scores.device).view(1, -1, 1) >= limit
        log_probs = log_probs.masked_fill(beyond, -math.inf)
    packed = _best_prefixes(log_probs, ids, nodes).cpu().numpy()
    return [_to_tree(packed[s], budgets[s]) for s in range(sessions)]


def build_tree_heap(
    scores: torch.Tensor, budget: int, *, max_depth: int | None = None, top_k: int | None = None
) -> DraftTree:
    """The reference: sort the vocabulary, then pop the best prefix and push its successors; O(N log N).

    scores: fp32 [horizon, vocab], log-softmax rows.
    """
    horizon, vocab = scores.shape
    depth_limit = horizon if max_depth is None else min(max_depth, horizon)
    width = min(budget, vocab, top_k or vocab)
    if width <= 0 or depth_limit <= 0:
        return EMPTY_TREE
    # A stable descending sort keeps equal values in the order of their ids. NaN would sort first.
    clean = torch.where(scores.isnan(), -math.inf, scores)
    ordered = torch.sort(clean, dim=-1, descending=True, stable=True)
    return _heap(
        ordered.values[:, :width].cpu().numpy(), ordered.indices[:, :width].tolist(), budget, depth_limit
    )


def _heap(log_probs: np.ndarray, ids: list[list[int]], budget: int, max_depth: int) -> DraftTree:
    """log_probs fp32, ids [horizon, width], each position's tokens in the order of their ranks.

    A tuple of ranks has exactly one predecessor (its previous sibling, or its parent for rank 0), which comes
    before it in the order of nodes: so none is missed, and none is pushed twice.
    """
    heap: list[tuple[float, int, tuple[int, ...], int]] = []  # -score, depth, ranks, parent's index
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[np.float32] = []

    def push(parent: int, ranks: tuple[int, ...]) -> None:
        step = log_probs[len(ranks) - 1, ranks[-1]]
        score = step if parent < 0 else scores[parent] + step
        if score > -math.inf:  # false for NaN, too
            heapq.heappush(heap, (-float(score), len(ranks), ranks, parent))

    if budget > 0 and max_depth > 0:
        push(-1, (0,))
    while heap and len(tokens) < budget:
        negative, depth, ranks, parent = heapq.heappop(heap)
        tokens.append(ids[depth - 1][ranks[-1]])
        parents.append(parent)
        scores.append(np.float32(-negative))
        if ranks[-1] + 1 < log_probs.shape[1]:
            push(parent, (*ranks[:-1], ranks[-1] + 1))
        if depth < max_depth:
            push(len(tokens) - 1, (*ranks, 0))
    return DraftTree(tuple(tokens), tuple(parents), tuple(map(float, scores)))


def _best_prefixes(log_probs: torch.Tensor, ids: torch.Tensor, nodes: int) -> torch.Tensor:
    """log_probs fp32, ids int64 [sessions, levels, width] -> int32 [sessions, 3, kept]: token, parent, score.

    A score travels as the bits of its magnitude, so that one tensor is read back.

    A level's kept nodes are stored in the lexicographic order of their rank paths, so that a child's place
    among all candidates (parent's place * width + rank) is that order again, and breaks ties rightly.
    """
    sessions, levels, width = log_probs.shape
    # Level 1: the root's children, by rank.
    score, token = log_probs[:, 0], ids[:, 0]
    parent = torch.full_like(token, -1)
    scores, tokens, parents, starts = [score], [token], [parent], [0]
    for level in range(1, levels):
        above = score.shape[1]
        kept = min(nodes, above * width)
        candidates = (score.unsqueeze(2) + log_probs[:, level].unsqueeze(1)).flatten(1)
        if kept < above * width:
            best = (
                sort_keys(candidates, nonpositive=True).topk(kept, dim=-1, largest=False, sorted=False).values
            )
            place = places_of(best).sort(dim=-1).values
            score = candidates.gather(1, place)
        else:
            place = torch.arange(kept, device=score.device).expand(sessions, kept)
            score = candidates
        token = ids[:, level].gather(1, place % width)
        parent = place // width + starts[-1]
        starts.append(starts[-1] + above)
        scores.append(score)
        tokens.append(token)
        parents.append(parent)
    # Over all levels: places run by depth, then lexicographically, as the order of nodes asks.
    flat = torch.cat(scores, dim=1)
    total = flat.shape[1]
    keys = sort_keys(flat, nonpositive=True).topk(min(nodes, total), dim=-1, largest=False).values
    order = places_of(keys)
    position = torch.full((sessions, total + 1), -1, dtype=torch.int64, device=flat.device)
    position.scatter_(1, order, torch.arange(order.shape[1], device=flat.device).expand_as(order))
    # The root's place is -1, which wraps to the spare last column.
    up = torch.cat(parents, dim=1).gather(1, order)
    up = position.gather(1, torch.where(up < 0, total, up))
    token = torch.cat(tokens, dim=1).gather(1, order)
    return torch.stack((token, up, keys >> 32), dim=1).to(torch.int32)


def _to_tree(packed: np.ndarray, budget: int) -> DraftTree:
    token, parent, magnitude = packed[:, : max(budget, 0)]
    count = int(
        np.searchsorted(magnitude, _INFINITE)
    )  # magnitudes ascend; from infinity on: probability zero
    if count == 0:
        return EMPTY_TREE
    scores = -magnitude[:count].view(np.float32)
    return DraftTree(tuple(token[:count].tolist()), tuple(parent[:count].tolist()), tuple(scores.tolist()))
