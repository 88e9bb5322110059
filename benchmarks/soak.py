"""Mixed load with cancels for minutes against a stack, and whether anything grows that should not.

Starts `specbridge serve`, keeps `--streams` clients busy with chats of several turns, raw prompts, streams,
whole answers, greedy and sampled, of several API keys and priorities; some leave in the middle, some ask for
nonsense. Meanwhile it samples each process's memory, threads and open files, and the services' own counts of
sessions, pages and slots. In the end the load stops, and sessions, pages in use and slots must be zero.

    python -m benchmarks.soak --minutes 3
    python -m benchmarks.soak --minutes 30 --streams 32 --flags kv_tokens=8192
    python -m benchmarks.soak --minutes 60 --streams 2 --pause 2 --prometheus prometheus

Memory grows while caches fill and libraries warm up: the slope is taken over the second half. Exit code 1 if
anything is left, or a process's memory grows by more than `--allow` MiB an hour, or, with --prometheus (the
program), if one of the shipped alerts fired.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import common
from benchmarks.watching import alerts, watching

SERVICES = ("target", "draft", "gateway")
# What must be back at zero when nobody asks for anything: service, metric.
COUNTS = (
    ("target", "specbridge_target_sessions"),
    ("target", "specbridge_target_kv_pages_used"),
    ("target", "specbridge_target_channel_ring_used"),
    ("draft", "specbridge_draft_sessions"),
    ("draft", "specbridge_draft_pages_used"),
    ("draft", "specbridge_draft_pending_rows"),
    ("gateway", "specbridge_gateway_requests_running"),
    ("gateway", "specbridge_gateway_requests_waiting"),
)
EVENTS = (
    ("target", "specbridge_target_preemptions_total"),
    ("target", "specbridge_target_defects_total"),
    ("draft", "specbridge_draft_defects_total"),
    ("gateway", "specbridge_gateway_session_reopens_total"),
)
IDLE_S = 30.0


@dataclass(slots=True)
class Samples:
    """Values by name, at `at` seconds since the start."""

    at: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, at: float, found: dict[str, float]) -> None:
        self.at.append(at)
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)


class Watched:
    """The processes of a stack, by its stack.json."""

    def __init__(self, run_dir: Path) -> None:
        self._state = json.loads((run_dir / "stack.json").read_text())
        self._processes = {name: psutil.Process(int(self._state["pids"][name])) for name in self.services}
        self._client = httpx.Client(timeout=30.0)

    @property
    def endpoints(self) -> dict[str, str]:
        """URL of each service's /metrics."""
        return {name: str(self._state["endpoints"][f"{name} metrics"]) for name in self.services}

    @property
    def services(self) -> list[str]:
        return [name for name in SERVICES if name in self._state["pids"]]

    def metrics(self, wanted: Sequence[tuple[str, str]]) -> dict[str, float]:
        """Sums over labels of these metrics, under their names."""
        found: dict[str, float] = {}
        for service in self.services:
            names = [name for owner, name in wanted if owner == service]
            text = self._client.get(self.endpoints[service]).text
            for name in names:
                lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
                found[name.removeprefix("specbridge_")] = sum(map(float, lines))
        return found

    def sample(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, process in self._processes.items():
            with process.oneshot():
                found[f"{name} MiB"] = process.memory_info().rss / 2**20
                found[f"{name} files"] = process.num_fds()
                found[f"{name} threads"] = process.num_threads()
        return found | self.metrics(COUNTS)

    def idle(self, patience_s: float = IDLE_S) -> dict[str, float]:
        """What is still held once nobody asks for anything; {} if nothing is."""
        end = time.monotonic() + patience_s
        while True:
            left = {name: value for name, value in self.metrics(COUNTS).items() if value}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def close(self) -> None:
        self._client.close()


class Client:
    """One client's endless stream of requests. outcomes: how they ended."""

    def __init__(
        self, url: str, number: int, prompts: Sequence[str], outcomes: Counter[str], pause: float
    ) -> None:
        self._rng = random.Random(number)
        self._pause = pause
        self._prompts = prompts
        self._outcomes = outcomes
        self._history: list[dict[str, str]] = []
        self._client = httpx.AsyncClient(
            base_url=url, timeout=600.0, headers={"authorization": f"Bearer key-{number % 3}"}
        )

    async def run(self, until: float) -> None:
        async with self._client:
            while time.monotonic() < until:
                kind = await self._one()
                self._outcomes[kind] += 1
                if kind == "refused":
                    await asyncio.sleep(1.0)
                if self._pause:
                    await asyncio.sleep(self._rng.expovariate(1 / self._pause))

    async def _one(self) -> str:
        rng = self._rng
        body: dict[str, Any] = {
            "max_tokens": rng.choice((1, 8, 24, 64)),
            "temperature": rng.choice((0, 0.8)),
            "priority": rng.choice((0, 0, 0, 1, -1)),
            "stream": rng.random() < 0.7,
            "no_speculation": rng.random() < 0.2,
        }
        if rng.random() < 0.05:
            body["top_p"] = 7
        path = "/v1/completions"
        if rng.random() < 0.6:
            path = "/v1/chat/completions"
            if len(self._history) > 4 or rng.random() < 0.3:
                self._history = []
            self._history.append({"role": "user", "content": rng.choice(self._prompts)[:600]})
            body["messages"] = self._history
        else:
            body["prompt"] = (rng.choice(self._prompts) + "\n") * rng.choice((1, 1, 1, 4))
            body["prompt"] = body["prompt"][:3000]
        leave_after = rng.expovariate(1 / 1.5) if rng.random() < 0.3 else None
        task = asyncio.create_task(self._send(path, body))
        done, _ = await asyncio.wait({task}, timeout=leave_after)
        if not done:
            task.cancel()
            await asyncio.wait({task})
            self._history = []
            return "left"
        return task.result()

    async def _send(self, path: str, body: dict[str, Any]) -> str:
        async with self._client.stream("POST", path, json=body) as response:
            data = await response.aread()
        if response.status_code != 200:
            self._history = []
            return {400: "wrong", 429: "refused"}.get(response.status_code, f"status {response.status_code}")
        if body["stream"]:
            if not data.endswith(b"data: [DONE]\n\n"):
                self._history = []
                return "broken stream"
            answer = "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                for line in data.decode().splitlines()
                if line.startswith('data: {"id"') and '"delta"' in line
            )
        else:
            choice = json.loads(data)["choices"][0]
            answer = choice["message"]["content"] if "message" in choice else ""
        if "messages" in body:
            self._history.append({"role": "assistant", "content": answer or "."})
        return "ok"


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Growth an hour over the second half: the median slope between its pairs (Theil and Sen)."""
    half = len(at) // 2
    pairs = [
        (values[j] - values[i]) / (at[j] - at[i])
        for i in range(half, len(at))
        for j in range(i + 1, len(at))
        if at[j] > at[i]
    ]
    return 3600 * statistics.median(pairs) if pairs else 0.0


async def load(url: str, samples: Samples, watched: Watched, args: Any, outcomes: Counter[str]) -> None:
    prompts = common.load_prompts(common.SETS, 60)
    begin = time.monotonic()
    until = begin + 60 * args.minutes
    clients = [
        asyncio.create_task(Client(url, n, prompts, outcomes, args.pause).run(until))
        for n in range(args.streams)
    ]
    while any(not client.done() for client in clients):
        await asyncio.wait(clients, timeout=args.every)
        samples.add(time.monotonic() - begin, await asyncio.to_thread(watched.sample))
    for client in clients:
        client.result()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8, help="clients at once")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between a client's requests")
    parser.add_argument("--prometheus", default="", help="its program, to run beside with the shipped rules")
    parser.add_argument("--allow", type=float, default=60.0, help="MiB an hour that a process may grow")
    parser.add_argument("--flags", nargs="*", default=[], help="flags of the stack, e.g. kv_tokens=4096")
    args = parser.parse_args()
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, _, value in (f.partition("=") for f in args.flags)
    ]
    outcomes: Counter[str] = Counter()
    samples = Samples()
    with (
        tempfile.TemporaryDirectory(prefix="sb-") as folder,
        common.serve(f"--run-dir={folder}", *flags) as stack,
        ExitStack() as beside,
    ):
        watched = Watched(Path(folder))
        fired: dict[str, float] | None = None
        if args.prometheus:
            data = Path(beside.enter_context(tempfile.TemporaryDirectory(prefix="sb-")))
            prometheus = beside.enter_context(watching(args.prometheus, watched.endpoints, data))
            print(f"Prometheus: {prometheus}", flush=True)
        start = watched.sample()
        asyncio.run(load(stack.url, samples, watched, args, outcomes))
        if args.prometheus:
            fired = alerts(prometheus, args.minutes + 1)
        left = watched.idle()
        end = watched.sample()
        events = watched.metrics(EVENTS)
        what = common.synthetic(stack.url)
    rows, grown = [], []
    for name, values in samples.values.items():
        growth = slope(samples.at, values)
        rows.append((name, start[name], statistics.median(values), max(values), end[name], growth))
        if name.endswith(" MiB") and growth > args.allow:
            grown.append(f"{name[:-4]} grows by {growth:.0f} MiB an hour")
    header = ("what", "before", "median", "most", "idle again", "growth an hour")
    found = {**dict(outcomes), **events}
    common.report("soak", header, rows, args.out, outcomes=found, left=left, alerts=fired, synthetic=what)
    print("requests: " + ", ".join(f"{count:g} {name}" for name, count in sorted(found.items())))
    bad = [name for name in outcomes if name.startswith(("status", "broken"))]
    if fired is not None:
        print("alerts that fired: " + (", ".join(sorted(fired)) or "none"))
    problems = [*grown, *(f"{value:g} {name} left" for name, value in left.items()), *bad]
    problems += [f"alert {name}" for name in fired or ()]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
