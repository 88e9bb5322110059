"""The built-in model and its drafter as a LiveProduct in fp32, with prompts of the benchmark sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from product import LiveProduct
from transformers import AutoTokenizer

from specbridge.models import resolve_draft

NAME = "smollm2-135m"
SETS = ("humaneval", "gsm8k_test", "mt_bench")
_PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"


@contextmanager
def real_product(model_folder: Path, **draft: Any) -> Iterator[LiveProduct]:
    """fp32 throughout, as transformers' model next to it; sized for short texts. draft: further settings."""
    sizes = {"dtype": "float32", "max_length": 1024, "kv_tokens": 16384}
    drafter = resolve_draft("auto", NAME)
    with LiveProduct(model_folder, drafter, target=sizes, draft={**sizes, **draft}) as product:
        yield product


def chat_prompts(model_folder: Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of `count` chats with the shortest prompts of each set, drawn from the sets in turn."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    columns = []
    for name in SETS:
        lines = (_PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        columns.append(sorted((json.loads(line)["prompt"] for line in lines), key=len))
    chosen = [prompt for row in zip(*columns, strict=True) for prompt in row][:count]
    assert len(chosen) == count
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for prompt in chosen
    ]
