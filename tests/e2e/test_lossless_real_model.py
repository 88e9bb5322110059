"""The built-in model with its drafter in fp32: speculation changes no token, up to explained near-ties.

22 cells cover every sampling with every budget, and every drafter, budget and sampling with one and with nine
requests. fp32 rounds differently in passes of different sizes, so a difference is allowed where the two best
candidates are closer than 1e-3; the whole suite may have two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafter_scripts import swapped
from plain_decoding import NearTies, PlainDecoding
from product import LiveProduct, request_for
from real_model import chat_prompts, real_product

from specbridge.rounds import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOKENS, TOKENS_OF_NINE = 32, 12
SINGLE = 2
"""Prompts that run by themselves, longer."""
HOT = 0.8
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=HOT),
    "top_k": SamplingParams(temperature=HOT, top_k=50),
    "top_p": SamplingParams(temperature=HOT, top_p=0.9),
    "min_p": SamplingParams(temperature=HOT, min_p=0.05),
}
# sampling, budget, drafter, requests. shipped: the drafter's trees; chain: no branches; swapped: wrong where
# it is sure, in every other round.
CELLS = [
    ("greedy", 1, "chain", 1),
    ("greedy", 7, "shipped", 9),
    ("greedy", 32, "swapped", 1),
    ("greedy", 64, "shipped", 1),
    ("sampled", 1, "shipped", 1),
    ("sampled", 7, "chain", 1),
    ("sampled", 32, "shipped", 1),
    ("sampled", 64, "swapped", 9),
    ("top_k", 1, "swapped", 9),
    ("top_k", 7, "shipped", 1),
    ("top_k", 32, "chain", 1),
    ("top_k", 64, "shipped", 1),
    ("top_p", 1, "shipped", 1),
    ("top_p", 7, "swapped", 1),
    ("top_p", 32, "shipped", 9),
    ("top_p", 64, "chain", 1),
    ("min_p", 1, "swapped", 1),
    ("min_p", 7, "chain", 9),
    ("min_p", 32, "shipped", 1),
    ("min_p", 64, "shipped", 1),
    ("sampled", 0, "shipped", 1),
    ("min_p", 0, "shipped", 9),
]
ROWS = 72
"""Of one verify pass: nine trees share them, seven nodes each."""


def tokens_of(i: int) -> int:
    return TOKENS if i < SINGLE else TOKENS_OF_NINE


class Bench:
    """The product, its prompts, and each prompt's text with speculation off, made when first needed."""

    def __init__(self, folder: Path, product: LiveProduct) -> None:
        self.product = product
        self.prompts = chat_prompts(folder, 9)
        self._folder = folder
        self._plain: dict[str, list[tuple[int, ...]]] = {}
        self._model: PlainDecoding | None = None

    def plain(self, sampling: str) -> list[tuple[int, ...]]:
        if sampling not in self._plain:
            requests = [
                request_for(p, SAMPLINGS[sampling], seed=i, max_tokens=tokens_of(i), speculate=False)
                for i, p in enumerate(self.prompts)
            ]
            self._plain[sampling] = self.product.run(requests).tokens
        return self._plain[sampling]

    @property
    def model(self) -> PlainDecoding:
        """transformers', to judge a difference."""
        if self._model is None:
            self._model = PlainDecoding(self._folder, torch.float32)
        return self._model


@pytest.fixture(scope="module")
def bench(model_folder: Path) -> Iterator[Bench]:
    with real_product(model_folder) as product:
        yield Bench(model_folder, product)


@pytest.mark.parametrize(("sampling", "budget", "drafter", "count"), CELLS)
def test_same_text_with_and_without_speculation(
    bench: Bench, near_ties: NearTies, sampling: str, budget: int, drafter: str, count: int
) -> None:
    params = SAMPLINGS[sampling]
    plain = bench.plain(sampling)
    chosen = range(9) if count == 9 else [(budget // 7) % SINGLE]
    requests = [request_for(bench.prompts[i], params, seed=i, max_tokens=tokens_of(i)) for i in chosen]
    bench.product.trees.limit_top_k(1 if drafter == "chain" else None)
    run = bench.product.run(
        requests, budget=budget, script=swapped if drafter == "swapped" else None, max_verify_rows=ROWS
    )
    bench.product.assert_idle()
    assert not run.recorder.fallbacks and not run.recorder.reopens
    drafted = sum(text.stats.num_draft_tokens for text in run.texts)
    assert (drafted > 0) == (budget > 0)
    if drafter == "shipped" and budget >= 7:
        assert run.tokens_per_round > 1.2, "the drafter's trees are hardly ever right: the cell shows nothing"
    for i, text in zip(chosen, run.texts, strict=True):
        near_ties.explain(
            f"{sampling} budget {budget} {drafter} x{count} prompt {i}",
            lambda: bench.model,
            bench.prompts[i],
            expected=plain[i],
            got=text.tokens,
            sampling=params,
            seed=i,
        )


def test_cells_cover_all_pairs() -> None:
    assert len(CELLS) <= 24
    samplings, budgets, drafters, counts = ({cell[i] for cell in CELLS} for i in range(4))
    assert budgets == {0, 1, 7, 32, 64} and counts == {1, 9} and samplings == set(SAMPLINGS)
    pairs = {pair for cell in CELLS for pair in itertools.combinations(enumerate(cell), 2)}
    trees = budgets - {0}  # no tree, no drafter: the plain path, which no sampling meets in a way of its own
    for (a, left), (b, right) in itertools.combinations(
        enumerate([sorted(samplings), sorted(trees), sorted(drafters), sorted(counts)]), 2
    ):
        missing = [(x, y) for x in left for y in right if ((a, x), (b, y)) not in pairs]
        assert not missing, missing
