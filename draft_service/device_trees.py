"""From anchors to trees on a GPU: one launch sequence, and one small read by the host at its end.

    inputs (one copy) -> block pass -> [simulated marginals] -> best tokens under the target's own noise ->
    trees -> packed trees (one copy back)

Shapes are those of a bucket: S sessions, N nodes a tree, a page table as wide as the longest session. The
whole sequence is captured in a CUDA graph per bucket, or, without graphs, launched piece by piece: the same
functions in the same order, so the same trees. Owns buckets, their buffers, and the sequence. Does not own
the pass (drafter), its attention (ragged_blocks), noise and tree rules (kernels.marginals, kernels.tree,
conditional_tree) nor capture (graphs).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draft_service.block_attention import ContextPages
from draft_service.conditional_tree import Conditioner
from draft_service.drafter import Drafter
from draft_service.graphs import GraphPool
from draft_service.host_trees import Ask, Grown
from draft_service.pass_inputs import InputWriter, PageRows, PassInputs
from draft_service.ragged_blocks import BlockRoom, RaggedBlocks, scratch_floats
from draft_service.simulation import Simulation
from kernels.simulate import simulated_marginals
from kernels.tree import MOST_NODES, deepest_tree, grow_trees, unpack_trees
from specbridge.tree import DraftTree

log = logging.getLogger(__name__)

SESSION_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
NODE_BUCKETS = (8, 16, 32, 64, 128, MOST_NODES)
MAX_LOGITS_BYTES = 512 << 20
"""Logits of one pass. A larger batch runs as several passes."""


@dataclass(frozen=True, slots=True)
class _Room:
    """The buffers of all passes of one number of sessions. inputs: on the device; staged: on the host."""

    inputs: PassInputs
    staged: PassInputs
    writer: InputWriter
    blocks: BlockRoom
    greedy: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A bucket's launch sequence, captured or not. packed: where its trees arrive, int32 [S, 3, N]."""

    launch: Callable[[], None]
    packed: torch.Tensor


