"""The block pass's attention: what differs between devices in a pass that is otherwise written once
(drafter).

A pass makes one BlockAttention and gives it each layer's q/k/v product. `SplitBlocks`, here, is the CPU's:
every session planned on the host, pages read where they lie. `RaggedBlocks` (ragged_blocks) is the GPU's:
described by tensors of fixed shapes on the device, so that a pass can be captured. Owns what a block row
sees, in the CPU's terms, and the types of a pass's inputs. Does not own kernels (kernels.attention) nor the
rest of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draft_service.drafter_config import DrafterConfig, LayerRule
from kernels.attention import AttentionPlan, PagedContext, plan_attention, split_attention
from kernels.norm import rms_norm
from kernels.rotary import RotaryTables, apply_rotary


@dataclass(frozen=True, slots=True)
class ContextPages:
    """K and V of committed tokens for every layer: each [layers, pages, page_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return int(self.k.shape[2])


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The sessions of one propose pass.

    anchors: token at position base. bases: context rows each session holds. pages: its page ids, in order,
    enough to cover base.
    """

    anchors: Sequence[int]
    bases: Sequence[int]
    pages: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.bases)


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What the attention of all passes of a drafter needs.

    qk_norms: per layer [heads + kv_heads, head_dim]. window: the last context rows that are attended to,
    None: all. dtype: of activations.
    """

    config: DrafterConfig
    qk_norms: tuple[torch.Tensor, ...]
    rotary: RotaryTables
    window: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def scale(self) -> float:
        return float(self.config.head_dim**-0.5)


class BlockAttention(Protocol):
    """Attention of one pass over `sessions` blocks."""

    @property
    def sessions(self) -> int: ...

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Norm, rotary embedding and attention of layer number `layer`.

        qkv [rows, (heads + 2 * kv_heads) * head_dim], rows = sessions * block_size; returns [rows, heads *
        head_dim].
        """
        ...


class SplitBlocks:
    """A pass planned on the host, over kernels.attention; see the module."""

    def __init__(self, setup: AttentionSetup, pages: ContextPages, batch: BlockBatch) -> None:
        config = setup.config
        self.sessions = len(batch)
        self._setup = setup
        self._pages = pages
        base = torch.tensor(batch.bases, dtype=torch.int64)
        positions = base.unsqueeze(1) + torch.arange(config.block_size)
        self._cos, self._sin = setup.rotary.rows(positions.flatten().to(setup.device))
        self._view = _context_view(setup, batch, base, pages.page_size)
        self._plans = {rule: self._plan(rule, base, positions) for rule in dict.fromkeys(config.layers)}

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        setup, view = self._setup, self._view
        c = setup.config
        blocks = (self.sessions, c.block_size)
        turned, kv_size = (c.num_heads + c.num_kv_heads) * c.head_dim, c.num_kv_heads * c.head_dim
        qk, v = qkv.split((turned, kv_size), dim=-1)
        qk = rms_norm(qk.unflatten(-1, (-1, c.head_dim)), setup.qk_norms[layer], c.rms_norm_eps)
        q, k = apply_rotary(qk, self._cos, self._sin).split((c.num_heads, c.num_kv_heads), dim=-2)
        v = v.unflatten(-1, (-1, c.head_dim))
        out = split_attention(
            q.unflatten(0, blocks),
            k.unflatten(0, blocks),
            (v if c.value_scale == 1.0 else v * c.value_scale).unflatten(0, blocks),
            PagedContext(self._pages.k[layer], self._pages.v[layer], view.page_table, view.lengths),
            None,
            scale=setup.scale,
            plan=self._plans[c.layers[layer]],
        )
        return out.reshape(len(qkv), -1)

    def _plan(self, rule: LayerRule, base: torch.Tensor, positions: torch.Tensor) -> AttentionPlan:
        setup, view = self._setup, self._view
        sessions, rows = positions.shape
        return plan_attention(
            view.page_table,
            view.lengths,
            _block_mask(setup.config, rule).expand(sessions, rows, rows),
            rows=rows,
            page_size=self._pages.page_size,
            dtype=setup.dtype,
            device=setup.device,
            window_start=_window_start(setup, rule.window, base, positions, view),
        )


@dataclass(frozen=True, slots=True)
class _ContextView:
    """page_table int64 [sessions, P]; lengths int64 [sessions] in it; offset: positions cut off its front. On
    the CPU.
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    offset: torch.Tensor


def _context_view(
    setup: AttentionSetup, batch: BlockBatch, base: torch.Tensor, page_size: int
) -> _ContextView:
    """Page table over what some layer can see: with a window in every layer, old pages are left out."""
    reach = [_reach(setup, rule.window) for rule in setup.config.layers]
    skip = [0] * len(batch)
    if all(r is not None for r in reach):
        widest = max(r for r in reach if r is not None)
        skip = [max(0, b - widest) // page_size for b in batch.bases]
    needed = [-(-b // page_size) for b in batch.bases]
    width = max((n - s for n, s in zip(needed, skip, strict=True)), default=0)
    table = torch.zeros((len(batch), width), dtype=torch.int64)
    for row, (pages, first, last) in enumerate(zip(batch.pages, skip, needed, strict=True)):
        table[row, : last - first] = torch.tensor(pages[first:last], dtype=torch.int64)
    offset = torch.tensor(skip, dtype=torch.int64) * page_size
    return _ContextView(table, base - offset, offset)


def _reach(setup: AttentionSetup, window: int | None) -> int | None:
    """Context rows before the anchor that a layer with `window` can see at most; None: all."""
    sizes = [w for w in (window, setup.window) if w is not None]
    return min(sizes) if sizes else None


def _window_start(
    setup: AttentionSetup,
    window: int | None,
    base: torch.Tensor,
    positions: torch.Tensor,
    view: _ContextView,
) -> torch.Tensor | None:
    """First visible context position of each block row, int64 [sessions, rows], counted in the view."""
    bounds = []
    if window is not None:
        from_anchor = (base - window).unsqueeze(1).expand_as(positions)
        bounds.append(from_anchor if setup.config.window_from_anchor else positions - window + 1)
    if setup.window is not None:
        bounds.append((base - setup.window).unsqueeze(1).expand_as(positions))
    if not bounds:
        return None
    start = bounds[0] if len(bounds) == 1 else torch.maximum(*bounds)
    return (start - view.offset.unsqueeze(1)).clamp_min(0)


def _block_mask(config: DrafterConfig, rule: LayerRule) -> torch.Tensor:
    """bool [block, block]: which rows of the block each row sees in a layer of this rule."""
    row = torch.arange(config.block_size)
    ahead = row.unsqueeze(0) - row.unsqueeze(1)  # key row - query row
    mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
    if rule.causal:
        mask &= ahead <= 0
    if rule.window is not None and not config.window_from_anchor:
        mask &= ahead.abs() < rule.window
    return mask
