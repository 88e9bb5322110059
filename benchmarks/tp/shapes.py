"""Part shapes: plain, chain and tree of large shapes on many ranks, by benchmarks.gpu_round.

A run of gpu_round for each shape and number of ranks, in a process of its own: its GPUs' memory is free after
it, and one that hangs ends with its time. Owns these runs and the tables over all of them: steps against
their floor, what of a step without graphs are collectives, rounds as clients see them. Does not own how
anything is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import Budget
from benchmarks.gpu.setup import Part

STEP_HEADER = (
    "shape", "tp", "graphs", "sessions", "nodes", "rows", "device ms", "host ms", "floor ms",
    "device / floor", "device / plain", "collectives ms", "of step",
)  # fmt: skip
ROUND_HEADER = (
    "shape", "tp", "arm", "streams", "tokens/s", "round ms", "of plain", "tokens / round", "draft ms",
    "verify ms", "outside ms",
)  # fmt: skip
LEAST_S = 60.0
"""Less is not begun with: loading alone takes as long."""
GRACE_S = 20.0
"""Beyond its budget, for gpu_round to end by itself."""


@dataclass(frozen=True, slots=True)
class Options:
    """shapes: folders of benchmarks/configs, or paths. parts: of gpu_round. more: further words of it."""

    shapes: tuple[str, ...]
    tp: tuple[int, ...]
    device: str
    dtype: str
    concurrency: tuple[int, ...]
    context: int
    nodes: tuple[int, ...]
    simulate: str
    parts: str = "target,draft,stack"
    more: tuple[str, ...] = ()


def command(options: Options, shape: str, tp: int, budget_s: float, out: Path) -> list[str]:
    return [
        sys.executable,
        *("-m", "benchmarks.gpu_round"),
        *("--config", shape),
        *("--tp", str(tp)),
        *("--device", options.device),
        *("--dtype", options.dtype),
        *("--concurrency", *map(str, options.concurrency)),
        *("--context", str(options.context)),
        *("--nodes", *map(str, options.nodes)),
        *("--simulate", options.simulate),
        *("--parts", options.parts),
        *("--budget-s", f"{budget_s:.0f}"),
        *("--out", str(out)),
        *options.more,
    ]


def run(words: Sequence[str], limit_s: float) -> int:
    """Exit code. Raises RuntimeError after limit_s; nothing of it is left either way."""
    process = subprocess.Popen(words, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"gpu_round did not end within {limit_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def step_rows(shape: str, tp: int, found: Mapping[str, Any]) -> list[list[Any]]:
    """Of the part `target`, with what share of the step its collectives are."""
    table = found["parts"].get("target", {}).get("tables", {}).get("steps")
    rows = []
    for row in _named(table):
        collectives, device_ms = row["collectives ms"], row["device ms"]
        part_of = collectives / device_ms if isinstance(collectives, float) else "-"
        rows.append(
            [shape, tp, row["graphs"], row["sessions"], row["nodes"], row["rows"], device_ms, row["host ms"],
             row["floor ms"], row["device / floor"], row["device / plain"], collectives, part_of]
        )  # fmt: skip
    return rows


def round_rows(shape: str, tp: int, found: Mapping[str, Any]) -> list[list[Any]]:
    """Of the part `stack`."""
    table = found["parts"].get("stack", {}).get("tables", {}).get("rounds")
    names = ROUND_HEADER[2:]
    # null: there was nothing to take a mean of, as of drafting in plain rounds.
    return [
        [shape, tp, *("-" if row[name] is None else row[name] for name in names)] for row in _named(table)
    ]


def notes_of(found: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {note}" for name, part in found["parts"].items() for note in part["notes"]]


def _named(table: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    return [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]


def measure(options: Options, budget: Budget, folder: Path) -> Part:
    """Tables `steps` and `rounds`, and what each run of gpu_round took."""
    part = Part()
    steps: list[list[Any]] = []
    rounds: list[list[Any]] = []
    part.tables |= {"steps": (STEP_HEADER, steps), "rounds": (ROUND_HEADER, rounds)}
    runs = [(shape, tp) for shape in options.shapes for tp in options.tp]
    for number, (shape, tp) in enumerate(runs):
        name = f"{Path(shape).name}, tp {tp}"
        # What is left is shared by those that are left.
        share = budget.left_s / (len(runs) - number) - GRACE_S
        if share < LEAST_S:
            part.notes.append(f"{name}: left out for want of time")
            continue
        out = folder / f"{Path(shape).name}-{tp}.json"
        before = budget.left_s
        try:
            code = run(command(options, shape, tp, share, out), share + GRACE_S)
            if code:
                part.notes.append(f"{name}: gpu_round ended with exit code {code}")
        except RuntimeError as error:
            part.notes.append(f"{name}: {error}")
        part.figures[f"{name}: s"] = before - budget.left_s
        if out.is_file():  # written after each of its parts
            found = json.loads(out.read_text())
            steps += step_rows(Path(shape).name, tp, found)
            rounds += round_rows(Path(shape).name, tp, found)
            part.notes += [f"{name}: {note}" for note in notes_of(found)]
    return part
