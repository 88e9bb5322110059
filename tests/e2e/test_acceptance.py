"""Tokens per round of the product equal those of the published algorithms, re-stated on transformers."""

from __future__ import annotations

import importlib.util
import sys
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


def test_chain_and_tree_accept_what_the_reference_accepts(model_folder: Path) -> None:
    prompts = chat_prompts(model_folder, PROMPTS)
    requests = [
        request_for(p, SamplingParams(), max_tokens=TOKENS, ignore_eos=False) for p in prompts
    ]
    reference = yardstick().Reference(model_folder, resolve_draft("auto", NAME), torch.float32)
    found: list[float] = []
    with real_product(model_folder) as product:
        for rule, budget in (("chain", None), ("tree", TREE)):
            product.proposer.limit_top_k(1 if budget is None else None)
            run = product.run(requests, budget=budget or product.horizon)
            assert not run.recorder.fallbacks
            rounds: list[list[int]] = []
            for p, text in zip(prompts, run.texts, strict=True):
                replay = reference.replay(list(p), list(text.tokens), budget=budget)
                rounds.append(list(replay.acceptance_lengths))
                assert sum(rounds[-1]) == len(text.tokens) - 1
            expected = sum(map(sum, rounds)) / sum(map(len, rounds))
            print(f"{rule}: {run.tokens_per_round:.3f} tokens a round, reference {expected:.3f}")
            assert run.tokens_per_round == pytest.approx(expected, rel=TOLERANCE)
            # Not only on average: nearly every text takes the very same number of rounds.
            same = [text.stats.num_rounds == len(r) for text, r in zip(run.texts, rounds, strict=True)]
            assert sum(same) >= PROMPTS - 1
            found.append(run.tokens_per_round)
    assert found[1] > found[0] > 1.5, "a drafter that is hardly ever right can't tell the rules apart"
