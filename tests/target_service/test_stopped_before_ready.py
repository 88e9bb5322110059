"""SIGTERM before a target is ready, wherever it is: it ends, and so do its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from stuck_service import ends_by_sigterm, stuck

LOADS = stuck("target", "target_service.loading", "load_runner")
RANKS_START = stuck("target", "target_service.worker", "WorkerPool._collect")
RANKS_LOAD = stuck("target", "target_service.worker", "WorkerPool._collect", first=True)
WARM_UP = stuck("target", "target_service.engine", "measure_verify_cost")


@pytest.mark.parametrize(
    ("code", "tp"), [(LOADS, 1), (RANKS_START, 2), (RANKS_LOAD, 2), (WARM_UP, 1), (WARM_UP, 2)],
    ids=["loading", "ranks starting", "ranks loading", "warm-up", "warm-up of ranks"],
)  # fmt: skip
async def test_sigterm_before_it_is_ready_ends_it_and_its_ranks(code: str, tp: int, tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "model", dtype=torch.float32)
    await ends_by_sigterm(
        code, "--target", str(folder), "--listen", f"unix:{tmp_path}/target.sock",
        "--device", "cpu", "--tp", str(tp), "--metrics-port", "-1", children=tp - 1,
    )  # fmt: skip
