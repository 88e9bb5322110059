"""config.json → ModelConfig: defaults, both generations of keys, and what is refused and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from safetensors.torch import load_file, save_file

from specbridge.errors import ConfigError
from target_service.model.config import ModelConfig
from target_service.runner import load_runner

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    merged = {**BASE, **changes}
    return ModelConfig.from_dict({k: v for k, v in merged.items() if v != "absent"}, generation)


def test_old_and_new_keys_say_the_same() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = parse(rope_theta=5e5, rope_scaling=scaling)
    new = parse(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        torch_dtype="absent",
        dtype="bfloat16",
    )
    assert (old.rope_theta, old.dtype, old.max_position_embeddings) == (5e5, torch.bfloat16, 256)
    assert (new.rope_theta, new.dtype, new.max_position_embeddings) == (5e5, torch.bfloat16, 256)


def test_lengths_served() -> None:
    llama3 = {**tm.LLAMA3, "rope_theta": 5e5}
    assert parse(rope_parameters=llama3).max_position_embeddings == 128
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(rope_scaling=yarn).max_position_embeddings == 256


def test_eos_ids_come_from_the_generation_config_first() -> None:
    assert parse().eos_token_ids == (7,)
    assert parse({"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert parse(eos_token_id=None).eos_token_ids == ()


def test_windows_follow_the_family() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert parse(**mistral).windows == (4096,) * 4  # transformers' default where the key is absent
    assert parse(**mistral, sliding_window=None).windows == (None,) * 4
    assert parse(**qwen, sliding_window=9).windows == (None,) * 4
    switched = {"use_sliding_window": True, "sliding_window": 9}
    assert parse(**qwen, **switched, max_window_layers=3).windows == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(**qwen, **switched, layer_types=kinds).windows == (9, None, 9, None)


def test_biases_and_norms_follow_the_family() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], head_dim=16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias


def test_family_from_model_type_alone() -> None:
    assert parse(architectures=None, model_type="qwen3").architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel .*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"'longrope' .*default, linear, llama3, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rule"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"hidden_size": "absent"}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn.*bfloat16"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked"] * 4,
            },
            "chunked",
        ),
    ],
    ids=str,
)
def test_what_is_refused_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tm.build("llama", path)
    return path


def rewrite(source: Path, target: Path, change: Any) -> Path:
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c, t: t.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (lambda c, t: c.update(intermediate_size=60), r"\[52, 32\].*\[60, 32\]"),
        (lambda c, t: c.update(num_hidden_layers=2), "does not use .*layers.2"),
        (lambda c, t: c.update(attention_bias=True), "no tensor .*bias"),
        (
            lambda c, t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "q_proj.bias",
        ),
        (lambda c, t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}), "stored as I8"),
    ],
    ids=["missing", "shape", "extra-layer", "no-bias", "extra-bias", "int8"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, change: Any, message: str
) -> None:
    rewrite(folder, tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load_runner(tmp_path, device="cpu", num_pages=4, max_rows=4)


def test_sharded_checkpoints_load_alike(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    model = tm.build("qwen2", whole)
    model.save_pretrained(split, max_shard_size="10KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    logits = []
    for path in (whole, split):
        with load_runner(path, device="cpu", num_pages=4, page_size=4, max_rows=8) as runner:
            logits.append(runner.run(tm.chain_step([1, 2, 3], 0, ())).logits)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"device": "tpu"}, "--device tpu is not known"),
        ({"device": "meta"}, "--device meta is not known"),
        ({"dtype": "int8"}, "'int8'"),
        ({"tp": 0}, "tp is 0"),
        ({"num_pages": 0}, "num_pages is 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runner(folder, **{"device": "cpu", "num_pages": 4, "max_rows": 4, **settings})


def test_fingerprint_tells_weights_and_dtype_apart(folder: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    rewrite(folder, tmp_path, change)
    seen = set()
    for path, dtype in ((folder, "float32"), (folder, "float64"), (tmp_path, "float32"), (folder, "float32")):
        with load_runner(path, device="cpu", dtype=dtype, num_pages=4, max_rows=4) as runner:
            seen.add(runner.fingerprint)
    assert len(seen) == 3


def test_steps_that_break_the_rules_are_refused(folder: Path) -> None:
    from specbridge.errors import InternalError, InvalidRequest, Unavailable

    runner = load_runner(folder, device="cpu", num_pages=4, page_size=4, max_rows=4)
    with pytest.raises(InternalError, match="5 rows"):
        runner.run(tm.chain_step([1] * 5, 0, ()))
    step = tm.chain_step([1, 2], 0, ())
    with pytest.raises(InternalError, match="2 rows with 1 slots"):
        runner.run(replace(step, slots=torch.tensor([0])))
    runner.set_taps((0,), normed_last_layer=False)
    with pytest.raises(InternalError, match="ring of rows of 7"):
        runner.set_ring(torch.zeros(4, 7))
    with pytest.raises(InvalidRequest, match="layer id 3"):
        runner.set_taps((3,), normed_last_layer=False)
    runner.close()
    runner.close()
    with pytest.raises(Unavailable, match="closed"):
        runner.run(tm.chain_step([1], 0, ()))
