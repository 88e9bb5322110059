"""Models for comparing ranks: small random checkpoints, written where they are wanted, or a real one.

Random weights of `--load-format dummy` would not do: each rank draws its own share, so that another number of
ranks is another model. Owns the sizes and the writing. Does not own what is compared (equality).

A token's logits depend on all of its context: norms differ from 1, heads are not tied. The drafter is random
too, but embedding and head are the target's: what all embeddings have in common leads both to favour the same
tokens, so that some of its tokens are right and trees are walked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import common
from specbridge.models import resolve_draft, resolve_target

LENGTH = 512
TAPS = (0, 2)
MASK = 511
BLOCK = 8
COMMON = 1.5
"""Of the part that all embeddings share, against 1 of a token's own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """hidden = heads * head_dim; kv_heads below the number of ranks are repeated on them."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 4
    vocab: int = 512

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


RANDOM = {
    "tiny": Sizes(heads=8, kv_heads=8, head_dim=16),
    "tiny-2kv": Sizes(heads=8, kv_heads=2, head_dim=16),
    "small": Sizes(heads=16, kv_heads=8, head_dim=128, layers=8, vocab=4096),
}
"""`small` is for GPUs: heads as wide as a large model's, all of its kernels' tiles."""


@dataclass(frozen=True, slots=True)
class Model:
    """Something to serve. place: of the target's files. prompts: ids. flags: of `serve`."""

    name: str
    place: Path
    heads: int
    kv_heads: int
    vocab: int
    prompts: tuple[tuple[int, ...], ...]
    flags: tuple[str, ...]


def make(name: str, folder: Path, prompts: int) -> Model:
    """The model `name`: of RANDOM, written to `folder`, or one that `specbridge serve` knows.

    Raises SpecBridgeError for a real model that can't be found.
    """
    if name in RANDOM:
        sizes = RANDOM[name]
        write(folder / name, sizes)
        ids = tuple(random_prompt(n, sizes.vocab) for n in range(prompts))
        flags = (f"--target={folder / name}", f"--draft={folder / name / 'dflash'}", "--tokenizer=bytes")
        return Model(name, folder / name, sizes.heads, sizes.kv_heads, sizes.vocab, ids, flags)
    from tokenizers import Tokenizer

    place = resolve_target(name)
    resolve_draft("auto", name)
    config = json.loads((place / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    texts = common.load_prompts(common.SETS, prompts)
    heads = int(config["num_attention_heads"])
    return Model(
        name,
        place,
        heads,
        int(config.get("num_key_value_heads") or heads),
        int(config["vocab_size"]),
        tuple(tuple(tokenizer.encode(text).ids[:200]) for text in texts),
        (f"--target={name}",),
    )


def random_prompt(number: int, vocab: int) -> tuple[int, ...]:
    """Prompts of 3 to some 70 tokens, on both sides of a page's end, each with its own beginning."""
    length = 3 + 9 * number % 68
    generator = torch.Generator().manual_seed(1000 + number)
    return tuple(torch.randint(0, vocab, (length,), generator=generator).tolist())


def write(folder: Path, sizes: Sizes) -> None:
    """The target in `folder`, its drafter in `folder`/dflash, fp32."""
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    drafter = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": sizes.layers,
        "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": MASK},
    }
    draw = _Draw(torch.Generator().manual_seed(7))
    wide = sizes.hidden
    weights = {
        "model.embed_tokens.weight": draw.matrix(sizes.vocab, wide, std=1.0)
        + draw.matrix(1, wide, std=COMMON),
        "model.norm.weight": draw.norm(wide),
        # Logits of a few units: greedy text that wanders, sampled text that is not all noise.
        "lm_head.weight": draw.matrix(sizes.vocab, wide, std=2.0 * wide**-0.5),
        **_layers("model.layers", sizes.layers, sizes, draw),
    }
    _save(folder, target, weights)
    weights = {
        "fc.weight": draw.matrix(wide, wide * len(TAPS)),
        "hidden_norm.weight": draw.norm(wide),
        "norm.weight": draw.norm(wide),
        **_layers("layers", 2, sizes, draw),
    }
    _save(folder / "dflash", drafter, weights)


class _Draw:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def matrix(self, out: int, inner: int, std: float = 0.0) -> torch.Tensor:
        """[out, inner], by default of the scale that keeps the size of what it multiplies."""
        return torch.randn(out, inner, generator=self._generator) * (std or inner**-0.5)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)


def _layers(prefix: str, count: int, sizes: Sizes, draw: _Draw) -> dict[str, torch.Tensor]:
    wide, keys = sizes.hidden, sizes.kv_heads * sizes.head_dim
    found: dict[str, torch.Tensor] = {}
    for i in range(count):
        attention, mlp = f"{prefix}.{i}.self_attn.", f"{prefix}.{i}.mlp."
        found |= {
            f"{prefix}.{i}.input_layernorm.weight": draw.norm(wide),
            f"{prefix}.{i}.post_attention_layernorm.weight": draw.norm(wide),
            attention + "q_proj.weight": draw.matrix(wide, wide),
            attention + "k_proj.weight": draw.matrix(keys, wide),
            attention + "v_proj.weight": draw.matrix(keys, wide),
            attention + "o_proj.weight": draw.matrix(wide, wide),
            attention + "q_norm.weight": draw.norm(sizes.head_dim),
            attention + "k_norm.weight": draw.norm(sizes.head_dim),
            mlp + "gate_proj.weight": draw.matrix(2 * wide, wide),
            mlp + "up_proj.weight": draw.matrix(2 * wide, wide),
            mlp + "down_proj.weight": draw.matrix(wide, 2 * wide),
        }
    return found


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
