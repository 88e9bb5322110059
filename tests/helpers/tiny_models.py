"""Tiny random checkpoints of every supported family, and stepping a Runner through token sequences by
hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specbridge.rounds import SamplingParams
from target_service.runner import Runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import NO_SLOT, Segment, Step, StepOutput

VOCAB = 101
PAGE = 4

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}


def rope(kind: str = "default", theta: float = 10000.0, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": rope()}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3, "num_attention_heads": 8}),
    "llama-linear-rope": ("Llama", {"rope_parameters": rope("linear", factor=2.0)}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 6, "head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": rope(theta=1e6)}),
    "llama-8kv": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}),
    "llama-2kv-of-8": ("Llama", {"num_attention_heads": 8, "num_hidden_layers": 2, "attention_bias": True}),
    "qwen3-2kv-of-8": ("Qwen3", {"num_attention_heads": 8, "num_hidden_layers": 2, "head_dim": 8}),
}


def build(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """Write the model `name` to `folder`; returns the transformers model (eval mode, `dtype`)."""
    import transformers

    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **settings, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:  # zeros and ones would hide a missing one
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def pages_for(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // PAGE)))


def slots(pages: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    return torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in positions], dtype=torch.int64)


GREEDY = ChoiceRule(SamplingParams())


def chain_step(
    tokens: Sequence[int],
    context: int,
    pages: Sequence[int],
    *,
    logits: str = "all",
    commit: bool = False,
) -> Step:
    """A prefill chunk of one session. logits: all, last or none."""
    n = len(tokens)
    wanted = {"all": list(range(n)), "last": [n - 1], "none": []}[logits]
    return Step(
        torch.tensor(tokens, dtype=torch.int64),
        torch.arange(context, context + n),
        (Segment(0, n, context, tuple(pages)),),
        torch.tensor(wanted, dtype=torch.int64),
        slots=slots(pages, range(context, context + n)) if commit else None,
    )


def feed(
    runner: Runner,
    tokens: Sequence[int],
    pages: Sequence[int],
    *,
    chunks: Sequence[int] = (),
    context: int = 0,
) -> list[StepOutput]:
    """Prefill and commit `tokens` in the given chunk sizes (what is left goes as one)."""
    outputs = []
    position = 0
    for size in [*chunks, len(tokens)]:
        part = tokens[position : position + size]
        if not len(part):
            break
        outputs.append(kept(runner.run(chain_step(part, context + position, pages, commit=True))))
        position += len(part)
    return outputs


def kept(output: StepOutput) -> StepOutput:
    """A copy that later steps don't overwrite."""
    taps = None if output.taps is None else output.taps.clone()
    return StepOutput(output.logits.clone(), taps, output.choices)


def tree_step(
    trees: Sequence[tuple[Sequence[int], Sequence[int], int, Sequence[int]]], *, commit: bool = False
) -> Step:
    """Several sessions' trees, greedy: (tokens with the anchor first, parents, context length, pages)
    each."""
    tokens: list[int] = []
    positions: list[int] = []
    segments = []
    at: list[torch.Tensor] = []
    for ids, parents, context, pages in trees:
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        segments.append(Segment(len(tokens), len(ids), context, tuple(pages), tuple(parents)))
        tokens += ids
        positions += [context + d for d in depths]
        at.append(slots(pages, [context + d for d in depths]) if commit else torch.full((len(ids),), NO_SLOT))
    return Step(
        torch.tensor(tokens),
        torch.tensor(positions),
        tuple(segments),
        torch.arange(len(tokens), dtype=torch.int64),
        slots=torch.cat(at) if commit else None,
        groups=(RowGroup(GREEDY, 0, [p + 1 for p in positions]),),
    )


def accepted_tree(
    runner: Runner,
    ids: Sequence[int],
    parents: Sequence[int],
    context: int,
    pages: Sequence[int],
    path: Sequence[int],
) -> list[int]:
    """`ids` with other tokens along `path` (from the anchor, row 0, on): those that the model chooses there,
    so that the walk accepts exactly this path.
    """
    tokens = list(ids)
    for row, child in zip(path, [*path[1:], None], strict=True):
        choice = runner.run(tree_step([(tokens, parents, context, pages)])).choices[row]
        if child is not None:
            tokens[child] = choice
        for other, parent in enumerate(parents):
            if parent == row and other != child and tokens[other] == choice:
                tokens[other] = (choice + 1) % VOCAB
    return tokens
