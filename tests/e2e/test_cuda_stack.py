"""The same services on a GPU: eager, the hidden states over whatever transport the handshake finds."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from running_stack import running_stack
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_cuda_stack_gives_transformers_greedy_text(tiny_models: tuple[Path, Path]) -> None:
    target, drafter = tiny_models
    prompts = [f"prompt {i} " for i in range(3)]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=40, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    flags = (
        f"--target={target}",
        f"--draft={drafter}",
        "--dtype=float32",
        "--tree-budget=8",
        "--device=cuda",
    )
    with running_stack(*flags, timeout_s=200) as stack:
        for prompt, text in zip(prompts, expected, strict=True):
            body = {"model": "target", "prompt": prompt, "max_tokens": 40, "temperature": 0}
            reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["text"] == text
        assert stack.total("gateway", "specbridge_gateway_spec_decode_drafts_total") > 0
        assert stack.total("target", "specbridge_target_channel_attached") == 1
