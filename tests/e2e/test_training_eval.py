"""`train eval` on the built-in model: rounds replayed are those of the published loops on transformers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from real_model import NAME, chat_prompts

from draft_service.training.evaluation import CHAIN, HeldOut, Replay
from draft_service.training.scoring import PLAIN
from specbridge.models import resolve_draft

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOKENS, TREE = 24, 16


def test_rounds_are_those_of_the_reference(model_folder: Path) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "reference.py"
    spec = importlib.util.spec_from_file_location("training_eval_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    draft = resolve_draft("auto", NAME)
    reference = module.Reference(model_folder, draft, torch.float32)
    [prompt] = chat_prompts(model_folder, 1)
    output = reference.greedy(list(prompt), TOKENS)
    # As if more had been asked for: the published loop does not know of an end.
    text = HeldOut(tuple(prompt), tuple(output), 0.0, 0, max_tokens=10 * TOKENS)
    replay = Replay.load(
        draft, model_folder, device="cpu", dtype="float32", length=len(text.tokens), vocabulary=0
    )
    with torch.inference_mode():
        states = reference.model(torch.tensor([text.tokens]), output_hidden_states=True).hidden_states
        taps = replay.drafter.config.target_layer_ids
        found = replay.rounds(text, torch.cat([states[i + 1][0] for i in taps], -1), [PLAIN], [CHAIN, TREE])
    for nodes, budget in ((CHAIN, None), (TREE, TREE)):
        ours = found[PLAIN.name, nodes]
        theirs = reference.replay(list(prompt), output, budget=budget).acceptance_lengths
        assert [depth + 1 for depth in ours.accepted[:-1]] == list(theirs[:-1])
        assert ours.committed == sum(theirs) == len(output) - 1
    assert found[PLAIN.name, CHAIN].committed > 1.5 * len(found[PLAIN.name, CHAIN].accepted)
