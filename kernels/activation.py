"""Gated activations of the MLP, on the output of one fused gate-and-up product.

Owns the choice of version; the Triton one is kernels/cuda/activation.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import cuda


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2 n] = [gate | up]; returns [..., n].

    silu(gate) is rounded to the dtype before the product, as the Hugging Face models do.
    """
    if cuda.takes(gate_up):
        from kernels.cuda import activation as triton_activation

        return triton_activation.silu_mul(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch, and what a CPU runs."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))
