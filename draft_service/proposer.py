"""From asks to trees: passes of a bounded size, the draft-cost curve, and replays for the self-check.

Owns the choice of how trees are grown on this device (host_trees, device_trees) and the batching over passes.
Does not own the drafter's arithmetic (drafter), the tree rules (tree) nor who is ready (engine).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draft_service.conditional_tree import Conditioner
from draft_service.context_cache import ContextCache
from draft_service.device_trees import DeviceTrees
from draft_service.drafter import BlockBatch, Drafter, Reading
from draft_service.host_trees import Ask, HostTrees, TreeGrower
from draft_service.memory import log_memory
from draft_service.session import Session
from draft_service.simulation import Simulation
from draft_service.tree import build_trees_from_logits
from specbridge.rounds import CostPoint, SamplingParams, SessionKey
from specbridge.tree import EMPTY_TREE, DraftTree

__all__ = ["Ask", "Place", "Proposed", "Proposer"]

MEASURED_NODES = 16
"""Size of the trees of the draft-cost curve."""


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a session's text: its token `anchor` at position `base`."""

    base: int
    anchor: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """trees: one per ask. Times of the block passes and of the tree builds, in ns; on a GPU most of the build
    is in the pass's time.
    """

    trees: tuple[DraftTree, ...]
    forward_ns: int
    tree_ns: int


class Proposer:
    """The drafter with its context, as one operation."""

    def __init__(
        self,
        drafter: Drafter,
        cache: ContextCache,
        *,
        top_k: int | None,
        simulation: Simulation | None = None,
        cuda_graphs: bool = True,
        shared_noise: bool = True,
        conditioner: Conditioner | None = None,
        trim_block: bool = False,
    ) -> None:
        self.drafter = drafter
        self.simulation = simulation
        self._cache = cache
        self.trees: TreeGrower
        if drafter.device.type == "cuda":
            self.trees = DeviceTrees(
                drafter,
                cache.pages,
                top_k=top_k,
                simulation=simulation,
                graphs=cuda_graphs,
                shared_noise=shared_noise,
                conditioner=conditioner,
            )
        else:
            self.trees = HostTrees(
                drafter,
                cache.pages,
                top_k=top_k,
                simulation=simulation,
                shared_noise=shared_noise,
                conditioner=conditioner,
                trim_block=trim_block,
            )

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work` done in every pass, where a device leaves the host time for it."""
        self.trees.meanwhile = work

    def take_thread(self) -> None:
        """Make the drafter's device the calling thread's: it is the one that proposes and appends."""
        if self.drafter.device.type == "cuda":
            torch.cuda.set_device(self.drafter.device)

    def warm_up(self, *, max_sessions: int, max_nodes: int) -> None:
        """Have no append, and no proposal of up to so many sessions and nodes, be slow for being the first of
        its size. Writes to no page.
        """
        if self.drafter.device.type == "cpu":
            return
        self._cache.warm_up()
        self.trees.warm_up(max_sessions=max_sessions, max_nodes=max_nodes)
        graphs = self._cache.captured + self.trees.captured
        log_memory(self.drafter, self._cache.pages, graphs=graphs)

    def propose(self, asks: Sequence[Ask]) -> Proposed:
        """Grow all trees. Asks for no node or no depth cost nothing."""
        trees: list[DraftTree] = [EMPTY_TREE] * len(asks)
        wanted = [i for i, ask in enumerate(asks) if ask.max_nodes > 0 and ask.max_depth > 0]
        forward_ns = tree_ns = 0
        most = self.trees.most_sessions
        for start in range(0, len(wanted), most):
            part = wanted[start : start + most]
            grown = self.trees.grow([asks[i] for i in part])
            forward_ns += grown.forward_ns
            tree_ns += grown.tree_ns
            for i, tree in zip(part, grown.trees, strict=True):
                trees[i] = tree
        return Proposed(tuple(trees), forward_ns, tree_ns)

    def measure(self, sessions: Sequence[int], context: int, repeats: int) -> tuple[CostPoint, ...]:
        """Median times of a propose of so many sessions, for the gateway's cost model. While no session is
        open: it takes pages for one of `context` rows and gives them back.
        """
        pool, config = self._cache.pool, self.drafter.config
        context = min(context, pool.available_pages * pool.page_size, self.drafter.max_position)
        sequence = pool.open(())
        try:
            sequence.extend([0] * context)
            session = Session(SessionKey(bytes(16), 0), SamplingParams(), b"", sequence)
            points = []
            for count in sessions:
                asks = [Ask(session, 0, MEASURED_NODES, config.horizon)] * count
                times = []
                for _ in range(repeats):
                    begun = time.perf_counter_ns()
                    self.propose(asks)
                    times.append(time.perf_counter_ns() - begun)
                median = sorted(times)[len(times) // 2]
                points.append(CostPoint(rows=count * config.block_size, context=context, time_ns=median))
            return tuple(points)
        finally:
            sequence.close(keep=False)

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
