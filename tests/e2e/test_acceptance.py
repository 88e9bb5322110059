"""Tokens per round of the product equal those of the published algorithms, re-stated on transformers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from types import ModuleType

import pytest
import torch
from product import request_for
from real_model import NAME, chat_prompts, real_product

from specbridge.models import resolve_draft
from specbridge.rounds import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS, TOKENS, TREE = 6, 64, 16
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


def test_chain_and_tree_accept_what_the_reference_accepts(model_folder: Path) -> None:
    prompts = chat_prompts(model_folder, PROMPTS)
    requests = [request_for(p, SamplingParams(), max_tokens=TOKENS, ignore_eos=False) for p in prompts]
    reference = yardstick().Reference(model_folder, resolve_draft("auto", NAME), torch.float32)
    means: list[float] = []
    with real_product(model_folder) as product:
        for rule, budget in (("chain", None), ("tree", TREE)):
            product.trees.limit_top_k(1 if budget is None else None)
            run = product.run(requests, budget=budget or product.horizon)
            assert not run.recorder.fallbacks
            ours: list[list[int]] = []
            theirs: list[list[int]] = []
            for p, text in zip(prompts, run.texts, strict=True):
                replay = reference.replay(list(p), list(text.tokens), budget=budget)
                cut = {"tokens": len(text.tokens), "horizon": product.horizon}
                theirs.append(undisturbed(replay.acceptance_lengths, **cut))
                ours.append(undisturbed([n + 1 for n in text.stats.per_step_accepted], **cut))
            found, expected = (sum(map(sum, r)) / sum(map(len, r)) for r in (ours, theirs))
            print(f"{rule}: {found:.3f} tokens a round, reference {expected:.3f}; all rounds, the last ones"
                  f" included: {run.tokens_per_round:.3f}")  # fmt: skip
            assert found == pytest.approx(expected, rel=TOLERANCE)
            # Not only on average: round by round the same, but for a rounding in one text.
            assert sum(map(eq, ours, theirs)) >= PROMPTS - 1
            means.append(found)
    assert means[1] > means[0] > 1.5, "a drafter that is hardly ever right can't tell the rules apart"
