"""The weights of one rank, packed for computing: what the forward pass reads, and nothing about where it came
from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads one rank computes."""

    query: int
    key_value: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: hidden -> [query | key | value heads]; gate_up: hidden -> [gate | up]. Norm weights are in the
    activation dtype; qk_norm [query + key heads, head_dim] repeats the two norms' weights per head, or is
    None."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    qk_norm: torch.Tensor | None
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding [vocabulary rows of this rank, hidden] in the model dtype, starting at id `first_token`;
    head: hidden -> the same ids (padded to the widest rank's share)."""

    embedding: torch.Tensor
    first_token: int
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear
    heads: Heads
