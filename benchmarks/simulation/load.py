"""Requests for a simulated stack: how many at a time, when they come, how long they are.

Owns arrivals, lengths and what a client sees of its answer. Draws are by seed: every policy gets the same
load.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.world import World
from gateway.generation import GenerationRequest
from gateway.scheduler import Scheduler
from specbridge.errors import ConfigError, SpecBridgeError
from specbridge.rounds import SamplingParams, StopParams

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: a number, uniform low..high, or a mean with a lognormal spread ("256~0.5")."""

    text: str
    low: int
    high: int
    sigma: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        """ "128", "64-512" or "256~0.5". Raises ConfigError."""
        try:
            if "~" in text:
                mean, sigma = text.split("~")
                found = Lengths(text, int(mean), int(mean), float(sigma))
            elif "-" in text:
                low, high = text.split("-")
                found = Lengths(text, int(low), int(high))
            else:
                found = Lengths(text, int(text), int(text))
        except ValueError:
            raise ConfigError(f"a length is {text!r}; write 128, 64-512 or 256~0.5 (mean~spread)") from None
        if not 1 <= found.low <= found.high or found.sigma < 0:
            raise ConfigError(f"a length is {text!r}; it must be at least 1 and rise")
        return found

    def draw(self, rng: random.Random) -> int:
        if self.sigma:
            return max(1, round(self.low * rng.lognormvariate(-0.5 * self.sigma**2, self.sigma)))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Load:
    """streams: requests at a time (closed loop); rate: requests a second (Poisson) instead, if not 0.

    requests: in all; no more than streams: a burst.
    """

    streams: int
    requests: int
    prompt: Lengths
    output: Lengths
    rate: float = 0.0
    prompts: tuple[int, ...] = ()
    """Lengths of the prompts, one after another; empty: drawn."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it: times in seconds of virtual time; tokens that came at each."""

    asked: float
    prompt: int
    output: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rejected: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked

    @property
    def tpot(self) -> float:
        """Seconds a token after the first event's."""
        more = sum(self.tokens[1:])
        return (self.times[-1] - self.times[0]) / more if more else 0.0

    @property
    def itls(self) -> Sequence[float]:
        """Between one event and the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class Clients:
    """Everybody who asks. seed: of lengths and arrivals; the i-th request is the same whatever else is."""

    def __init__(self, world: World, scheduler: Scheduler, load: Load, *, seed: int) -> None:
        self.seen: list[Seen] = []
        self._world = world
        self._scheduler = scheduler
        self._load = load
        self._seed = seed
        self._next = 0

    async def run(self) -> None:
        """All requests, to their ends."""
        load = self._load
        async with asyncio.TaskGroup() as group:
            if load.rate:
                rng = random.Random(f"arrivals {self._seed}")
                for _ in range(load.requests):
                    group.create_task(self._one())
                    await asyncio.sleep(rng.expovariate(load.rate))
            else:
                for _ in range(min(load.streams, load.requests)):
                    group.create_task(self._stream())

    async def _stream(self) -> None:
        while self._next < self._load.requests:
            await self._one()

    async def _one(self) -> None:
        number, self._next = self._next, self._next + 1
        load, world = self._load, self._world
        rng = random.Random(f"{number} {self._seed}")
        prompt, output = load.prompt.draw(rng), load.output.draw(rng)
        if load.prompts:
            prompt = load.prompts[number % len(load.prompts)]
        prompt = min(prompt, world.costs.max_length - 2)
        output = min(output, world.costs.max_length - prompt)
        seed = rng.getrandbits(62)
        world.texts[seed] = world.drafter.text(seed, prompt, output + world.drafter.depth + 2)
        seen = Seen(world.now(), prompt, output)
        self.seen.append(seen)
        await world.gateway.work(world.costs.request_ms / 1e3)
        request = GenerationRequest(
            tokens=(0,) * prompt, sampling=GREEDY, stop=StopParams(output, ignore_eos=True), seed=seed,
            request_id=f"r{number}",
        )  # fmt: skip
        try:
            async with self._scheduler.generate(request) as generation:
                async for event in generation:
                    if event.tokens:
                        # One event is formatted and sent, and read on the other side, before the next.
                        await world.gateway.work(world.costs.gateway_event_ms / 1e3)
                        await world.client.work(world.costs.client_event_ms / 1e3)
                        seen.times.append(world.now())
                        seen.tokens.append(len(event.tokens))
        except SpecBridgeError as error:
            seen.rejected = str(error)
        finally:
            del world.texts[seed]
