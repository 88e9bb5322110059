"""Reading model folders: values against safetensors' own writer, damage of every kind named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specbridge.checkpoint import BIGRAMS_FILE, INDEX_NAME, VOCABULARY_FILE, Checkpoint
from specbridge.errors import ConfigError

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "b.weight": torch.arange(30, dtype=torch.bfloat16).reshape(5, 3, 2),
    "b.bias": torch.ones(7, dtype=torch.float16),
}


def write(
    folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, *, shards: int = 1, config: object = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_tensors_come_back_as_written(tmp_path: Path, shards: int) -> None:
    with Checkpoint(write(tmp_path, shards=shards)) as checkpoint:
        assert checkpoint.names() == tuple(sorted(TENSORS))
        assert checkpoint.config == {"model_type": "llama"}
        for name, tensor in TENSORS.items():
            assert name in checkpoint and checkpoint.shape(name) == tuple(tensor.shape)
            got = checkpoint.get(name)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor)


def test_slices_of_every_dimension(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path))
    whole = TENSORS["b.weight"]
    for dim in (-1, 0, 1, 2):
        for start in range(whole.shape[dim]):
            for stop in range(start, whole.shape[dim] + 1):
                got = checkpoint.get_slice("b.weight", dim, start, stop)
                assert got.is_contiguous() and torch.equal(got, whole.narrow(dim, start, stop - start))
    for dim, start, stop in ((0, 0, 6), (0, -1, 2), (0, 3, 2), (3, 0, 1)):
        with pytest.raises(ConfigError, match="has no range"):
            checkpoint.get_slice("b.weight", dim, start, stop)


def test_missing_tensor_names_similar_ones(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path))
    assert "x.bias" not in checkpoint
    with pytest.raises(ConfigError, match=r"no tensor 'model.b.bias' \(similar: b.bias\)"):
        checkpoint.get("model.b.bias")


def test_fingerprint_follows_weights_and_config_but_not_provenance(tmp_path: Path) -> None:
    def print_of(name: str, tensors: dict[str, torch.Tensor] = TENSORS, config: object = None) -> str:
        return Checkpoint(write(tmp_path / name, tensors, config=config)).fingerprint()

    same = print_of("one")
    assert same == print_of("two") and len(same) == 32
    changed = {**TENSORS, "a.weight": TENSORS["a.weight"] + 1}
    assert print_of("weights", changed) != same
    assert print_of("config", config={"model_type": "qwen2"}) != same
    assert (
        print_of("origin", config={"model_type": "llama", "_name_or_path": "x", "transformers_version": "5"})
        == same
    )


def test_fingerprint_sees_a_change_in_any_tensor_of_a_large_file(tmp_path: Path) -> None:
    big = {f"layer{i}": torch.zeros(4096) for i in range(8)}
    prints = {Checkpoint(write(tmp_path / "base", big)).fingerprint()}
    for i in range(8):
        touched = {**big, f"layer{i}": big[f"layer{i}"] + 1e-3}
        prints.add(Checkpoint(write(tmp_path / f"layer{i}", touched)).fingerprint())
    assert len(prints) == 9


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.joinpath("config.json").unlink(), "config.json is missing"),
        (lambda f: f.joinpath("config.json").write_text("{"), "does not parse as JSON"),
        (lambda f: f.joinpath("config.json").write_text("[]"), "holds list"),
        (lambda f: f.joinpath("model.safetensors").unlink(), "has no .*safetensors file"),
        (
            lambda f: f.joinpath("model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin, which is not read",
        ),
        (lambda f: truncate(f / "model.safetensors", 30), "not a whole safetensors file"),
        (lambda f: truncate(f / "model.safetensors", -8), "ends at byte"),
        (lambda f: truncate(f / "model.safetensors", 4), "not a whole safetensors file"),
        (
            lambda f: f.joinpath("model.safetensors").write_bytes(b"\x04" + bytes(7) + b"nope"),
            "header does not parse",
        ),
        (lambda f: save_file({"a.weight": torch.ones(1)}, f / "other.safetensors"), "'a.weight' twice"),
        (
            lambda f: f.joinpath(INDEX_NAME).write_text('{"weight_map": {"a.weight": "gone.safetensors"}}'),
            "are missing: gone",
        ),
        (
            lambda f: f.joinpath(INDEX_NAME).write_text('{"weight_map": {"q": "model.safetensors"}}'),
            "does not hold it",
        ),
        (
            lambda f: f.joinpath(INDEX_NAME).write_text('{"weight_map": {"q": "../x.safetensors"}}'),
            "outside its folder",
        ),
        (lambda f: f.joinpath(INDEX_NAME).write_text("{}"), "no weight_map"),
    ],
)
def test_damage_is_a_config_error_that_names_it(tmp_path: Path, damage: object, message: str) -> None:
    folder = write(tmp_path)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("table", [BIGRAMS_FILE, VOCABULARY_FILE])
def test_tables_beside_a_drafter_are_not_its_checkpoint(tmp_path: Path, table: str) -> None:
    plain = Checkpoint(write(tmp_path)).fingerprint()
    for content in (b"", b"half a fi"):
        (tmp_path / table).write_bytes(content)
        assert Checkpoint(tmp_path).names() == tuple(sorted(TENSORS))
        assert Checkpoint(tmp_path).fingerprint() == plain
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no .*safetensors file"):
        Checkpoint(tmp_path)


def truncate(path: Path, size: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:size])


def test_missing_folder() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Checkpoint("/nowhere/at/all")


def test_opening_loads_no_torch(tmp_path: Path) -> None:
    folder = write(tmp_path)
    code = (
        "import sys; from specbridge.checkpoint import Checkpoint; "
        f"c = Checkpoint({str(folder)!r}); c.fingerprint(); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )
