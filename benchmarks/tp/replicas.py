"""Part replicas: one stack on all GPUs against two on half of them each, the clients shared out between them.

Each replica is a whole stack (target, draft, gateway) that sees its own GPUs only. Clients are dealt to the
replicas in turn, as a balancer would that counts open requests. Owns starting them and putting together what
the clients of both saw. Does not own a stack's flags, streams or rates (benchmarks.gpu.stack).
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu import stack as rounds
from benchmarks.gpu.setup import Part, Setup
from benchmarks.tp import stacks

HEADER = (
    "shape", "layout", "arm", "streams", "tokens/s", "of one stack", "round ms", "tokens / round",
    "slowest stream's tokens/s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """`count` stacks of `tp` ranks."""

    count: int
    tp: int

    @property
    def name(self) -> str:
        return f"tp {self.tp}" if self.count == 1 else f"{self.count} x tp {self.tp}"

    def environments(self, visible: Sequence[str]) -> list[dict[str, str]]:
        """For each stack. visible: GPUs of this process, as CUDA_VISIBLE_DEVICES has them; none: a CPU."""
        if not visible:
            return [{} for _ in range(self.count)]
        starts = range(0, self.count * self.tp, self.tp)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(visible[s : s + self.tp])} for s in starts]


def layouts(most: int) -> list[Layout]:
    """All ranks in one, and two of half of them."""
    return [Layout(1, most)] + ([Layout(2, most // 2)] if most % 2 == 0 else [])


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of `count` GPUs, as this process may use them."""
    chosen = [word for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return chosen[:count] if chosen else [str(n) for n in range(count)]


def dealt(prompts: Sequence[Any], count: int) -> list[list[Any]]:
    """In turn."""
    return [list(prompts[n::count]) for n in range(count)]


def together(bursts: Sequence[rounds.Burst]) -> rounds.Burst:
    """What the clients of all replicas saw at the same time."""
    return rounds.Burst(tuple(stream for one in bursts for stream in one.streams))


class Replicas:
    """Goes through layouts and arms; keeps the table."""

    def __init__(self, setup: Setup, options: rounds.Options, shape: str, part: Part) -> None:
        self._setup, self._options, self._shape, self._part = setup, options, shape, part
        self._rows: list[list[Any]] = []
        self._one: dict[tuple[str, int], float] = {}
        part.tables.setdefault("one stack against replicas", (HEADER, self._rows))
        self._rows = part.tables["one stack against replicas"][1]

    def go(self, layout: Layout, arm: rounds.Arm, visible: Sequence[str]) -> None:
        """Raises RuntimeError, httpx.HTTPError for a stack that does not start or answer."""
        setup = self._setup
        counts = [n for n in setup.concurrency if n >= layout.count]
        own = replace(setup, tp=layout.tp, concurrency=tuple(-(-n // layout.count) for n in counts))
        flags = rounds.flags_of(own, self._options, arm)
        with ExitStack() as opened:
            running = [
                opened.enter_context(
                    stacks.running(*flags, env=env, timeout_s=min(stacks.START_S, setup.budget.left_s))
                )
                for env in layout.environments(visible)
            ]
            for count in counts:
                if not setup.budget.fits(10.0):
                    self._part.notes.append(f"{layout.name}, {arm.name}, {count} streams: no time left")
                    continue
                self._load([stack.url for stack in running], layout, arm, count)
        for stack in running:
            stacks.note_left(self._part, f"{layout.name}, {arm.name}", stack)

    def _load(self, urls: Sequence[str], layout: Layout, arm: rounds.Arm, count: int) -> None:
        setup, options = self._setup, self._options
        nodes = arm.budget

        async def all_at_once(number: int, tokens: int) -> rounds.Burst:
            prompts = dealt(rounds.prompts_of(setup, options, count, number), len(urls))
            limit = max(setup.budget.left_s, 5.0)
            return together(
                await asyncio.gather(
                    *(
                        rounds.burst(url, own, tokens, nodes, limit)
                        for url, own in zip(urls, prompts, strict=True)
                    )
                )
            )

        asyncio.run(all_at_once(0, min(rounds.WARM_TOKENS, options.max_tokens)))
        bursts = [asyncio.run(all_at_once(1, options.max_tokens))]
        while len(bursts) < options.bursts and setup.budget.fits(10.0):
            bursts.append(asyncio.run(all_at_once(len(bursts) + 1, options.max_tokens)))
        streams = [stream for one in bursts for stream in one.streams if stream.rounds]
        if not streams:
            raise RuntimeError("no text was longer than a token")
        rate = rounds.tokens_per_s(bursts)
        if layout.count == 1:
            self._one[arm.name, count] = rate
        base = self._one.get((arm.name, count))
        name = f"{arm.name} {nodes}" if nodes else arm.name
        self._rows.append(
            [self._shape, layout.name, name, count, rate, rate / base if base else "-",
             statistics.median(stream.round_ms for stream in streams),
             sum(s.tokens - 1 for s in streams) / sum(s.rounds for s in streams),
             min((s.tokens - 1) / max(s.last - s.first, 1e-9) for s in streams)]
        )  # fmt: skip


def measure(setup: Setup, options: rounds.Options, part: Part) -> None:
    """Add the shape of `setup` to table `one stack against replicas`. setup.tp: of the one stack."""
    shape = Path(setup.place).name
    visible = visible_gpus(setup.tp) if setup.on_gpu else []
    run = Replicas(setup, options, shape, part)
    for arm in rounds.arms_of(setup, options):
        # The largest tree only: sizes are the part shapes' matter.
        one = replace(arm, nodes=(arm.budget,))
        for layout in layouts(setup.tp):
            if not setup.budget.fits(30.0):
                part.notes.append(f"{shape}, {layout.name}, {arm.name}: left out for want of time")
                continue
            try:
                run.go(layout, one, visible)
            except (RuntimeError, httpx.HTTPError) as error:
                part.notes.append(f"{shape}, {layout.name}, {arm.name}: {type(error).__name__}: {error}")
    part.notes.append("DUMMY WEIGHTS: times are those of the shape; SIMULATED ACCEPTANCE")
