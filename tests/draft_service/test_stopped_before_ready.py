"""SIGTERM before a draft is ready: it ends at once, as a target does."""

from __future__ import annotations

from pathlib import Path

import pytest
from stuck_service import ends_by_sigterm, stuck
from tiny import make_drafter, make_target

LOADS = stuck("draft", "draft_service.server", "load_engine")
WARM_UP = stuck("draft", "draft_service.proposer", "Proposer.measure")


@pytest.mark.parametrize("code", [LOADS, WARM_UP], ids=["loading", "warm-up"])
async def test_sigterm_before_it_is_ready_ends_it(code: str, tmp_path: Path) -> None:
    target, drafter = make_target(tmp_path / "target"), make_drafter(tmp_path / "draft")
    await ends_by_sigterm(
        code, "--target", str(target), "--draft", str(drafter), "--device", "cpu", "--metrics-port", "-1",
        "--listen", f"unix:{tmp_path}/draft.sock", "--target-address", f"unix:{tmp_path}/target.sock",
    )  # fmt: skip
