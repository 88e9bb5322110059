"""A running stack, measured: what its services say they cost, and bursts of requests with what they counted.

Owns the bursts and the raw record of them (JSON). Does not own what becomes of it: costs (record) and the
comparison with the simulation (validate).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from specbridge.clients import Ask, Message, Summary
from specbridge.explain.clients import Samples, budget_state, draft_info, target_info
from specbridge.explain.find import of_folder
from specbridge.explain.measure import Arm, Bench, Burst, Load
from specbridge.rounds import CostPoint

SENTENCE = "Write down what number {} of the list says about the river, the bridge and the people there. "


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one stack: arms (names of `arm_of`) at numbers of streams, all of which divide
    `prompts`. Every arm answers the same prompts, once, so that acceptance is the same in all of them.

    costs: also what costs are made of (record); without, only the bursts, to compare with.
    """

    arms: tuple[str, ...]
    streams: tuple[int, ...]
    max_tokens: int = 48
    prompts: int = 8
    costs: bool = True


def arm_of(name: str, streams: int) -> Arm:
    """plain; tree N: at most N nodes; cost, or any other name: as the stack was started."""
    if name == "plain":
        return Arm(name, speculate=False, streams=streams)
    if name.startswith("tree "):
        return Arm(name, max_tree_nodes=int(name.removeprefix("tree ")), streams=streams)
    return Arm(name, streams=streams)


async def measure(
    folder: Path, plan: Plan, *, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The record of the stack whose run folder this is."""
    addresses = of_folder(folder)
    target = await target_info(addresses.target)
    draft = await draft_info(addresses.draft) if addresses.draft else None
    bursts: list[dict[str, Any]] = []
    async with Bench(addresses) as bench:
        await bench.until_quiet()
        prefill = await _prefills(bench) if plan.costs else []
        say(f"prompts: {prefill}")
        prompts = common.load_prompts(common.SETS, plan.prompts)
        load = Load(tuple(prompts), plan.max_tokens, repeats=1)
        pids = _pids(folder)
        for arm in (arm_of(name, 4) for name in plan.arms):
            # Unmeasured: prompts are then found as prefixes by all arms, and code paths are warm.
            for first in range(0, plan.prompts, 4):
                await bench.burst(arm, prompts[first : first + 4], replace(load, max_tokens=4))
        for streams in plan.streams:
            for first in range(0, plan.prompts, streams):
                for name in plan.arms if first % 2 else reversed(plan.arms):
                    arm = arm_of(name, streams)
                    before = _cpu_seconds(pids)
                    burst = await bench.burst(arm, prompts[first : first + streams], load)
                    spent = {who: s - before[who] for who, s in _cpu_seconds(pids).items()}
                    bursts.append({**_burst(arm, burst), "cpu_s": spent})
                    say(f"{streams} x {name}: {burst.rate:.1f} tokens/s")
        budget = await budget_state(addresses.rest) if addresses.rest else None
    return {
        "provenance": common.provenance(),
        "max_tokens": plan.max_tokens,
        "target": {
            "model": target.model_id,
            "device": target.device,
            "max_length": target.max_length,
            "max_tree_nodes": target.max_tree_nodes,
            "verify": points(target.verify_cost),
        },
        "draft": None
        if draft is None
        else {
            "drafter": draft.drafter_id,
            "block_size": draft.block_size,
            "draft": points(draft.draft_cost),
        },
        "prefill": prefill,
        "bursts": bursts,
        "budget": budget and {k: budget[k] for k in ("policy", "verify_curve", "draft_curve", "overhead_ms")},
    }


def _pids(folder: Path) -> dict[str, int]:
    found = json.loads((folder / "stack.json").read_text(encoding="utf-8"))["pids"]
    return {str(name): int(pid) for name, pid in found.items()}


def points(costs: Sequence[CostPoint]) -> list[list[float]]:
    """[rows, context, ms] of each."""
    return [[p.rows, p.context, round(p.time_ns / 1e6, 4)] for p in costs]


async def _prefills(bench: Bench) -> list[list[float]]:
    """[prompt tokens, 0, ms] of first tokens alone: no draft session, nothing else at work."""
    found: list[list[float]] = []
    for number, sentences in enumerate((1, 1, 4, 16, 1, 4, 16)):
        text = "".join(SENTENCE.format(100 * number + i) for i in range(sentences))
        ask = Ask([Message("user", f"{number} {text}")], max_tokens=1, temperature=0.0, speculate=False)
        begun = time.perf_counter()
        async for part in bench.client.generate(ask):
            if isinstance(part, Summary) and number:
                rows = part.prompt_tokens - part.cached_tokens
                found.append([rows, part.cached_tokens, round(1e3 * (time.perf_counter() - begun), 3)])
    return found


def _cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time of the services and of this process, the load generator, so far."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {"client": time.process_time()}
    for name, pid in pids.items():
        parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        found[name] = (int(parts[11]) + int(parts[12])) / tick
    return found


def _burst(arm: Arm, burst: Burst) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "streams": arm.streams,
        "tokens": burst.tokens,
        "seconds": burst.seconds,
        "rounds": burst.rounds,
        "delivered": burst.delivered,
        "counted": {service: _plain(samples) for service, samples in burst.counted.items()},
    }


def _plain(samples: Samples) -> dict[str, float]:
    """Series that moved, by name and labels."""
    return {
        name + "".join(f"|{k}={v}" for k, v in labels): value
        for (name, labels), value in samples.values.items()
        if value and name.startswith("specbridge_") and not name.endswith("_created")
    }
