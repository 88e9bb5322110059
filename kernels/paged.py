"""Paged K/V: writing committed rows to their slots and reading a session's pages back as one run.

slot = page * page_size + offset. Which pages a session owns is the services' matter.
"""

from __future__ import annotations

import torch


def append_rows(
    pages_k: torch.Tensor, pages_v: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write k, v [n, kv_heads, d] to `slots` (int64 [n], on the pages' device) of pages [pages, page_size,
    kv_heads, d].

    Slots must be distinct.
    """
    pages_k.view(-1, *pages_k.shape[2:]).index_copy_(0, slots, k.to(pages_k.dtype))
    pages_v.view(-1, *pages_v.shape[2:]).index_copy_(0, slots, v.to(pages_v.dtype))


def gather_context(pages: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """pages [pages, page_size, kv_heads, d], page_table int64 [..., P] -> [..., P * page_size, kv_heads, d],
    a copy."""
    rows = pages.index_select(0, page_table.reshape(-1))
    return rows.view(*page_table.shape[:-1], page_table.shape[-1] * pages.shape[1], *pages.shape[2:])
