"""Checkpoints of other families and sizes, with drafters of their own in the z-lab layout, served by name:
the OpenAI client gets the text that transformers generates from the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from running_stack import RunningStack, running_stack, wait_for
from tiny import make_drafter, make_target
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

TOKENS = 40
PROMPT = "Every checkpoint of its own size"
MESSAGES: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": PROMPT}]
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # More layers, one K/V head, biases; a block of 16, three taps, the last layer among them.
    "qwen2": (
        {"family": "qwen2", "layers": 7, "hidden": 60, "heads": 6, "kv_heads": 1, "intermediate": 100},
        {"block_size": 16, "target_layer_ids": (1, 4, 6), "layers": 3},
    ),
    # Fewer, wider layers, q/k norms, every head its own K/V, an output head of its own; one tap.
    "qwen3": (
        {"family": "qwen3", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "intermediate": 72},
        {"block_size": 4, "target_layer_ids": (0,), "layers": 1},
    ),
}


@dataclass
class Served:
    stack: RunningStack
    target: Path
    client: openai.OpenAI


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints")
    shape, drafter = SHAPES[request.param]
    target = make_target(
        folder / "a-model-of-mine", dtype=torch.float32, max_length=256, seed=11, scale=0.25, **shape
    )
    fitting = {"hidden": shape["hidden"], "heads": shape["heads"], "target_layers": shape["layers"]}
    draft = make_drafter(
        folder / "its-drafter", dtype=torch.float32, max_length=256, seed=12, **fitting, **drafter
    )
    with running_stack(
        f"--target={target}",
        f"--draft={draft}",
        "--dtype=float32",
        "--tree-budget=12",
        "--max-verify-rows=26",
        "--warmup-repeats=1",
    ) as stack:
        # /health says that there is an answer to be had; drafts come once the channel is up.
        wait_for(lambda: stack.total("draft", "specbridge_draft_channel_attached") == 1, 30, "attached")
        url = f"{stack.url}/v1"
        yield Served(stack, target, openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0))


def generate(folder: Path, prompt: str | list[Any]) -> str:
    """Greedy text of `prompt`, or of the chat, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    out = model.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=TOKENS,
        do_sample=False,
    )
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_completion_and_plain_text(served: Served) -> None:
    [model] = served.client.models.list().data
    assert model.id == "a-model-of-mine"
    settings: dict[str, Any] = {"model": model.id, "max_tokens": TOKENS, "temperature": 0}
    chat = generate(served.target, MESSAGES)
    reply = served.client.chat.completions.create(messages=MESSAGES, **settings)
    assert reply.choices[0].message.content == chat
    statistics = (reply.model_extra or {})["metrics"]["speculative_decoding"]
    assert statistics["num_spec_steps"] > 0 and statistics["num_draft_tokens"] > 0

    stream = served.client.chat.completions.create(messages=MESSAGES, stream=True, **settings)
    assert "".join(c.delta.content or "" for chunk in stream for c in chunk.choices) == chat

    plain = served.client.completions.create(prompt=PROMPT, **settings)
    assert plain.choices[0].text == generate(served.target, PROMPT)
    sampled = [
        served.client.completions.create(
            prompt=PROMPT,
            **{**settings, "temperature": 0.8},
            seed=5,
            extra_body={"no_speculation": without},
        )
        for without in (False, True)
    ]
    assert sampled[0].choices[0].text == sampled[1].choices[0].text
