"""DraftTree: the candidate continuation of one anchor, in best-first order.

Owns the tree's shape and its validation. How trees are grown is draft_service.tree's matter, how they
are verified target_service.verify's. Pure Python: the gateway imports it and must not load torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import ge, lt

from specbridge.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes of a draft tree, best first; the root (the anchor) is not a node.

    tokens[i]  token id of node i
    parents[i] index of its parent node, -1 for a child of the anchor; parents[i] < i
    scores[i]  natural log of the path's probability under the draft, non-increasing

    Any prefix of the lists is itself a tree: the best smaller one.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the anchor have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the anchor) with this token, of which there is one at most.

        Paths are short: looking for each of its nodes is less work than a table of all.
        """
        at = node  # children come after their parents
        try:
            while self.parents[at := self.tokens.index(token, at + 1)] != node:
                pass
        except ValueError:
            return None
        return at

    def prefix(self, num_nodes: int) -> DraftTree:
        """The best tree of at most `num_nodes` nodes."""
        if num_nodes >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.scores[:num_nodes])

    def limit_depth(self, max_depth: int) -> DraftTree:
        """Drop all nodes deeper than `max_depth` (their descendants are deeper, so the rest stays a tree)."""
        depths = self.depths()
        if max(depths, default=0) <= max_depth:
            return self
        kept = [i for i, depth in enumerate(depths) if depth <= max_depth]
        place = {old: new for new, old in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[i] for i in kept),
            tuple(place.get(self.parents[i], -1) for i in kept),
            tuple(self.scores[i] for i in kept),
        )

    def well_formed(self, vocab_size: int) -> bool:
        """Whether it has nodes and keeps all rules of `validate` but those of its size: at a fraction of the
        cost, since it is asked of every tree in every round.
        """
        tokens, parents, scores = self.tokens, self.parents, self.scores
        size = len(tokens)
        return (
            len(parents) == len(scores) == size > 0
            and min(tokens) >= 0
            and max(tokens) < vocab_size
            and min(parents) >= -1
            and all(map(lt, parents, range(size)))
            # NaN compares false with everything.
            and scores[0] <= 0.0
            and all(map(ge, scores, scores[1:]))
            and len(set(zip(parents, tokens, strict=True))) == size
        )

    def validate(self, *, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """Check what a peer sent. Raises InvalidRequest naming the first broken rule and its value."""
        n = len(self.tokens)
        # A tree of no more nodes than levels can't be too deep.
        deep = n > max_depth
        if n <= max_nodes and self.well_formed(vocab_size) and not (deep and max(self.depths()) > max_depth):
            return
        self._validate_each(vocab_size, max_nodes, max_depth)

    def _validate_each(self, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """`validate` node by node, which finds the broken rule."""
        n = len(self.tokens)
        if len(self.parents) != n or len(self.scores) != n:
            raise InvalidRequest(
                f"tree lists differ in length: {n} tokens, {len(self.parents)} parents, "
                f"{len(self.scores)} scores"
            )
        if n > max_nodes:
            raise InvalidRequest(
                f"tree has {n} nodes, at most {max_nodes} are accepted: lower the tree budget"
            )
        depths: list[int] = []
        children: set[tuple[int, int]] = set()
        previous = 0.0
        for i, (token, parent, score) in enumerate(zip(self.tokens, self.parents, self.scores, strict=True)):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"tree token {token} at node {i} is outside the vocabulary of {vocab_size}"
                )
            if not -1 <= parent < i:
                raise InvalidRequest(f"tree parent {parent} at node {i} must lie in [-1, {i})")
            if (parent, token) in children:
                raise InvalidRequest(f"tree node {i} repeats token {token} under parent {parent}")
            if math.isnan(score) or score > previous:
                raise InvalidRequest(
                    f"tree score {score} at node {i} must be at most {previous} (non-increasing, log)"
                )
            children.add((parent, token))
            previous = score
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if depths[i] > max_depth:
                raise InvalidRequest(
                    f"tree node {i} has depth {depths[i]}, at most {max_depth} is legal here"
                )


EMPTY_TREE = DraftTree()
