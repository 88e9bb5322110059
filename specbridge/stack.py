"""The one-machine supervisor: starts target, draft and gateway as processes, watches and restarts them.

Owns: the folder of their sockets, their start, logs, restarts and orderly end. Does not own: what flags mean
and which service gets which (specbridge.serve), threads inside a process (specbridge.process), judging a
process's health (specbridge.watch).

How the end of a process is met: before it ever served, the stack ends and shows its last log lines; later it
is started again after a growing pause; too often in a row, without a calm period between, ends the stack.
Exit code 2 (a setting that can't work) is never retried. A process that lives but hangs (its health check
stays unanswered, or says NOT_SERVING, for too long) is killed, and so started again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbridge import process
from specbridge.clients import Joined
from specbridge.errors import ConfigError, Unavailable
from specbridge.settings import child_environment
from specbridge.watch import until_hung, until_serving

log = logging.getLogger(__name__)

CONFIG_EXIT_CODE = 2
LAST_LINES = 20
ABANDON_S, JOIN_S, REAP_S = 2.0, 15.0, 2.0
# A socket's path must fit the kernel's 108 bytes, with room for the longest name.
MAX_SOCKET_FOLDER = 80


@dataclass(frozen=True, slots=True)
class Limits:
    """The supervisor's patience, in seconds and counts.

    start_timeout    until a started service serves
    hang_timeout     without a sign of life until it is killed; 0: never. Longer than any service's drain,
                     during which it is NOT_SERVING. A long prefill is no silence: health has its own thread.
    calm             without an end of the process, after which its restarts are counted anew
    """

    start_timeout: float = 600.0
    hang_timeout: float = 60.0
    max_restarts: int = 5
    calm: float = 30.0
    backoff_first: float = 0.5
    backoff_max: float = 10.0
    drain: float = 35.0
    stop: float = 15.0


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run.

    address: where its health is asked. env: its whole environment. follows: the service that it works with
    once it has `joined` that one; a stack is ready then. mirrors_others: it is NOT_SERVING while another
    service is away, which is then no sign of a hang.
    """

    name: str
    command: Sequence[str]
    address: str
    env: Mapping[str, str]
    follows: str = ""
    joined: Joined | None = None
    mirrors_others: bool = False


