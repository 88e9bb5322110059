"""RMSNorm, alone and fused with the residual addition before it.

Owns the choice of version; the Triton one is kernels/cuda/norm.py.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from kernels import cuda


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    x [..., n]; weight [n], or [heads, n] for x [..., heads, n], in x's dtype. Half-precision input
    is normalised in float32 and rounded to x's dtype before the weight is applied, as the Hugging Face models
    do. Returns x's dtype.
    """
    if cuda.takes(x):
        from kernels.cuda import norm as triton_norm

        return triton_norm.rms_norm(x, weight, eps)
    return torch_rms_norm(x, weight, eps)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm by the torch ops that are fastest on x's device; weight is anything that broadcasts to x."""
    if x.dtype not in (torch.float32, torch.float64) or (weight.dim() > 1 and x.device.type != "cpu"):
        return rms_norm_reference(x, weight, eps)
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # A few rows on a CPU cost what the calls cost: five cheap ones, half of what F.rms_norm takes.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(eps, x.dtype), length, length, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(weight)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm, spelled out."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then rms_norm(residual). All [..., n]; returns the normed rows."""
    if cuda.takes(x):
        from kernels.cuda import norm as triton_norm

        return triton_norm.add_rms_norm(x, residual, weight, eps)
    residual.add_(x)
    return torch_rms_norm(residual, weight, eps)


@cache
def _scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    # Made outside of inference mode whatever the caller's mode, so that it may be used in both.
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)
