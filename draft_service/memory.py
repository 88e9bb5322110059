"""Memory of a draft service's GPU: does the context fit, and what went where.

Owns the check before pages are allocated and the line in the log once everything is. Does not own
allocations.
"""

from __future__ import annotations

import logging

import torch

from draft_service.block_attention import ContextPages
from draft_service.drafter import Drafter
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 1 << 30
FOR_PASSES = GIB
"""Left beside the context for what passes and their graphs take."""


def check_memory(drafter: Drafter, num_tokens: int) -> None:
    """Raises ConfigError if the context of so many tokens does not fit the drafter's GPU beside what is
    there.
    """
    free, total = torch.cuda.mem_get_info(drafter.device)
    needed = num_tokens * drafter.bytes_per_token
    if needed + FOR_PASSES > free:
        fitting = max(0, (free - FOR_PASSES) // drafter.bytes_per_token)
        raise ConfigError(
            f"the context of {num_tokens} tokens takes {needed / GIB:.1f} GiB and passes up to "
            f"{FOR_PASSES / GIB:.1f} GiB; of the GPU's {total / GIB:.1f} GiB only {free / GIB:.1f} are free: "
            f"set kv_tokens to {fitting} or less, or free memory on {drafter.device}"
        )


def log_memory(drafter: Drafter, pages: ContextPages, *, graphs: int) -> None:
    """One line: weights, context, and the rest, after the passes' buffers and graphs have been made."""
    torch.cuda.empty_cache()  # what trial runs took beside the graphs
    context = 2 * pages.k.nbytes
    weights = drafter.weight_bytes
    reserved = torch.cuda.memory_reserved(drafter.device)
    free, total = torch.cuda.mem_get_info(drafter.device)
    log.info(
        "memory: weights %.2f GiB, context pages %.2f GiB (%d tokens), passes %.2f GiB (%d graphs); "
        "%.1f of the GPU's %.1f GiB are free",
        weights / GIB,
        context / GIB,
        pages.k.shape[1] * pages.page_size,
        max(0, reserved - weights - context) / GIB,
        graphs,
        free / GIB,
        total / GIB,
    )
