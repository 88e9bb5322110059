"""What the parts of gpu_round share: what is measured, on what, how long, and what a part hands back.

Owns no measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import table
from benchmarks.gpu.clock import Budget, Rates
from draft_service.config import DraftSettings
from draft_service.drafter_config import DrafterConfig
from kernels.linear import activation_dtype
from target_service.model.config import ModelConfig
from target_service.weight_sources import LoadFormat

PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One step: sessions of `context` committed tokens with trees of `nodes`; 0: a plain step. captured:
    hidden states of accepted rows go to a ring."""

    sessions: int
    context: int
    nodes: int
    captured: bool = False

    @property
    def rows(self) -> int:
        return self.sessions * (self.nodes + 1)


@dataclass(frozen=True, slots=True)
class Setup:
    """place: the target's folder or config.json. drafter None: there is none. tp: GPUs of
    the target. kv_tokens, max_rows: larger
    combinations are left out. eager: steps and passes also without CUDA graphs. budget: of this part."""

    place: Path
    load_format: LoadFormat
    config: ModelConfig
    drafter: DrafterConfig | None
    draft_settings: DraftSettings
    dtype: torch.dtype
    device: torch.device
    tp: int
    rates: Rates
    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    kv_tokens: int
    max_rows: int
    eager: bool
    repeats: int
    budget: Budget

    @property
    def act(self) -> torch.dtype:
        """Of activations and K/V."""
        return activation_dtype(self.dtype, self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.target_layer_ids if self.drafter is not None else ()

    @property
    def told(self) -> Case:
        """The step of which the closing table tells stage by stage."""
        nodes = 64 if 64 in self.nodes else self.nodes[-1]
        return Case(min(self.concurrency), self.contexts[0], nodes, captured=bool(self.taps))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the round. floor_ms: of what it must read."""

    name: str
    floor_ms: float
    ms: float

    @property
    def lost_ms(self) -> float:
        return self.ms - self.floor_ms


@dataclass(slots=True)
class Part:
    """What a part found. figures: single numbers, by name. stages: its share of the closing table."""

    tables: dict[str, tuple[Sequence[str], list[list[Any]]]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As Markdown."""
        pieces = [
            f"### {name}\n\n{table(header, rounded(rows))}" for name, (header, rows) in self.tables.items()
        ]
        if self.figures:
            pieces.append("\n".join(f"- {name}: {_shown(value)}" for name, value in self.figures.items()))
        pieces += [f"_{note}_" for note in self.notes]
        return "\n\n".join(pieces)

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": {
                n: {"header": list(header), "rows": rows} for n, (header, rows) in self.tables.items()
            },
            "stages": [asdict(stage) for stage in self.stages],
            "figures": self.figures,
            "notes": self.notes,
        }


def rounded(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Floats as texts of about three digits that count."""
    return [[_shown(value) for value in row] for row in rows]


def _shown(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
