"""Attention of training's blocks: each sees its own rows in both directions, and of its response's context
what lies before its anchor.

    dense   the scores of context and block in one softmax. The formula as it stands; memory for all scores.
    split   the context by torch's fused attention, the block by itself, merged by their log-sum-exps.
            Backward runs each part with the merged output and log-sum-exp: with P = exp(S - lse) and
            D = sum(dO * O) over both parts, dS = P * (dO V^T - D) holds for each part's keys alone.

Owns both, equal but for rounding. Shapes, throughout: q [rows, kv_heads, blocks, group * block, d], the query
heads of a kv head beside each other; context k, v [rows, kv_heads, length, d]; own k, v [rows, kv_heads,
blocks, block, d]. No block may see nothing: `visible` has a True for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_LSE_ALIGNMENT = 32
"""The fused CUDA op pads its log-sum-exp's rows to a multiple of this, and wants it so back."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a pass's blocks see of the context, in the form that its variant wants.

    mask: bool [rows, 1, blocks, 1, length], for "dense". bias: 0 or -inf in the dtype of q, [rows, 1, blocks
    * group * block, length], for "split".
    """

    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @staticmethod
    def make(
        variant: str,
        starts: torch.Tensor,
        anchors: torch.Tensor,
        length: int,
        repeat: int,
        dtype: torch.dtype,
    ) -> Visibility:
        """starts, anchors int64 [rows, blocks]: context key j is visible where start <= j < anchor.

        repeat: query rows of a block, all heads of a kv head counted.
        """
        j = torch.arange(length, device=anchors.device)
        seen = (j >= starts.unsqueeze(-1)) & (j < anchors.unsqueeze(-1))
        if variant == "dense":
            return Visibility(mask=seen[:, None, :, None])
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        rows, blocks, _ = seen.shape
        wide = bias.unsqueeze(2).expand(rows, blocks, repeat, length)
        return Visibility(bias=wide.reshape(rows, 1, blocks * repeat, length))


def block_attention(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    visible: Visibility,
) -> torch.Tensor:
    """Attention output, shaped like q. Differentiable in all five."""
    if visible.bias is not None:
        return _Split.apply(q, context_k, context_v, own_k, own_v, visible.bias)
    assert visible.mask is not None
    return _dense(q, context_k, context_v, own_k, own_v, visible.mask)


def _dense(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    scale, length = q.shape[-1] ** -0.5, context_k.shape[2]
    flat = q.flatten(2, 3)
    context = (
        (flat @ context_k.transpose(-1, -2)).view(*q.shape[:4], length).masked_fill(~mask, float("-inf"))
    )
    scores = torch.cat((context, q @ own_k.transpose(-1, -2)), -1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores * scale, -1, dtype=wide).to(q.dtype)
    seen, own = weights.split((length, own_k.shape[3]), -1)
    return (seen.flatten(2, 3) @ context_v).view_as(q) + own @ own_v


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5
        part, part_lse, random = _fused(q.flatten(2, 3), context_k, context_v, bias, scale)
        own = (q @ own_k.transpose(-1, -2)).to(part_lse.dtype) * scale
        part_lse = part_lse.view(q.shape[:4])
        lse = torch.logaddexp(part_lse, torch.logsumexp(own, -1))
        weights = (own - lse.unsqueeze(-1)).exp().to(q.dtype)
        out = part.view_as(q) * (part_lse - lse).exp().unsqueeze(-1).to(q.dtype) + weights @ own_v
        ctx.save_for_backward(q, context_k, context_v, own_k, own_v, bias, out, lse, *random)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, context_k, context_v, own_k, own_v, bias, out, lse, *random = ctx.saved_tensors
        scale, grad = q.shape[-1] ** -0.5, grad.contiguous()
        grad_q, grad_k, grad_v = _fused_backward(
            grad.flatten(2, 3), q.flatten(2, 3), context_k, context_v, bias, out.flatten(2, 3),
            lse.flatten(2, 3), random, scale,
        )  # fmt: skip
        own = (q @ own_k.transpose(-1, -2)).to(lse.dtype) * scale
        weights = (own - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
        grad_own = (weights * (grad @ own_v.transpose(-1, -2) - delta) * scale).to(q.dtype)
        grad_own_v = weights.to(q.dtype).transpose(-1, -2) @ grad
        grad_own_k = grad_own.transpose(-1, -2) @ q
        return grad_q.view_as(q) + grad_own @ own_k, grad_k, grad_v, grad_own_k, grad_own_v, None


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """q [rows, heads, n, d] -> output, log-sum-exp [rows, heads, n], and what backward wants besides."""
    if q.is_cuda:
        wide = bias.expand(*q.shape[:3], bias.shape[-1])
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, wide, True, scale=scale
        )
        return out, lse[:, :, : q.shape[2]], (seed, offset)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scale
    )
    return out, lse, ()


def _fused_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, random: list[torch.Tensor], scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
        )
    count = lse.shape[-1]
    padded = -(-count // _LSE_ALIGNMENT) * _LSE_ALIGNMENT
    lse = torch.nn.functional.pad(lse, (0, padded - count)) if padded != count else lse.contiguous()
    wide = bias.expand(*q.shape[:3], bias.shape[-1])
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, wide, out, lse, *random, 0.0, [True, True, True, False], scale=scale
    )
    return grads[0], grads[1], grads[2]
