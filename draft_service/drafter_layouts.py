"""Reading a published drafter's config.json, in both layouts of the field, into one DrafterConfig.

Owns the keys of the z-lab layout (transformer fields at the top, `dflash_config` beside them) and of the
`speculators` layout (nested `transformer_layer_config`), and resolving the mask token. Does not own what the
fields mean (drafter_config).

A key that asks for what this build does not do is a ConfigError that names it: a drafter run in a way it was
not trained for loads without complaint and never has a token accepted. Of the drafter's own keys that holds
for all that are not known; of those every transformer configuration has, for those known to change the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draft_service.drafter_config import (
    DrafterConfig,
    LayerRule,
    TargetFacts,
    build_target_layer_ids,
    check_config,
    integers,
    positive_integer,
)
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MASK_TOKEN = "<|MASK|>"

# Features of relatives of DFlash (DFlash2, Domino, MiMo drafters, DSpark) whose keys mark a checkpoint we
# can't run.
_FOREIGN_KEYS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "attention_sink_bias",
    "markov_rank",
    "shift_label",
)
_PLAIN_PROJECTORS = (None, "", "default", "linear", "dflash")
# Everything this build honours in `dflash_config`, and what only records where the drafter came from.
_KNOWN_DFLASH_KEYS = {
    *("block_size", "num_target_layers", "target_layer_ids", "mask_token", "mask_token_id", "projector_type"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "attention_value_scale"),
    *("use_aux_hidden_state", "sample_from_anchor", "is_causal", "layer_types", "sliding_window"),
    *("num_anchors", "loss_decay_gamma", "gamma", "target_model", "target_model_name_or_path"),
}
# What configuration classes write beside the model's own fields; none of it reaches the forward pass.
_BENIGN_KEYS = {
    "_name_or_path", "_attn_implementation", "architectures", "auto_map", "model_type",
    "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "return_dict",
    "use_return_dict", "tie_word_embeddings", "torchscript", "pretraining_tp", "attention_dropout",
    "hidden_dropout", "embd_pdrop", "resid_pdrop", "gradient_checkpointing", "use_bfloat16", "tf_legacy_loss",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "tokenizer_class", "output_attentions", "output_hidden_states", "is_decoder", "is_encoder_decoder",
    "add_cross_attention", "pruned_heads", "cross_attention_hidden_size", "tie_encoder_decoder",
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "prefix", "max_window_layers", "has_no_defaults_at_init", "base_model_tp_plan",
    "base_model_pp_plan", "license", "library_name", "tags",
}  # fmt: skip
# Arithmetic of other families that the tensors do not show, and the value that means none. (Biases, experts
# and quantisation do show: as tensors that are missing or left over.)
_FOREIGN_ARITHMETIC: dict[str, object] = {
    **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale"), 1.0),
    **dict.fromkeys(("attention_multiplier", "attn_logit_softcapping", "clip_qkv"), None),
    "use_parallel_residual": False,
}
_KNOWN_SPECULATORS_KEYS = _BENIGN_KEYS | {
    *("speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"),
    *("block_size", "draft_vocab_size", "target_hidden_size", "mask_token_id", "sample_from_anchor"),
    *("aux_hidden_state_layer_ids", "sliding_window_non_causal"),
}
_ACTIVATIONS = ("silu", "swish")
# An unknown key with such a value asks for nothing.
_NOTHING: tuple[object, ...] = (None, False, "", [], {})


def parse_config(
    config: Mapping[str, Any],
    target: TargetFacts,
    *,
    fc_columns: int | None = None,
    sample_from_anchor: bool | None = None,
) -> DrafterConfig:
    """Read a drafter's config.json against its target.

    fc_columns: width of fc.weight, which decides whether a speculators id of the last layer is a tap.
    sample_from_anchor: overrides the checkpoint's block convention.
    Raises ConfigError naming the key, its value and the fix.
    """
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        parsed = _parse_speculators(config, target, fc_columns)
    else:
        parsed = _parse_zlab(config, target)
    if sample_from_anchor is not None:
        parsed = replace(parsed, first_row=0 if sample_from_anchor else 1)
    check_config(parsed, target, fc_columns)
    return parsed


# ---- layouts --------------------------------------------------------------------------------


def _parse_zlab(config: Mapping[str, Any], target: TargetFacts) -> DrafterConfig:
    own = config.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"dflash_config is {own!r}; it must be an object")
    for key in own:
        if (
            key not in _KNOWN_DFLASH_KEYS | _BENIGN_KEYS
            and key not in _FOREIGN_KEYS
            and own[key] not in _NOTHING
        ):
            raise ConfigError(
                f"dflash_config.{key} = {own[key]!r} is not known to this build, so it can't be honoured"
            )

    def value(key: str, default: Any = None) -> Any:
        return own[key] if own.get(key) is not None else config.get(key, default)

    _refuse_foreign(config.get("architectures"), value)
    if value("use_aux_hidden_state", True) is False:
        raise ConfigError(
            "dflash_config.use_aux_hidden_state is false: a drafter without hidden states is not built"
        )
    num_layers = positive_integer(config, "num_hidden_layers", "the drafter's config.json")
    taps = value("target_layer_ids")
    named = value("num_target_layers")
    if named is not None and int(named) != target.num_layers:
        log.warning("drafter was made for %s target layers, this target has %d", named, target.num_layers)
    if taps is None:
        taps = build_target_layer_ids(int(named or target.num_layers), num_layers)
    softcap = value("final_logit_softcapping")
    sample_from_anchor = bool(value("sample_from_anchor", False))
    return DrafterConfig(
        **_transformer(config, num_layers),
        block_size=int(value("block_size", DEFAULT_BLOCK_SIZE)),
        first_row=0 if sample_from_anchor else 1,
        mask_token_id=_mask_token(value("mask_token_id"), value("mask_token"), target),
        target_layer_ids=integers(taps, "target_layer_ids"),
        # The layout's own reference reads Hugging Face's tuple, whose last entry is the normed state.
        normed_last_layer=True,
        layers=_layer_rules(
            value("layer_types") or _window_layers(config, num_layers),
            value("sliding_window"),
            num_layers,
            is_causal=value("is_causal"),
            causal_slides=True,
        ),
        window_from_anchor=False,
        output_multiplier=float(value("output_multiplier", 1.0)),
        logit_softcap=float(softcap) if softcap is not None and float(softcap) > 0 else None,
        embedding_scale=float(value("input_embedding_scale", 1.0)),
        value_scale=float(value("attention_value_scale", 1.0)),
        draft_vocab_size=target.vocab_size,
        vocab_size=int(config.get("vocab_size", target.vocab_size)),
        layout="z-lab",
    )


def _parse_speculators(
    config: Mapping[str, Any], target: TargetFacts, fc_columns: int | None
) -> DrafterConfig:
    kind = config.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise ConfigError(f"speculators_model_type is {kind!r}; this build runs 'dflash'")
    for key in config:
        if key not in _KNOWN_SPECULATORS_KEYS and config[key] not in _NOTHING:
            raise ConfigError(f"speculators key {key!r} = {config[key]!r} is not known to this build")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"transformer_layer_config is {inner!r}; it must be an object")
    verifier_hidden = config.get("target_hidden_size")
    hidden = positive_integer(inner, "hidden_size", "transformer_layer_config")
    if verifier_hidden is not None and int(verifier_hidden) != hidden:
        raise ConfigError(
            f"target_hidden_size {verifier_hidden} is not the drafter's hidden_size {hidden}: unsupported"
        )
    num_layers = positive_integer(inner, "num_hidden_layers", "transformer_layer_config")
    ids = config.get("aux_hidden_state_layer_ids")
    if not ids:
        raise ConfigError(
            "aux_hidden_state_layer_ids is missing: the checkpoint does not say which layers it reads"
        )
    non_causal = bool(config.get("sliding_window_non_causal", False))
    vocab_size = int(inner.get("vocab_size", target.vocab_size))
    tap_ids = integers(ids, "aux_hidden_state_layer_ids")
    return DrafterConfig(
        **_transformer(inner, num_layers),
        block_size=int(config.get("block_size", 8)),
        first_row=0 if config.get("sample_from_anchor", False) else 1,
        mask_token_id=_mask_token(config.get("mask_token_id"), None, target),
        target_layer_ids=_shifted_taps(tap_ids, target, hidden, fc_columns),
        normed_last_layer=False,
        layers=_layer_rules(
            inner.get("layer_types") or _window_layers(inner, num_layers), inner.get("sliding_window"),
            num_layers, is_causal=None,
            causal_slides=not non_causal,
        ),
        window_from_anchor=True,
        output_multiplier=1.0,
        logit_softcap=None,
        embedding_scale=1.0,
        value_scale=1.0,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        vocab_size=vocab_size,
        layout="speculators",
    )  # fmt: skip


def _shifted_taps(
    ids: tuple[int, ...], target: TargetFacts, hidden: int, fc_columns: int | None
) -> tuple[int, ...]:
    """speculators ids index the embeddings' output as 0, so "output of layer i" is id i + 1.

    The id num_layers stands for the final state, which its training tooling adds for the loss: it is dropped,
    unless `fc` is wide enough to prove that the drafter reads it.
    """
    if 0 in ids:
        raise ConfigError(f"aux_hidden_state_layer_ids {list(ids)} taps id 0, the embeddings: not supported")
    if fc_columns is None or fc_columns != len(ids) * hidden:
        ids = tuple(i for i in ids if i != target.num_layers)
    return tuple(i - 1 for i in ids)


# ---- pieces ---------------------------------------------------------------------------------


def _transformer(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    where = "the drafter's transformer config"
    hidden = positive_integer(config, "hidden_size", where)
    heads = positive_integer(config, "num_attention_heads", where)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{where}: {heads} heads, {kv_heads} KV heads of {head_dim}: heads must be a multiple, even"
        )
    for key, off in _FOREIGN_ARITHMETIC.items():
        if config.get(key) not in (None, off):
            raise ConfigError(f"{key} is {config[key]!r}: drafters with this feature are not supported")
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act is {activation!r}; this build has {', '.join(_ACTIVATIONS)}")
    theta, scaling = _rope(config)
    return {
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": positive_integer(config, "intermediate_size", where),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bool(config.get("attention_bias", False)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": int(config.get("max_position_embeddings", 32768)),
    }


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """theta and scaling: rope_theta + rope_scaling (transformers 4) or rope_parameters (transformers 5)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope parameters are {rope!r}; they must be an object")
    nested = [v for v in rope.values() if isinstance(v, Mapping)]
    if nested:
        # One table per kind of layer. The published forwards use one table for all layers.
        if any(v != nested[0] for v in nested):
            raise ConfigError(f"rope_parameters differ between layer types ({dict(rope)}): not supported")
        rope = nested[0]
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise ConfigError(
            "partial_rotary_factor is not 1: partial rotary embeddings of drafters are not supported"
        )
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return theta, None if kind in (None, "default") else dict(rope)


