"""Weights without a checkpoint: a rank makes its share only, the numbers are sensible and depend on names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch

from specbridge.errors import ConfigError
from specbridge.models import config_name, resolve_config
from target_service.config import TargetSettings
from target_service.model.config import ModelConfig
from target_service.parallel import Span
from target_service.runner import load_runner
from target_service.weight_sources import LoadFormat, RandomSource, open_weights, weights_fingerprint
from target_service.weights import Placement, load_weights

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 203,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
CPU = torch.device("cpu")


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_its_share_and_no_more(size: int, tied: bool) -> None:
    config = ModelConfig.from_dict({**CONFIG, "tie_word_embeddings": tied})
    made = []
    source = RandomSource(torch.float32, CPU)

    class Watched(RandomSource):
        def _make(self, name: str, part: Span | None, shape: tuple[int, ...], *, dim: int) -> torch.Tensor:
            made.append(source._make(name, part, shape, dim=dim))
            return made[-1]

    for rank in range(size):
        made.clear()
        placement = Placement(rank, size, torch.float32, CPU)
        weights = load_weights(Watched(torch.float32, CPU), config, placement)
        head_rows = -(-203 // size)
        assert weights.head.out_features == head_rows
        assert weights.heads.query == 8 // size and weights.heads.key_value == max(2 // size, 1)
        layer = weights.layers[0]
        kv = weights.heads.key_value
        assert (layer.qkv.out_features, layer.qkv.in_features) == ((8 // size + 2 * kv) * 16, 64)
        assert (layer.output.out_features, layer.output.in_features) == (64, 8 // size * 16)
        assert (layer.down.out_features, layer.down.in_features) == (64, 96 // size)
        own = sum(tensor.numel() for tensor in made)
        vocabulary = (1 if tied else 2) * 203 * 64
        matrices = 2 * ((8 // size + 2 * kv) * 16 * 64 + 8 // size * 16 * 64 + 3 * 64 * 96 // size)
        assert own <= vocabulary // size + 2 * 64 + matrices + 2 * (2 * 64 + 2 * 16) + 64


def test_numbers_depend_on_name_and_part_only() -> None:
    first, second = RandomSource(torch.float32, CPU), RandomSource(torch.float32, CPU)
    name = "model.layers.0.self_attn.k_proj.weight"
    part = Span(0, 16)
    assert torch.equal(first.rows(name, part, (32, 64)), second.rows(name, part, (32, 64)))
    assert not torch.equal(first.rows(name, part, (32, 64)), first.rows(name, Span(16, 32), (32, 64)))
    assert not torch.equal(first.rows("other", part, (32, 64)), first.rows(name, part, (32, 64)))


@pytest.mark.parametrize("family", ["qwen3", "llama-biases", "qwen2", "mistral-window"])
def test_a_forward_stays_in_range(tmp_path: Path, family: str) -> None:
    """Activations as large as a trained model's: logits neither flat nor huge."""
    architecture, settings = tm.MODELS[family]
    changes = {**tm._COMMON, **settings, "hidden_size": 128, "num_hidden_layers": 12}
    changes["architectures"] = [f"{architecture}ForCausalLM"]
    folder = write(tmp_path / "m", **{k: v for k, v in changes.items() if v is not None})
    with load_runner(
        folder, device="cpu", dtype="float32", num_pages=4, page_size=4, max_rows=8, load_format="dummy"
    ) as runner:
        output = runner.run(tm.chain_step([1, 2, 3, 4], 0, (0,)))
        assert bool(output.logits.isfinite().all())
        assert 0.3 < float(output.logits.std()) < 3.0
        assert runner.fingerprint


def test_the_fingerprint_is_the_configuration_s(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a"), write(tmp_path / "b", _name_or_path="elsewhere")
    other = write(tmp_path / "c", rope_theta=5.0)
    prints = [weights_fingerprint(folder, "dummy") for folder in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert weights_fingerprint(one / "config.json", "dummy") == prints[0]


def test_a_configuration_may_be_a_file_of_any_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "shape")
    (folder / "other.json").write_text((folder / "config.json").read_text())
    assert ModelConfig.from_folder(resolve_config(str(folder / "other.json"), "--config")).vocab_size == 203
    assert config_name(folder) == config_name(folder / "config.json") == "shape-dummy"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config '/nowhere/x' is no file .*benchmarks/conf"):
        resolve_config("/nowhere/x", "--config")
    with pytest.raises(ConfigError, match="is a folder without config.json"):
        resolve_config(str(tmp_path), "--target")
    with pytest.raises(ConfigError, match="has no \\*.safetensors file"):
        weights_fingerprint(write(tmp_path / "bare"), "auto")


def test_a_configuration_without_dummy_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="is read with load_format dummy only"):
        TargetSettings(config="benchmarks/configs/qwen3-8b")


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "qwen3-32b", "llama-3-70b", "smollm2-135m"])
def test_shipped_configurations_parse_and_fit_each_other(name: str) -> None:
    from draft_service.drafter_config import TargetFacts, build_target_layer_ids
    from draft_service.drafter_layouts import parse_config

    folder = Path(__file__).parents[2] / "benchmarks" / "configs" / name
    config = ModelConfig.from_folder(folder)
    raw = json.loads((folder / "config.json").read_text())
    drafter = parse_config(json.loads((folder / "dflash" / "config.json").read_text()), TargetFacts.read(raw))
    assert drafter.num_layers == 5 and drafter.block_size == 16
    assert drafter.target_layer_ids == build_target_layer_ids(config.num_layers, 5)
    assert drafter.head_dim == config.head_dim and drafter.num_kv_heads == config.num_kv_heads
    expected = {"qwen3-4b": 4.02e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.76e9, "llama-3-70b": 70.55e9,
                "smollm2-135m": 134.5e6}[name]  # fmt: skip
    assert weights_of(config) == pytest.approx(expected, rel=0.005)


def weights_of(config: ModelConfig) -> int:
    hidden, dim = config.hidden_size, config.head_dim
    attention = hidden * dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_rank_reads_or_makes_its_own_share_only(
    load_format: LoadFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements that pass through the source, rank by rank: their sum is the model, norms on every rank."""
    theirs = tm.build("llama-8kv", tmp_path, vocab_size=104, intermediate_size=64)
    config = ModelConfig.from_folder(tmp_path)
    whole = sum(p.numel() for p in theirs.parameters())
    norms = sum(p.numel() for name, p in theirs.named_parameters() if "norm" in name)
    taken = []
    for rank in range(4):
        place = Placement(rank, 4, torch.float32, torch.device("cpu"))
        with open_weights(tmp_path, load_format, dtype=torch.float32, device=place.device) as source:
            seen = 0

            def counted(kind: str, source: Any = source) -> Any:
                original = getattr(source, kind)

                def call(*args: Any) -> torch.Tensor:
                    nonlocal seen
                    part = original(*args)
                    seen += part.numel()
                    return part

                return call

            monkeypatch.setattr(source, "rows", counted("rows"))
            monkeypatch.setattr(source, "columns", counted("columns"))
            load_weights(source, config, place)
        taken.append(seen)
    assert taken == [(whole - norms) // 4 + norms] * 4
