"""The training's own forward of a target against the transformers library's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import MODELS, build

from draft_service.training.frozen_target import Documents, FrozenTarget, TargetShape
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

CPU = torch.device("cpu")
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
SLIDING = {"mistral-window", "qwen2-window"}


@pytest.mark.parametrize("name", sorted(set(MODELS) - SLIDING))
def test_features_and_final_states_are_transformers(name: str, tmp_path: Path) -> None:
    """Two rows; the second holds two documents, which must not see each other."""
    model = build(name, tmp_path)
    target = FrozenTarget(Checkpoint(tmp_path), row_tokens=12, dtype=torch.float32, device=CPU)
    last = target.shape.num_layers - 1
    tokens = torch.randint(0, target.shape.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros(2, 12, dtype=torch.int64)
    documents[1, 5:] = 1
    positions = torch.arange(12).repeat(2, 1)
    positions[1, 5:] = torch.arange(7)
    found = target.forward(tokens, positions, Documents.masked(documents), (last, 0), want_final=True)
    assert found.final is not None
    pieces = (slice(0, 12), tokens[0]), (slice(0, 5), tokens[1, :5]), (slice(5, 12), tokens[1, 5:])
    for (place, text), row in zip(pieces, (0, 1, 1), strict=True):
        with torch.no_grad():
            out = model(text[None], output_hidden_states=True)
        wanted = torch.cat((out.hidden_states[last + 1][0], out.hidden_states[1][0]), -1)
        torch.testing.assert_close(found.features[row, place], wanted, **CLOSE)
        logits = found.final[row, place] @ target.head.T
        torch.testing.assert_close(logits, out.logits[0], **CLOSE)


def test_layers_that_nothing_asks_for_are_not_run(tmp_path: Path) -> None:
    build("llama", tmp_path)
    target = FrozenTarget(Checkpoint(tmp_path), row_tokens=6, dtype=torch.float32, device=CPU)
    tokens, positions = torch.arange(6)[None], torch.arange(6)[None]
    documents = Documents.masked(torch.zeros(1, 6, dtype=torch.int64))
    whole = target.forward(tokens, positions, documents, (0,), want_final=True)
    ran = target._layers[0]
    target._layers = (ran, *(replace(layer, qkv=ran.qkv[:0]) for layer in target._layers[1:]))  # can't be run
    part = target.forward(tokens, positions, documents, (0,), want_final=False)
    assert part.final is None
    torch.testing.assert_close(part.features, whole.features, rtol=0, atol=0)


def test_targets_that_would_be_another_model_are_refused(tmp_path: Path) -> None:
    build("mistral-window", tmp_path / "m")
    with pytest.raises(ConfigError, match="slide over 6 tokens, less than --row-tokens 12"):
        FrozenTarget(Checkpoint(tmp_path / "m"), row_tokens=12, dtype=torch.float32, device=CPU)
    build("llama", tmp_path / "l")
    config = Checkpoint(tmp_path / "l").config
    for change, message in (
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": None}, "longrope"),
    ):
        with pytest.raises(ConfigError, match=message):
            TargetShape.read({**config, **change}, 8)
