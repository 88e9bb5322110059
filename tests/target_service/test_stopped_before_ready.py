"""SIGTERM before a target is ready, wherever it is: it ends, and so do its ranks."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest
import tiny
import torch

STUCK = """
import multiprocessing, sys, threading
from specbridge.cli import main
from target_service import {module}

real = {module}.{name}

def stuck(*args, **more):
    {before}
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    threading.Event().wait()

{module}.{name} = stuck
sys.exit(main(["target", *sys.argv[1:]]))
"""
"""A target that gets no further than the call of one function, and tells its ranks then."""

RANKS_LOAD = STUCK.format(module="worker", name="WorkerPool._collect", before="real(*args, **more)")
RANKS_START = STUCK.format(module="worker", name="WorkerPool._collect", before="pass")
WARM_UP = STUCK.format(module="engine", name="measure_verify_cost", before="pass")
LOADS = STUCK.format(module="loading", name="load_runner", before="pass")


@pytest.mark.parametrize(
    ("code", "tp"), [(LOADS, 1), (RANKS_START, 2), (RANKS_LOAD, 2), (WARM_UP, 1), (WARM_UP, 2)],
    ids=["loading", "ranks starting", "ranks loading", "warm-up", "warm-up of ranks"],
)  # fmt: skip
async def test_sigterm_before_it_is_ready_ends_it_and_its_ranks(code: str, tp: int, tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "model", dtype=torch.float32)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "--target", str(folder), "--listen", f"unix:{tmp_path}/target.sock"),
        *("--device", "cpu", "--tp", str(tp), "--metrics-port", "-1"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    ranks: list[int] = []
    try:
        assert process.stdout is not None
        ranks = [int(word) for word in (await asyncio.wait_for(process.stdout.readline(), 120)).split()]
        assert len(ranks) == tp - 1
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
        assert not any(psutil.pid_exists(rank) for rank in ranks)
    finally:
        if process.returncode is None:
            process.kill()
        for rank in filter(psutil.pid_exists, ranks):
            psutil.Process(rank).kill()
        _, log = await process.communicate()
    assert b"before it was ready" in log, log.decode()
    # Ranks that were ended are no failure.
    assert b"Traceback" not in log and b"died" not in log and b" ERROR " not in log, log.decode()
