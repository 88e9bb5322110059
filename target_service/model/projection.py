"""A draft's projection, run here: tapped hidden states become what its context is made of.

    row = norm * rms_normalised(matrix @ taps)

The same product and norm, in the same dtype, that the drafter would run itself; one hidden size a row crosses
the channel then, not one a tap. Owns the weights on the device, not how they came (specbridge.channel).
"""

from __future__ import annotations

import torch

import kernels.device
from kernels.linear import PackedLinear, activation_dtype
from kernels.norm import rms_norm
from specbridge.channel.base import Projection as Weights


class Projection:
    """On one device. width: of a row; dtype: of the rows, what the drafter has its activations in."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        dtype = kernels.device.parse_dtype(weights.dtype)
        self.width = weights.matrix.shape[0]
        self.dtype = activation_dtype(dtype, device)
        self._product = PackedLinear(weights.matrix, dtype=dtype, device=device)
        self._norm = weights.norm.to(device=device, dtype=self.dtype)
        self._eps = weights.eps

    def __call__(self, taps: torch.Tensor) -> torch.Tensor:
        """taps [n, taps * hidden] -> [n, width]."""
        return rms_norm(self._product(taps.to(self.dtype)), self._norm, self._eps)
