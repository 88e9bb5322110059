"""What a draft pass on the device is told: one int32 buffer, filled on the host and copied at once.

Owns the buffer's layout and how asks are written into it. Does not own the copy nor what reads it
(device_trees).

    seeds int64 [S], temperature fp32 [S], bases, budgets, depth_limits, choices [S], row_start [S + 1],
    tokens, positions [S * block_size], page_table [S, P]

Each part begins at a multiple of 16 bytes: kernels are compiled for pointers of that kind, once for all
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from draft_service.host_trees import Ask
from draft_service.ragged_blocks import BlockSessions
from kernels.philox import signed_seed
from specbridge.paging import PagedSequence

_ALIGNMENT = 4  # int32 elements


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Views of a buffer for S sessions with up to P pages; see the module. S sessions may be fewer: those
    from there on have no rows, no budget and no depth.
    """

    buffer: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    bases: torch.Tensor
    budgets: torch.Tensor
    depth_limits: torch.Tensor
    choices: torch.Tensor
    row_start: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor

    @classmethod
    def allocate(
        cls, sessions: int, block_size: int, pages: int, *, device: torch.device, pinned: bool = False
    ) -> PassInputs:
        """Zeros. pinned: host memory that the device copies from by itself."""
        rows = sessions * block_size
        sizes = [2 * sessions, *[sessions] * 5, sessions + 1, rows, rows, sessions * pages]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        buffer = torch.zeros(starts[-1], dtype=torch.int32, device=device, pin_memory=pinned)
        parts = [buffer[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        return cls(
            buffer=buffer,
            seeds=parts[0].view(torch.int64),
            temperature=parts[1].view(torch.float32),
            bases=parts[2],
            budgets=parts[3],
            depth_limits=parts[4],
            choices=parts[5],
            row_start=parts[6],
            tokens=parts[7],
            positions=parts[8],
            page_table=parts[9].view(sessions, pages),
        )

    @property
    def blocks(self) -> BlockSessions:
        """What of it describes the block pass."""
        return BlockSessions(self.bases, self.row_start, self.positions, self.page_table)


class InputWriter:
    """Writes asks into inputs on the host."""

    def __init__(
        self,
        inputs: PassInputs,
        *,
        block_size: int,
        mask_token_id: int,
        page_size: int,
        page_rows: PageRows,
    ) -> None:
        self._block_size = block_size
        self._page_size = page_size
        self._page_rows = page_rows
        self._ends = np.arange(inputs.row_start.shape[0], dtype=np.int32)
        self._seeds, self._temperature = inputs.seeds.numpy(), inputs.temperature.numpy()
        self._budgets, self._depth_limits = inputs.budgets.numpy(), inputs.depth_limits.numpy()
        self._choices, self._row_start = inputs.choices.numpy(), inputs.row_start.numpy()
        self._bases, self._page_table = inputs.bases.numpy(), inputs.page_table.numpy()
        self._steps = np.arange(block_size, dtype=np.int32)
        self._positions = inputs.positions.numpy().reshape(-1, block_size)
        self._tokens = inputs.tokens.numpy().reshape(-1, block_size)
        self._tokens[:] = mask_token_id

    def write(self, asks: Sequence[Ask]) -> None:
        """The asks of one pass, padded to the buffer's sessions."""
        count = len(asks)
        samplings = [ask.session.sampling for ask in asks]
        self._seeds[:count] = [signed_seed(s.seed) for s in samplings]
        self._temperature[:count] = [s.temperature for s in samplings]
        self._choices[:count] = [_int32(s.choice) for s in samplings]
        self._tokens[:count, 0] = [ask.anchor for ask in asks]
        self._budgets[:count] = [ask.max_nodes for ask in asks]
        self._depth_limits[:count] = [ask.max_depth for ask in asks]
        for row, ask in enumerate(asks):
            sequence = ask.session.sequence
            self._bases[row] = sequence.length
            pages = self._page_rows.of(sequence, -(-sequence.length // self._page_size))
            self._page_table[row, : len(pages)] = pages
        for column in (self._bases, self._budgets, self._depth_limits):
            column[count:] = 0
        np.add(self._bases[:, np.newaxis], self._steps, out=self._positions)
        np.minimum(self._ends, count, out=self._row_start)
        self._row_start *= self._block_size


class PageRows:
    """Page ids of sequences as int32 arrays, which a long list would take too long to become in every
    round.
    """

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[PagedSequence, np.ndarray] = WeakKeyDictionary()

    def of(self, sequence: PagedSequence, count: int) -> np.ndarray:
        """The first `count` pages of a sequence: int32 [count]."""
        row = self._rows.get(sequence)
        if row is None or len(row) < count:
            known = 0 if row is None else len(row)
            # A sequence's pages stay as they are; more are added behind them.
            fresh = np.array(sequence.pages[known:], dtype=np.int32)
            row = fresh if row is None else np.concatenate((row, fresh))
            self._rows[sequence] = row
        return row[:count]


def _int32(value: int) -> int:
    """The low 32 bits, in two's complement."""
    return (value + 2**31) % 2**32 - 2**31
