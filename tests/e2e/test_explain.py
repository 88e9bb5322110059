"""`specbridge explain --local` on tiny models, in whole processes: its counts are those that models and texts
imply, and every way of asking gives the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import check_page
from product import LiveProduct, request_for
from safetensors.torch import load_file

from specbridge.explain import command
from specbridge.explain.html import page
from specbridge.explain.words import PARTS
from specbridge.rounds import SamplingParams

pytestmark = pytest.mark.slow

PROMPT = "Say hello to the world"
MAX_TOKENS = 12
# The tokenizer has a token a byte and one for each special.
PROMPT_TOKENS = len(f"user\n{PROMPT}") + len("\n") + len("assistant\n") + 3
TAPS, HIDDEN = 2, 48
CONTEXT = ("specbridge_target_context_rows_total", "specbridge_target_context_rows_read_total")


def test_a_report_of_a_stack_of_its_own(
    tiny_models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = tiny_models
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    words = ["--local", "--only=shared_noise", f"--prompts={prompts}", "--repeats=1", "--json"]
    words += [f"--max-tokens={MAX_TOKENS}", f"--target={target}", f"--draft={drafter}", "--dtype=float32"]
    words += ["--tree-budget=8", "--warmup-repeats=1", "--no-selfcheck", "--log-level=warning"]
    assert command.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    for part in PARTS:
        assert made[part]["answer"] and not made[part]["answer"].startswith("Not known")

    tensors = load_file(target / "model.safetensors")
    weights = made["bytes"]["reads"][0]
    assert weights["bytes"] == 4 * sum(tensor.numel() for tensor in tensors.values())
    context = made["bytes"]["context"]
    assert context["times_read"] == 1
    assert PROMPT_TOKENS <= context["rows"] <= PROMPT_TOKENS + MAX_TOKENS
    hidden = next(read for read in made["bytes"]["reads"] if read["kind"] == "hidden_states")
    assert hidden["size"] == TAPS * HIDDEN * 4
    # All tokens but a prompt's first come of rounds, of which each text has as many as its trees allowed.
    rounds = made["round"]
    assert rounds["tokens"] * made["load"]["rounds"] == pytest.approx(MAX_TOKENS - 1)
    total = sum(stage["seconds"] for stage in rounds["stages"])
    assert total == pytest.approx(rounds["seconds"], rel=0.05)
    assert rounds["floor_s"] > 0 and made["stack"]["target"]["copy_bytes_per_s"] > 0
    assert made["candidates"]["chosen"]["nodes"] > 0

    measured = {one["key"]: one for one in made["parts"]["comparisons"] if one["ratio"] is not None}
    assert set(measured) == {"speculation", "speculation_sampled", "shared_noise"}
    # In fp32 no part changes a text.
    assert all(one["same_text"] for one in measured.values())
    reasons = {one["key"]: one["missing"] for one in made["parts"]["comparisons"] if one["missing"]}
    assert reasons["eager"] == "was not asked for" and set(reasons) == {
        "tree",
        "eager",
        "cohorts",
        "cuda_graphs",
    }
    assert "plain" in made["candidates"]["answer"] and made["candidates"]["points"]
    check_page(page(made))


def test_the_context_counted_is_that_of_the_rounds(tiny_models: tuple[Path, Path]) -> None:
    """A round's context is the prompt and what rounds before it committed; it is read once."""
    with LiveProduct(*tiny_models) as product:
        for budget in (0, 8):
            before = [product.target_metrics.registry.get_sample_value(name) for name in CONTEXT]
            prompt = range(40, 77)
            run = product.run([request_for(prompt, SamplingParams(), max_tokens=20)], budget=budget)
            after = [product.target_metrics.registry.get_sample_value(name) for name in CONTEXT]
            length, expected = len(prompt), 0
            for record in run.recorder.rounds:
                expected += length
                length += record.tokens
            assert length == len(prompt) + 19  # the first token is the prefill's
            held, read = (b - a for a, b in zip(before, after, strict=True))
            assert held == read == expected
