"""A `specbridge serve` with several ranks, seen from outside: its processes, log, metrics, what it leaves.

Owns finding them and the check that nothing outlives the stack. Does not own starting it (benchmarks.common),
nor what it is asked (equality, killed, replicas).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import common
from benchmarks.gpu import stack as rounds
from benchmarks.gpu.setup import Part
from benchmarks.soak import Watched
from benchmarks.tp.compare import Ask
from specbridge.channel import segment
from specbridge.clients import is_serving
from specbridge.explain.clients import Samples, target_info
from specbridge.rounds import TargetInfo

START_S = 300.0
PATIENCE_S = 5.0
LAST_LINES = 12


@dataclass(slots=True)
class Stack:
    """A running one. left: filled at its end with what it left behind."""

    url: str
    folder: Path
    process: Any
    left: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return found

    def pid(self, service: str) -> int | None:
        pid = self.state["pids"].get(service)
        return None if pid is None else int(pid)

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks above 0, in their order."""
        pid = self.pid("target")
        try:
            children = psutil.Process(pid).children() if pid else []
        except psutil.NoSuchProcess:
            return []
        # The launcher's resource tracker is a child, too.
        ranks = [child for child in children if any("spawn_main" in word for word in _command(child))]
        return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def samples(self, service: str) -> Samples:
        """Its /metrics now. Raises httpx.HTTPError."""
        url = str(self.state["endpoints"][f"{service} metrics"])
        return Samples.parse(httpx.get(url, timeout=10.0).text)

    @property
    def target(self) -> str:
        """Its address."""
        return f"unix:{self.folder / 'target.sock'}"

    def info(self) -> TargetInfo:
        """Raises Unavailable."""
        return asyncio.run(target_info(self.target))

    def serving(self) -> bool:
        """Whether the target is."""
        return asyncio.run(is_serving(self.target))

    def idle(self) -> dict[str, float]:
        """What sessions, pages and slots are still in use; {} if none."""
        with contextlib.closing(Watched(self.folder)) as watched:
            return watched.idle()

    def drafts(self) -> bool:
        """Whether hidden states flow, and the gateway has met the draft."""
        met = self.samples("gateway").total("specbridge_gateway_service_connected", service="draft")
        return bool(met) and self.samples("draft").total(rounds.ATTACHED) > 0


@contextlib.contextmanager
def running(*flags: str, timeout_s: float = START_S, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Start a stack, wait until it drafts (unless --no-draft), end it, and look what is left.

    Raises RuntimeError if it does not start, or does not draft; its last log lines go to stderr.
    """
    shared = shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="sb-"))
    log = folder / "log"
    processes: list[psutil.Process] = []
    stack: Stack | None = None
    try:
        with common.serve(
            f"--run-dir={folder}", *flags, start_timeout_s=max(timeout_s, 5.0), env=env, log=log
        ) as made:
            stack = Stack(made.url, folder, made.process)
            if "--no-draft" not in flags:
                until(stack.drafts, timeout_s, "the stack began to draft")
            yield stack
            processes = psutil.Process(made.process.pid).children(recursive=True)
    except SystemExit as error:
        _show_end(log)
        # Its message is a command with this machine's paths.
        raise RuntimeError("the stack did not start; its log lines say why") from error
    except BaseException:
        _show_end(log)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if stack is not None:
            stack.left = left_of(processes, shared)


def left_of(
    processes: Sequence[psutil.Process], shared: set[str], *, patience_s: float = PATIENCE_S
) -> list[str]:
    """Which of these processes still run, and what of shared memory was not there before."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    found = [f"a process: {' '.join(_command(process)[-3:])}" for process in alive]
    new = shared_memory() - shared
    if new:
        # Another stack's has its name for some milliseconds.
        time.sleep(1.0)
        new &= shared_memory()
    return found + [str(segment.FOLDER / name) for name in sorted(new)]


def shared_memory() -> set[str]:
    """Segments of the channel that have a name."""
    if not segment.FOLDER.is_dir():
        return set()
    return {path.name for path in segment.FOLDER.iterdir() if path.name.startswith(segment.PREFIX)}


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it holds; what can't be asked yet does not hold. Raises RuntimeError."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, OSError, KeyError, ValueError):
            pass  # not there yet, or just being replaced
        if time.monotonic() > end:
            raise RuntimeError(f"it did not happen within {timeout_s:.0f} s that {what}")
        time.sleep(0.2)


async def streams(
    url: str,
    asks: Sequence[Ask],
    max_tokens: int,
    *,
    speculate: bool = True,
    timeout_s: float,
    kept: Sequence[rounds.Stream] | None = None,
) -> list[rounds.Stream]:
    """All of them at once. kept: filled while they go on. Raises RuntimeError for one that breaks off."""
    kept = [rounds.Stream() for _ in asks] if kept is None else kept
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
        return list(
            await asyncio.gather(
                *(
                    rounds.one_stream(
                        client, {**ask.body(), "no_speculation": not speculate}, max_tokens, 0, stream
                    )
                    for ask, stream in zip(asks, kept, strict=True)
                )
            )
        )


def note_left(part: Part, name: str, stack: Stack) -> int:
    """Say what a stack left behind; how many things."""
    part.notes += [f"failed: {name} left {what}" for what in stack.left]
    return len(stack.left)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _show_end(log: Path) -> None:
    if log.is_file():
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        sys.stderr.write("".join(f"  {line}{os.linesep}" for line in lines))
