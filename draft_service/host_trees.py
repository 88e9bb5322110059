"""From anchors to trees on the CPU: the block pass, the noise of sampled sessions, the heap.

Owns the reuse of noise rows between rounds, and what any device's way (`TreeGrower`) takes and gives. Does
not own the drafter's arithmetic (drafter), the tree rules (tree, conditional_tree) nor who asks (proposer).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draft_service.block_attention import BlockBatch, ContextPages
from draft_service.conditional_tree import Conditioner
from draft_service.drafter import Drafter
from draft_service.session import Session
from draft_service.simulation import Simulation
from draft_service.tree import build_trees_from_logits
from kernels.philox import Columns, gumbel_noise, gumbel_noise_of
from specbridge.tree import DraftTree

LEAST_OF_BLOCK = 0.75
"""Of a block's rows, what is computed in any case. A CPU's products take six rows in one go (kernels.linear):
of a block of 8 the last two, which no tree of 5 nodes can use, are a sixth of the pass, and without them the
shipped drafter's trees of 5 commit 0.6 % less a round (docs/training.md). Drafters are trained on whole
blocks; how they do with much shorter ones has not been measured.
"""
MAX_LOGITS = 1 << 26
"""Logits of one pass, in elements: 256 MiB of fp32. A larger batch runs as several passes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One tree wanted: of `session`, whose context ends at its anchor's position."""

    session: Session
    anchor: int
    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Grown:
    """trees: one per ask. Times of the block pass and of the tree build, in ns."""

    trees: tuple[DraftTree, ...]
    forward_ns: int
    tree_ns: int


class TreeGrower(Protocol):
    """The drafter's pass and the tree build of one device. most_sessions: asks that one pass can take.
    captured: CUDA graphs there are. meanwhile: what the host does while a device is at a pass.
    """

    meanwhile: Callable[[], object]

    @property
    def most_sessions(self) -> int: ...
    @property
    def captured(self) -> int: ...

    def grow(self, asks: Sequence[Ask]) -> Grown:
        """One tree an ask, each of which wants at least one node and one level; at least one ask."""
        ...

    def warm_up(self, *, max_sessions: int, max_nodes: int) -> None:
        """Do what would make the first asks of some size slower than later ones."""
        ...


