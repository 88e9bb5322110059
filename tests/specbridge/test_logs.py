"""Log lines: one format in every process, and the request's id on what is done for a request."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from specbridge.logs import configure_logging, request_id

ROOT = Path(__file__).parents[2]


def test_lines_carry_service_and_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as a new process has it
    level = root.level
    configure_logging("info", "draft")
    log = logging.getLogger("some.module")

    async def serve(name: str) -> None:
        request_id.set(name)
        await asyncio.sleep(0.01)
        log.info("work for %s", name)

    async def main() -> None:
        log.info("no request")
        await asyncio.gather(asyncio.create_task(serve("r-1")), asyncio.create_task(serve("r-2")))

    asyncio.run(main())
    log.debug("below the level")
    root.setLevel(level)
    lines = [re.sub(r"^[\d-]+ [\d:,]+ ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "INFO draft some.module: no request",
        "INFO draft some.module [r-1]: work for r-1",
        "INFO draft some.module [r-2]: work for r-2",
    ]


def test_a_process_that_logs_already_is_left_alone() -> None:
    before = logging.getLogger().handlers[:]
    configure_logging("debug", "target")
    assert logging.getLogger().handlers == before


def test_the_format_is_in_one_place() -> None:
    packages = ("specbridge", "target_service", "draft_service", "gateway")
    found = [
        path.name
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "basicConfig" in path.read_text() or "asctime" in path.read_text()
    ]
    assert found == ["logs.py"]
