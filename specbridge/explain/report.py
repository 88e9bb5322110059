"""The report: a JSON object with a part for each question, what it is about, and what to doubt.

Owns how the parts come together and the notes. Does not own the parts (answers, comparisons) nor how it is
shown (text, html, charts).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbridge.explain import answers
from specbridge.explain.answers import TOLERANCE, Measured
from specbridge.explain.comparisons import comparison_json, drift
from specbridge.explain.rounds import mean_round

SCHEMA = 1


def report(measured: Measured) -> dict[str, Any]:
    """The report; numbers are plain floats and ints, times seconds, sizes bytes."""
    trees, plain = mean_round(measured.trees), mean_round(measured.plain)
    reads = answers.reads_of(trees, measured)
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "version": measured.version,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "measured_for_s": measured.seconds,
        "stack": _stack(measured),
        "load": {
            "prompts": len(measured.load.prompts),
            "max_tokens": measured.load.max_tokens,
            "repeats": measured.load.repeats,
            "rounds": trees.rounds if trees else 0,
        },
        "bytes": answers.bytes_read(trees, reads, measured),
        "candidates": answers.candidates(trees, plain, measured),
        "parts": {
            "comparisons": [comparison_json(one) for one in measured.comparisons],
            "drift": drift(measured.plain, len(measured.load.prompts)),
        },
        "round": answers.round_time(trees, plain, reads, measured),
        "ranks": answers.more_ranks(trees, measured),
    }
    made["parts"]["answer"] = answers.parts_answer(made["parts"]["comparisons"])
    made["notes"] = [*measured.notes, *_doubts(made, measured)]
    return made


def _stack(m: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": m.model.model_id,
        "drafter": m.model.drafter_id,
        "block_size": m.model.block_size,
        "tree_budget": m.model.tree_budget,
        "machine": machine(),
    }
    if m.target is not None:
        for name in ("dtype", "device", "tp_size", "num_layers", "hidden_size", "channel_transport"):
            found[name] = getattr(m.target, name)
        found["dummy_weights"] = m.target.dummy_weights
        found["simulated_acceptance"] = m.target.simulated_acceptance
        found["target"] = asdict(m.target.footprint)
    if m.draft is not None:
        found["draft"] = asdict(m.draft.footprint)
    if m.budget is not None:
        found["policy"] = m.budget.get("policy")
        found["cohorts"] = m.budget.get("cohorts")
    return found


def machine() -> str:
    """This machine's processor and its cores, for people."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    cores = 0
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        cores = sum(line.startswith("processor") for line in lines)
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {cores} cores" if cores else name


def _doubts(made: Mapping[str, Any], m: Measured) -> list[str]:
    """What a reader should know before believing the numbers."""
    doubts = []
    bursts = [
        *m.trees, *m.plain,
        *(burst for size in (m.curve.bursts if m.curve else {}).values() for burst in size),
        *(burst for one in m.comparisons for burst in (*one.on, *one.off)),
    ]  # fmt: skip
    own = {id(burst): burst for burst in bursts if burst.counted.get("gateway")}
    foreign = sum(burst.foreign_tokens for burst in own.values())
    if foreign > 0:
        doubts.append(
            f"The stack served {foreign} tokens to others meanwhile: times and bytes are of the mixture."
        )
    drifting = made["parts"]["drift"]
    if drifting is not None and drifting > TOLERANCE:
        doubts.append(
            f"The machine is not quiet: the same plain request differed by {drifting:.0%} in speed between "
            "repeats (median). Ratios are of requests that ran right after each other; times are less sure."
        )
    doubts += [
        f"Off by {abs(check['ratio'] - 1):.0%}: {check['what']}."
        for check in made["round"]["checks"]
        if not check["agrees"]
    ]
    floor = made["round"].get("floor_s")
    if floor and floor > made["round"]["seconds"]:
        doubts.append(
            "The round is faster than its floor: the copy rate was measured, at the start, while something "
            "else had the memory. Start the stack on a quiet machine."
        )
    if any(one["same_text"] is False for one in made["parts"]["comparisons"]):
        doubts.append(
            "Some texts differed with a part switched off. In half precision passes of different sizes round "
            "differently where two tokens all but tie; in fp32 there should be none."
        )
    if made["stack"].get("dummy_weights") or made["stack"].get("simulated_acceptance"):
        doubts.append(
            "Weights or acceptance are not a model's: times are real, tokens per round are made up."
        )
    return doubts