class HostTrees:
    """See the module."""

    captured = 0
    meanwhile: Callable[[], object] = staticmethod(lambda: None)
    """Never called: the host itself is at the pass."""

    def __init__(
        self,
        drafter: Drafter,
        pages: ContextPages,
        *,
        top_k: int | None,
        simulation: Simulation | None,
        shared_noise: bool = True,
        conditioner: Conditioner | None = None,
        trim_block: bool = False,
    ) -> None:
        """trim_block: leave out rows of a block that are below what any tree of a pass may reach."""
        self.top_k = top_k
        self._least_rows = math.ceil(LEAST_OF_BLOCK * drafter.config.block_size)
        self._trimmed: dict[int, Drafter] = {}
        self._trim_block = trim_block
        self._conditioner = conditioner
        self._shared_noise = shared_noise
        self._drafter = drafter
        self._pages = pages
        self._simulation = simulation
        self._columns = None if drafter.head_ids is None else Columns(drafter.head_ids)
        self.most_sessions = max(1, MAX_LOGITS // (drafter.config.horizon * drafter.config.vocab_size))

    def grow(self, asks: Sequence[Ask]) -> Grown:
        begun = time.perf_counter_ns()
        logits = self.logits(asks)
        passed = time.perf_counter_ns()
        trees = tuple(self._build(logits, asks))
        return Grown(trees, passed - begun, time.perf_counter_ns() - passed)

    def warm_up(self, *, max_sessions: int, max_nodes: int) -> None:
        """Nothing here is slow once only."""

    def logits(self, asks: Sequence[Ask]) -> torch.Tensor:
        """fp32 [asks, depth, vocab]: the marginals that the trees are grown from, before noise. Of a reduced
        head its own columns only, unless marginals are simulated.
        """
        batch = BlockBatch(
            [ask.anchor for ask in asks],
            [ask.session.sequence.length for ask in asks],
            [ask.session.sequence.pages for ask in asks],
        )
        # A tree of N nodes is at most N deep: rows beyond that are computed for nothing.
        depth = max(min(ask.max_depth, ask.max_nodes) for ask in asks)
        return self._drafter_of(depth).propose(self._pages, batch, depth, own_ids=self._simulation is None)

    def _drafter_of(self, depth: int) -> Drafter:
        """With the rows of a block that predict `depth` positions, and no fewer than LEAST_OF_BLOCK."""
        config = self._drafter.config
        rows = max(config.first_row + depth, self._least_rows)
        if not self._trim_block or rows >= config.block_size:
            return self._drafter
        if rows not in self._trimmed:
            self._trimmed[rows] = self._drafter.trimmed(rows)
        return self._trimmed[rows]

    def noise(self, session: Session, depth: int) -> list[torch.Tensor] | None:
        """The target's own noise for the tokens at positions base + 1 .. base + depth: fp32 [columns of
        `logits`] each.

        A round commits fewer positions than it drafts, so most rows serve again in the next round.
        """
        sampling = session.sampling
        if sampling.greedy:
            return None
        base = session.sequence.length
        kept = session.noise
        for position in [p for p in kept if p <= base]:
            del kept[position]
        missing = [p for p in range(base + 1, base + depth + 1) if p not in kept]
        if missing:
            drawn = [sampling.seed] * len(missing), missing, [sampling.choice] * len(missing)
            rows = (
                gumbel_noise(*drawn, self._drafter.config.vocab_size)
                if self._columns is None
                else gumbel_noise_of(self._columns, *drawn)
            )
            kept.update(zip(missing, rows, strict=True))
        return [kept[p] for p in range(base + 1, base + depth + 1)]

    def _build(self, logits: torch.Tensor, asks: Sequence[Ask]) -> list[DraftTree]:
        temperatures: list[float] | None = None
        noise: list[list[torch.Tensor] | None] | None = None
        if self._simulation is None and self._shared_noise:
            temperatures = [ask.session.sampling.temperature for ask in asks]
            noise = [self.noise(ask.session, logits.shape[1]) for ask in asks]
        elif self._simulation is not None:
            samplings = [ask.session.sampling for ask in asks]
            bases = [ask.session.sequence.length for ask in asks]
            logits = self._simulation.marginals(logits, samplings, bases)
        if self._conditioner is not None and self._simulation is None:
            return self._conditional(self._conditioner, logits, asks, temperatures, noise)
        trees = build_trees_from_logits(
            logits,
            [ask.max_nodes for ask in asks],
            max_depths=[ask.max_depth for ask in asks],
            top_k=self.top_k,
            temperatures=temperatures,
            noise=None if noise is None else [None if rows is None else torch.stack(rows) for rows in noise],
        )
        ids = self._drafter.head_ids
        if ids is None or logits.shape[2] == self._drafter.config.vocab_size:
            return trees
        # A node's token is a column so far. Columns are in the order of their ids: ties fell the same way.
        return [
            DraftTree(tuple(ids[list(tree.tokens)].tolist()), tree.parents, tree.scores) for tree in trees
        ]

    def _conditional(
        self,
        conditioner: Conditioner,
        logits: torch.Tensor,
        asks: Sequence[Ask],
        temperatures: list[float] | None,
        noise: list[list[torch.Tensor] | None] | None,
    ) -> list[DraftTree]:
        """`_build` where nodes know the token before theirs."""
        return [
            conditioner.host_tree(
                row[: min(ask.max_depth, ask.max_nodes)],
                0.0 if temperatures is None else temperatures[i],
                None if noise is None else noise[i],
                budget=ask.max_nodes,
                top_k=self.top_k,
                head_ids=self._drafter.head_ids,
            )
            for i, (row, ask) in enumerate(zip(logits, asks, strict=True))
        ]
