"""Triton append_context: a program writes the K and V heads of one row in one layer. See kernels.append."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.heads import norm_halves, rotate
from kernels.rotary import RotaryTables

_HEADS = 8
"""K heads, and V heads, that a program takes on at most."""


def append_context(
    kv: torch.Tensor,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_norms: torch.Tensor,
    rotary: RotaryTables,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    eps: float,
    value_scale: float,
) -> None:
    """See kernels.append.append_context. Raises ValueError for pages that are not contiguous."""
    layers, pages, page_size, kv_heads, d = k_pages.shape
    if not (k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape):
        raise ValueError(
            f"k_pages {list(k_pages.shape)} and v_pages {list(v_pages.shape)} must be alike and contiguous"
        )
    if kv.stride(1) != 1:
        kv = kv.contiguous()
    heads = min(_HEADS, triton.next_power_of_2(kv_heads))
    half = triton.next_power_of_2(d // 2)
    _append[(kv.shape[0], layers, triton.cdiv(kv_heads, heads))](
        kv,
        positions,
        slots,
        k_norms.contiguous(),
        rotary.cos,
        rotary.sin,
        k_pages,
        v_pages,
        pages * page_size,
        kv.stride(0),
        eps,
        value_scale,
        KV_HEADS=kv_heads,
        D=d,
        HALF_BLOCK=half,
        HEAD_BLOCK=heads,
        num_warps=max(1, min(4, heads * half // 256)),
    )


@triton.jit(do_not_specialize=["num_slots"])
def _append(
    kv,
    positions,
    slots,
    k_norms,
    cos,
    sin,
    k_pages,
    v_pages,
    num_slots,
    stride_row,
    eps,
    value_scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = kv.dtype.element_ty
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        layer = tl.program_id(1)
        position = tl.load(positions + row).to(tl.int64)
        head = (tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
        i = tl.arange(0, HALF_BLOCK)
        live = (head < KV_HEADS) & (i < HALF)[None, :]
        at = head * D + i[None, :]
        source = kv + row.to(tl.int64) * stride_row + layer * (2 * KV_HEADS * D) + at
        target = (layer.to(tl.int64) * num_slots + slot) * (KV_HEADS * D) + at
        weight = k_norms + layer * D + i
        weight_low = tl.load(weight, mask=i < HALF, other=0.0)[None, :]
        weight_high = tl.load(weight + HALF, mask=i < HALF, other=0.0)[None, :]
        low = tl.load(source, mask=live, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
        low, high = norm_halves(low, high, weight_low, weight_high, eps, D, dtype)
        low, high = rotate(low, high, cos + position * D, sin + position * D, i, i < HALF, D, dtype)
        tl.store(k_pages + target, low.to(k_pages.dtype.element_ty), mask=live)
        tl.store(k_pages + target + HALF, high.to(k_pages.dtype.element_ty), mask=live)
        source += KV_HEADS * D
        for part in tl.static_range(2):
            value = tl.load(source + part * HALF, mask=live, other=0.0).to(tl.float32) * value_scale
            value = value.to(dtype).to(v_pages.dtype.element_ty)
            tl.store(v_pages + target + part * HALF, value, mask=live)
