"""split_heads: what lies between the q/k/v product and attention, in one pass over the product's rows.

Owns q/k norm, rotary embedding and the way of K and V to where attention reads them, fused. The parts alone
are kernels.norm and kernels.rotary; the Triton version is kernels/cuda/heads.py.
"""

from __future__ import annotations

import torch

from kernels import cuda
from kernels.norm import torch_rms_norm
from kernels.rotary import apply_rotary


def split_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """q, k = rotary(norm(q, k)); k and v go to k_out and v_out, q is returned: [n, heads, d].

    qkv [n, (heads + 2 * kv_heads) * d], a row's q heads, then its k heads, then its v heads; rows may be
    strided. cos, sin [n, 1, d]: RotaryTables.rows of the rows' positions, indexed once for all layers.
    k_out, v_out [n, kv_heads, d], rows contiguous in themselves. qk_norm [heads + kv_heads, d]: the weight of
    every q and k head's RMSNorm (with eps), or None for models without one. value_scale: factor on v.
    """
    if cuda.takes(qkv):
        from kernels.cuda import heads as triton_heads

        split = triton_heads.split_heads
    else:
        split = split_heads_reference
    return split(
        qkv,
        cos,
        sin,
        heads=heads,
        kv_heads=kv_heads,
        k_out=k_out,
        v_out=v_out,
        qk_norm=qk_norm,
        eps=eps,
        value_scale=value_scale,
    )


def split_heads_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    value_scale: float,
) -> torch.Tensor:
    """The same in torch, and what a CPU runs; the result is a view of the rotated q and k."""
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    qk = split.narrow(1, 0, heads + kv_heads)
    v = split.narrow(1, heads + kv_heads, kv_heads)
    if qk_norm is not None:
        qk = torch_rms_norm(qk, qk_norm, eps)
    qk = apply_rotary(qk, cos, sin)
    k_out.copy_(qk.narrow(1, heads, kv_heads))
    v_out.copy_(v if value_scale == 1.0 else v * value_scale)
    return qk.narrow(1, 0, heads)
