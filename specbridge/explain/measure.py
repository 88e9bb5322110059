"""Bursts of requests on running stacks, in turns, with what the processes counted meanwhile.

Owns the order of the bursts and what one of them measures. Everything compared is run in turns (A B, B A,
...), so that a drift of the machine's speed hits all alike. Does not own what is compared (switches, command)
nor what it means (answers).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from specbridge.clients import Ask, GenerationClient, Message, Summary
from specbridge.errors import InternalError
from specbridge.explain.clients import NOTHING, Samples, samples
from specbridge.explain.find import Addresses

SERVICES = ("gateway", "target", "draft")
QUIET_S = 0.3
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask. max_tree_nodes None: as large as the gateway lets them be. streams: at a time."""

    name: str
    speculate: bool = True
    max_tree_nodes: int | None = None
    temperature: float = 0.0
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What every arm is asked. groups of prompts that run at a time are as large as an arm's streams."""

    prompts: tuple[str, ...]
    max_tokens: int
    repeats: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that ran together: tokens and the seconds in which they came, both after the first ones of
    each.

    counted: what each service counted from before the first request to after the last. delivered: tokens in
    all.
    """

    tokens: int
    seconds: float
    rounds: int
    delivered: int
    texts: tuple[tuple[int, ...], ...]
    counted: dict[str, Samples] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def foreign_tokens(self) -> int:
        """Tokens that the gateway delivered to somebody else meanwhile."""
        counted = self.counted.get("gateway", NOTHING)
        return round(counted.total("specbridge_gateway_generation_tokens_total")) - self.delivered


class Bench:
    """One running stack: `async with Bench(addresses) as bench`."""

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses
        self.client = GenerationClient(addresses.grpc)

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.__aexit__(kind, error, trace)

    async def counters(self) -> dict[str, Samples]:
        """All services' samples now; nothing for those whose /metrics is not known."""
        pages = await asyncio.gather(*(samples(self.addresses.metrics_of(service)) for service in SERVICES))
        return dict(zip(SERVICES, pages, strict=True))

    async def until_quiet(self) -> None:
        """Wait for what a start leaves running (a draft's self-check), at most SETTLE_S."""
        until = time.monotonic() + SETTLE_S
        before = await self._busy()
        while time.monotonic() < until:
            await asyncio.sleep(QUIET_S)
            now = await self._busy()
            if now == before:
                return
            before = now

    async def burst(self, arm: Arm, prompts: Sequence[str], load: Load) -> Burst:
        """All prompts at once. Raises what a request failed with."""
        before = await self.counters()
        streams = await asyncio.gather(*(self._stream(arm, prompt, load) for prompt in prompts))
        after = await self._settled()
        timed = [stream for stream in streams if stream.tokens]
        seconds = 0.0
        if timed:
            seconds = max(s.last for s in timed) - min(s.first for s in timed)
        return Burst(
            tokens=sum(s.tokens for s in timed),
            seconds=seconds,
            rounds=sum(s.rounds for s in streams),
            delivered=sum(len(s.ids) for s in streams),
            texts=tuple(s.ids for s in streams),
            counted={service: after[service].since(before[service]) for service in SERVICES},
        )

    async def _settled(self) -> dict[str, Samples]:
        """The counters once the requests have ended in them, too: an answer leaves before its release."""
        until = time.monotonic() + 1.0
        while True:
            now = await self.counters()
            gateway = now["gateway"]
            running = gateway.total("specbridge_gateway_requests_running")
            if not running or time.monotonic() > until:
                return now
            await asyncio.sleep(0.01)

    async def _busy(self) -> tuple[float, ...]:
        counters = await self.counters()
        return (
            counters["target"].total("specbridge_target_tokens_total"),
            counters["draft"].total("specbridge_draft_append_rows_total"),
        )

    async def _stream(self, arm: Arm, prompt: str, load: Load) -> _Stream:
        ask = Ask(
            messages=[Message("user", prompt)],
            max_tokens=load.max_tokens,
            temperature=arm.temperature,
            seed=load.seed,
            speculate=arm.speculate,
            max_tree_nodes=arm.max_tree_nodes,
        )
        first = last = 0.0
        ids: list[int] = []
        in_first = 0
        async for part in self.client.generate(ask):
            if isinstance(part, Summary):
                return _Stream(first, last, len(ids) - in_first, part.rounds, tuple(ids))
            if part.token_ids:
                last = time.perf_counter()
                if not first:
                    first, in_first = last, len(part.token_ids)
            ids.extend(part.token_ids)
        raise InternalError("the gateway ended a stream without a final message")


@dataclass(frozen=True, slots=True)
class _Stream:
    first: float
    last: float
    tokens: int
    rounds: int
    ids: tuple[int, ...]


Side = tuple[Bench, Arm]
"""A way to ask, and the stack that is asked."""


async def in_turns(
    sides: Sequence[Side], load: Load, *, progress: Callable[[str], None] = lambda line: None
) -> list[list[Burst]]:
    """Every side's bursts, aligned: the i-th of each ran the same prompts right after each other."""
    streams = max(arm.streams for _, arm in sides)
    groups = [_group(load.prompts, start, streams) for start in range(0, len(load.prompts), streams)]
    for bench, arm in sides:
        # Once each, unmeasured: the first passes of a process and of a size are slower.
        short = Load(load.prompts, min(16, load.max_tokens), 1, load.seed)
        await bench.burst(arm, groups[0], short)
    found: list[list[Burst]] = [[] for _ in sides]
    order = list(range(len(sides)))
    for repeat in range(load.repeats):
        for number, group in enumerate(groups):
            progress(f"{repeat * len(groups) + number + 1}/{load.repeats * len(groups)}")
            for place in order:
                bench, arm = sides[place]
                found[place].append(await bench.burst(arm, group, load))
            order.reverse()
    return found


def _group(prompts: Sequence[str], start: int, size: int) -> list[str]:
    """`size` prompts from `start` on, beginning again at the first when they run out."""
    return [prompts[(start + i) % len(prompts)] for i in range(size)]


def added(bursts: Sequence[Burst]) -> dict[str, Samples]:
    """What the services counted over all of these bursts."""
    sums = dict.fromkeys(SERVICES, NOTHING)
    for burst in bursts:
        for service, counted in burst.counted.items():
            sums[service] = sums[service].plus(counted)
    return sums
