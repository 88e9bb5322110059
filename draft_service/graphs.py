"""CUDA graphs: a launch sequence of fixed shapes, recorded once and replayed.

Owns capture, the memory pool that all graphs of an owner share, and the side stream captures run on. Does not
own what is recorded. A recording holds addresses, so what it reads and writes must stay where it is: weights,
pages, and the buffers of its owner. Graphs of one pool are replayed one after the other, never at once: their
intermediate results lie in the same memory, and nothing in it is read after a replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


class GraphPool:
    """Captures and keeps graphs on one device; for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self.captured = 0

    def capture(self, work: Callable[[], object], name: str) -> Callable[[], None]:
        """A replay of `work`, on whatever stream is current then. `work` runs once for real, which compiles
        and loads what it launches, before it is recorded.

        Raises what `work` raises, torch's error if it does what can't be recorded.
        """
        begun = time.perf_counter()
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            work()
            self._side.synchronize()
            # Other threads (the channel's) may map memory or make events meanwhile: that is none of ours.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                _give_up(graph)
                raise
            graph.capture_end()
        main.wait_stream(self._side)
        self.captured += 1
        log.debug("%s captured in %.0f ms", name, (time.perf_counter() - begun) * 1e3)
        return graph.replay


def _give_up(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose work has raised; its own complaint would hide the cause."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        log.debug("the broken capture ended: %s", error)
