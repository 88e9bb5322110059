"""Gated activations of the MLP, on the output of one fused gate-and-up product."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2 n] = [gate | up]; returns [..., n]."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))
