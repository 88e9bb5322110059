"""The drafter's paged context: K/V of committed tokens only, found again by prefix.

Owns the page tensors together with their pool, and the coalesced append of several sessions' new rows. Block
rows of a propose pass never come here, so nothing is ever rolled back and a shared page can't be spoilt. Page
bookkeeping itself is specbridge.paging's, arithmetic the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.device_appends import DeviceAppends
from draft_service.drafter import Drafter
from specbridge.errors import CapacityError
from specbridge.paging import PagedSequence, PagePool

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Hidden states of the tokens that follow `sequence`: features [count, taps * hidden], one row a token.

    valid: asked after the features were read; False means that they were overwritten meanwhile.
    """

    sequence: PagedSequence
    tokens: Sequence[int]
    features: torch.Tensor
    valid: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class AppendFailures:
    """Items that were not committed. no_pages: none were to be had. overtaken: their features were
    overwritten.
    """

    no_pages: tuple[NewRows, ...] = ()
    overtaken: tuple[NewRows, ...] = ()


class ContextCache:
    """`num_tokens` context rows in pages of `page_size`.

    fingerprint: of everything the rows depend on (both models' weights, dtype, taps); part of every page's
    key. cuda_graphs: on a GPU, append few rows by CUDA graphs.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        num_tokens: int,
        fingerprint: str,
        page_size: int = PAGE_SIZE,
        cuda_graphs: bool = True,
    ) -> None:
        num_pages = max(1, num_tokens // page_size)
        self.pool = PagePool(num_pages, page_size, fingerprint=fingerprint.encode())
        self.pages = drafter.new_pages(num_pages, page_size)
        self._appends = DeviceAppends(drafter, self.pages, graphs=cuda_graphs)

    @property
    def captured(self) -> int:
        """CUDA graphs of appends."""
        return self._appends.captured

    def warm_up(self) -> None:
        """Have no append be slow for being the first of its size. Writes to no page."""
        self._appends.warm_up()

    def open(self, tokens: Sequence[int], *, salt: bytes = b"") -> PagedSequence:
        """Pin the pages already held for `tokens`; the last token is never among them, since the target
        always runs it.
        """
        return self.pool.open(tokens, salt=salt, limit=len(tokens) - 1)

    def append(self, items: Sequence[NewRows]) -> AppendFailures:
        """Write all items' rows in one pass and commit them. An item's sequence may occur once.

        Returns the items that could not be; their sequences hold what they held before.
        """
        fitting: list[NewRows] = []
        refused: list[NewRows] = []
        for item in items:
            assert len(item.tokens) == len(item.features)
            try:
                item.sequence.reserve(len(item.tokens))
            except CapacityError:
                refused.append(item)
            else:
                fitting.append(item)
        if not fitting:
            return AppendFailures(tuple(refused))
        positions: list[int] = []
        slots: list[int] = []
        for item in fitting:
            first, count = item.sequence.length, len(item.tokens)
            positions.extend(range(first, first + count))
            slots.extend(item.sequence.slots(first, count))
        features = (
            fitting[0].features if len(fitting) == 1 else torch.cat([item.features for item in fitting])
        )
        # By numpy: torch takes tens of microseconds to look at a list.
        places = torch.from_numpy(np.array((positions, slots), dtype=np.int64))
        self._appends.append(features, places[0], places[1])
        # Only now: a page must hold its rows before the index can hand it to somebody.
        overtaken: list[NewRows] = []
        for item in fitting:
            if item.valid():
                item.sequence.extend(item.tokens)
            else:
                overtaken.append(item)
        return AppendFailures(tuple(refused), tuple(overtaken))
