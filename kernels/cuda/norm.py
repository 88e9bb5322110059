"""Triton RMSNorm, and residual addition + RMSNorm: each row is read once. Rounding order: see kernels.norm.

A program normalises a few short rows (heads) or one long one (a hidden state). Does not own the choice of
version (kernels.norm).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Elements of a program that takes on several rows."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.rms_norm. Rows of x may be strided; the result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[-2] if x.dim() > 2 else 1
    rows = _strided(x, heads)
    _launch(rows, rows, weight, out, eps, add=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.add_rms_norm. Raises ValueError for a residual whose rows are not contiguous."""
    if not residual.is_contiguous():
        raise ValueError(f"residual has strides {residual.stride()}; it must be contiguous to be added to")
    out = torch.empty_like(residual)
    heads = residual.shape[-2] if residual.dim() > 2 else 1
    _launch(_strided(x, heads), residual, weight, out, eps, add=True)
    return out


def _strided(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x as [rows, heads, n] with contiguous last dimension: a view wherever one is possible."""
    x = x.reshape(-1, heads, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool
) -> None:
    """x [rows, heads, n]; residual and out contiguous, of as many elements; weight [n] or [heads, n]."""
    outer, heads, n = x.shape
    if weight.shape not in ((n,), (heads, n)):
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{n}] or [{heads}, {n}]")
    block = triton.next_power_of_2(n)
    rows = max(1, _TILE // block)
    _norm[(triton.cdiv(outer * heads, rows),)](
        x,
        residual,
        weight if weight.is_contiguous() else weight.contiguous(),
        out,
        outer * heads,
        x.stride(0),
        x.stride(1),
        eps,
        HEADS=heads,
        WEIGHT_HEADS=heads if weight.dim() > 1 else 1,
        N=n,
        BLOCK=block,
        ROWS=rows,
        ADD=add,
        num_warps=max(2, min(16, rows * block // 512)),
    )


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    residual,
    weight,
    out,
    rows,
    stride_outer,
    stride_head,
    eps,
    HEADS: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (column < N)[None, :]
    source = (row // HEADS) * stride_outer + (row % HEADS) * stride_head
    value = tl.load(x + source[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    packed = row[:, None] * N + column[None, :]
    if ADD:
        value += tl.load(residual + packed, mask=live, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + packed, total, mask=live)
        value = total.to(tl.float32)  # what later layers see is what is normed
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / N + eps)
    normed = (value * inverse[:, None]).to(out.dtype.element_ty).to(tl.float32)
    if WEIGHT_HEADS == 1:
        scale = tl.load(weight + column, mask=column < N, other=0.0)[None, :]
    else:
        scale = tl.load(weight + (row % HEADS)[:, None] * N + column[None, :], mask=live, other=0.0)
    tl.store(out + packed, (normed * scale.to(tl.float32)).to(out.dtype.element_ty), mask=live)
