"""What a pass reads: weights and K/V against counts made elsewhere, and how often the context is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_target

from kernels.copy_rate import copy_rate
from target_service.model import shard
from target_service.runner import Runner, load_runner
from target_service.step import Step, visible_context
from target_service.warmup import chunk_step, scratch_step

PAGE = 4


def load(folder: Path, **changes: object) -> Runner:
    sizes = {"device": "cpu", "dtype": "float32", "num_pages": 64, "page_size": PAGE, "max_rows": 64}
    return load_runner(folder, **{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_bytes_and_products_are_the_checkpoint_s(family: str, tied: bool, tmp_path: Path) -> None:
    layers, heads, kv_heads, hidden = 3, 4, 2, 48
    make_target(
        tmp_path, family=family, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden,
        dtype=torch.float32, tie_word_embeddings=tied,
    )  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    if not tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        save_file(tensors, tmp_path / "model.safetensors")
        # Of an embedding that is not the head, too, a pass reads a row a token only.
        del tensors["model.embed_tokens.weight"]
    with load(tmp_path) as runner:
        found = runner.footprint
    width = hidden // heads
    # The norms of queries and keys are held once a head.
    repeated = (heads + kv_heads - 2) * width * layers if family == "qwen3" else 0
    assert found.weight_bytes == 4 * (sum(t.numel() for t in tensors.values()) + repeated)
    assert found.products_per_row == sum(t.numel() for t in tensors.values() if t.dim() == 2)
    assert found.kv_bytes_per_token == 2 * layers * kv_heads * width * 4
    assert found.num_kv_heads == kv_heads


@pytest.mark.model
def test_the_built_in_model_s_bytes_are_its_file_s(model_folder: Path) -> None:
    """Within 5 %: the file also has a header, the norms are held wider."""
    config = json.loads((model_folder / "config.json").read_text())
    with load_runner(
        model_folder, device="cpu", dtype="auto", num_pages=2, page_size=16, max_rows=8
    ) as runner:
        found, item = runner.footprint, runner.activation_dtype.itemsize
    size = (model_folder / "model.safetensors").stat().st_size
    assert found.weight_bytes == pytest.approx(size, rel=0.05)
    assert found.products_per_row * 2 == pytest.approx(size, rel=0.05)
    head = config["hidden_size"] // config["num_attention_heads"]
    row = config["num_hidden_layers"] * config["num_key_value_heads"] * head
    assert found.kv_bytes_per_token == 2 * row * item


def tree(rows: int, context: int, pages: tuple[int, ...]) -> Step:
    step = scratch_step(rows, context, PAGE)
    [segment] = step.segments
    return replace(step, segments=(replace(segment, pages=pages),))


def test_a_verify_pass_reads_its_context_once_wherever_it_lies(tmp_path: Path) -> None:
    make_target(tmp_path, layers=2)
    with load(tmp_path) as runner, torch.inference_mode():
        for rows in (1, 6, 40):
            output = runner.run(tree(rows, 37, tuple(range(10))))
            assert (output.context_rows, output.context_rows_read) == (37, 37)
            assert output.context_rows_copied == 0
        # Pages here and there are put together first.
        output = runner.run(tree(6, 37, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18)))
        assert (output.context_rows, output.context_rows_read) == (37, 37)
        assert output.context_rows_copied == 37


def test_on_a_gpu_each_tile_of_rows_and_heads_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same step's device pass, whose ops have references here; tiles are those of the kernels."""
    make_target(tmp_path, layers=2, heads=4, kv_heads=2, dtype=torch.float32)
    monkeypatch.setattr(shard, "uses_kernels", lambda device, dtype: True)
    with load(tmp_path) as runner, torch.inference_mode():
        # fp32: 16 or 32 rows x heads a tile; two query heads share a key/value head.
        for rows, times in ((1, 1), (8, 1), (40, 3)):
            output = runner.run(tree(rows, 37, tuple(range(10))))
            assert (output.context_rows, output.context_rows_read) == (37, 37 * times)


def test_a_prompt_s_chunks_are_not_counted(tmp_path: Path) -> None:
    make_target(tmp_path, layers=2)
    with load(tmp_path) as runner, torch.inference_mode():
        output = runner.run(chunk_step(3, 8, PAGE))
    assert (output.context_rows, output.context_rows_read) == (0, 0)


def test_a_sliding_window_bounds_what_is_read(tmp_path: Path) -> None:
    # One layer of three sees everything, two the last 5 positions.
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    make_target(tmp_path, family="qwen2", layers=3, **window)
    with load(tmp_path) as runner, torch.inference_mode():
        output = runner.run(tree(1, 20, tuple(range(5))))
    assert output.context_rows == output.context_rows_read == pytest.approx((20 + 4 + 4) / 3)
    assert visible_context(3, {None: 1, 5: 2}) == 3


def test_the_copy_rate_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.copy_rate as module

    monkeypatch.setattr(module, "_on_host", lambda source, target, count: 0.5)
    assert copy_rate("cpu", block_bytes=1 << 16) == 4 * (1 << 16)
    monkeypatch.undo()
    assert copy_rate("cpu", block_bytes=1 << 16) > 0

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty_like", full)
    assert copy_rate("cpu", block_bytes=1 << 16) == 0
