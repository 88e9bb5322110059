"""What the benchmarks share: prompts, provenance, tables, a stack to measure. Not part of the wheel."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent
SETS = ("humaneval", "gsm8k_test", "mt_bench")
UNREAL = ("dummy_weights", "simulated_acceptance")
"""What a model of ours says of itself in /v1/models where figures or texts are not those of a real one."""


def load_prompts(names: Sequence[str], count: int) -> list[str]:
    """`count` prompts, drawn in turn from the named sets of benchmarks/prompts (or JSON-lines paths)."""
    columns = []
    for name in names:
        path = ROOT / "prompts" / f"{name}.jsonl" if name in SETS else Path(name)
        columns.append([json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()])
    rounds = zip(*columns, strict=False)
    return [prompt for row in rounds for prompt in row][:count]


def provenance() -> dict[str, Any]:
    """Command, revision, machine and versions: what a reader needs to run the same again."""
    cpu = platform.processor() or platform.machine()
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
        flags = next((line for line in lines if line.startswith("flags")), "")
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers", "grpcio", "tokenizers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "argv": [Path(sys.argv[0]).name, *_without_keys(sys.argv[1:])],
        "revision": revision,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "avx512_bf16": "avx512_bf16" in flags,
        "versions": versions,
    }


def _without_keys(words: Sequence[str]) -> list[str]:
    """A command line fit to be published: what follows --api-key is not in it."""
    shown = [word.partition("=")[0] + "=***" if word.startswith("--api-key=") else word for word in words]
    return [
        "***" if before == "--api-key" else word for before, word in zip(["", *shown], shown, strict=False)
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats get two decimals."""

    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def report(
    name: str, header: Sequence[str], rows: Sequence[Sequence[object]], out: Path | None, **extra: Any
) -> None:
    """Print the table; with `out`, write it and its provenance as JSON too.

    extra `synthetic` (see below): what of the services was not real is printed and written with the figures.
    """
    print(table(header, rows), flush=True)
    for line in _warnings(extra.get("synthetic") or {}):
        print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "benchmark": name,
            "provenance": provenance(),
            "header": list(header),
            "rows": list(rows),
            **extra,
        }
        out.write_text(json.dumps(body, indent=1) + "\n")


def model_name(url: str) -> str:
    """The name that the stack at `url` serves its model under."""
    import httpx

    return str(httpx.get(f"{url}/v1/models", timeout=10.0).json()["data"][0]["id"])


def synthetic(url: str) -> dict[str, Any]:
    """What the stack at `url` says is not real: `dummy_weights`, `simulated_acceptance`; {} if all is."""
    import httpx

    model = httpx.get(f"{url}/v1/models", timeout=10.0).json()["data"][0]
    found = {name: model.get(name) for name in UNREAL}
    return {name: value for name, value in found.items() if value}


def _warnings(found: dict[str, Any]) -> list[str]:
    lines = []
    if found.get("dummy_weights"):
        lines.append("DUMMY WEIGHTS: times are those of the shape, texts mean nothing")
    if found.get("simulated_acceptance"):
        lines.append(
            f"SIMULATED ACCEPTANCE: {found['simulated_acceptance']}; tokens per round are its, not a model's"
        )
    return lines


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=None, help="write the table with its provenance to this JSON file"
    )
    return parser


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A `specbridge serve` started for a benchmark."""

    url: str
    process: subprocess.Popen[bytes]


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def serve(
    *flags: str, start_timeout_s: float = 240.0, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[RunningStack]:
    """Run `specbridge serve` with `flags` on a free port; ready when it says that it serves: by then its
    gateway has met the draft, which /health does not wait for.

    env: variables beyond this process's. log: the file that its log lines go to; None: stderr.
    Raises SystemExit if it ends, or is not ready in time.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "specbridge.cli",
        "serve",
        "--http-port",
        str(port),
        "--grpc-port=0",
        "--log-level=warning",
        *flags,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    serving = threading.Event()
    reader = threading.Thread(target=_forward, args=(process.stderr, log, serving), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + start_timeout_s
        while not serving.wait(0.2):
            if process.poll() is not None:
                reader.join(5.0)
                raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} was not ready after {start_timeout_s:.0f} s")
        yield RunningStack(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(5.0)


def _forward(lines: IO[bytes], log: Path | None, serving: threading.Event) -> None:
    """A stack's lines to where they shall go, until it ends; sets `serving` at the one that says so."""
    with lines, log.open("wb") if log is not None else nullcontext(sys.stderr.buffer) as out:
        for line in lines:
            out.write(line)
            out.flush()
            if line.startswith(b"SpecBridge serves"):
                serving.set()
