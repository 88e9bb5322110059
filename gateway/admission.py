"""Admission: what a request must satisfy, and when it gets its place among the running ones.

Owns the checks against the target's limits, the bounds of the queue, and the decision that there are a place
and K/V pages for the next one. Does not own who is next (gateway.waiting) nor what is done with the place
(gateway.scheduler).

Pages are the target's matter; what it last said is free, less what was promised since, decides here. A
newcomer leaves room for the next tokens of those that run, so that it does not cost one of them its pages at
once. One that was preempted comes back when there is room for twice as many tokens as the last time: so it is
preempted a few times at most, and in the end only returns to a place that it can keep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from gateway.crowd import Crowd
from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.session import Phase, Session
from gateway.waiting import FairQueue
from specbridge.errors import CapacityError, InvalidRequest
from specbridge.rounds import TargetInfo, check_token_ids

MOST_PRIORITY = 1000
"""Priorities lie in [-MOST_PRIORITY, MOST_PRIORITY]."""
ROOM_TOKENS = 64
"""Tokens that every session must have room to grow by when a newcomer is admitted."""
RATE_S = 30.0
"""Time over which throughput is averaged."""
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Bounds of the hint when to try again."""
TYPICAL_OUTPUT = 256
"""Output tokens of a request, as long as none has ended."""


