"""The room that `serve` has the target leave for a draft on the same GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbridge import room
from specbridge.serve import plan, serve_settings
from specbridge.settings import load

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("target", "ranks", "draft", "meet"),
    [
        ("auto", 1, "auto", True),
        ("cuda", 1, "cuda:0", True),
        ("cuda:1", 2, "cuda:2", True),
        ("cuda:1", 2, "cuda", False),
        ("cuda:0", 2, "cuda:2", False),
        ("cpu", 1, "cuda", False),
        ("cuda", 1, "cpu", False),
    ],
)
def test_who_meets_on_one_gpu(target: str, ranks: int, draft: str, meet: bool) -> None:
    assert room.shares_gpu(target, ranks, draft) is meet


def test_the_estimate_of_a_known_drafter() -> None:
    """Qwen3-8B's drafter: 5 layers of 192 M, fc, embedding and head, 64 Ki tokens of 20 KiB."""
    from specbridge.checkpoint import config_files

    folder = CONFIGS / "qwen3-8b"
    files = [config_files(place).model for place in (folder / "dflash", folder)]
    parameters = 5 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 5 * 4096**2 + 2 * 151936 * 4096
    least = (2 * parameters + 65536 * 5 * 2 * 1024 * 2) / GIB
    guess = room.draft_gib(*files)
    assert least + room.PROCESS_GIB <= guess < least + room.PROCESS_GIB + 0.5
    assert room.draft_gib(*files, dtype="float32") > 1.8 * least
    assert room.draft_gib(*files, kv_tokens=1024) < guess


def reserve(**options: object) -> str | None:
    settings = load(serve_settings(), **options)
    target = plan(settings, Path("/tmp")).services[0]
    found = [word for word in target.command if word.startswith("--gpu-reserve")]
    return found[0].partition("=")[2] if found else None


def test_serve_promises_the_draft_its_room() -> None:
    dummy = {"load_format": "dummy", "target": str(CONFIGS / "qwen3-8b")}
    assert 5 < float(reserve(**dummy) or 0) < 10
    assert reserve(**dummy, gpu_reserve="3") == "3.0"
    assert reserve(**dummy, draft_device="cuda:1") in (None, "0.0")
    assert reserve(**dummy, no_draft=True) is None


def test_a_drafter_that_is_not_here_yet_gets_a_guess(tmp_path: Path) -> None:
    assert reserve(target="somebody/some-model", draft="somebody/some-drafter") == str(room.UNKNOWN_GIB)
