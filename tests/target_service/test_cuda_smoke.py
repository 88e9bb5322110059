"""The same tiny models on a GPU as on the CPU: prefill, tree, commit, taps; two GPUs over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models as tm
import torch

from target_service.runner import load_runner
from target_service.step import StepOutput

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def walk(folder: Path, device: str, dtype: str, tp: int = 1) -> list[StepOutput]:
    """Two sessions: chunked prefill, a tree each, a commit, one more row."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, tm.VOCAB, (count,), generator=generator).tolist()

    with load_runner(
        folder, device=device, dtype=dtype, tp=tp, num_pages=32, page_size=tm.PAGE, max_rows=64
    ) as runner:
        runner.set_taps((0, runner.config.num_layers - 1), normed_last_layer=True)
        first, second = tm.pages_for(40), tm.pages_for(40, 12)
        outputs = tm.feed(runner, ids(19), first, chunks=(8,))
        outputs += tm.feed(runner, ids(5), second)
        parents = (-1, 0, 0, 1, 2, 2, 4)
        wide = tm.accepted_tree(runner, ids(7), parents, 19, first, [0, 2, 4])
        narrow = tm.accepted_tree(runner, ids(3), (-1, 0, 1), 5, second, [0])
        step = tm.tree_step([(wide, parents, 19, first), (narrow, (-1, 0, 1), 5, second)], commit=True)
        outputs.append(tm.kept(runner.run(step)))
        step = tm.tree_step([(ids(1), (-1,), 22, first), (ids(1), (-1,), 6, second)])
        outputs.append(tm.kept(runner.run(step)))
        return [StepOutput(o.logits.cpu(), None if o.taps is None else o.taps.cpu()) for o in outputs]


@pytest.fixture(scope="module", params=["llama-llama3-rope", "mistral-window", "qwen2-window", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tm.build(request.param, path)
    return path


def compare(got: list[StepOutput], expected: list[StepOutput], atol: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, atol=atol, rtol=1e-3)
        assert ours.taps is not None and theirs.taps is not None
        torch.testing.assert_close(ours.taps.float(), theirs.taps.float(), atol=atol, rtol=1e-3)


@pytest.mark.parametrize("dtype,atol", [("float32", 1e-3), ("float64", 1e-4)])
def test_cuda_equals_cpu(folder: Path, dtype: str, atol: float) -> None:
    compare(walk(folder, "cuda", dtype), walk(folder, "cpu", dtype), atol)


def test_bfloat16_runs_and_is_near(folder: Path) -> None:
    got, expected = walk(folder, "cuda", "bfloat16"), walk(folder, "cpu", "float32")
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logits.dtype == torch.float32
        assert (ours.logits - theirs.logits).abs().max() < 0.15 * theirs.logits.abs().max()


@pytest.mark.multi_gpu
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    tm.build("llama-2kv-of-8", tmp_path)
    compare(walk(tmp_path, "cuda", "float32", tp=2), walk(tmp_path, "cpu", "float32"), 1e-3)
