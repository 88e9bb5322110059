"""Greedy decoding of the built-in model against transformers: `generate` gives the same text, and the
published algorithms, re-stated on transformers, accept as many tokens a round.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from operator import eq
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_decoding import NearTies, PlainDecoding
from product import LiveProduct, Run, request_for
from real_model import NAME, chat_prompts, real_product

from gateway.limits import SchedulerLimits
from specbridge.models import resolve_draft
from specbridge.rounds import SamplingParams

# The limit is for machines with other things to do: undisturbed, the longer test takes 40 s.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(480)]

PROMPTS = 20
REPLAYED, REPLAYED_TOKENS, TREE = 4, 48, 16
"""Prompts whose rounds are replayed as well, their length, and the budget of their trees."""
TOKENS, TOGETHER = 32, 8
"""Of the other prompts, and how many of them share passes: the weights are read once for all of a pass."""
TOLERANCE = 0.02


def yardstick() -> ModuleType:
    """benchmarks/reference.py; the benchmarks are no installed package."""
    path = Path(__file__).parents[2] / "benchmarks" / "reference.py"
    spec = importlib.util.spec_from_file_location("acceptance_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """`generate` on all prompts at once, padded to the left, up to and with the end-of-text id."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    texts = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:end])
    return texts


class Bench:
    """The product, the same weights in transformers, and what has been run: both tests look at it."""

    def __init__(self, folder: Path, product: LiveProduct) -> None:
        self.product = product
        self.prompts = chat_prompts(folder, PROMPTS)
        self.reference = yardstick().Reference(folder, resolve_draft("auto", NAME), torch.float32)
        self.model = PlainDecoding(folder, torch.float32, model=self.reference.model)
        self._replayed: dict[int | None, Run] = {}

    def replayed(self, budget: int | None) -> Run:
        """The first prompts with trees of `budget` nodes, with chains for None."""
        if budget not in self._replayed:
            self.product.trees.limit_top_k(1 if budget is None else None)
            requests = [request_for(p, SamplingParams(), max_tokens=REPLAYED_TOKENS, ignore_eos=False)
                        for p in self.prompts[:REPLAYED]]  # fmt: skip
            self._replayed[budget] = self.product.run(requests, budget=budget or self.product.horizon)
            self.product.trees.limit_top_k(None)
        return self._replayed[budget]


@pytest.fixture(scope="module")
def bench(model_folder: Path) -> Iterator[Bench]:
    # The published loop proposes from the whole vocabulary, by marginals alone.
    with real_product(model_folder, draft_vocabulary=0, tree_scores="marginals") as product:
        yield Bench(model_folder, product)


def test_twenty_prompts(bench: Bench, near_ties: NearTies) -> None:
    """Two by the defaults, most by default trees with more of them in a pass; the other test's own, too, with
    its chains and trees.
    """
    product, defaults = bench.product, SchedulerLimits()
    rest = sorted(range(REPLAYED, PROMPTS), key=lambda i: len(bench.prompts[i]))
    requests = {
        i: request_for(bench.prompts[i], SamplingParams(), max_tokens=TOKENS, ignore_eos=False) for i in rest
    }
    runs = [(range(REPLAYED), bench.replayed(budget)) for budget in (None, TREE)]
    rows = defaults.tree_budget + 1
    pair = defaults.max_verify_rows // rows
    for first, last in ((0, pair), *((at, at + TOGETHER) for at in range(pair, len(rest), TOGETHER))):
        some = rest[first:last]
        run = product.run(
            [requests[i] for i in some],
            budget=defaults.tree_budget,
            # As many rows as leave each its default tree.
            max_verify_rows=max(defaults.max_verify_rows, len(some) * rows),
            min_tree=defaults.min_tree,
        )
        runs.append((some, run))
    product.assert_idle()
    expected: dict[int, list[int]] = {}
    half = len(rest) // 2  # prompts of like length together: less padding
    for some, tokens in ((range(REPLAYED), REPLAYED_TOKENS), (rest[:half], TOKENS), (rest[half:], TOKENS)):
        texts = generate(bench.model.model, [bench.prompts[i] for i in some], tokens)
        expected.update(zip(some, texts, strict=True))
    assert sorted(expected) == list(range(PROMPTS))
    for some, run in runs:
        assert not run.recorder.fallbacks
        for i, text in zip(some, run.texts, strict=True):
            near_ties.explain(
                f"transformers' generate, prompt {i}",
                lambda: bench.model,
                bench.prompts[i],
                expected=expected[i],
                got=text.tokens,
                sampling=SamplingParams(),
            )
            assert text.stats.num_spec_steps > 0
    stats = [text.stats for _, run in runs[2:] for text in run.texts]
    steps = sum(one.num_spec_steps for one in stats)
    assert sum(one.num_accepted_draft_tokens for one in stats) > steps, "hardly anything was accepted"


def undisturbed(lengths: Sequence[int], *, tokens: int, horizon: int) -> list[int]:
    """Rounds with room for a whole block before the text's end.

    The service grows no node deeper than what is left of the text and has more breadth for it there; the
    published loop does not know of an end.
    """
    kept, done = [], 1
    for length in lengths:
        if tokens - done - 1 >= horizon:
            kept.append(length)
        done += length
    return kept


def test_chain_and_tree_accept_what_the_reference_accepts(bench: Bench) -> None:
    means: list[float] = []
    for budget in (None, TREE):
        run = bench.replayed(budget)
        assert not run.recorder.fallbacks
        ours: list[list[int]] = []
        theirs: list[list[int]] = []
        for p, text in zip(bench.prompts, run.texts, strict=False):
            replay = bench.reference.replay(list(p), list(text.tokens), budget=budget)
            cut = {"tokens": len(text.tokens), "horizon": bench.product.horizon}
            theirs.append(undisturbed(replay.acceptance_lengths, **cut))
            ours.append(undisturbed([n + 1 for n in text.stats.per_step_accepted], **cut))
        assert len(ours) == REPLAYED
        found, expected = (sum(map(sum, r)) / sum(map(len, r)) for r in (ours, theirs))
        print(f"{'tree' if budget else 'chain'}: {found:.3f} tokens a round, reference {expected:.3f}; all"
              f" rounds, the last ones included: {run.tokens_per_round:.3f}")  # fmt: skip
        assert found == pytest.approx(expected, rel=TOLERANCE)
        # Not only on average: round by round the same, but for a rounding in one text.
        assert sum(map(eq, ours, theirs)) >= REPLAYED - 1
        means.append(found)
    assert means[1] > means[0] > 1.5, "a drafter that is hardly ever right can't tell the rules apart"
