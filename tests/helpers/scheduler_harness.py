"""Running a scheduler over any pair of clients: requests, a recording observer, reading to the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.generation import (
    DeliveredRecord,
    GenerationRequest,
    RequestRecord,
    RoundRecord,
    SpecStats,
    TokenEvent,
)
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from specbridge.rounds import FinishReason, SamplingParams, StopParams


@dataclass
class Collected:
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    events: list[TokenEvent]
    stats: SpecStats
    seed: int


@dataclass
class Recorder:
    """A RoundObserver that keeps everything, and checks that the accounts agree."""

    rounds: list[RoundRecord] = field(default_factory=list)
    delivered: list[DeliveredRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    rejected: list[BaseException] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    reopens: Counter[tuple[str, str]] = field(default_factory=Counter)
    connections: list[tuple[str, bool]] = field(default_factory=list)

    def on_round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def on_delivered(self, record: DeliveredRecord) -> None:
        self.delivered.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def on_rejected(self, error: BaseException) -> None:
        self.rejected.append(error)

    def on_fallback(self, cause: str, count: int) -> None:
        self.fallbacks[cause] += count

    def on_reopen(self, service: str, cause: str) -> None:
        self.reopens[service, cause] += 1

    def on_connection(self, service: str, connected: bool, reason: str) -> None:
        self.connections.append((service, connected))

    def reconcile(self) -> None:
        """Sums over delivered records equal sums over requests, entry by entry of the histogram."""
        assert sum(d.tokens for d in self.delivered) == sum(r.output_tokens for r in self.requests)
        shares = [s for d in self.delivered for s in d.rounds]
        steps = [s for s in shares if s.drafted]
        stats = [r.stats for r in self.requests]
        assert len(shares) == sum(s.num_rounds for s in stats)
        assert len(steps) == sum(s.num_spec_steps for s in stats)
        assert sum(s.drafted for s in steps) == sum(s.num_draft_tokens for s in stats)
        assert sum(s.accepted for s in steps) == sum(s.num_accepted_draft_tokens for s in stats)
        histogram: Counter[int] = Counter()
        for s in stats:
            assert len(s.acceptance_histogram) == s.num_spec_tokens + 1
            histogram.update({k: n for k, n in enumerate(s.acceptance_histogram) if n})
        assert histogram == Counter(s.accepted for s in steps)


def make_request(i: int, **changes: Any) -> GenerationRequest:
    """A request of its own prompt and seed."""
    rng = random.Random(i)
    values: dict[str, Any] = {
        "tokens": tuple(rng.randrange(1, 90) for _ in range(3 + i % 5)),
        "sampling": SamplingParams(temperature=0.8),
        "seed": 1000 + i,
        "request_id": f"r{i}",
    }
    stop = StopParams(
        max_tokens=changes.pop("max_tokens", 30),
        stop_token_ids=changes.pop("stop_token_ids", ()),
        min_tokens=changes.pop("min_tokens", 0),
        ignore_eos=changes.pop("ignore_eos", False),
    )
    return GenerationRequest(**{**values, "stop": stop, **changes})


async def collect(scheduler: Scheduler, request: GenerationRequest) -> Collected:
    """Read a request to its end."""
    events: list[TokenEvent] = []
    async with scheduler.generate(request) as generation:
        async for event in generation:
            events.append(event)
    last = events[-1]
    assert last.stats is not None
    return Collected(
        tuple(t for e in events for t in e.tokens), last.finish_reason, events, last.stats, generation.seed
    )


def run_scheduler(
    body: Callable[[Scheduler], Awaitable[None]],
    target: Any,
    draft: Any,
    *,
    limits: SchedulerLimits | None = None,
    observer: Any = None,
    timeout_s: float = 60.0,
    policy: Any = None,
) -> None:
    """Run `body` with a started scheduler; everything hangs at most `timeout_s` seconds."""

    async def main() -> None:
        scheduler = Scheduler(target, draft, limits=limits, observer=observer, policy=policy)
        async with asyncio.timeout(timeout_s):
            await scheduler.start()
            await scheduler.wait_ready(5.0)
            try:
                await body(scheduler)
            finally:
                await scheduler.close()

    asyncio.run(main())
