"""Fixtures of the draft service's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_bench import Bench
from tiny_drafters import HIDDEN, TARGET_CONFIG, VOCAB, Built, layout, random_drafter, write

from draft_service.drafter import Drafter
from draft_service.drafter_config import TargetFacts
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from specbridge.checkpoint import Checkpoint


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Built]:
    """build(config, dtype=..., seed=..., tied=..., **options of Drafter)."""
    counter = iter(range(1000))

    def make(
        config: dict[str, Any],
        *,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        tied: bool = False,
        max_position: int = 512,
        sample_from_anchor: bool | None = None,
        **options: Any,
    ) -> Built:
        generator = torch.Generator().manual_seed(seed)
        number = next(counter)
        embedding = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        head = embedding if tied else torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        padding = torch.full((3, HIDDEN), float("nan"), dtype=torch.float64)
        target_tensors = {"model.embed_tokens.weight": torch.cat((embedding, padding))}
        if not tied:
            target_tensors["lm_head.weight"] = torch.cat((head, padding))
        target_folder = write(
            tmp_path / f"target{number}", {**TARGET_CONFIG, "tie_word_embeddings": tied}, target_tensors
        )
        tensors = random_drafter(config, generator)
        draft_folder = write(tmp_path / f"draft{number}", config, tensors)
        draft, target = Checkpoint(draft_folder), Checkpoint(target_folder)
        parsed = parse_config(
            draft.config,
            TargetFacts.read(target.config, target_folder),
            fc_columns=draft.shape("fc.weight")[1],
            sample_from_anchor=sample_from_anchor,
        )
        weights = load_weights(draft, target, parsed, dtype=dtype)
        drafter = Drafter(parsed, weights, dtype=dtype, max_position=max_position, **options)
        return Built(drafter, parsed, tensors, embedding, head, draft_folder, target_folder)

    return make


@pytest.fixture
def bench(build: Callable[..., Any]) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(build(layout("z-lab"), dtype=torch.float32), **options))
        return made[-1]

    yield make
    for item in made:
        item.engine.close()
        item.cache.pool.check()
        assert item.cache.pool.used_pages == 0
        assert item.count("defects_total") == 0
