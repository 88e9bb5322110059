"""Costs of a model on hardware that nobody has measured it on: a roofline, every assumption a named number.

Owns the arithmetic. PLANNED, NOT MEASURED: good for comparing policies and layouts, not for promising a
figure. A pass of R rows over C context tokens in all takes, on each of tp ranks,

    max(bytes read / bandwidth, products / rate) / efficiency + 2 * layers * all-reduce + host,
    all-reduce = latency + 2 (tp - 1) / tp * R * hidden bytes / link          (none with one rank)

with matrices, heads and K/V split evenly. A drafter runs whole on one device; its block pass reads its
matrices, its head and its sessions' context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.floor import StepBytes, append_bytes, draft_bytes, target_bytes
from benchmarks.simulation.costs import Costs, Points, Worker
from draft_service.drafter_config import TargetFacts
from draft_service.drafter_layouts import parse_config
from specbridge.errors import ConfigError
from target_service.model.config import ModelConfig

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (0, 4096, 65536, 1 << 20)
SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = (64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Defaults: an H200 with NVLink, as docs/performance.md measured one where it did.

    bytes_per_s       read from memory (copy rate: bytes read and written of a large copy)
    flop_per_s        bf16 products
    efficiency        share of that floor's speed that a pass reaches: a plain step of the 8B shape took
                      1.33 floors, 0.75 of the speed
    all_reduce_us     of a small message; link_bytes_per_s: of a large one, one rank's way. Not measured here
    host_ms           of a pass with one rank, and with several: rank 0 tells the others what the step is
    message_ms        of a round, messages and the gateway's own part, one exchange
    """

    bytes_per_s: float = 4.24e12
    flop_per_s: float = 7.9e14
    efficiency: float = 0.75
    all_reduce_us: float = 12.0
    link_bytes_per_s: float = 4.0e11
    host_ms: float = 1.0
    host_ranks_ms: float = 1.8
    message_ms: float = 0.83
    channel_ms: float = 0.13
    bytes_per_weight: float = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a pass: bytes of matrices and K/V a token, values of a product per row, exchanges between ranks."""

    weights: float
    kv_per_token: float
    parameters: float
    layers: int
    hidden: int

    def pass_ms(self, rows: int, context: int, tp: int, hardware: Hardware) -> float:
        read = (self.weights + context * self.kv_per_token) / tp / hardware.bytes_per_s
        products = 2.0 * self.parameters * rows / tp / hardware.flop_per_s
        exchange = 0.0
        if tp > 1:
            moved = 2.0 * (tp - 1) / tp * rows * self.hidden * 2.0 / hardware.link_bytes_per_s
            exchange = 2 * self.layers * (hardware.all_reduce_us / 1e6 + moved)
        return 1e3 * (max(read, products) / hardware.efficiency + exchange)


def plan(folder: Path, *, tp: int, hardware: Hardware, shared: bool = False) -> Costs:
    """Costs of the model whose config.json is in `folder` (with its drafter's in `dflash/`) on tp devices.

    shared: the drafter runs on the first of them, not on one more. Raises ConfigError for sizes that don't
    divide, or a folder without configurations.
    """
    config, raw = _config(folder)
    if tp < 1 or config.num_kv_heads % tp or config.num_heads % tp:
        raise ConfigError(
            f"--tp {tp} does not divide {config.num_heads} heads and {config.num_kv_heads} key/value heads"
        )
    drafter = parse_config(_json(folder / "dflash" / "config.json"), TargetFacts.read(raw, folder))
    scale = hardware.bytes_per_weight / 2.0
    target = _shape(target_bytes(config, torch.bfloat16), config.num_layers, config.hidden_size, scale)
    draft = _shape(draft_bytes(drafter, torch.bfloat16), drafter.num_layers, drafter.hidden_size, scale)
    host = hardware.host_ms if tp == 1 else hardware.host_ranks_ms
    block = drafter.block_size

    def verify(rows: int, context: int) -> float:
        return host + target.pass_ms(rows, context, tp, hardware)

    def drafts(sessions: int, context: int) -> float:
        # A session's block reads that session's context.
        return hardware.host_ms + draft.pass_ms(sessions * block, sessions * context, 1, hardware)

    append = 1e3 * append_bytes(drafter, torch.bfloat16) / hardware.bytes_per_s / hardware.efficiency
    quarter = hardware.message_ms / 4
    return Costs(
        name=f"{folder.name}, tp {tp}{', drafter on the first device' if shared else ''}",
        source={
            "measured": False,
            "what": "PLANNED, NOT MEASURED: a roofline with the assumptions below",
            "config": folder.name,
            "tp": tp,
            "hardware": asdict(hardware),
        },
        device="cuda",
        verify=_grid(ROWS, CONTEXTS, verify),
        draft=_grid(SESSIONS, (256, 8192), drafts),
        append=((1, 0, append), (512, 0, 2 * append)),
        prefill=_grid(CHUNKS, (0,), verify),
        channel_ms=hardware.channel_ms,
        hop_ms=quarter,
        gateway_batch_ms=quarter,
        gateway_session_ms=0.02,
        gateway_event_ms=0.05,
        block_size=block,
        prefill_chunk=CHUNKS[-1],
        max_verify_rows=ROWS[-1],
        max_length=config.max_position_embeddings,
        propose_wait_ms=3.0,
        pools={"target": 1.0, "draft": 1.0, "host": 16.0},
        workers={
            "target": Worker("target"),
            "draft": Worker("target" if shared else "draft"),
            "gateway": Worker("host"),
            "client": Worker("host"),
        },
    )


def _shape(step: StepBytes, layers: int, hidden: int, scale: float) -> Shape:
    return Shape(
        weights=(step.matrices + step.head + step.norms) * scale,
        kv_per_token=float(step.kv_per_token),
        parameters=(step.matrices + step.head) / 2,
        layers=layers,
        hidden=hidden,
    )


def _grid(sizes: tuple[int, ...], contexts: tuple[int, ...], ms: Callable[[int, int], float]) -> Points:
    return tuple((size, context, round(ms(size, context), 5)) for context in contexts for size in sizes)


def _config(folder: Path) -> tuple[ModelConfig, Mapping[str, Any]]:
    raw = _json(folder / "config.json")
    return ModelConfig.from_dict(raw), raw


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no object")
    return value
