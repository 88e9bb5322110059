"""append_context: a drafter's context K and V of committed tokens into the pages of all its layers.

Owns what follows the one stacked K/V product: K-norm, rotary embedding, the factor on V, the scatter. Which
slot a token has is the services' matter. The Triton version is kernels/cuda/append.py: one launch.
"""

from __future__ import annotations

import torch

from kernels import cuda
from kernels.norm import torch_rms_norm
from kernels.rotary import RotaryTables, apply_rotary


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
    value_scale: float = 1.0,
) -> None:
    """k_pages[l, slot] = rotary(norm(k)), v_pages[l, slot] = value_scale * v for every row with a slot >= 0.

    kv [n, layers * 2 * kv_heads * d]: of each row and layer its k heads, then its v heads. positions int32 or
    int64 [n], within the tables of `rotary` where the row has a slot; slots int32 or int64 [n], -1 for
    padding rows, the others distinct, slot = page * page_size + offset. k_norms [layers, d]. k_pages, v_pages
    [layers, pages, page_size, kv_heads, d], contiguous.
    """
    if cuda.takes(kv):
        from kernels.cuda import append as triton_append

        append = triton_append.append_context
    else:
        append = append_context_reference
    append(
        kv,
        positions=positions,
        slots=slots,
        k_norms=k_norms,
        rotary=rotary,
        k_pages=k_pages,
        v_pages=v_pages,
        eps=eps,
        value_scale=value_scale,
    )


def append_context_reference(
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
    """The same in torch, and what a CPU runs."""
    layers, _, _, kv_heads, d = k_pages.shape
    rows = (slots >= 0).nonzero().view(-1)
    if rows.numel() < slots.numel():
        kv, positions, slots = (x.index_select(0, rows) for x in (kv, positions, slots))
    by_layer = kv.view(kv.shape[0], layers, 2, kv_heads, d).transpose(0, 1)
    normed = torch_rms_norm(by_layer[:, :, 0], k_norms.view(layers, 1, 1, d), eps)
    keys = apply_rotary(normed, *rotary.rows(positions))
    values = by_layer[:, :, 1] if value_scale == 1.0 else by_layer[:, :, 1] * value_scale
    slots = slots.long()
    for pages, new in ((k_pages, keys), (v_pages, values)):
        pages.view(layers, -1, kv_heads, d).index_copy_(1, slots, new.to(pages.dtype))
