"""Part floor: what a step must read, how long that takes at the copy rate, and what its products alone take.

Owns the counting of bytes. A plain step reads every matrix once (the head included, the embedding for its
rows only), all norms, and the sessions' K/V; a draft pass its layers, the head and its context. Nothing that
is written, and no activation, is counted: they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from benchmarks.gpu.clock import captured, device_ms, release
from benchmarks.gpu.setup import Part, Setup
from draft_service.drafter_config import DrafterConfig
from kernels.linear import PackedLinear
from target_service.model.config import ModelConfig

PRODUCT_ROWS = (1, 17, 65, 129)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Of one rank that holds the whole model. norms: all norm weights; kv_per_token: K and V, all layers."""

    matrices: int
    head: int
    norms: int
    embedding_row: int
    kv_per_token: int

    def step(self, rows: int, context_tokens: int) -> int:
        """What a pass of `rows` rows over so many context tokens in all must read."""
        return (
            self.matrices
            + self.head
            + self.norms
            + rows * self.embedding_row
            + context_tokens * self.kv_per_token
        )


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of a layer's products, in order."""
    d, hidden = config.head_dim, config.hidden_size
    heads, kv = config.num_heads * d, config.num_kv_heads * d
    return [
        (heads + 2 * kv, hidden),
        (hidden, heads),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    ]


def target_bytes(config: ModelConfig, dtype: torch.dtype) -> StepBytes:
    """dtype: of weights and K/V."""
    size, layers = dtype.itemsize, config.num_layers
    norm = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    return StepBytes(
        matrices=layers * sum(out * inner for out, inner in matrix_shapes(config)) * size,
        head=config.vocab_size * config.hidden_size * size,
        norms=(layers * norm + config.hidden_size) * size,
        embedding_row=config.hidden_size * size,
        kv_per_token=2 * layers * config.num_kv_heads * config.head_dim * size,
    )


def draft_bytes(config: DrafterConfig, dtype: torch.dtype) -> StepBytes:
    """The drafter's block pass, without its norms and embedding rows (under 0.1%)."""
    size = dtype.itemsize
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = (2 * heads + 2 * kv + 3 * config.intermediate_size) * config.hidden_size
    return StepBytes(
        matrices=config.num_layers * layer * size,
        head=config.draft_vocab_size * config.hidden_size * size,
        norms=0,
        embedding_row=0,
        kv_per_token=2 * config.num_layers * kv * size,
    )


def append_bytes(config: DrafterConfig, dtype: torch.dtype) -> int:
    """What an append of a few rows must read: fc, and K and V of all layers."""
    columns = config.feature_size + 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return columns * config.hidden_size * dtype.itemsize


def products(
    linears: Sequence[PackedLinear], rows: int, *, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """All of them once, each on random rows of its width."""
    inputs = {
        width: torch.randn(rows, width, device=device).to(dtype) for width in {x.in_features for x in linears}
    }

    @torch.inference_mode()
    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    return run


def products_ms(
    linears: Sequence[PackedLinear], rows: int, *, dtype: torch.dtype, device: torch.device, repeats: int
) -> float:
    """Device ms of the products alone in a CUDA graph."""
    run = captured(products(linears, rows, dtype=dtype, device=device), device)
    return device_ms(run, device, repeats=repeats)


def random_linears(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list[PackedLinear]:
    """Every matrix of a model, each with memory of its own, the head last."""
    shapes = matrix_shapes(config) * config.num_layers + [(config.vocab_size, config.hidden_size)]
    linears = []
    for out, inner in shapes:
        weight = torch.empty(out, inner, dtype=dtype, device=device).normal_(std=inner**-0.5)
        linears.append(PackedLinear(weight, None, dtype=dtype, device=device))
    return linears


def measure(setup: Setup) -> Part:
    """Tables `floors` and `products alone`."""
    part, rates, device = Part(), setup.rates, setup.device
    sizes = target_bytes(setup.config, setup.act)
    block = draft_bytes(setup.drafter, setup.act) if setup.drafter is not None else None
    floors: list[list[Any]] = []
    for context in setup.contexts:
        for sessions in setup.concurrency:
            step = sizes.step(sessions, sessions * context)
            draft = block.step(0, sessions * context) if block is not None else 0
            row = [sessions, context, step / 1e9, rates.read_ms(step)]
            floors.append(row + ([draft / 1e9, rates.read_ms(draft)] if draft else ["-", "-"]))
    part.tables["floors"] = (("sessions", "context", "step GB", "step ms", "draft GB", "draft ms"), floors)
    counted = {"target": sizes} | ({"draft pass": block} if block is not None else {})
    names = [item.name for item in fields(StepBytes)]
    part.tables["bytes"] = (("of", *names), [[of, *asdict(size).values()] for of, size in counted.items()])
    weights = rates.read_ms(sizes.matrices + sizes.head)
    rows: list[list[Any]] = []
    part.tables["products alone"] = (("rows", "ms", "floor ms", "of floor", "of 1 row"), rows)
    linears = random_linears(setup.config, setup.dtype, device)
    for count in PRODUCT_ROWS:
        if not setup.budget.fits():
            part.notes.append(f"products of {count} rows and more: left out for want of time")
            break
        taken = products_ms(linears, count, dtype=setup.act, device=device, repeats=setup.repeats)
        rows.append([count, taken, weights, taken / weights, taken / (rows[0][1] if rows else taken)])
    del linears
    release(device)
    return part
