"""What goes where in a GPU's memory, settled before a weight is read.

Owns the arithmetic: what a rank's weights and fixed buffers take, how many K/V pages fit beside them, and the
message when something does not fit. Asks no device and allocates nothing (target_service.model.memory does).

    weights + staging + rotary + ring + passes + K/V pages <= gpu_memory_fraction * total - others
    others = what other processes hold now, or the reserve they were promised, the larger

The reserve counts as taken from the start, so that the draft of a shared GPU may load before, during or after
the target with the same outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbridge.errors import ConfigError
from target_service.config import MemoryRules
from target_service.model.config import ModelConfig
from target_service.parallel import kv_share, padded_share, share

GIB = 1 << 30
RUNTIME = 3 * GIB // 4
"""Libraries' workspaces, loaded kernels, attention's scratch, and what the allocator can't use."""
COLLECTIVES = GIB // 2
"""NCCL's buffers, with more than one rank."""
KEPT_ROWS = 4096
"""Rows whose logits and taps captured passes may hold beyond the largest one: their pool keeps pieces of
several sizes."""
RING_TAPS = 6
"""Layers assumed to be captured: the ring is made when a draft attaches and says which."""
FEWEST_TOKENS = 1024
"""A pool below this serves nobody; refused unless --max-length or --kv-tokens asks for as little."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes of a rank's GPU in all, and free as it was found."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on one rank, the fullest; token: of the K/V of one token in all its layers."""

    weights: int
    staging: int
    rotary: int
    ring: int
    passes: int
    token: int

    @property
    def fixed(self) -> int:
        return self.weights + self.staging + self.rotary + self.ring + self.passes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of the GPU with the least room. others: other processes' part; spare: nobody's. Bytes."""

    total: int
    others: int
    needs: Needs
    num_pages: int
    page_size: int
    spare: int

    @property
    def tokens(self) -> int:
        return self.num_pages * self.page_size

    def parts(self) -> dict[str, int]:
        """Bytes by kind; their sum is the GPU."""
        needs = self.needs
        return {
            "weights": needs.weights,
            "kv_pages": self.tokens * needs.token,
            "staging": needs.staging,
            "rotary": needs.rotary,
            "ring": needs.ring,
            "passes": needs.passes,
            "others": self.others,
            "free": self.spare,
        }

    def __str__(self) -> str:
        shown = {name.replace("_", " "): _gib(size) for name, size in self.parts().items()}
        shown["kv pages"] += f" ({self.tokens} tokens of {self.needs.token / 1024:.1f} KiB)"
        return f"of {_gib(self.total)} GiB: " + ", ".join(f"{name} {size}" for name, size in shown.items())


def needs_of(
    config: ModelConfig,
    rules: MemoryRules,
    *,
    ranks: int,
    dtype: torch.dtype,
    max_rows: int,
) -> Needs:
    """What the fullest rank takes. dtype: of weights and activations (on a GPU they are the same)."""
    item, hidden, d = dtype.itemsize, config.hidden_size, config.head_dim
    query = len(share(config.num_heads, 0, ranks)) * d
    kv = len(kv_share(config.num_kv_heads, 0, ranks)) * d
    mlp = -(-config.intermediate_size // ranks)
    vocab = len(padded_share(config.vocab_size, 0, ranks))
    layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * mlp + 2 * hidden
    layer += (query + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    layer += (2 * mlp + hidden) * config.mlp_bias + (query + kv) * config.qk_norm
    # A tied head is the embedding itself, unless it is padded to the other ranks' width.
    tables = 1 if config.tie_word_embeddings and config.vocab_size % ranks == 0 else 2
    token = 2 * config.num_layers * kv * item
    taps = RING_TAPS * hidden
    live = 4 * hidden + 2 * (query + 2 * kv) + 3 * mlp + taps
    # Logits in the model's dtype, gathered, and for filters as fp32 with their sorted and noisy copies.
    passes = RUNTIME + max_rows * live * item
    passes += rules.verify_rows * (vocab * item + config.vocab_size * (item + 4 * 4))
    if rules.graphs:
        passes += KEPT_ROWS * (vocab + taps) * item
    return Needs(
        weights=(config.num_layers * layer + tables * vocab * hidden + hidden) * item,
        staging=max_rows * token,
        rotary=2 * (config.max_position_embeddings + max_rows) * d * item,
        ring=rules.ring_slots * taps * item,
        passes=passes + (COLLECTIVES if ranks > 1 else 0),
        token=token,
    )


def plan_memory(needs: Needs, gpus: Sequence[Gpu], rules: MemoryRules, *, page_size: int) -> MemoryPlan:
    """Pages for the ranks' GPUs, the same number on each. Raises ConfigError naming what does not fit, by how
    much, and what to change.
    """
    rooms = [_room(gpu, rules) for gpu in gpus]
    rank = min(range(len(gpus)), key=lambda i: rooms[i])
    gpu, room = gpus[rank], rooms[rank]
    left = room - needs.fixed
    others = max(gpu.total - gpu.free, rules.reserve)
    where = (
        f"--gpu-memory-fraction {rules.fraction:g} of the {_gib(gpu.total)} GiB of rank {rank}'s GPU, "
        f"less {_gib(others)} GiB of other processes"
    )
    if left < 0:
        raise ConfigError(
            f"the model does not fit: {_itemised(needs)} make {_gib(needs.fixed)} GiB without K/V, "
            f"{_gib(-left)} more than {where}; {_remedy(needs, room, len(gpus))}"
        )
    fitting = left // needs.token // page_size * page_size
    if rules.kv_tokens:
        tokens = -(-rules.kv_tokens // page_size) * page_size
        if tokens > fitting:
            raise ConfigError(
                f"--kv-tokens {rules.kv_tokens} takes {_gib(tokens * needs.token)} GiB, "
                f"{_gib((tokens - fitting) * needs.token)} more than fits beside {_itemised(needs)} into "
                f"{where}; lower it to {fitting} or less, or leave it out to take what fits"
            )
    else:
        # More than every session at its longest is of no use.
        tokens = min(fitting, -(-rules.max_sessions * rules.max_length // page_size) * page_size)
        fewest = rules.max_length if rules.fixed_length else min(rules.max_length, FEWEST_TOKENS)
        if fitting < fewest:
            asked = f"--max-length {rules.max_length}" if rules.fixed_length else f"{fewest} tokens"
            raise ConfigError(
                f"{asked} of K/V take {_gib(fewest * needs.token)} GiB, "
                f"{_gib((fewest - fitting) * needs.token)} more than is left of {where} beside "
                f"{_itemised(needs)}; "
                + (f"lower --max-length to {fitting} or " if rules.fixed_length and fitting > 1 else "")
                + _remedy(needs, room, len(gpus))
            )
    spare = gpu.total - others - needs.fixed - tokens * needs.token
    return MemoryPlan(gpu.total, others, needs, tokens // page_size, page_size, spare)


def _room(gpu: Gpu, rules: MemoryRules) -> int:
    return int(rules.fraction * gpu.total) - max(gpu.total - gpu.free, rules.reserve)


def _itemised(needs: Needs) -> str:
    parts = {
        "weights": needs.weights,
        "staging": needs.staging,
        "ring": needs.ring,
        "passes": needs.passes,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _remedy(needs: Needs, room: int, ranks: int) -> str:
    """The flag whose part is to blame."""
    if needs.weights > room - RUNTIME:
        return f"use more GPUs (--tp above {ranks}), a smaller --dtype, or raise --gpu-memory-fraction"
    if needs.ring > max(needs.staging, needs.passes):
        return "lower --channel-slots"
    return "lower --max-verify-rows, --prefill-chunk or --max-tree-nodes, or raise --gpu-memory-fraction"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
