"""Triton split_heads: a program turns a few heads of one row. See kernels.heads.

The two halves of a head are loaded apart, so that rotating needs no exchange between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 4
"""Heads a program takes on."""


def split_heads(
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
    """See kernels.heads.split_heads; the result is contiguous. Raises ValueError for a k_out or v_out whose
    rows are not contiguous."""
    n, total = qkv.shape[0], heads + 2 * kv_heads
    d = qkv.shape[1] // total
    for name, rows in (("k_out", k_out), ("v_out", v_out)):
        if rows.stride()[1:] != (d, 1):
            raise ValueError(f"{name} has strides {rows.stride()}; each of its rows must be contiguous")
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    q = torch.empty(n, heads, d, dtype=qkv.dtype, device=qkv.device)
    half = triton.next_power_of_2(d // 2)
    _split_heads[(n, triton.cdiv(total, _HEADS))](
        qkv,
        cos,
        sin,
        qkv if qk_norm is None else qk_norm,
        q,
        k_out,
        v_out,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        k_out.stride(0),
        v_out.stride(0),
        eps,
        value_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        HALF_BLOCK=half,
        HEAD_BLOCK=_HEADS,
        NORM=qk_norm is not None,
        num_warps=max(1, _HEADS * half // 256),
    )
    return q


@triton.jit
def rotate(low, high, cos, sin, i, live, D: tl.constexpr, dtype: tl.constexpr):
    """kernels.rotary.apply_rotary of [low | high], float32 [heads, d / 2] each, by one row's tables.

    cos, sin: pointers to the row; i: channel numbers below d / 2, live where they are. Rounds in the
    reference's order, to dtype.
    """
    HALF: tl.constexpr = D // 2
    cos_low = tl.load(cos + i, mask=live, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + i, mask=live, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + i, mask=live, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + i, mask=live, other=0.0).to(tl.float32)[None, :]
    turned_low = (low * cos_low).to(dtype).to(tl.float32) + high * sin_low
    turned_high = (high * cos_high).to(dtype).to(tl.float32) + low * sin_high
    return turned_low.to(dtype), turned_high.to(dtype)


@triton.jit
def norm_halves(low, high, weight_low, weight_high, eps, D: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of the heads [low | high], float32 [heads, d / 2] each with zeros past d / 2, rounded to dtype
    before and after the weight; float32 again."""
    square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    inverse = tl.rsqrt(square / D + eps)[:, None]
    low = (low * inverse).to(dtype).to(tl.float32) * weight_low.to(tl.float32)
    high = (high * inverse).to(dtype).to(tl.float32) * weight_high.to(tl.float32)
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def _split_heads(
    qkv,
    cos,
    sin,
    norm,
    q_out,
    k_out,
    v_out,
    stride_row,
    stride_cos,
    stride_sin,
    stride_k,
    stride_v,
    eps,
    value_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    TURNED: tl.constexpr = HEADS + KV_HEADS
    dtype: tl.constexpr = q_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    i = tl.arange(0, HALF_BLOCK)
    live = (head < TURNED + KV_HEADS) & (i < HALF)[None, :]
    at = head * D + i[None, :]
    source = qkv + row * stride_row + at
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    is_value = live & (head >= TURNED)
    target = v_out + row * stride_v + at - TURNED * D
    tl.store(target, (low * value_scale).to(v_out.dtype.element_ty), mask=is_value)
    tl.store(target + HALF, (high * value_scale).to(v_out.dtype.element_ty), mask=is_value)
    if NORM:
        weighed = live & (head < TURNED)
        weight_low = tl.load(norm + at, mask=weighed, other=0.0)
        weight_high = tl.load(norm + HALF + at, mask=weighed, other=0.0)
        low, high = norm_halves(low, high, weight_low, weight_high, eps, D, dtype)
    low, high = rotate(low, high, cos + row * stride_cos, sin + row * stride_sin, i, i < HALF, D, dtype)
    is_query = live & (head < HEADS)
    target = q_out + row * (HEADS * D) + at
    tl.store(target, low, mask=is_query)
    tl.store(target + HALF, high, mask=is_query)
    is_key = live & (head >= HEADS) & (head < TURNED)
    target = k_out + row * stride_k + at - HEADS * D
    tl.store(target, low.to(k_out.dtype.element_ty), mask=is_key)
    tl.store(target + HALF, high.to(k_out.dtype.element_ty), mask=is_key)
