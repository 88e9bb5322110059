"""The machine that a simulation runs on: who works on what, how long messages take, and chance.

Owns pools and threads made from costs, and the wires between gateway and services. Does not own what is sent.
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.pools import Pool, Thread
from benchmarks.simulation.texts import Drafter, Text

RequestT = TypeVar("RequestT")


class World:
    """Of one run: `costs` on pools, texts by their seeds. seed: of the jitter."""

    def __init__(self, costs: Costs, drafter: Drafter, *, seed: int) -> None:
        self.costs = costs
        self.drafter = drafter
        self.texts: dict[int, Text] = {}
        self.pools = {name: Pool(capacity) for name, capacity in costs.pools.items()}
        self.gateway = self._thread("gateway")
        self.client = self._thread("client")
        self._random = random.Random(seed)

    def _thread(self, name: str) -> Thread:
        worker = self.costs.workers[name]
        return Thread(self.pools[worker.pool], demand=worker.demand, weight=worker.weight)

    async def run(self, name: str, ms: float) -> float:
        """Do a service's work, which takes `ms` when nobody else is there. Returns the seconds it took."""
        worker = self.costs.workers[name]
        begun = asyncio.get_running_loop().time()
        if self.costs.jitter:
            sigma = self.costs.jitter
            ms *= math.exp(self._random.gauss(-0.5 * sigma * sigma, sigma))
        await self.pools[worker.pool].run(ms / 1e3, demand=worker.demand, weight=worker.weight)
        return asyncio.get_running_loop().time() - begun

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def now_ns(self) -> int:
        return round(1e9 * self.now())


class Wire:
    """Messages in one direction: each takes as long, and none passes another."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: deque[Callable[[], None]] = deque()

    def post(self, arrive: Callable[[], None]) -> None:
        self._under_way.append(arrive)
        asyncio.get_running_loop().call_later(self._seconds, lambda: self._under_way.popleft()())


class Service(ABC, Generic[RequestT]):
    """A gateway.clients.Client whose service is simulated: what both have in common.

    Sending and taking in an answer is the gateway thread's work, in the order in which it came.
    """

    connected = False

    def __init__(self, world: World) -> None:
        self.world = world
        self._listener: Any = None
        self._there = Wire(world.costs.hop_ms / 1e3)
        self._back = Wire(world.costs.hop_ms / 1e3)
        self._inbox: deque[tuple[RequestT, float]] = deque()
        self._wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    # ---- as the gateway sees it ---------------------------------------------------------------

    def start(self, listener: Any) -> None:
        self._listener = listener
        self.connected = True
        self.task = asyncio.create_task(self._engine())
        asyncio.get_running_loop().call_soon(lambda: listener.on_connected(self.make_info()))

    async def info(self, timeout_s: float) -> Any:
        return self.make_info()

    def send(self, request: RequestT) -> None:
        sessions = self.sessions_of(request)
        self.world.gateway.post(
            self._own_s(sessions), lambda: self._there.post(lambda: self._arrive(request))
        )

    def reset(self, reason: str) -> None:
        raise RuntimeError(f"the scheduler gave a simulated stream up: {reason}")

    async def close(self) -> None:
        self.connected = False
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    # ---- as the service sees it ---------------------------------------------------------------

    @abstractmethod
    def make_info(self) -> Any:
        """The service's GetInfo."""

    @abstractmethod
    def sessions_of(self, message: Any) -> int:
        """Sessions in a message of either direction."""

    @abstractmethod
    async def _engine(self) -> None:
        """The service's one thread."""

    def _arrive(self, request: RequestT) -> None:
        self._inbox.append((request, self.world.now()))
        self._wake.set()

    def answer(self, reply: Any) -> None:
        seconds = self._own_s(self.sessions_of(reply))
        self._back.post(lambda: self.world.gateway.post(seconds, lambda: self._deliver(reply)))

    def _deliver(self, reply: Any) -> None:
        if self.connected:
            self._listener.on_reply(reply)

    def _own_s(self, sessions: int) -> float:
        costs = self.world.costs
        return (costs.gateway_batch_ms + costs.gateway_session_ms * sessions) / 1e3
