"""Greedy text of the built-in model, speculation on: transformers' `generate` gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from plain_decoding import NearTies, PlainDecoding
from product import request_for
from real_model import chat_prompts, real_product

from gateway.limits import SchedulerLimits
from specbridge.rounds import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS, TOKENS = 20, 48


@torch.inference_mode()
def generate(model: PlainDecoding, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """`generate` on all prompts at once, padded to the left, up to and with the end-of-text id."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
    ends = model.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    texts = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:end])
    return texts


def test_twenty_prompts(model_folder: Path, near_ties: NearTies) -> None:
    prompts = chat_prompts(model_folder, PROMPTS)
    model = PlainDecoding(model_folder, torch.float32)
    expected = generate(model, prompts)
    requests = [request_for(p, SamplingParams(), max_tokens=TOKENS, ignore_eos=False) for p in prompts]
    defaults = SchedulerLimits()
    with real_product(model_folder) as product:
        # As many at once as leave each its default tree.
        together = defaults.max_verify_rows // (defaults.tree_budget + 1)
        runs = [
            product.run(
                requests[i : i + together],
                budget=defaults.tree_budget,
                max_verify_rows=defaults.max_verify_rows,
                min_tree=defaults.min_tree,
            )
            for i in range(0, PROMPTS, together)
        ]
        product.assert_idle()
    texts = [text for run in runs for text in run.texts]
    for i, (p, text, right) in enumerate(zip(prompts, texts, expected, strict=True)):
        near_ties.explain(
            f"transformers' generate, prompt {i}",
            lambda: model,
            p,
            expected=right,
            got=text.tokens,
            sampling=SamplingParams(),
        )
        assert text.stats.num_spec_steps > 0
    assert not any(run.recorder.fallbacks for run in runs)
    steps = sum(text.stats.num_spec_steps for text in texts)
    assert sum(text.stats.num_accepted_draft_tokens for text in texts) > steps, "hardly anything was accepted"
