"""The scheduler over the real engines, tiny models in fp64: speculation changes the number of rounds only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import Product
from scheduler_harness import Collected, Recorder, collect, run_scheduler
from tiny import VOCAB_SIZE, make_drafter, make_target

from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.rounds import SamplingParams, StopParams

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return make_target(root / "target"), make_drafter(root / "draft")


@pytest.fixture(scope="module")
def product(folders: tuple[Path, Path]) -> Iterator[Product]:
    product = Product(*folders)
    yield product
    product.close()


def requests(
    sampling: str, *, speculate: bool, count: int = 3, max_tokens: int = 24
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            tokens=tuple((7 * i + 3 * j) % 250 for j in range(5 + 20 * i)),
            sampling=SAMPLINGS[sampling],
            stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
            seed=10 + i,
            speculate=speculate,
        )
        for i in range(count)
    ]


async def texts(scheduler: Scheduler, wanted: list[GenerationRequest]) -> list[Collected]:
    return list(await asyncio.gather(*(collect(scheduler, r) for r in wanted)))


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ("greedy", {"tree_budget": 16}),
        ("sampled", {"tree_budget": 1}),
        ("sampled", {"tree_budget": 16}),
        ("filtered", {"tree_budget": 16}),
        ("greedy", {"budget": "cost", "cohorts": 2}),
        ("sampled", {"budget": "cost", "cohorts": 0}),
        ("sampled", {"tree_budget": 8, "cohorts": 2}),
    ],
)
def test_same_text_with_and_without_speculation(
    product: Product, sampling: str, changes: dict[str, Any]
) -> None:
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        plain = await texts(scheduler, requests(sampling, speculate=False))
        seen = len(observer.rounds)
        spec = await texts(scheduler, requests(sampling, speculate=True))
        assert [t.tokens for t in spec] == [t.tokens for t in plain]
        assert all(r.nodes == 0 for r in observer.rounds[:seen])
        assert sum(r.nodes for r in observer.rounds[seen:]) > 0
        assert all(0 <= token < VOCAB_SIZE for t in plain for token in t.tokens)

    limits = SchedulerLimits(max_verify_rows=128, min_tree=1, draft_timeout=5.0, **changes)
    run_scheduler(body, product.target, product.draft, limits=limits, observer=observer, timeout_s=60)
    observer.reconcile()


def test_restarts_in_the_middle(folders: tuple[Path, Path]) -> None:
    product = Product(*folders)
    observer = Recorder()

    async def body(scheduler: Scheduler) -> None:
        wanted = requests("sampled", speculate=True, max_tokens=100)
        plain = await texts(scheduler, requests("sampled", speculate=False, max_tokens=100))
        seen = len(observer.rounds)
        task = asyncio.create_task(texts(scheduler, wanted))
        while len(observer.rounds) < seen + 5:
            await asyncio.sleep(0.001)
        product.restart_draft()
        mark = len(observer.rounds)
        while not any(r.nodes for r in observer.rounds[mark + 1 :]) and not task.done():
            await asyncio.sleep(0.001)
        assert not task.done(), "speculation did not resume after the draft came back"
        product.restart_target()
        assert [t.tokens for t in await task] == [t.tokens for t in plain]

    limits = SchedulerLimits(min_tree=1, max_verify_rows=128, draft_timeout=5.0, reopen_backoff=0.005)
    try:
        run_scheduler(body, product.target, product.draft, limits=limits, observer=observer, timeout_s=60)
        assert observer.reopens["target", "disconnected"] >= 1
        assert sum(n for (service, _), n in observer.reopens.items() if service == "draft") >= 1
        for _ in range(200):  # releases are carried out on the engine's thread
            if product.target_engine.num_sessions == 0:
                break
            time.sleep(0.01)
        assert product.target_engine.num_sessions == 0
    finally:
        product.close()
    observer.reconcile()
