"""A drafter that is always right about a target whose hidden states say what it will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny_drafters import HIDDEN, VOCAB

from draft_service.drafter_config import DrafterConfig
from draft_service.drafter_weights import DrafterWeights, LayerWeights


def oracle(config: DrafterConfig, embedding: torch.Tensor) -> DrafterWeights:
    """Weights of a drafter that reads the next token off its first tap: attention averages the context's
    values, which are the tapped state itself, and everything else adds nothing.
    """
    dim, heads, kv = config.head_dim, config.num_heads, config.num_kv_heads
    q_size, kv_size = heads * dim, kv * dim
    qkv = torch.zeros(q_size + 2 * kv_size, HIDDEN)
    qkv[q_size + kv_size :] = torch.eye(HIDDEN)
    out = torch.zeros(HIDDEN, q_size)
    for group in range(kv):  # one query head of each KV head carries its values on
        head = group * (heads // kv)
        out[group * dim : (group + 1) * dim, head * dim : (head + 1) * dim] = 50 * torch.eye(dim)
    ones, small = torch.ones(HIDDEN), torch.ones(dim)
    mlp = torch.zeros(2 * config.intermediate_size, HIDDEN)
    silent = torch.zeros_like(out)
    fc = torch.zeros(HIDDEN, config.feature_size)
    fc[:, :HIDDEN] = torch.eye(HIDDEN)
    layers = [
        LayerWeights(
            ones, qkv, None, small, small, out if i == 0 else silent, None, ones, mlp, mlp[: len(mlp) // 2].T
        )
        for i in range(config.num_layers)
    ]
    return DrafterWeights(fc, ones, ones, tuple(layers), embedding, 6 * embedding, None)


def tapped(embedding: torch.Tensor, shift: int) -> Callable[[Sequence[int], int], torch.Tensor]:
    """A target whose output of layer l, at a token t, encodes t + l - 1: its text repeats one token for ever.
    `shift`: how far off its taps are."""

    def states(tokens: Sequence[int], width: int) -> torch.Tensor:
        ids = torch.tensor(tokens, dtype=torch.int64)
        columns = [embedding[(ids + layer - 1 + shift) % VOCAB] for layer in (1, 4, 6)]
        return torch.cat(columns, -1) if len(tokens) else torch.zeros(0, width)

    return states
