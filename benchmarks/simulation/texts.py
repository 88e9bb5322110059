"""Texts that are known beforehand, and what a drafter of known quality makes of them.

Owns the draws of simulated acceptance (kernels.simulate's, the same as with --simulate-acceptance) for a
whole text at once, and trees from the marginals that go with them. A round's marginals are those of its
class: a tree has the same shape in ranks whenever class and size are the same, so the real builder
(draft_service.tree) grows each of these once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from draft_service.simulation import tables_of
from draft_service.tree import build_trees
from kernels.simulate import MarginalTables, draw_rounds, pack_rows, true_tokens_reference
from specbridge.acceptance import Acceptance
from specbridge.acceptance_model import resolve
from specbridge.tree import EMPTY_TREE, DraftTree

VOCAB = 49152


class Drafter:
    """What `acceptance` proposes, blocks of `block_size`."""

    def __init__(self, acceptance: Acceptance, *, block_size: int) -> None:
        self.acceptance = acceptance
        self.depth = min(block_size - 1, acceptance.depths)
        self.tables: MarginalTables = tables_of(acceptance, vocab_size=VOCAB)
        self.shape = lru_cache(maxsize=None)(self._shape)

    @staticmethod
    def of(setting: str, *, block_size: int) -> Drafter:
        """setting: as for --simulate-acceptance, a file or a mean. Raises ConfigError."""
        return Drafter(resolve(setting, depths=block_size - 1), block_size=block_size)

    def text(self, seed: int, first: int, count: int) -> Text:
        """Tokens at positions [first, first + count) and the rounds with their bases there."""
        return Text(self, seed, first, count)

    def _shape(self, kind: int, nodes: int, depth: int) -> DraftTree:
        """A class's tree, its tokens being ranks."""
        scores = self.tables.log_probs[kind, :depth].unsqueeze(0)
        return build_trees(scores, [nodes], max_depths=[depth])[0]


class Text:
    """One request's text: the true token at every position, and every round's draws."""

    def __init__(self, drafter: Drafter, seed: int, first: int, count: int) -> None:
        self._drafter = drafter
        self._first = first
        bases = range(first, first + count)
        seeds, positions, choices = pack_rows([(seed, base, 0) for base in bases], "cpu")
        self._true: list[int] = true_tokens_reference(seeds, positions, choices, VOCAB).tolist()
        kinds, ranks = draw_rounds(drafter.tables, seeds, positions, choices, drafter.depth)
        self._kinds: list[int] = kinds.tolist()
        self._ranks: Any = ranks.tolist()

    def token(self, position: int) -> int:
        """The target's choice for `position`."""
        return self._true[position - self._first]

    def tree(self, base: int, nodes: int, depth: int) -> DraftTree:
        """What is drafted at `base`, whose anchor sits there; ids by the rank that the true token has."""
        depth = min(depth, self._drafter.depth)
        if nodes <= 0 or depth <= 0:
            return EMPTY_TREE
        place = base - self._first
        shape = self._drafter.shape(self._kinds[place], nodes, depth)
        names: list[int] = []
        depths: list[int] = []
        for rank, parent in zip(shape.tokens, shape.parents, strict=True):
            level = 1 if parent < 0 else depths[parent] + 1
            depths.append(level)
            # Neighbours in the vocabulary: other tokens than the true one only have to differ from it.
            names.append((self._true[place + level] + rank - self._ranks[place][level - 1]) % VOCAB)
        return DraftTree(tuple(names), shape.parents, shape.scores)