class ServiceFailed(Unavailable):
    """A service could not be kept running. `code` is the exit code the stack should end with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """One supervised service: its current process, its last lines, its restarts."""

    def __init__(
        self, service: Service, limits: Limits, *, write: Callable[[str], None], on_start: Callable[[], None]
    ) -> None:
        self.service = service
        self.restarts = 0
        self.lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.serving = asyncio.Event()
        self._limits = limits
        self._write = write
        self._on_start = on_start
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._hung = ""
        self._helpers: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep the service running until stop(). Raises ServiceFailed when that is hopeless."""
        in_a_row, served_once = 0, False
        while True:
            began = time.monotonic()
            await self._start()
            running = self._process
            assert running is not None
            health = asyncio.create_task(self._watch_health(), name=f"health-{self.name}")
            self._helpers = {health, asyncio.create_task(self._forward_logs(), name=f"logs-{self.name}")}
            try:
                code = await running.wait()
            finally:
                health.cancel()
                served, served_once = self.serving.is_set(), served_once or self.serving.is_set()
                self.serving.clear()
                self._kill_group()
                self._process = None  # its number may be another process's from here on
                # Killed, it ends at once; not waited for, its pipes would stay open.
                await asyncio.wait({asyncio.ensure_future(running.wait())}, timeout=REAP_S)
                await self.settle()
            if self._ending():
                return
            in_a_row = 0 if served and time.monotonic() - began >= self._limits.calm else in_a_row + 1
            reason, self._hung = self._hung or _exit_text(code), ""
            if code == CONFIG_EXIT_CODE or not served_once or in_a_row > self._limits.max_restarts:
                raise ServiceFailed(
                    f"{self.name} {reason}{'' if served_once else ' before it served'}; its last lines:\n"
                    + "\n".join(f"  {line}" for line in self.lines),
                    CONFIG_EXIT_CODE if code == CONFIG_EXIT_CODE else 1,
                )
            pause = (
                min(self._limits.backoff_first * 2 ** (in_a_row - 1), self._limits.backoff_max)
                if in_a_row
                else 0.0
            )
            self.restarts += 1
            log.warning(
                "%s %s; starting it again in %.1f s (restart %d)", self.name, reason, pause, self.restarts
            )
            await asyncio.sleep(pause)
            if self._ending():
                return

    async def stop(self, patience: float) -> None:
        """SIGTERM, wait up to `patience` seconds, then SIGKILL to its whole process group."""
        self._stopping = True
        running = self._process
        if running is None or running.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await running.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s of SIGTERM: killing it", self.name, patience)
        self._kill_group()

    async def settle(self) -> None:
        """Once the process has ended: its last lines, and what watched it. Idempotent."""
        # A gRPC channel that is left open would hold up the end of this process.
        if self._helpers:
            await asyncio.wait(self._helpers, timeout=2.0)
        for task in self._helpers:
            task.cancel()

    def kill(self) -> None:
        """End it now, without a drain."""
        self._stopping = True
        self._kill_group()

    def _ending(self) -> bool:
        return self._stopping

    async def _start(self) -> None:
        if self.service.address.startswith("unix:"):
            Path(self.service.address.removeprefix("unix:")).unlink(missing_ok=True)
        # A group of its own: Ctrl-C in the terminal reaches only the supervisor, which drains in order, and
        # what the service itself started can be ended with it. The pipe on stdin tells it of our end.
        self._process = await asyncio.create_subprocess_exec(
            *self.service.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.service.env),
            start_new_session=True,
            limit=1 << 20,
        )
        log.debug("%s started as process %d", self.name, self._process.pid)
        self._on_start()

    async def _watch_health(self) -> None:
        service, limits = self.service, self._limits
        try:
            self._hung = await until_serving(service.address, timeout_s=limits.start_timeout)
            if not self._hung:
                self.serving.set()
                if not limits.hang_timeout:
                    return
                self._hung = await until_hung(
                    service.address, timeout_s=limits.hang_timeout, mirrors_others=service.mirrors_others
                )
        except Exception:  # a defect of the watch must not cost a service that may be well
            return log.exception("the health of %s is not watched any more", self.name)
        if not self._ending():
            log.error("%s %s: killing it", self.name, self._hung)
            self._kill_group()

    async def _forward_logs(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                raw = await self._process.stdout.readline()
            except ValueError:  # a line longer than the buffer; asyncio has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            self.lines.append(line)
            self._write(f"{self.name:>7} | {line}")

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Stack:
    """All services of one machine: `await start()`, `await wait()`, `await stop()`.

    services: in start order; they end in the reverse order, each after the one before it. write: takes the
    services' log lines. on_change: called with this stack whenever a process has been started.
    """

    def __init__(
        self,
        services: Sequence[Service],
        limits: Limits | None = None,
        *,
        write: Callable[[str], None] | None = None,
        on_change: Callable[[Stack], None] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        notify = on_change or (lambda stack: None)
        self.children = [
            Child(service, self.limits, write=write or _to_stderr, on_start=lambda: notify(self))
            for service in services
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = False

    async def start(self, on_wait: Callable[[str, float], None] | None = None) -> None:
        """Start everything and return once all are SERVING.

        on_wait: called about once a second with what is missing and the seconds waited. Raises ServiceFailed.
        """
        began = time.monotonic()
        self._tasks = [asyncio.create_task(child.run(), name=child.name) for child in self.children]
        ready = asyncio.create_task(self._all_serving())
        try:
            while not ready.done():
                await asyncio.wait({ready, *self._tasks}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
                missing = ", ".join(child.name for child in self.children if not child.serving.is_set())
                waited = time.monotonic() - began
                if on_wait and missing:
                    on_wait(missing, waited)
                if missing and waited > self.limits.start_timeout:
                    raise ServiceFailed(
                        f"{missing} did not become ready within {self.limits.start_timeout:.0f} s", 1
                    )
            self._ready = True
        finally:
            ready.cancel()

    async def wait(self) -> None:
        """Return only by raising ServiceFailed, when a service can't be kept running."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._raise_failure()

    async def stop(self) -> None:
        """Drain and end the services, last started first, and leave no process behind.

        A stack that never became ready has nothing to drain and ends quickly.
        """
        first, others = (self.limits.drain, self.limits.stop) if self._ready else (ABANDON_S, ABANDON_S)
        try:
            for i, child in enumerate(reversed(self.children)):
                await child.stop(first if i == 0 else others)
        finally:
            self.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for child in self.children:
                await child.settle()

    def kill(self) -> None:
        """End everything now."""
        for child in self.children:
            child.kill()

    async def _all_serving(self) -> None:
        for child in self.children:
            await child.serving.wait()
        for child in self.children:
            own = child.service
            if own.joined is not None and not await own.joined(own.address, JOIN_S):
                log.warning("%s has not joined %s: serving without it so far", own.name, own.follows)

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


@contextlib.asynccontextmanager
async def run_folder(chosen: str = "") -> AsyncIterator[Path]:
    """The folder for sockets: `chosen`, or a private temporary one that is removed at the end.

    Raises ConfigError if its path is too long for a socket.
    """
    temporary = not chosen
    folder = Path(chosen).expanduser().resolve() if chosen else Path(tempfile.mkdtemp(prefix="specbridge-"))
    if len(str(folder).encode()) > MAX_SOCKET_FOLDER and temporary:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="specbridge-", dir="/tmp"))
    if len(str(folder).encode()) > MAX_SOCKET_FOLDER:
        raise ConfigError(
            f"run_dir {str(folder)!r} is too long for Unix sockets; use one of {MAX_SOCKET_FOLDER} bytes"
        )
    try:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run-dir {str(folder)!r}: {error.strerror}; name another") from None
        yield folder
    finally:
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now. If another process takes it before it is used, that start fails."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def service_command(name: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "specbridge.cli", name, *flags]


def service_environment(threads: int, processes: int, drop: Collection[str], **values: str) -> dict[str, str]:
    """This process's environment less `drop`, plus thread counts, passive waiting, the tie to this process.

    threads 0: the CPUs, shared by `processes`; then what the user has exported wins.
    """
    outer = {key: value for key, value in child_environment().items() if key not in drop}
    chosen = process.thread_environment(threads, processes)
    wins = {key: value for key, value in outer.items() if key in chosen and not threads}
    return {**outer, **chosen, **wins, "SPECBRIDGE_SUPERVISED": "1", "PYTHONUNBUFFERED": "1", **values}


def write_state(path: Path, stack: Stack, endpoints: Mapping[str, str]) -> None:
    """Say in a JSON file who runs where, for scripts and tests; replaced as a whole."""
    state = {"endpoints": dict(endpoints), "pids": {child.name: child.pid for child in stack.children}}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
