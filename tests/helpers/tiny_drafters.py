"""Tiny random targets and drafters on disk, in both published layouts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_service.drafter import Drafter
from draft_service.drafter_config import DrafterConfig

VOCAB, HIDDEN, TARGET_LAYERS = 67, 32, 9

TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": TARGET_LAYERS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
TRANSFORMER = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
}
ZLAB = {
    **TRANSFORMER,
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": TARGET_LAYERS,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 6]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": TRANSFORMER,
    "block_size": 6,
    "draft_vocab_size": VOCAB,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [2, 5, 7],
}


@dataclass(frozen=True, slots=True)
class Built:
    """A drafter and what it was made of. tensors: its state dict; embedding, head: the target's."""

    drafter: Drafter
    config: DrafterConfig
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    draft_folder: Path
    target_folder: Path


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_drafter(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A state dict for either layout's config."""
    inner = config.get("transformer_layer_config", config)
    hidden, dim = inner["hidden_size"], inner["head_dim"]
    q, kv, wide = (
        inner["num_attention_heads"] * dim,
        inner["num_key_value_heads"] * dim,
        inner["intermediate_size"],
    )
    own = config.get("dflash_config", {})
    taps = (
        config.get("aux_hidden_state_layer_ids")
        or own.get("target_layer_ids")
        or [0] * inner["num_hidden_layers"]
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)

    tensors = {"fc.weight": normal(hidden, len(taps) * hidden), "hidden_norm.weight": norm(hidden),
               "norm.weight": norm(hidden)}  # fmt: skip
    for i in range(inner["num_hidden_layers"]):
        name = f"layers.{i}."
        attention = name + "self_attn."
        shapes = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }
        for projection, shape in shapes.items():
            tensors[f"{attention}{projection}.weight"] = normal(*shape)
            if inner.get("attention_bias"):
                tensors[f"{attention}{projection}.bias"] = normal(shape[0])
        tensors |= {
            attention + "q_norm.weight": norm(dim),
            attention + "k_norm.weight": norm(dim),
            name + "input_layernorm.weight": norm(hidden),
            name + "post_attention_layernorm.weight": norm(hidden),
            name + "mlp.gate_proj.weight": normal(wide, hidden),
            name + "mlp.up_proj.weight": normal(wide, hidden),
            name + "mlp.down_proj.weight": normal(hidden, wide),
        }
    reduced = config.get("draft_vocab_size", inner["vocab_size"])
    if reduced != inner["vocab_size"]:
        chosen = torch.randperm(inner["vocab_size"], generator=generator)[:reduced].sort().values
        tensors["lm_head.weight"] = normal(reduced, hidden) * 4
        tensors["d2t"] = chosen - torch.arange(reduced)
        tensors["t2d"] = torch.zeros(inner["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def layout(name: str) -> dict[str, Any]:
    """A fresh copy of a layout's config: "z-lab" or "speculators"."""
    return copy.deepcopy({"z-lab": ZLAB, "speculators": SPECULATORS}[name])


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """A layout's config with keys changed; `inner` goes to the transformer fields, `own` to dflash_config."""
    config = layout(name)
    config.get("transformer_layer_config", config).update(changes.pop("inner", {}))
    if "own" in changes:
        config["dflash_config"].update(changes.pop("own"))
    return {**config, **changes}
