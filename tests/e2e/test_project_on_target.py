"""--project-on-target: the target applies the drafter's first product. The same contexts, marginals, trees
and text as without, for as many times fewer bytes as there are taps.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from product import LiveProduct, Run, request_for
from tiny import make_drafter, make_target

from specbridge.rounds import SamplingParams

PROMPTS = tuple(tuple((37 * i + 11 * j + j * j) % 250 for j in range(5 + 13 * i)) for i in range(3))
SAMPLING = SamplingParams(temperature=0.9)


def run(folder: Path, draft: dict[str, Any], target: dict[str, Any]) -> tuple[Run, list[torch.Tensor], float]:
    """Requests one after the other: text and rounds, the drafter's logits of each pass, and bytes moved."""
    seen: list[torch.Tensor] = []

    def watch(asks: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits

    with LiveProduct(
        folder / "target", folder / "drafter", target=target, draft={"eager": False, **draft}
    ) as product:
        runs = [
            product.run([request_for(p, SAMPLING, seed=i, max_tokens=20)], budget=16, script=watch)
            for i, p in enumerate(PROMPTS)
        ]
        moved = settled(product._engine._capture._sink.stats)
        assert product.transport == draft["transport"]
        texts = [text for one in runs for text in one.texts]
        assert not any(one.recorder.fallbacks for one in runs)
        return Run(texts, runs[0].recorder), seen, moved


def settled(stats: Any) -> float:
    """Bytes moved. The last rows are announced after the answer."""
    before, now = -1.0, 0.0
    while now != before:
        time.sleep(0.1)
        before, now = now, sum(stats.snapshot().bytes_by_transport.values())
    return now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_target(root / "target", family="qwen3")
    make_drafter(root / "drafter", block_size=8)
    return root


@pytest.mark.parametrize("transport", ["shared_memory", "inline"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_trees_for_fewer_bytes(folder: Path, transport: str, dtype: str) -> None:
    settings = {"transport": transport, "dtype": dtype}
    plain, logits, all_taps = run(folder, settings, {"dtype": dtype})
    projected, ours, moved = run(folder, {**settings, "project_on_target": True}, {"dtype": dtype})
    assert projected.tokens == plain.tokens
    stats = [[(t.stats.num_rounds, t.stats.per_step_accepted) for t in r.texts] for r in (projected, plain)]
    assert stats[0] == stats[1]
    assert len(ours) == len(logits) > 0
    for mine, theirs in zip(ours, logits, strict=True):
        # Products over other numbers of rows may round differently in the last place.
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
    config = json.loads((folder / "drafter" / "config.json").read_text())
    taps = len(config["dflash_config"]["target_layer_ids"])
    assert taps > 1 and moved * taps == all_taps
