"""DDTree on the device: from the drafter's logits to packed trees, one readback for all sessions.

Owns the growing of trees from ranked marginals and the packed form. Does not own the ranking
(kernels.marginals), the tree type that travels between services (specbridge.tree), nor the rule's reference
on the host, to which it is equal, list by list (draft_service.tree, which says what the order of nodes is and
why).

    packed int32 [sessions, 3, nodes]: tokens, parents (index of a node, -1: the anchor), bits of fp32 scores
    unused places, all at the end: token -1, parent -1, score -inf
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import cuda
from kernels.marginals import Candidates, top_candidates

MOST_NODES = 256
"""Nodes that a tree can have here."""


@dataclass(frozen=True, slots=True)
class TreeLists:
    """One tree, best node first: token ids, indexes of parents (-1: the anchor), path log-probabilities."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def grow_trees(
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
    """Packed trees int32 [sessions, 3, nodes] from the drafter's logits [sessions, depths, vocab].

    budgets int32 [sessions]: most nodes of each tree, at most `nodes` of them. depth_limits int32 [sessions]:
    depth of its deepest node at most. top_k: most tokens that a position may offer; None: as many as a tree
    can use. The other arguments are kernels.marginals.top_candidates'. Raises ValueError as it and pack_trees
    do.
    """
    width = min(nodes, logits.shape[-1], top_k or nodes)
    candidates = top_candidates(logits, temperature, seeds, choices, bases, depth_limits, width=width)
    return pack_trees(candidates, budgets, depth_limits, nodes=nodes)


def pack_trees(
    candidates: Candidates, budgets: torch.Tensor, depth_limits: torch.Tensor, *, nodes: int
) -> torch.Tensor:
    """The best-first trees over ranked candidates; arguments and result as in grow_trees.

    Raises ValueError unless 1 <= nodes <= 256 and the depths fit (deepest_tree).
    """
    depths = candidates.log_probs.shape[1]
    if not 1 <= nodes <= MOST_NODES or depths > deepest_tree(nodes):
        raise ValueError(
            f"trees of {nodes} nodes and {depths} levels are not grown here; use 1 to {MOST_NODES} nodes and "
            f"at most {deepest_tree(min(max(nodes, 1), MOST_NODES))} levels"
        )
    if cuda.takes(candidates.log_probs):
        from kernels.cuda import tree as triton_op

        return triton_op.pack_trees(candidates, budgets, depth_limits, nodes=nodes)
    return pack_trees_reference(candidates, budgets, depth_limits, nodes=nodes)


def deepest_tree(nodes: int) -> int:
    """Most levels of a tree of `nodes` nodes: what 56 bits, by which the device orders paths, can hold.

    All paths of the same depth whose ranks are nowhere higher come before a path, so the ranks r of a node
    satisfy product(r + 1) <= nodes, and those of a candidate 2 nodes at most. In the code that keeps their
    order, a rank takes 1 + 2 floor(log2(r + 1)) bits: one a level, and 2 log2(2 nodes) in all for those above
    0.
    """
    return 56 - 2 * math.ceil(math.log2(2 * nodes))


def pack_trees_reference(
    candidates: Candidates, budgets: torch.Tensor, depth_limits: torch.Tensor, *, nodes: int
) -> torch.Tensor:
    """pack_trees by a heap on the host; reads the candidates back."""
    log_probs, ids = candidates.log_probs.float().cpu().numpy(), candidates.ids.cpu().numpy()
    sessions, depths, _ = log_probs.shape
    packed = np.full((sessions, 3, nodes), -1, np.int32)
    packed[:, 2] = np.float32(-math.inf).view(np.int32)
    for s, (budget, limit) in enumerate(zip(budgets.tolist(), depth_limits.tolist(), strict=True)):
        _grow(log_probs[s, : min(limit, depths)], ids[s], packed[s, :, : min(budget, nodes)])
    return torch.from_numpy(packed).to(candidates.log_probs.device)


def _grow(log_probs: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Fill out [3, n] with the best n nodes. log_probs, ids: [levels, width]."""
    levels, width = log_probs.shape
    scores: list[np.float32] = []
    frontier: list[tuple[float, int, tuple[int, ...], int]] = []  # -score, depth, ranks, parent

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        above = scores[parent] if parent >= 0 else np.float32(0.0)
        score = above + log_probs[len(ranks) - 1, ranks[-1]]
        if score > -math.inf:  # no NaN either
            heapq.heappush(frontier, (-float(score), len(ranks), ranks, parent))

    if levels and out.shape[1]:
        offer(-1, (0,))
    while frontier and len(scores) < out.shape[1]:
        negative, depth, ranks, parent = heapq.heappop(frontier)
        node = len(scores)
        scores.append(np.float32(-negative))
        out[:, node] = ids[depth - 1, ranks[-1]], parent, scores[-1].view(np.int32)
        if ranks[-1] + 1 < width:
            offer(parent, (*ranks[:-1], ranks[-1] + 1))
        if depth < levels:
            offer(node, (*ranks, 0))


def unpack_trees(packed: torch.Tensor, budgets: Sequence[int]) -> list[TreeLists]:
    """Lists from packed trees on the host, at most budgets[s] nodes each: a prefix is a tree, too."""
    if packed.device.type != "cpu":
        raise ValueError(f"packed trees are on {packed.device}; read them back first")
    rows = packed.numpy()
    counts = np.minimum(np.count_nonzero(rows[:, 0] >= 0, axis=1), np.maximum(budgets, 0)).tolist()
    # Whole tables become lists at once: a call of numpy costs more than a tree's numbers do.
    columns = (rows[:, 0].tolist(), rows[:, 1].tolist(), rows[:, 2].view(np.float32).tolist())
    return [
        TreeLists(tokens[:count], parents[:count], scores[:count])
        for count, tokens, parents, scores in zip(counts, *columns, strict=True)
    ]