def check_request(request: GenerationRequest, info: TargetInfo) -> None:
    """Raises InvalidRequest (Unsupported) naming field, value and legal range."""
    tokens, stop = request.tokens, request.stop
    if not tokens:
        raise InvalidRequest("the prompt is empty; at least one token is needed", param="prompt")
    check_token_ids(tokens, info.vocab_size, name="prompt")
    prompt_length = len(tokens) if request.prompt_length is None else request.prompt_length
    if not 1 <= prompt_length <= len(tokens):
        raise InvalidRequest(
            f"prompt_length is {prompt_length}; it must be in [1, {len(tokens)}]", param="prompt_length"
        )
    stop.validate(vocab_size=info.vocab_size)
    if prompt_length + stop.max_tokens > info.max_length:
        raise InvalidRequest(
            f"prompt of {prompt_length} tokens + max_tokens {stop.max_tokens} is more than the model's "
            f"length of {info.max_length}",
            param="max_tokens",
        )
    pages = -(-(prompt_length + stop.max_tokens) // max(1, info.page_size))
    if 0 < info.total_pages < pages:
        # It would be preempted by itself for ever.
        raise InvalidRequest(
            f"prompt of {prompt_length} tokens + max_tokens {stop.max_tokens} need {pages} KV pages, the "
            f"target has {info.total_pages}; ask for less or start the target with more --kv-tokens",
            param="max_tokens",
        )
    if len(tokens) - prompt_length >= stop.max_tokens:
        raise InvalidRequest(
            f"{len(tokens) - prompt_length} output tokens are given already; max_tokens {stop.max_tokens} "
            "leaves none",
            param="max_tokens",
        )
    for name, value, least, most in (
        ("max_tree_nodes", request.max_tree_nodes, 0, math.inf),
        ("priority", request.priority, -MOST_PRIORITY, MOST_PRIORITY),
    ):
        if value is not None and not least <= value <= most:
            legal = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
            raise InvalidRequest(f"{name} is {value}; it must be {legal}", param=name)
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise InvalidRequest(
            f"the deadline is {request.deadline_s} s; it must be positive", param="deadline_s"
        )
    request.sampling.validate()


class Pages(Protocol):
    """The target as admission sees it. available_pages: those that no session held when it last spoke."""

    info: TargetInfo | None
    available_pages: int


class Admission:
    """The queue, and who holds a place. On one event loop."""

    def __init__(
        self, limits: SchedulerLimits, target: Pages, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._target = target
        self._clock = clock
        self._queue: FairQueue[Session] = FairQueue(
            quantum=limits.fair_quantum, ageing_s=limits.priority_ageing
        )
        self._active: dict[int, Session] = {}
        self._crowd = Crowd(clock)
        self._rate = _Rate()
        self._output = float(TYPICAL_OUTPUT)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sessions that hold a place: opening, running or re-opening."""
        return len(self._active)

    @property
    def expected(self) -> int:
        """Sessions that one which comes now will mostly run beside, itself among them."""
        return self._crowd.expected

    @property
    def places(self) -> int:
        """Sessions that may run at once."""
        info = self._target.info
        limit = info.max_sessions if info is not None and info.max_sessions > 0 else self._limits.max_running
        return min(self._limits.max_running, limit)

    # ---- coming -----------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Raises CapacityError, with a hint when to try again, if the queue has no room for `request`."""
        waiting, tokens = len(self._queue), self._queue.tokens
        if not waiting and self.running < self.places:
            return
        if waiting >= self._limits.max_queue:
            raise CapacityError(
                f"the queue is full: {waiting} requests wait for one of {self.places} places, --max-queue "
                f"allows {self._limits.max_queue}; try later",
                retry_after=self._retry_after(),
            )
        more = len(request.tokens)
        if waiting and tokens + more > self._limits.max_queue_tokens:
            raise CapacityError(
                f"the queue is full: requests of {tokens} tokens wait, one of {more} more would pass "
                f"--max-queue-tokens {self._limits.max_queue_tokens}; try later",
                retry_after=self._retry_after(),
            )

    def put(self, session: Session) -> None:
        """A new request joins the queue."""
        request = session.request
        session.charged = len(session.tokens) + int(min(request.stop.max_tokens, self._output))
        self._queue.put(
            session,
            priority=request.priority,
            tenant=request.tenant,
            cost=session.charged,
            now=self._clock(),
        )

    def put_back(self, session: Session) -> None:
        """A session has lost its pages: it waits until it can have them back."""
        self._gone(session)
        session.preemptions += 1
        assert session.admitted_at is not None
        self._queue.put_back(
            session,
            priority=session.request.priority,
            cost=len(session.tokens),
            born=session.admitted_at,
            now=self._clock(),
        )

    def next(self) -> Session | None:
        """The next one, which now holds a place; None if it has to wait, and with it all behind it."""
        if not len(self._queue) or self.running >= self.places:
            return None
        now = self._clock()
        session = self._queue.peek(now)
        assert session is not None
        if not self._pages_for(session):
            return None
        self._queue.take(session)
        self._active[session.key.number] = session
        self._crowd.enter(session.key.number)
        if session.admitted_at is None:
            session.admitted_at = now
        return session

    # ---- going ------------------------------------------------------------------------------

    def _gone(self, session: Session) -> None:
        del self._active[session.key.number]
        self._crowd.leave(session.key.number)

    def end(self, session: Session) -> None:
        """A request is over, wherever it was."""
        if session.phase is Phase.QUEUED:
            self._queue.remove(session)
            return
        self._gone(session)
        output = session.ledger.output
        request = session.request
        self._rate.add(len(session.tokens) - session.cached_tokens, self._clock())
        self._queue.settle(
            priority=request.priority,
            tenant=request.tenant,
            tokens=session.prompt_length + output - session.charged,
        )
        if session.finished:
            self._output += 0.1 * (output - self._output)

    def _retry_after(self) -> float:
        """Seconds in which what waits now will have been served, at the rate of late."""
        rate = self._rate.value(self._clock())
        seconds = self._queue.tokens / rate if rate > 0 else LEAST_RETRY_S
        return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)

    # ---- pages ------------------------------------------------------------------------------

    def _pages_for(self, session: Session) -> bool:
        """Whether the target has pages for a session, and for the next tokens of all."""
        info = self._target.info
        if info is None or not self._active or not info.total_pages:
            return True
        room = ROOM_TOKENS << min(session.preemptions, 24)

        def pages(tokens: int) -> int:
            return -(-tokens // info.page_size)

        def growth(other: Session) -> int:
            return pages(min(room, max(other.remaining, 0)))

        needed = pages(len(session.tokens)) + growth(session) + sum(map(growth, self._active.values()))
        # What opens has been promised its prompt's pages, and may not have taken them yet.
        promised = sum(pages(len(s.tokens)) for s in self._active.values() if s.phase is Phase.OPENING)
        return needed + promised <= self._target.available_pages


class _Rate:
    """Tokens a second, of late."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at: float | None = None
        self._weight = 0.0

    def add(self, tokens: int, now: float) -> None:
        self._decay(now)
        self._level += tokens / RATE_S

    def value(self, now: float) -> float:
        """0 as long as nothing is known."""
        self._decay(now)
        # Before RATE_S have passed the average is over less.
        return self._level / self._weight if self._weight > 0 else 0.0

    def _decay(self, now: float) -> None:
        if self._at is not None:
            left = math.exp(-max(now - self._at, 0.0) / RATE_S)
            self._level *= left
            self._weight = 1 - (1 - self._weight) * left
        self._at = now
