"""The fixed budget's rows that `specbridge serve` takes where the target runs on a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config import GatewaySettings
from specbridge import fixed_rows
from specbridge.errors import ConfigError
from specbridge.serve import plan, serve_settings
from specbridge.settings import load

DUMMY = {"load_format": "dummy", "target": str(Path(__file__).parents[2] / "benchmarks/configs/qwen3-8b")}


def rows(**options: Any) -> tuple[int, int]:
    """--tree-budget and --max-verify-rows that the gateway of such a stack has."""
    made = plan(load(serve_settings(), **DUMMY, **options), Path("/tmp"))
    words = next(s.command for s in made.services if s.name == "gateway")
    given = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--") and "=" in word)
    own = GatewaySettings.model_fields
    return tuple(
        int(given.get(n, own[n.replace("-", "_")].default)) for n in ("tree-budget", "max-verify-rows")
    )  # type: ignore[return-value]


def test_on_a_gpu_there_are_more_rows_than_on_two_cores() -> None:
    assert rows(device="cpu") == (5, 12)
    on_gpu = fixed_rows.ON_GPU
    assert rows(device="cuda:1") == (on_gpu.tree_budget, on_gpu.max_verify_rows) == (16, 264)
    # Where the target is, not the draft.
    assert rows(device="cuda", target_device="cpu") == (5, 12)


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(device="cuda", tree_budget="8") == (8, 264)
    assert rows(device="cuda", max_tree_nodes="7") == (7, 264)
    assert rows(device="cuda", budget="cost") == (5, 12)  # goes by neither
    monkeypatch.setenv("SPECBRIDGE_MAX_VERIFY_ROWS", "99")
    assert rows(device="cuda") == (16, 99)


def test_combinations_are_checked_with_them() -> None:
    rows(device="cuda", min_tree="10")
    with pytest.raises(ConfigError, match="--min-tree 10 is above --tree-budget 5"):
        rows(device="cpu", min_tree="10")


@pytest.mark.parametrize(("init", "count", "there"), [(0, 2, True), (0, 0, False), (100, 1, False)])
def test_auto_asks_the_driver(monkeypatch: pytest.MonkeyPatch, init: int, count: int, there: bool) -> None:
    def devices(found: Any) -> int:
        found._obj.value = count
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=devices)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    for version, can in (("2.13.0", True), ("2.11.0+cu130", True), ("2.13.0+cpu", False)):
        monkeypatch.setattr(fixed_rows.metadata, "version", lambda name, version=version: version)
        assert fixed_rows.runs_on_gpu("auto") is (there and can)


def test_auto_without_a_driver_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(fixed_rows.metadata, "version", lambda name: "2.13.0")
    assert not fixed_rows.runs_on_gpu("auto")
