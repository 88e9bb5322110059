"""The weights of one rank, packed for computing: what the forward pass reads, and nothing about where it came
from."""

from __future__ import annotations

from collections.abc import Iterator
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

    @property
    def products(self) -> int:
        """Multiply-adds that one row costs in the matrices."""
        return sum(matrix.products for matrix in self._matrices())

    @property
    def pass_bytes(self) -> int:
        """Bytes that every pass reads: matrices and norms, as they are held. Not the embedding: rows only."""
        norms = [self.final_norm]
        for layer in self.layers:
            norms += [layer.input_norm, layer.post_norm]
            norms += [] if layer.qk_norm is None else [layer.qk_norm]
        return sum(matrix.nbytes for matrix in self._matrices()) + sum(norm.nbytes for norm in norms)

    def _matrices(self) -> Iterator[PackedLinear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head
