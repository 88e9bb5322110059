"""From anchors to trees: the block pass of a batch of sessions, their noise, and the tree build.

Owns batching of the pass and the reuse of noise rows between rounds. Does not own the drafter's arithmetic
(drafter), the tree rules (tree) nor who is ready (engine).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.context_cache import ContextCache
from draft_service.drafter import BlockBatch, Drafter, Reading
from draft_service.session import Session
from draft_service.tree import build_trees_from_logits
from kernels.philox import gumbel_noise
from specbridge.rounds import CostPoint
from specbridge.tree import EMPTY_TREE, DraftTree

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
class Place:
    """A point of a session's text: its token `anchor` at position `base`."""

    base: int
    anchor: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """trees: one per ask. Times of the block passes and of the tree builds, in ns."""

    trees: tuple[DraftTree, ...]
    forward_ns: int
    tree_ns: int


class Proposer:
    """The drafter with its context, as one operation."""

    def __init__(self, drafter: Drafter, cache: ContextCache, *, top_k: int | None) -> None:
        self.drafter = drafter
        self._cache = cache
        self._top_k = top_k
        config = drafter.config
        self._max_sessions = max(1, MAX_LOGITS // (config.horizon * config.vocab_size))

    def propose(self, asks: Sequence[Ask]) -> Proposed:
        """Grow all trees. Asks for no node or no depth cost nothing."""
        trees: list[DraftTree] = [EMPTY_TREE] * len(asks)
        wanted = [i for i, ask in enumerate(asks) if ask.max_nodes > 0 and ask.max_depth > 0]
        forward_ns = tree_ns = 0
        for start in range(0, len(wanted), self._max_sessions):
            part = wanted[start : start + self._max_sessions]
            begun = time.perf_counter_ns()
            logits = self._pass([asks[i] for i in part])
            passed = time.perf_counter_ns()
            grown = self._grow(logits, [asks[i] for i in part])
            tree_ns += time.perf_counter_ns() - passed
            forward_ns += passed - begun
            for i, tree in zip(part, grown, strict=True):
                trees[i] = tree
        return Proposed(tuple(trees), forward_ns, tree_ns)

    def measure(self, sessions: Sequence[int], context: int, repeats: int) -> tuple[CostPoint, ...]:
        """Median times of a propose of so many sessions, for the gateway's cost model. Reads pages, writes
        none.
        """
        drafter, pool = self.drafter, self._cache.pool
        page = list(range(pool.pages_for(context)))
        if len(page) > pool.num_pages:
            context, page = pool.num_pages * pool.page_size, list(range(pool.num_pages))
        points = []
        for count in sessions:
            batch = BlockBatch([0] * count, [context] * count, [page] * count)
            times = []
            for _ in range(repeats):
                begun = time.perf_counter_ns()
                logits = drafter.propose(self._cache.pages, batch)
                build_trees_from_logits(
                    logits, [16] * count, max_depths=[drafter.config.horizon] * count, top_k=self._top_k
                )
                times.append(time.perf_counter_ns() - begun)
            median = sorted(times)[len(times) // 2]
            points.append(CostPoint(rows=count * drafter.config.block_size, context=context, time_ns=median))
        return tuple(points)

    def replay(
        self, session: Session, places: Sequence[Place], *, reading: Reading, max_nodes: int
    ) -> tuple[DraftTree, ...]:
        """The greedy trees that `reading` of the drafter would have grown at `places` of a session's text.

        Context rows do not depend on how the block is read, so those the session holds serve for all of it.
        """
        drafter = self.drafter.reread(reading)
        count = len(places)
        batch = BlockBatch(
            [place.anchor for place in places],
            [place.base for place in places],
            [session.sequence.pages] * count,
        )
        logits = drafter.propose(self._cache.pages, batch)
        # No deeper than the drafter really went: readings differ in where they look, not in how far.
        horizon = min(drafter.config.horizon, self.drafter.config.horizon)
        return tuple(build_trees_from_logits(logits, [max_nodes] * count, max_depths=[horizon] * count))

    def _pass(self, asks: Sequence[Ask]) -> torch.Tensor:
        batch = BlockBatch(
            [ask.anchor for ask in asks],
            [ask.session.sequence.length for ask in asks],
            [ask.session.sequence.pages for ask in asks],
        )
        # A tree of N nodes is at most N deep: rows of the head beyond that are computed for nothing.
        depth = max(min(ask.max_depth, ask.max_nodes) for ask in asks)
        return self.drafter.propose(self._cache.pages, batch, depth)

    def _grow(self, logits: torch.Tensor, asks: Sequence[Ask]) -> list[DraftTree]:
        return build_trees_from_logits(
            logits,
            [ask.max_nodes for ask in asks],
            max_depths=[ask.max_depth for ask in asks],
            top_k=self._top_k,
            temperatures=[ask.session.sampling.temperature for ask in asks],
            noise=[self._noise(ask.session, logits.shape[1]) for ask in asks],
        )

    def _noise(self, session: Session, depth: int) -> torch.Tensor | None:
        """The target's own noise for the tokens at positions base + 1 .. base + depth, fp32 [depth, vocab].

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
            rows = gumbel_noise(
                [sampling.seed] * len(missing),
                missing,
                [sampling.choice] * len(missing),
                self.drafter.config.vocab_size,
                device=self.drafter.device,
            )
            kept.update(zip(missing, rows, strict=True))
        return torch.stack([kept[p] for p in range(base + 1, base + depth + 1)])
