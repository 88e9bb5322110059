"""Triton gated activations: gate and up read once, the product written once. See kernels.activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See kernels.activation.silu_mul."""
    n = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * n)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(n))
    _silu_mul[(rows.shape[0], triton.cdiv(n, block))](
        rows, out, rows.stride(0), N=n, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, stride_row, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < N
    source = gate_up + row * stride_row + column
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + N, mask=live, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + column, (gated * up).to(out.dtype.element_ty), mask=live)
