"""`specbridge serve` as a process of its own, for end-to-end tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

REPO = Path(__file__).resolve().parents[2]


@dataclass
class RunningStack:
    """A started stack; `folder` holds its sockets, stack.json and log."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def state(self) -> dict[str, dict[str, object]]:
        return json.loads((self.folder / "stack.json").read_text())

    @property
    def url(self) -> str:
        return str(self.state["endpoints"]["rest"]).removesuffix("/v1")

    @property
    def grpc(self) -> str:
        return str(self.state["endpoints"]["grpc"])

    def socket(self, service: str) -> str:
        return f"unix:{self.folder / service}.sock"

    def kill(self, service: str) -> int:
        """kill -9 one service; returns the pid it had."""
        pid = int(str(self.state["pids"][service]))
        os.kill(pid, signal.SIGKILL)
        return pid

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def metrics(self, service: str) -> dict[str, float]:
        """All samples of a service's /metrics: 'name{labels}' → value."""
        text = httpx.get(str(self.state["endpoints"][f"{service} metrics"]), timeout=10).text
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def draft_connected(self) -> bool:
        """Whether the gateway has a stream to the draft."""
        samples = self.metrics("gateway")
        return any(v for k, v in samples.items() if k.endswith('service_connected{service="draft"}'))

    def total(self, service: str, name: str) -> float:
        """Sum of a metric over its labels."""
        pattern = re.compile(re.escape(name) + r"(\{.*\})?$")
        return sum(value for key, value in self.metrics(service).items() if pattern.match(key))


def wait_for(condition, timeout_s: float, what: str) -> None:  # type: ignore[no-untyped-def]
    """Poll until condition() is true; a failure says what did not happen."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    pause = 0.05
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, FileNotFoundError, KeyError, json.JSONDecodeError):
            last = condition()
            if last:
                return
        time.sleep(pause)
        pause = min(1.1 * pause, 0.5)  # a look at /metrics costs the stack milliseconds
    raise AssertionError(f"{what} did not happen within {timeout_s} s (last value {last!r})")


@contextmanager
def running_stack(*flags: str, timeout_s: float = 120.0) -> Iterator[RunningStack]:
    """Start `specbridge serve` on free ports and stop it with SIGTERM; its log is printed if a test fails."""
    with tempfile.TemporaryDirectory(prefix="sb-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "specbridge.cli", "serve", "--http-port=0", "--grpc-port=0"]
        command += [f"--run-dir={folder}", *flags]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=subprocess.STDOUT)
        stack = RunningStack(folder, process)

        def healthy() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"serve ended with {process.returncode}:\n{stack.log()}")
            return httpx.get(f"{stack.url}/health", timeout=5).status_code == 200

        try:
            wait_for(healthy, timeout_s, "/health 200")
            if "--no-draft" not in flags:  # health does not wait for it: streams go without
                wait_for(stack.draft_connected, timeout_s, "a stream to the draft")
            yield stack
        except BaseException:
            print(stack.log()[-8000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
