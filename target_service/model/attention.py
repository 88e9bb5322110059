"""Attention of a device pass, as the decoder calls it. Owns nothing but the binding: the pass's batch and the
workspace planned for it, to kernels.ragged_attention.
"""

from __future__ import annotations

import torch

from kernels.ragged import RaggedBatch
from kernels.ragged_attention import AttentionWorkspace, Window, ragged_attention


class RaggedAttention:
    """Attention of one pass (kernels.ragged_attention)."""

    def __init__(self, batch: RaggedBatch, workspace: AttentionWorkspace) -> None:
        self._batch, self._workspace = batch, workspace

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out = ragged_attention(
            q,
            k,
            v,
            k_pages,
            v_pages,
            self._batch,
            scale=scale,
            window=Window(rows=window),
            workspace=self._workspace,
        )
        return out.view(out.shape[0], -1)
