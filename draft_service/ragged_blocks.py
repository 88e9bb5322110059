"""The block pass's attention on a GPU: everything about the sessions is in int32 tensors of fixed shapes.

Owns a bucket's buffers (`BlockRoom`) and what a drafter's layer rules mean in terms of packed batches: a
bidirectional layer is a BLOCK, a causal one a CHAIN, its window a kernels.ragged_attention.Window. Does not
own who fills the tensors (device_trees) nor the kernels. Nothing here reads a tensor back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.block_attention import AttentionSetup, BlockBatch, ContextPages
from draft_service.drafter_config import DrafterConfig, LayerRule
from kernels import cuda
from kernels.heads import split_heads
from kernels.ragged import BLOCK, CHAIN, RaggedBatch
from kernels.ragged_attention import (
    AttentionWorkspace,
    Window,
    make_workspace,
    ragged_attention,
    workspace_floats,
)


@dataclass(frozen=True, slots=True)
class BlockSessions:
    """The sessions of a pass on the device, all int32, padded to a bucket of S.

    bases [S]: context rows. row_start [S + 1]: s * block_size for the sessions there are, then the same
    again: padding sessions have no rows. positions [S * block_size]: of all rows. page_table [S, P].
    """

    bases: torch.Tensor
    row_start: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor

    @property
    def sessions(self) -> int:
        return int(self.bases.shape[0])


def upload(batch: BlockBatch, *, block_size: int, page_size: int, device: torch.device) -> BlockSessions:
    """The sessions of a batch, without padding; waits for the copies."""
    needed = [-(-base // page_size) for base in batch.bases]
    table = torch.zeros(len(batch), max(1, max(needed, default=0)), dtype=torch.int32)
    for row, (pages, count) in enumerate(zip(batch.pages, needed, strict=True)):
        table[row, :count] = torch.tensor(pages[:count], dtype=torch.int32)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    starts = [s * block_size for s in range(len(batch) + 1)]
    positions = [base + step for base in batch.bases for step in range(block_size)]
    return BlockSessions(ints(batch.bases), ints(starts), ints(positions), table.to(device))


def layer_window(config: DrafterConfig, rule: LayerRule, window: int | None) -> Window:
    """What rows of a layer see at most; window: the drafter's own, in context rows."""
    from_anchor = [window] if window is not None else []
    if rule.window is not None and config.window_from_anchor:
        from_anchor.append(rule.window)
    return Window(
        rows=None if config.window_from_anchor else rule.window,
        context=min(from_anchor, default=None),
    )


class BlockRoom:
    """Buffers of the passes over up to `sessions` blocks; passes that use one room must not overlap.

    scratch: memory that rooms share (`scratch_floats`); None: its own.
    """

    def __init__(
        self, setup: AttentionSetup, sessions: int, page_size: int, *, scratch: torch.Tensor | None = None
    ) -> None:
        c, device = setup.config, setup.device
        rows = sessions * c.block_size

        def ints(count: int, value: int) -> torch.Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        self.sessions = sessions
        self.kinds = {BLOCK: ints(sessions, BLOCK), CHAIN: ints(sessions, CHAIN)}
        self.no_ancestors = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        self.windows = {rule: layer_window(c, rule, setup.window) for rule in c.layers}
        self.k_new = torch.empty(rows, c.num_kv_heads, c.head_dim, dtype=setup.dtype, device=device)
        self.v_new = torch.empty_like(self.k_new)
        self.workspace: AttentionWorkspace | None = None
        if cuda.takes(self.k_new):
            self.workspace = make_workspace(
                rows=rows,
                sessions=sessions,
                most_rows=c.block_size,
                heads=c.num_heads,
                kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                page_size=page_size,
                dtype=setup.dtype,
                device=device,
                windows=tuple(dict.fromkeys(self.windows.values())),
                scratch=scratch,
            )


def scratch_floats(setup: AttentionSetup, sessions: int) -> int:
    """fp32 elements of scratch that a room of so many sessions needs."""
    c = setup.config
    if setup.dtype not in cuda.DTYPES:
        return 0
    return workspace_floats(
        rows=sessions * c.block_size,
        sessions=sessions,
        most_rows=c.block_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype=setup.dtype,
        device=setup.device,
    )


class RaggedBlocks:
    """A pass over packed blocks; see the module."""

    def __init__(
        self, setup: AttentionSetup, pages: ContextPages, who: BlockSessions, room: BlockRoom
    ) -> None:
        c = setup.config
        self.sessions = who.sessions
        self._setup = setup
        self._pages = pages
        self._room = room
        self._cos, self._sin = setup.rotary.rows(who.positions)
        self._batches = {
            kind: RaggedBatch(
                row_start=who.row_start,
                lengths=who.bases,
                page_table=who.page_table,
                positions=who.positions,
                kinds=room.kinds[kind],
                ancestors=room.no_ancestors,
                most_rows=c.block_size,
                chains=kind == CHAIN,
            )
            for kind in (BLOCK, CHAIN)
        }
        if room.workspace is not None:
            # By rows and lengths only: the same for both kinds.
            room.workspace.plan(self._batches[BLOCK])

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        setup, room = self._setup, self._room
        c = setup.config
        rule = c.layers[layer]
        q = split_heads(
            qkv,
            self._cos,
            self._sin,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            k_out=room.k_new,
            v_out=room.v_new,
            qk_norm=setup.qk_norms[layer],
            eps=c.rms_norm_eps,
            value_scale=c.value_scale,
        )
        out = ragged_attention(
            q,
            room.k_new,
            room.v_new,
            self._pages.k[layer],
            self._pages.v[layer],
            self._batches[CHAIN if rule.causal else BLOCK],
            scale=setup.scale,
            window=room.windows[rule],
            workspace=room.workspace,
        )
        return out.view(len(qkv), -1)
