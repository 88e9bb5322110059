"""Tiny random models on disk: a target of any supported family and a DFlash drafter for it.

The tokenizer is byte-level with one id per byte plus a few special tokens, so that any text and any id
round-trips.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
VOCAB_SIZE = 320
EOS_ID = 258
MASK_ID = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """256 byte tokens (ids 0..255), then SPECIALS at 256.."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_target(
    folder: Path,
    *,
    family: str = "llama",
    layers: int = 4,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    vocab_size: int = VOCAB_SIZE,
    max_length: int = 1024,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 0.35,
    **extra: Any,
) -> Path:
    """Write a random target. `scale` (std of the weights) is large so that greedy text does not loop at
    once."""
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // heads
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = {
        "architectures": [architectures[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": EOS_ID,
        "bos_token_id": 256,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng, dtype=torch.float64) * scale).to(dtype)

    def ones(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=rng, dtype=torch.float64)).to(dtype)

    tensors = {"model.embed_tokens.weight": draw(vocab_size, hidden), "model.norm.weight": ones(hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors[p + "self_attn.q_proj.weight"] = draw(heads * head_dim, hidden)
        tensors[p + "self_attn.k_proj.weight"] = draw(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.v_proj.weight"] = draw(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
        tensors[p + "mlp.gate_proj.weight"] = draw(intermediate, hidden)
        tensors[p + "mlp.up_proj.weight"] = draw(intermediate, hidden)
        tensors[p + "mlp.down_proj.weight"] = draw(hidden, intermediate)
        tensors[p + "input_layernorm.weight"] = ones(hidden)
        tensors[p + "post_attention_layernorm.weight"] = ones(hidden)
        if family == "qwen2":
            for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                tensors[p + f"self_attn.{name}_proj.bias"] = draw(size * head_dim)
        if family == "qwen3":
            tensors[p + "self_attn.q_norm.weight"] = ones(head_dim)
            tensors[p + "self_attn.k_norm.weight"] = ones(head_dim)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def make_drafter(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 64,
    vocab_size: int = VOCAB_SIZE,
    target_layers: int = 4,
    target_layer_ids: tuple[int, ...] = (0, 2),
    block_size: int = 8,
    mask_id: int = MASK_ID,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
    scale: float = 0.35,
    max_length: int = 1024,
    **extra: Any,
) -> Path:
    """Write a random drafter in the z-lab layout for a target of `make_target`'s shape."""
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // heads
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": max_length,
        "num_target_layers": target_layers,
        "block_size": block_size,
        "dflash_config": {"target_layer_ids": list(target_layer_ids), "mask_token_id": mask_id},
        "torch_dtype": str(dtype).removeprefix("torch."),
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng, dtype=torch.float64) * scale).to(dtype)

    def ones(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=rng, dtype=torch.float64)).to(dtype)

    tensors = {
        "fc.weight": draw(hidden, hidden * len(target_layer_ids)),
        "hidden_norm.weight": ones(hidden),
        "norm.weight": ones(hidden),
    }
    for i in range(layers):
        p = f"layers.{i}."
        tensors[p + "self_attn.q_proj.weight"] = draw(heads * head_dim, hidden)
        tensors[p + "self_attn.k_proj.weight"] = draw(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.v_proj.weight"] = draw(kv_heads * head_dim, hidden)
        tensors[p + "self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
        tensors[p + "self_attn.q_norm.weight"] = ones(head_dim)
        tensors[p + "self_attn.k_norm.weight"] = ones(head_dim)
        tensors[p + "mlp.gate_proj.weight"] = draw(intermediate, hidden)
        tensors[p + "mlp.up_proj.weight"] = draw(intermediate, hidden)
        tensors[p + "mlp.down_proj.weight"] = draw(hidden, intermediate)
        tensors[p + "input_layernorm.weight"] = ones(hidden)
        tensors[p + "post_attention_layernorm.weight"] = ones(hidden)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
