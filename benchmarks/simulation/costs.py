"""What a simulated stack's work costs: curves, overheads, and what runs on what; read from a JSON file.

Owns the file's schema, its checks and interpolation. Where the numbers come from is the file's own `source`:
record.py writes measured ones, planning.py computed ones.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError
from specbridge.rounds import CostPoint

FORMAT = "specbridge-simulation-costs-1"

Points = tuple[tuple[int, int, float], ...]
"""(size, context, ms) each."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Where one kind of work runs. demand: cores (or devices) of the pool that a piece of it keeps busy when
    alone; weight: its share against others when there are too few."""

    pool: str
    demand: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that takes time. Curves' times are of an otherwise idle machine; ms unless named otherwise.

    verify         target passes: (rows, context that the pass reads in all, ms)
    prefill        prompt chunks: (rows, context, ms); empty: as verify
    draft          block passes: (sessions, context of a session, ms), trees included
    append         rows appended to the draft's context: (rows, 0, ms)
    session_ms     of a target pass, for each session in it beyond the first: curves are measured with one
    channel_ms     rows written by the target until the draft has them
    commit_ms      target's own work after a pass, and commit_session_ms for each session of it
    hop_ms         a message on its way, one way, nobody's core busy with it
    gateway_*      the gateway thread's own work: a batch sent or answered, each session in one, each event
                   handed to a reader; client_event_ms: the load generator's, for the same event
    request_ms     the gateway's work for a new request before it can be opened
    reported       verify, draft: curves as the services report them, where passes take something else
    device         of the target, as it tells the gateway, whose default rows depend on it
    pools          capacities: cores, or 1 for a device (2 / slowdown for one that two services share)
    workers        target, draft, gateway, client -> Worker
    """

    name: str
    source: Mapping[str, Any]
    verify: Points
    draft: Points = ()
    append: Points = ()
    prefill: Points = ()
    session_ms: float = 0.0
    channel_ms: float = 0.0
    commit_ms: float = 0.0
    commit_session_ms: float = 0.0
    hop_ms: float = 0.0
    gateway_batch_ms: float = 0.0
    gateway_session_ms: float = 0.0
    gateway_event_ms: float = 0.0
    client_event_ms: float = 0.0
    request_ms: float = 0.0
    jitter: float = 0.0
    device: str = "simulated"
    block_size: int = 8
    max_tree_nodes: int = 64
    reported: Mapping[str, Points] = field(default_factory=dict)
    max_verify_rows: int = 520
    prefill_chunk: int = 128
    max_itl_ms: float = 0.0
    max_length: int = 2048
    max_sessions: int = 256
    propose_wait_ms: float = 20.0
    pools: Mapping[str, float] = field(default_factory=lambda: {"target": 1.0, "draft": 1.0, "host": 8.0})
    workers: Mapping[str, Worker] = field(
        default_factory=lambda: {
            "target": Worker("target"),
            "draft": Worker("draft"),
            "gateway": Worker("host"),
            "client": Worker("host"),
        }
    )

    def __post_init__(self) -> None:
        if not self.verify:
            raise ConfigError("costs need a verify curve of at least one point")
        if any(rows < 2 for rows, _, _ in self.prefill):
            raise ConfigError("prefill holds a chunk of fewer than 2 rows: what 1 costs is verify's to say")
        for name in ("target", "draft", "gateway", "client"):
            worker = self.workers.get(name)
            if worker is None or worker.pool not in self.pools:
                raise ConfigError(
                    f"workers[{name!r}] is {worker}; it must name one of the pools {sorted(self.pools)}"
                )
            if worker.demand <= 0 or worker.weight <= 0 or self.pools[worker.pool] <= 0:
                raise ConfigError(f"workers[{name!r}] is {worker}; demand, weight and capacity are positive")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and (not math.isfinite(value) or value < 0):
                raise ConfigError(f"{item.name} is {value}; it must be at least 0")

    def verify_points(self) -> tuple[CostPoint, ...]:
        """As the target would report them in GetInfo."""
        points = self.reported.get("verify", self.verify)
        return tuple(CostPoint(rows, context, round(1e6 * ms)) for rows, context, ms in points)

    def prefill_points(self) -> tuple[CostPoint, ...]:
        sizes = tuple((max(2, self.prefill_chunk * k // 16), 128, 0.0) for k in (1, 4, 16))
        curve = Curve(self.prefill or self.verify)
        return tuple(
            CostPoint(rows, context, round(1e6 * curve(rows, context)))
            for rows, context, _ in self.prefill or sizes
        )

    def draft_points(self) -> tuple[CostPoint, ...]:
        """As the draft would: rows of block passes."""
        points = self.reported.get("draft", self.draft)
        return tuple(CostPoint(n * self.block_size, context, round(1e6 * ms)) for n, context, ms in points)

    def to_json(self) -> str:
        """The file's text, one curve a line."""
        values = {"format": FORMAT, **asdict(self)}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


class Curve:
    """ms by size and context: linear between points, the last slope beyond; never falling with size."""

    def __init__(self, points: Sequence[tuple[int, int, float]]) -> None:
        by_context: dict[int, list[tuple[int, float]]] = {}
        for size, context, ms in points:
            by_context.setdefault(context, []).append((size, ms))
        self._contexts = sorted(by_context)
        self._lines = [_rising(sorted(by_context[context])) for context in self._contexts]
        self._kept: dict[tuple[int, int], float] = {}

    def __call__(self, size: int, context: int = 0) -> float:
        key = (size, context)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._value(size, context)
        return found

    def _value(self, size: int, context: int) -> float:
        if not self._contexts or size <= 0:
            return 0.0
        if len(self._contexts) == 1:
            return _along(self._lines[0], size)
        place = min(max(bisect_left(self._contexts, context), 1), len(self._contexts) - 1)
        low, high = self._contexts[place - 1], self._contexts[place]
        first, second = _along(self._lines[place - 1], size), _along(self._lines[place], size)
        # A shorter context than any measured costs as the shortest; noise must not make a longer one cheaper.
        return first + max(0.0, (context - low) / (high - low)) * max(0.0, second - first)


def _rising(line: list[tuple[int, float]]) -> list[tuple[int, float]]:
    kept: list[tuple[int, float]] = []
    for size, ms in line:
        kept.append((size, max(ms, kept[-1][1] if kept else 0.0)))
    return kept


def _along(line: list[tuple[int, float]], size: int) -> float:
    sizes = [at for at, _ in line]
    if size <= sizes[0] or len(line) == 1:
        return line[0][1]
    place = min(bisect_left(sizes, size), len(sizes) - 1)
    (low, first), (high, second) = line[place - 1], line[place]
    return first + (second - first) * (size - low) / (high - low)


def read(path: Path) -> Costs:
    """Raises ConfigError for a file that is none, or holds something unknown or impossible."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"costs {str(path)!r} can't be read: {error}") from None
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise ConfigError(f"costs {str(path)!r} are not of format {FORMAT}: write them with --record")
    return of(value)


def of(value: Mapping[str, Any]) -> Costs:
    """From what a file holds. Raises ConfigError."""
    known = {item.name for item in fields(Costs)}
    if unknown := sorted(set(value) - known):
        raise ConfigError(f"costs hold {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    made = dict(value)
    try:
        for name in ("verify", "draft", "append", "prefill"):
            points = made.get(name, ())
            made[name] = tuple((int(size), int(context), float(ms)) for size, context, ms in points)
        made["reported"] = {
            name: tuple((int(size), int(context), float(ms)) for size, context, ms in points)
            for name, points in made.get("reported", {}).items()
        }
        if "workers" in made:
            made["workers"] = {name: Worker(**worker) for name, worker in made["workers"].items()}
        return Costs(**made)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"costs are malformed: {error}") from None
