"""A drafter without a checkpoint: random tensors of its configuration's shapes, made on the device.

Owns shapes and scales; embedding and head take the shape of the target's. Does not own the configuration
(drafter_config) nor the forward (drafter).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draft_service.drafter_config import DrafterConfig
from draft_service.drafter_weights import DrafterWeights, LayerWeights
from kernels.random_weights import random_tensor

_RESIDUAL_SCALE = 0.25
"""Of what adds to the residual stream, so that it does not outgrow the embedding."""


def dummy_weights(
    config: DrafterConfig,
    target_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DrafterWeights:
    """Random weights of `config`; the head is the embedding if the target's is tied to it."""

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return random_tensor(
            f"draft.{name}", (rows, columns), std=scale * columns**-0.5, dtype=dtype, device=device
        )

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def bias(size: int) -> torch.Tensor | None:
        return torch.zeros(size, dtype=dtype, device=device) if config.attention_bias else None

    hidden, dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    layers = tuple(
        LayerWeights(
            input_norm=ones(hidden),
            qkv=matrix(f"{i}.qkv", q_size + 2 * kv_size, hidden),
            qkv_bias=bias(q_size + 2 * kv_size),
            q_norm=ones(dim),
            k_norm=ones(dim),
            o=matrix(f"{i}.o", hidden, q_size, _RESIDUAL_SCALE),
            o_bias=bias(hidden),
            post_norm=ones(hidden),
            gate_up=matrix(f"{i}.gate_up", 2 * wide, hidden),
            down=matrix(f"{i}.down", hidden, wide, _RESIDUAL_SCALE),
        )
        for i in range(config.num_layers)
    )
    text = target_config.get("text_config") or {}
    tied = target_config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    embedding = matrix("embedding", config.vocab_size, hidden)
    reduced = config.draft_vocab_size != config.vocab_size
    own_head = matrix("head", config.draft_vocab_size, hidden) if reduced or not tied else embedding
    return DrafterWeights(
        fc=matrix("fc", hidden, config.feature_size),
        hidden_norm=ones(hidden),
        norm=ones(hidden),
        layers=layers,
        embedding=embedding,
        head=own_head,
        # Which ids a reduced head would name is the checkpoint's matter: here the first ones.
        target_ids=torch.arange(config.draft_vocab_size) if reduced else None,
    )
