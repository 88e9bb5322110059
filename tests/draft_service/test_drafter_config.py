"""Both published layouts' configurations, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import HIDDEN, TARGET_LAYERS, VOCAB, changed, layout
from tokenizers import Tokenizer, models

from draft_service.drafter_config import DrafterConfig, LayerRule, TargetFacts, build_target_layer_ids
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError
from specbridge.models import packaged_drafter

TARGET = TargetFacts(HIDDEN, TARGET_LAYERS, VOCAB)


def parsed(config: dict[str, Any], **options: Any) -> DrafterConfig:
    target = options.pop("target", TARGET)
    return parse_config(config, target, **options)


@pytest.mark.parametrize(
    ("layers", "draft_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (61, 6, (1, 12, 24, 35, 47, 58)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_those_of_the_published_checkpoints(
    layers: int, draft_layers: int, expected: tuple[int, ...]
) -> None:
    assert build_target_layer_ids(layers, draft_layers) == expected


def test_the_packaged_drafter_reads_as_its_readme_says() -> None:
    folder = packaged_drafter("smollm2-135m")
    assert folder is not None
    config = parsed(Checkpoint(folder).config, target=TargetFacts(576, 30, 49152), fc_columns=2880)
    assert (config.block_size, config.horizon, config.first_row) == (8, 7, 1)
    assert config.target_layer_ids == (1, 8, 14, 20, 27) and config.mask_token_id == 3
    assert config.layers == (LayerRule(),) * 5 and config.normed_last_layer
    assert config.rope_theta == 100000.0 and config.rope_scaling is None


def test_zlab_keys_are_found_in_dflash_config_first() -> None:
    config = parsed(changed("z-lab", block_size=4, own={"block_size": 8}, target_layer_ids=[0]))
    assert config.block_size == 8 and config.target_layer_ids == (1, 4, 6)
    assert parsed(changed("z-lab", block_size=4)).block_size == 4
    bare = {k: v for k, v in layout("z-lab").items() if k != "block_size"}
    assert parsed(bare).block_size == 16


def test_zlab_default_taps_follow_the_number_of_layers_it_was_made_for() -> None:
    config = changed("z-lab", dflash_config={"mask_token_id": 5})
    assert parsed(config).target_layer_ids == build_target_layer_ids(TARGET_LAYERS, 3)
    config["num_target_layers"] = 7  # only a warning: the taps exist
    assert parsed(config).target_layer_ids == build_target_layer_ids(7, 3)


def test_causality_follows_the_layer_unless_is_causal_says() -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 9}
    default = parsed(changed("z-lab", inner=mixed)).layers
    assert default == (LayerRule(True, 9), LayerRule(False), LayerRule(False))
    assert [r.causal for r in parsed(changed("z-lab", inner=mixed, is_causal=False)).layers] == [False] * 3
    assert [r.causal for r in parsed(changed("z-lab", inner=mixed, is_causal=True)).layers] == [True] * 3


def test_rope_of_both_transformers_generations() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0}}
    assert parsed(changed("z-lab", inner=old)).rope_theta == 5e5
    assert parsed(changed("z-lab", inner=old)).rope_scaling == {"type": "linear", "factor": 4.0}
    config = {k: v for k, v in changed("z-lab", inner=new).items() if k != "rope_theta"}
    assert parsed(config).rope_theta == 5e4
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    config = {k: v for k, v in changed("z-lab", inner=plain).items() if k != "rope_theta"}
    assert (parsed(config).rope_theta, parsed(config).rope_scaling) == (7.0, None)
    nested = {
        "rope_parameters": {"full_attention": {"rope_theta": 3.0}, "sliding_attention": {"rope_theta": 3.0}}
    }
    config = {k: v for k, v in changed("z-lab", inner=nested).items() if k != "rope_theta"}
    assert parsed(config).rope_theta == 3.0


def test_speculators_taps_are_shifted_and_the_last_layer_dropped() -> None:
    config = parsed(layout("speculators"), fc_columns=3 * HIDDEN)
    assert config.target_layer_ids == (1, 4, 6) and not config.normed_last_layer and config.window_from_anchor
    with_last = changed("speculators", aux_hidden_state_layer_ids=[2, 5, 7, TARGET_LAYERS])
    assert parsed(with_last, fc_columns=3 * HIDDEN).target_layer_ids == (1, 4, 6)
    # A head that is wide enough for it really reads the last layer.
    assert parsed(with_last, fc_columns=4 * HIDDEN).target_layer_ids == (1, 4, 6, TARGET_LAYERS - 1)


def test_speculators_conventions() -> None:
    assert parsed(layout("speculators")).horizon == 5
    anchored = parsed(changed("speculators", sample_from_anchor=True))
    assert (anchored.first_row, anchored.horizon) == (0, 6)
    slides = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}
    assert parsed(changed("speculators", inner=slides)).layers[0] == LayerRule(True, 4)
    assert parsed(changed("speculators", inner=slides, sliding_window_non_causal=True)).layers[
        0
    ] == LayerRule(False, 4)
    assert parsed(changed("speculators", draft_vocab_size=41)).reduced_vocab


def test_the_block_convention_can_be_overridden() -> None:
    assert parsed(layout("z-lab"), sample_from_anchor=True).first_row == 0
    assert parsed(changed("speculators", sample_from_anchor=True), sample_from_anchor=False).first_row == 1


def with_tokenizer(folder: Path, **tokens: int) -> TargetFacts:
    folder.mkdir()
    vocab = {"<unk>": 0, **{text.replace("MASK", "<|MASK|>"): i for text, i in tokens.items()}}
    Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return replace(TARGET, folder=folder)


def test_the_mask_token_may_be_given_as_text(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "t", MASK=7, other=8)
    assert parsed(changed("z-lab", dflash_config={"mask_token": "other"}), target=target).mask_token_id == 8
    assert parsed(changed("z-lab", dflash_config={}), target=target).mask_token_id == 7
    both = changed("z-lab", dflash_config={"mask_token": "other", "mask_token_id": 8})
    assert parsed(both, target=target).mask_token_id == 8
    unknown = changed("z-lab", dflash_config={"mask_token": "elsewhere", "mask_token_id": 9})
    assert parsed(unknown, target=target).mask_token_id == 9
    with pytest.raises(ConfigError, match="mask_token_id is 7.*'other' the id 8"):
        parsed(changed("z-lab", dflash_config={"mask_token": "other", "mask_token_id": 7}), target=target)
    with pytest.raises(ConfigError, match="no mask_token_id.*'nothing'"):
        parsed(changed("z-lab", dflash_config={"mask_token": "nothing"}), target=target)
    with pytest.raises(ConfigError, match="no mask_token_id"):
        parsed(changed("z-lab", dflash_config={}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown dflash key": (changed("z-lab", own={"telepathy": 3}), "dflash_config.telepathy = 3"),
    "unknown speculators key": (changed("speculators", telepathy=3), "'telepathy' = 3"),
    "DFlash2 architecture": (changed("z-lab", architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    "DFlash2 convolution": (changed("z-lab", own={"conv_kernel_size": 4}), "conv_kernel_size is 4"),
    "DFlash2 selector": (changed("z-lab", selector_rank=64), "selector_rank is 64"),
    "Domino projector": (changed("z-lab", own={"projector_type": "domino"}), "projector_type is 'domino'"),
    "attention sinks": (changed("z-lab", own={"attention_sink_bias": True}), "attention_sink_bias"),
    "no hidden states": (changed("z-lab", own={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    "another algorithm": (changed("speculators", speculators_model_type="dspark"), "'dspark'"),
    "hidden size": (changed("z-lab", inner={"hidden_size": 64}), "hidden_size is 64.*target's 32"),
    "another vocabulary": (changed("z-lab", inner={"vocab_size": 68}), "vocab_size is 68, the target's 67"),
    "layer beyond the target": (changed("z-lab", own={"target_layer_ids": [1, 9]}), r"\[1, 9\]"),
    "layer twice": (changed("z-lab", own={"target_layer_ids": [1, 1]}), r"\[1, 1\]"),
    "taps as text": (changed("z-lab", own={"target_layer_ids": "1,2"}), "target_layer_ids is '1,2'"),
    "embeddings tapped": (changed("speculators", aux_hidden_state_layer_ids=[0, 3]), "taps id 0"),
    "no taps": (changed("speculators", aux_hidden_state_layer_ids=None), "layer_ids is missing"),
    "mask outside": (changed("z-lab", own={"mask_token_id": VOCAB}), "mask_token_id 67"),
    "window missing": (changed("z-lab", inner={"layer_types": ["sliding_attention"] * 3}), "sliding_window"),
    "layer kind": (changed("z-lab", inner={"layer_types": ["linear_attention"] * 3}), "linear_attention"),
    "layer kinds too few": (changed("z-lab", inner={"layer_types": ["full_attention"]}), "1 entries for 3"),
    "activation": (changed("z-lab", inner={"hidden_act": "gelu"}), "hidden_act is 'gelu'"),
    "partial rotary": (changed("z-lab", inner={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    "heads": (changed("z-lab", inner={"num_key_value_heads": 3}), "4 heads, 3 KV heads"),
    "block of one": (changed("z-lab", block_size=1), "block_size is 1"),
    "reduced vocabulary too large": (changed("speculators", draft_vocab_size=99), "draft_vocab_size 99"),
    "scaled residuals": (changed("z-lab", inner={"residual_multiplier": 0.5}), "residual_multiplier is 0.5"),
    "capped attention": (changed("speculators", inner={"attn_logit_softcapping": 30.0}), "attn_logit_softc"),
    "no layers": (changed("z-lab", inner={"num_hidden_layers": None}), "num_hidden_layers is None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_honoured_is_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        parsed(config)


# The fields of z-lab/Qwen3-8B-DFlash-b16's config.json: what a Qwen3 configuration writes, and its own keys.
QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_a_published_qwen3_drafter_reads_as_described() -> None:
    config = parsed(QWEN3_8B, target=TargetFacts(4096, 36, 151936), fc_columns=5 * 4096)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (5, 4096, 12288)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.block_size, config.horizon, config.first_row) == (16, 15, 1)
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.mask_token_id == 151669
    assert config.layers == (LayerRule(),) * 5 and config.rope_scaling is None
    assert (config.rope_theta, config.layout, config.reduced_vocab) == (1e6, "z-lab", False)
    # The same without the list of layer types, as older configurations have it, and with windows.
    older = {k: v for k, v in QWEN3_8B.items() if k != "layer_types"}
    target = TargetFacts(4096, 36, 151936)
    assert parsed(older, target=target).layers == (LayerRule(),) * 5
    sliding = {**older, "use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 3}
    assert parsed(sliding, target=target).layers == (LayerRule(),) * 3 + (LayerRule(True, 2048),) * 2


HARMLESS = {
    "transformers_version": "5.0", "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "x.Y"},
    "use_cache": True, "_name_or_path": "a/b", "initializer_range": 0.02, "attention_dropout": 0.1,
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "return_dict": True,
    "output_attentions": False,
    "id2label": {"0": "LABEL_0"}, "chunk_size_feed_forward": 0, "tie_word_embeddings": True,
    "telepathy": None,
}  # fmt: skip


def test_keys_of_the_configuration_class_do_no_harm() -> None:
    assert parsed({**layout("speculators"), **HARMLESS}) == parsed(layout("speculators"))
    assert parsed(changed("speculators", inner=HARMLESS)) == parsed(layout("speculators"))
    assert parsed({**layout("z-lab"), **HARMLESS}) == parsed(layout("z-lab"))
    assert parsed(changed("z-lab", own={"dtype": "bfloat16", "telepathy": None})) == parsed(layout("z-lab"))


def test_fc_must_be_as_wide_as_the_taps() -> None:
    with pytest.raises(ConfigError, match="fc.weight has 64 columns, 3 taps"):
        parsed(layout("z-lab"), fc_columns=64)


# ---- weights ---------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


def test_a_fused_projection_reads_like_its_parts(build: Callable[..., Any]) -> None:
    built = build(layout("z-lab"))
    plain = load_weights(
        Checkpoint(built.draft_folder), Checkpoint(built.target_folder), built.config, dtype=torch.float64
    )

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(3):
            parts = [tensors.pop(f"layers.{i}.self_attn.{p}_proj.weight") for p in "qkv"]
            tensors[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    fused = load_weights(
        edit(built.draft_folder, fuse), Checkpoint(built.target_folder), built.config, dtype=torch.float64
    )
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(plain.layers, fused.layers, strict=True))
    assert torch.equal(plain.fc, fused.fc)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "no tensor 'layers.1.mlp.up_proj.weight'"),
        (
            lambda t: t.update({"candidate_selector.hidden_projection.weight": torch.zeros(2)}),
            "candidate_selector",
        ),
        (lambda t: t.update({"layers.0.self_attn.g_proj.weight": torch.zeros(2)}), "g_proj"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"'norm.weight' has shape \[3\]"),
    ],
)
def test_missing_foreign_and_misshapen_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, build: Callable[..., Any]
) -> None:
    built = build(layout("z-lab"))
    with pytest.raises(ConfigError, match=message):
        load_weights(
            edit(built.draft_folder, change),
            Checkpoint(built.target_folder),
            built.config,
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "no lm_head.weight"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "needs d2t or t2d"),
        (lambda t: t["d2t"].add_(1), "contradicts itself|outside"),
        (lambda t: (t.pop("t2d"), t["d2t"].fill_(0).add_(60)), "outside"),
        (lambda t: t["t2d"].fill_(True), "t2d marks 67"),
    ],
)
def test_a_reduced_vocabulary_must_be_consistent(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, build: Callable[..., Any]
) -> None:
    built = build(changed("speculators", draft_vocab_size=41))
    with pytest.raises(ConfigError, match=message):
        load_weights(
            edit(built.draft_folder, change),
            Checkpoint(built.target_folder),
            built.config,
            dtype=torch.float32,
        )


@pytest.mark.parametrize("name", ["z-lab", "speculators"])
def test_a_drafters_own_head_is_used_in_place_of_the_targets(name: str, build: Callable[..., Any]) -> None:
    built = build(layout(name))
    target = Checkpoint(built.target_folder)
    own = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def load(change: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
        files = edit(built.draft_folder, change)
        return load_weights(files, target, built.config, dtype=torch.float64)

    assert torch.equal(load(lambda t: None).head, built.head)
    weights = load(lambda t: t.update({"lm_head.weight": own}))
    assert torch.equal(weights.head, own) and weights.target_ids is None
    # What its rows stand for may be said as well: nothing new, or another order.
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    assert load(lambda t: t.update(maps)).target_ids is None
    turned = torch.arange(VOCAB).flip(0)
    assert torch.equal(load(lambda t: t.update(d2t=turned - torch.arange(VOCAB))).target_ids, turned)
    for name in ("d2t", "t2d"):
        load(lambda t, name=name: t.pop(name))
    padded = load(lambda t: t.update({"lm_head.weight": torch.cat((own, own[:5]))}))
    assert torch.equal(padded.head, own)
    with pytest.raises(ConfigError, match=rf"lm_head.weight has shape \[{VOCAB - 1}, {HIDDEN}\]"):
        load(lambda t: t.update({"lm_head.weight": own[1:].clone()}))


def test_either_map_of_a_reduced_vocabulary_is_enough(build: Callable[..., Any]) -> None:
    built = build(changed("speculators", draft_vocab_size=41))
    target = Checkpoint(built.target_folder)
    both = load_weights(Checkpoint(built.draft_folder), target, built.config, dtype=torch.float32).target_ids
    assert both is not None and both.numel() == 41
    for name in ("d2t", "t2d"):
        files = edit(built.draft_folder, lambda t, name=name: t.pop(name, None))
        if name in ("d2t",):
            assert torch.equal(
                load_weights(files, target, built.config, dtype=torch.float32).target_ids, both
            )