class DeviceTrees:
    """See the module. Everything it launches goes to the calling thread's current stream.

    graphs: capture the passes (on a CPU, where tests run this, there are none).
    """

    def __init__(
        self,
        drafter: Drafter,
        pages: ContextPages,
        *,
        top_k: int | None,
        simulation: Simulation | None,
        graphs: bool,
        shared_noise: bool = True,
        conditioner: Conditioner | None = None,
    ) -> None:
        config = drafter.config
        self.meanwhile: Callable[[], object] = lambda: None
        # Simulated marginals know nothing of tokens.
        self._grow_trees = grow_trees if conditioner is None or simulation else conditioner.grow
        self._drafter = drafter
        self._pages = pages
        self._top_k = top_k
        self._simulation = simulation
        self._shared_noise = shared_noise
        self._device = drafter.device
        self._on_gpu = drafter.device.type == "cuda"
        self._table_width = max(1, -(-drafter.max_position // pages.page_size))
        row_bytes = config.horizon * config.vocab_size * (4 if simulation else drafter.dtype.itemsize)
        self._sizes = [s for s in SESSION_BUCKETS if s == 1 or s * row_bytes <= MAX_LOGITS_BYTES]
        self.most_sessions = self._sizes[-1]
        self._graphs = GraphPool(self._device) if graphs and drafter.capturable else None
        self._rooms: dict[int, _Room] = {}
        self._passes: dict[tuple[int, int], DevicePass] = {}
        self._page_rows = PageRows()
        self._scratch: torch.Tensor | None = None
        self._done = torch.cuda.Event() if self._on_gpu else None
        if config.horizon > deepest_tree(MOST_NODES):
            log.info("the block is %d long; trees here are at most %d deep", config.horizon,
                     deepest_tree(MOST_NODES))  # fmt: skip

    @property
    def captured(self) -> int:
        """Graphs there are."""
        return self._graphs.captured if self._graphs is not None else 0

    def grow(self, asks: Sequence[Ask]) -> Grown:
        """The time of the tree build is in the pass's: only the device knows it."""
        begun = time.perf_counter_ns()
        work = self.prepare(asks)
        work.launch()
        try:
            self.meanwhile()
        finally:
            self._wait()
        passed = time.perf_counter_ns()
        lists = unpack_trees(work.packed[: len(asks)], [ask.max_nodes for ask in asks])
        trees = tuple(DraftTree(tuple(x.tokens), tuple(x.parents), tuple(x.scores)) for x in lists)
        return Grown(trees, passed - begun, time.perf_counter_ns() - passed)

    def prepare(self, asks: Sequence[Ask]) -> DevicePass:
        """The pass of these asks, its inputs written: valid until the next one of as many sessions."""
        sessions = _bucket(self._sizes, len(asks))
        nodes = _bucket(NODE_BUCKETS, max(ask.max_nodes for ask in asks))
        self._room(sessions).writer.write(asks)
        return self._pass(sessions, nodes)

    def warm_up(self, *, max_sessions: int, max_nodes: int) -> None:
        """Compile and capture the buckets up to these sizes."""
        largest = _bucket(self._sizes, min(max_sessions, self.most_sessions))
        nodes = _bucket(NODE_BUCKETS, max(1, min(max_nodes, MOST_NODES)))
        # The largest first: smaller ones then fit into the memory that it took.
        for size in sorted(self._sizes, reverse=True):
            for count in NODE_BUCKETS:
                if size <= largest and count <= nodes:
                    self._room(size).writer.write(())
                    self._pass(size, count).launch()
                    self._wait()

    def _wait(self) -> None:
        """Until the device has done all that it was told."""
        if self._done is not None:
            self._done.record()
            self._done.synchronize()

    def _pass(self, sessions: int, nodes: int) -> DevicePass:
        """The bucket's pass; made when it is first wanted. Its inputs must be written already."""
        found = self._passes.get((sessions, nodes))
        if found is None:
            room = self._room(sessions)
            packed = torch.empty(sessions, 3, nodes, dtype=torch.int32, pin_memory=self._on_gpu)

            def launch() -> None:
                self._launch(room, packed)

            replay: Callable[[], None] = launch
            if self._graphs is not None:
                replay = self._graphs.capture(launch, f"draft pass of {sessions} sessions, {nodes} nodes")
            found = self._passes[sessions, nodes] = DevicePass(replay, packed)
        return found

    @torch.inference_mode()
    def _launch(self, room: _Room, out: torch.Tensor) -> None:
        """The sequence; nothing in it waits for the device, allocates by what tensors hold, or goes stale."""
        inputs = room.inputs
        nodes = out.shape[2]
        inputs.buffer.copy_(room.staged.buffer, non_blocking=True)
        attention = RaggedBlocks(self._drafter.attention, self._pages, inputs.blocks, room.blocks)
        depth = min(self._drafter.config.horizon, nodes, deepest_tree(nodes))
        logits = self._drafter.forward(inputs.tokens, attention, depth)
        # Recorded ranks are those after the noise: grown from as they stand.
        noisy = self._shared_noise and self._simulation is None
        temperature = inputs.temperature if noisy else room.greedy
        if self._simulation is not None:
            logits = simulated_marginals(
                torch.empty(logits.shape, dtype=torch.float32, device=self._device),
                self._simulation.tables,
                inputs.seeds,
                inputs.bases,
                inputs.choices,
            )
        packed = self._grow_trees(
            logits,
            temperature,
            inputs.seeds,
            inputs.choices,
            inputs.bases,
            inputs.budgets,
            inputs.depth_limits,
            nodes=nodes,
            top_k=self._top_k,
        )
        out.copy_(packed, non_blocking=True)

    def _room(self, sessions: int) -> _Room:
        found = self._rooms.get(sessions)
        if found is None:
            setup, page_size = self._drafter.attention, self._pages.page_size
            shape = (sessions, setup.config.block_size, self._table_width)
            staged = PassInputs.allocate(*shape, device=torch.device("cpu"), pinned=self._on_gpu)
            found = self._rooms[sessions] = _Room(
                inputs=PassInputs.allocate(*shape, device=self._device),
                staged=staged,
                writer=InputWriter(
                    staged,
                    block_size=setup.config.block_size,
                    mask_token_id=setup.config.mask_token_id,
                    page_size=page_size,
                    page_rows=self._page_rows,
                ),
                blocks=BlockRoom(setup, sessions, page_size, scratch=self._shared_scratch()),
                greedy=torch.zeros(sessions, dtype=torch.float32, device=self._device),
            )
        return found

    def _shared_scratch(self) -> torch.Tensor:
        """Attention's memory for parts; passes never overlap, so that all buckets share it."""
        if self._scratch is None:
            size = max(scratch_floats(self._drafter.attention, s) for s in self._sizes)
            self._scratch = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._scratch


def _bucket(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of the ascending sizes that is enough; the largest if none is."""
    return next((size for size in sizes if size >= wanted), sizes[-1])