def _window_layers(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """layer_types where a configuration has none: the layers from max_window_layers on slide."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return ["full_attention"] * num_layers
    full = int(config.get("max_window_layers", num_layers))
    return ["sliding_attention" if i >= full else "full_attention" for i in range(num_layers)]


def _layer_rules(
    layer_types: Any, window: Any, num_layers: int, *, is_causal: Any, causal_slides: bool
) -> tuple[LayerRule, ...]:
    kinds: Sequence[str] = layer_types or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    rules = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types has {kind!r}; this build runs full_attention and sliding_attention"
            )
        slides = kind == "sliding_attention"
        if slides and (not isinstance(window, int) or window < 1):
            raise ConfigError(f"a sliding_attention layer needs sliding_window, which is {window!r}")
        causal = (slides and causal_slides) if is_causal is None else bool(is_causal)
        rules.append(LayerRule(causal=causal, window=window if slides else None))
    return tuple(rules)


def _mask_token(token_id: Any, text: Any, target: TargetFacts) -> int:
    """The mask token's id: given, or looked up by its text in the target's tokenizer; both must agree."""
    if token_id is not None and text is None:
        return int(token_id)
    wanted = text or DEFAULT_MASK_TOKEN
    found = _token_to_id(wanted, target.folder)
    if token_id is None:
        if found is None:
            raise ConfigError(
                f"the drafter has no mask_token_id, and its mask token {wanted!r} is not in the target's "
                f"tokenizer.json: set mask_token_id in the drafter's config.json"
            )
        return found
    if found is not None and found != int(token_id):
        raise ConfigError(
            f"mask_token_id is {token_id}, but the target's tokenizer gives {wanted!r} the id {found}"
        )
    return int(token_id)


def _token_to_id(text: str, folder: Path | None) -> int | None:
    path = folder / "tokenizer.json" if folder else None
    if path is None or not path.exists():
        return None
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path)).token_to_id(text)
    return None if found is None else int(found)


def _refuse_foreign(architectures: Any, value: Callable[[str], Any]) -> None:
    if "DFlash2DraftModel" in (architectures or []):
        raise ConfigError(
            "architectures names DFlash2DraftModel: DFlash2 drafters are not supported, use a DFlash one"
        )
    if value("projector_type") not in _PLAIN_PROJECTORS:
        raise ConfigError(
            f"projector_type is {value('projector_type')!r}: only plain DFlash projectors are supported"
        )
    for key in _FOREIGN_KEYS:
        if value(key):
            raise ConfigError(f"{key} is {value(key)!r}: drafters with this feature are not supported")
