"""K/V pages for a quarter of the load, on tiny models in fp64: all requests end, with the text of an empty
machine, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from product import LiveProduct, request_for
from tiny import make_drafter, make_target

from gateway.admission import Admission
from gateway.generation import GenerationRequest
from specbridge.rounds import SamplingParams

REQUESTS = 12
LENGTHS = [5 + 7 * (i % 5) for i in range(REQUESTS)]
OUTPUTS = [36 + 9 * (i % 4) for i in range(REQUESTS)]
PAGES = sum(-(-(n + m) // 16) for n, m in zip(LENGTHS, OUTPUTS, strict=True))
QUARTER = PAGES // 4 * 16


def requests(**changes: Any) -> list[GenerationRequest]:
    return [
        request_for(
            [(37 * i + 11 * j + j * j) % 250 for j in range(LENGTHS[i])],
            SamplingParams() if i % 2 else SamplingParams(temperature=0.8),
            seed=i,
            max_tokens=OUTPUTS[i],
            **changes,
        )
        for i in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("crowded")
    return make_target(root / "target"), make_drafter(root / "draft", block_size=8)


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> list[tuple[int, ...]]:
    """Texts with pages for all."""
    with LiveProduct(*folders, target={"kv_tokens": 4 * PAGES * 16}) as product:
        run = product.run(requests(), budget=5)
        assert product.target_metrics.registry.get_sample_value(
            "specbridge_target_preemptions_total", {"cause": "round"}
        ) == 0  # fmt: skip
        return run.tokens


@pytest.fixture(scope="module")
def crowded(folders: tuple[Path, Path]) -> Iterator[LiveProduct]:
    with LiveProduct(*folders, target={"kv_tokens": QUARTER, "max_length": 128}) as product:
        yield product


@pytest.fixture(autouse=True)
def _careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway lets newcomers in without a look at pages, as if other gateways took them: they run short
    often. Who was preempted comes back by the rule.
    """
    fits = Admission._pages_for
    monkeypatch.setattr(Admission, "_pages_for", lambda self, s: not s.preemptions or fits(self, s))


def preemptions(product: LiveProduct) -> float:
    value = product.target_metrics.registry.get_sample_value
    return sum(
        value("specbridge_target_preemptions_total", {"cause": cause}) or 0.0 for cause in ("round", "prompt")
    )


def test_all_requests_end_with_the_text_of_an_empty_machine(
    crowded: LiveProduct, alone: list[tuple[int, ...]]
) -> None:
    run = crowded.run(requests(), budget=5)
    crowded.assert_idle()
    assert run.tokens == alone
    assert run.recorder.reopens["target", "preempted"] == preemptions(crowded) > 0
    assert set(run.recorder.reopens) == {("target", "preempted")}
    # Each comes back to room for twice as many tokens as before: none is preempted time and again.
    assert max(r.reopens for r in run.recorder.requests) <= 3
    assert sum(text.stats.num_draft_tokens for text in run.texts) > 0


def test_many_priorities_and_cancels_in_between(crowded: LiveProduct, alone: list[tuple[int, ...]]) -> None:
    mixed = [dataclasses.replace(r, priority=i % 3 - 1) for i, r in enumerate(requests())]
    rng = random.Random(3)
    before = preemptions(crowded)
    cancelled: set[int] = set()

    async def leave(i: int, task: asyncio.Task[Any]) -> None:
        await asyncio.sleep(rng.uniform(0.0, 0.8))
        if task.cancel():
            cancelled.add(i)

    tokens = crowded.run_with(mixed, leave, which=[i for i in range(REQUESTS) if i % 3 == 0])
    crowded.assert_idle()
    assert cancelled and preemptions(crowded) > before
    for i, text in enumerate(tokens):
        assert text == alone[i] or (text is None and i in cancelled)


def test_a_draft_short_of_pages_costs_speculation_only(
    folders: tuple[Path, Path], alone: list[tuple[int, ...]]
) -> None:
    with LiveProduct(*folders, draft={"kv_tokens": 160}) as product:
        run = product.run(requests(), budget=5)
        product.assert_idle()
        assert run.tokens == alone
        assert sum(run.recorder.fallbacks.values()) > 0 and not run.recorder.reopens["target", "preempted"]
