"""What a rank keeps between passes: K/V pages, staging for a pass's own rows, rotary tables.

Owns the allocation. Which page belongs to whom is decided by the engine on rank 0; what is written when, by
the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary import RotaryTables, rotary_tables
from specbridge.errors import ConfigError
from target_service.model.config import ModelConfig
from target_service.model.layers import Heads


@dataclass(frozen=True, slots=True)
class Memory:
    """pages: 2 * layers tensors [pages, page_size, kv_heads, d], K of a layer, then its V; page_rows: the
    same memory as [2 * layers, slots, kv_heads * d]. staging [2 * layers, max_rows, kv_heads, d];
    staged_rows: the same as [2 * layers, max_rows, kv_heads * d]. max_position: positions [0, max_position)
    have rotary rows.
    """

    pages: tuple[torch.Tensor, ...]
    page_rows: torch.Tensor
    staging: torch.Tensor
    staged_rows: torch.Tensor
    rotary: RotaryTables
    page_size: int
    max_position: int

    @property
    def num_pages(self) -> int:
        return self.pages[0].shape[0]

    @property
    def max_rows(self) -> int:
        return self.staging.shape[1]


def allocate(
    config: ModelConfig,
    heads: Heads,
    *,
    num_pages: int,
    page_size: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Memory:
    """Raises ConfigError, with the size and the flag to lower, if it does not fit."""
    planes, row = 2 * config.num_layers, heads.key_value * heads.dim
    try:
        # Zeros, not garbage: masked-out slots must hold finite values.
        pages = torch.zeros(
            planes, num_pages, page_size, heads.key_value, heads.dim, dtype=dtype, device=device
        )
    except (RuntimeError, MemoryError) as error:
        size = planes * num_pages * page_size * row * dtype.itemsize
        raise ConfigError(
            f"no memory for {num_pages} KV pages of {page_size} tokens ({size / 2**30:.1f} GiB on {device}); "
            "lower --kv-tokens"
        ) from error
    staging = torch.zeros(planes, max_rows, heads.key_value, heads.dim, dtype=dtype, device=device)
    # No session can be longer than the whole pool, so rotary rows past it are never read.
    positions = min(config.max_position_embeddings, num_pages * page_size)
    return Memory(
        pages=pages.unbind(0),
        page_rows=pages.view(planes, num_pages * page_size, row),
        staging=staging,
        staged_rows=staging.view(planes, max_rows, row),
        rotary=rotary_tables(
            head_dim=config.head_dim,
            theta=config.rope_theta,
            max_position=positions + max_rows,
            scaling=config.rope_scaling,
            trained_position=config.trained_positions,
            dtype=dtype,
            device=device,
        ),
        page_size=page_size,
        max_position=positions,
    )
