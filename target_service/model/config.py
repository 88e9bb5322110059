"""ModelConfig: what a checkpoint's config.json says about the decoder, checked before any weight is read.

Owns the list of supported families and their defaults (those of the transformers library, whose files these
are). Anything that would make our forward differ from the published model is a ConfigError that names the
key, its value and what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels import rotary
from kernels.device import parse_dtype as named_dtype
from specbridge.checkpoint import config_files
from specbridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family fixes. qkv_bias, output_bias: True, False, or the config key that decides."""

    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    window: (
        str  # "none", "all" (every layer, default 4096) or "switched" (use_sliding_window, max_window_layers)
    )


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("attention_bias", "attention_bias", "mlp_bias", False, "none"),
    "MistralForCausalLM": _Family(False, False, False, False, "all"),
    "Qwen2ForCausalLM": _Family(True, False, False, False, "switched"),
    "Qwen3ForCausalLM": _Family("attention_bias", "attention_bias", False, True, "switched"),
}
_BY_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. windows[i] is layer i's sliding window (a row sees that many positions, its own
    included) or None; max_position_embeddings is the length served, rope scaling counted in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    trained_positions: int
    max_position_embeddings: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_folder(folder: Path) -> ModelConfig:
        """Read config.json (or the file given), and generation_config.json for the eos ids. Raises
        ConfigError.
        """
        files = config_files(folder)
        return ModelConfig.from_dict(files.model, files.generation)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Raises ConfigError for anything not supported."""
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _refuse_what_changes_the_model(raw)
        heads = _positive(raw, "num_attention_heads")
        hidden = _positive(raw, "hidden_size")
        layers = _positive(raw, "num_hidden_layers")
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if raw.get("head_dim") is None and hidden % heads and architecture != "Qwen3ForCausalLM":
            raise ConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim"
            )
        head_dim = _positive(raw, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
        if head_dim % 2:
            raise ConfigError(f"head_dim is {head_dim}; rotary embedding needs an even number")
        theta, scaling = _rope(raw)
        trained = _positive(raw, "max_position_embeddings")

        def flag(value: bool | str) -> bool:
            return bool(raw.get(value, False)) if isinstance(value, str) else value

        return ModelConfig(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            trained_positions=trained,
            max_position_embeddings=_served_length(trained, scaling),
            qkv_bias=flag(family.qkv_bias),
            output_bias=flag(family.output_bias),
            mlp_bias=flag(family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            windows=_windows(raw, family, layers),
            eos_token_ids=_eos(raw, generation or {}),
            dtype=parse_dtype(str(raw.get("dtype") or raw.get("torch_dtype") or "float32")),
        )


def parse_dtype(name: str) -> torch.dtype:
    """Raises ConfigError for a name we do not compute in."""
    try:
        return named_dtype(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [_BY_TYPE.get(str(raw.get("model_type")), str(raw.get("model_type")))]
    for name in named:
        if name in FAMILIES:
            return str(name)
    raise ConfigError(
        f"architecture {', '.join(map(str, named))} is not supported; supported are {', '.join(FAMILIES)}"
    )


def _refuse_what_changes_the_model(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        )
        raise ConfigError(
            f"the checkpoint is quantised ({method}); "
            "supported are plain float64, float32, bfloat16 and float16 weights"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported is silu")
    partial = raw.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """theta and the scaling rule, from rope_parameters (transformers 5) or rope_theta + rope_scaling
    (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or None
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_parameters is {scaling!r}; it must be an object")
    if scaling and any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigError(
            "rope_parameters that differ between layer types are not supported; supported is one rule"
        )
    theta = float((scaling or {}).get("rope_theta", raw.get("rope_theta", 10000.0)))
    rule = rotary.scaling_type(scaling)
    if rule not in rotary.SUPPORTED:
        raise ConfigError(f"rope type {rule!r} is not supported; supported are {', '.join(rotary.SUPPORTED)}")
    if (scaling or {}).get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError("rope_parameters.partial_rotary_factor is not supported; supported is 1.0")
    return theta, None if rule == "default" else scaling


def _served_length(trained: int, scaling: Mapping[str, Any] | None) -> int:
    """linear and yarn stretch the trained length by their factor; llama3 configs give the stretched
    length."""
    rule = rotary.scaling_type(scaling)
    if scaling is None or rule not in ("linear", "yarn"):
        return trained
    original = scaling.get("original_max_position_embeddings") if rule == "yarn" else None
    return max(trained, int(float(original or trained) * float(scaling.get("factor", 1.0))))


def _windows(raw: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    if family.window == "none":
        return (None,) * layers
    window = raw.get("sliding_window", 4096)
    if family.window == "switched" and not raw.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    window = _positive({"sliding_window": window}, "sliding_window")
    kinds = raw.get("layer_types")
    if family.window == "all":
        return (window,) * layers
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if i >= first else None for i in range(layers))
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries for {layers} layers and unknown kinds {unknown}; "
            "supported are full_attention and sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)
