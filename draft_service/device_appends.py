"""Context appends on a GPU: few rows as one replay of a CUDA graph, many as single launches.

What follows a round is an append of a few rows, whose launches would take longer than their work. Rows come
from wherever the channel has them, so they are copied to where the graph reads them. Owns buckets of rows
and their buffers. Does not own the arithmetic (drafter) nor which rows go where (context_cache).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.block_attention import ContextPages
from draft_service.drafter import Drafter
from draft_service.graphs import GraphPool
from draft_service.staging import Staging

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
TRIED_ROWS = (256, 512)
"""Larger appends that are tried at the start: libraries load their kernels at a shape's first use."""


@dataclass(frozen=True, slots=True)
class _Room:
    """A bucket's inputs: features [rows, width]; places int32 [2, rows], positions and slots. replay: the
    graph.
    """

    features: torch.Tensor
    places: torch.Tensor
    replay: Callable[[], None]


class DeviceAppends:
    """Writes into `pages`. For one thread; everything goes to its current stream.

    graphs: off, every append is single launches (as it is where the drafter can't be captured).
    """

    def __init__(self, drafter: Drafter, pages: ContextPages, *, graphs: bool) -> None:
        self._drafter = drafter
        self._pages = pages
        self._staging = Staging(drafter.device)
        self._graphs = GraphPool(drafter.device) if graphs and drafter.capturable else None
        self._rooms: dict[int, _Room] = {}

    @property
    def captured(self) -> int:
        """Graphs there are."""
        return self._graphs.captured if self._graphs is not None else 0

    def append(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """As Drafter.append."""
        count = len(features)
        bucket = next((size for size in ROW_BUCKETS if size >= count), None)
        if self._graphs is None or bucket is None:
            self._drafter.append(self._pages, features, positions, slots)
            return
        room = self._room(bucket, self._graphs)
        # Rows of an earlier append stay behind these; without a slot they go nowhere.
        room.features[:count].copy_(features, non_blocking=features.is_cuda)
        places = np.full((2, bucket), -1)
        places[0, :count], places[1, :count] = positions.numpy(), slots.numpy()
        self._staging.send(torch.from_numpy(places), out=room.places)
        room.replay()

    def warm_up(self) -> None:
        """Capture all buckets, and load what larger appends launch."""
        width = self._drafter.feature_width
        for rows in (*reversed(ROW_BUCKETS), *TRIED_ROWS):
            features = torch.zeros(rows, width, dtype=self._drafter.dtype, device=self._drafter.device)
            self.append(features, torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1))

    def _room(self, rows: int, graphs: GraphPool) -> _Room:
        found = self._rooms.get(rows)
        if found is None:
            drafter, pages = self._drafter, self._pages
            features = torch.zeros(rows, drafter.feature_width, dtype=drafter.dtype, device=drafter.device)
            places = torch.full((2, rows), -1, dtype=torch.int32, device=drafter.device)

            def work() -> None:
                drafter.append_at(pages, features, places)

            replay = graphs.capture(work, f"append of {rows} rows")
            found = self._rooms[rows] = _Room(features, places, replay)
        return found
