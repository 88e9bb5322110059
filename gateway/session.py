"""One request's state inside the scheduler: tokens held, keys, draft standing, undelivered tokens, accounts.

Owns what is true of a single session and the mailbox its reader takes events from. Does not own when
things happen: opening, rounds and releases are the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterable

from gateway.generation import (
    DeliveredRecord,
    GenerationRequest,
    RequestRecord,
    RoundObserver,
    SpecStats,
    TokenEvent,
)
from gateway.ledger import Ledger
from specbridge.errors import SpecBridgeError
from specbridge.rounds import (
    DraftOpen,
    DraftResult,
    FinishReason,
    SamplingParams,
    SessionKey,
    TargetOpen,
    TargetResult,
    TokenLogprobs,
)


class Phase(enum.Enum):
    QUEUED = "queued"
    OPENING = "opening"  # also re-opening
    RUNNING = "running"
    DONE = "done"


MAX_FAILURES = 3
"""Internal errors of the target for one session, without a token between, after which it fails."""


class DraftStanding(enum.Enum):
    OFF = "off"  # this request never speculates
    CLOSED = "closed"  # wants a draft session and has none
    OPENING = "opening"
    OPEN = "open"


class Session:
    """See the module. The scheduler is the only writer, except for the reader's methods at the end."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        key: SessionKey,
        seed: int,
        wants_draft: bool,
        target_fingerprint: str,
        observer: RoundObserver,
        now: Callable[[], float],
    ) -> None:
        self.request = request
        self.key = key
        self.seed = seed
        self.sampling: SamplingParams = dataclasses.replace(request.sampling, seed=seed)
        self.tokens: list[int] = list(request.tokens)
        self.prompt_length = len(request.tokens) if request.prompt_length is None else request.prompt_length
        self.speculate = wants_draft
        self.phase = Phase.QUEUED
        self.target_fingerprint = target_fingerprint
        self.ledger = Ledger()
        self.num_spec_tokens = 0

        self.context = contextvars.copy_context()
        """What is done for this session runs in it: log lines then carry the request's id."""
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.target_reply: asyncio.Future[TargetResult | SpecBridgeError] | None = None
        self.draft_reply: asyncio.Future[DraftResult | None] | None = None
        self.target_key: SessionKey | None = None  # last opened there: what a release must name
        self.attempts = 0
        self.failures = 0  # errors of the target's own since the last token
        self.reopens = 0
        self.preemptions = 0
        self.charged = 0
        """Tokens that its tenant was charged for it."""
        self.outage_since: float | None = None

        self.draft = DraftStanding.CLOSED if wants_draft else DraftStanding.OFF
        self.draft_key: SessionKey | None = None
        self.draft_retry_at = 0.0
        self.draft_failures = 0
        self.draft_sent_at = 0.0
        self.draft_spared = False
        """It has no draft session because none is expected to be asked for long."""
        self.has_context = True
        self.not_ready = 0
        self.blind_rounds = 0
        self.skip_rounds = 0
        self.rows_deferred = False
        """The draft has not been told of the last rounds' rows (Verify.defer_rows)."""

        self.cached_tokens = 0
        self._observer = observer
        self._now = now
        self._created = now()
        self.admitted_at: float | None = None
        self._first_at: float | None = None
        self._last_at = self._created
        self._finish = FinishReason.RUNNING
        self._error: BaseException | None = None
        self._handed = 0  # output tokens given to the reader
        self._first_delivered = False
        self._intervals_from = self._created
        self._reported = False
        self._closed = False
        self._final_handed = False
        self._logprobs: list[TokenLogprobs] = []
        self._waiter: asyncio.Future[None] | None = None

    # ---- state ------------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """kv_length: index of the anchor."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        return self.prompt_length + self.request.stop.max_tokens - len(self.tokens)

    @property
    def waits_since(self) -> float | None:
        """When its last token came, or else it was admitted; None while it is in the queue."""
        if self.admitted_at is None or self.phase is Phase.QUEUED:
            return None
        return max(self._last_at, self.admitted_at)

    def next_key(self) -> None:
        """The key of the next open at the target; every attempt but the first raises the incarnation."""
        if self.attempts:
            self.key = dataclasses.replace(self.key, incarnation=self.key.incarnation + 1)
        self.attempts += 1

    def target_open(self, draft_prefix: int | None) -> TargetOpen:
        """draft_prefix: context rows that the draft holds; None if it has no session, and so no say in which
        prefix the target reuses.
        """
        length = len(self.tokens)
        return TargetOpen(
            session=self.key,
            tokens=tuple(self.tokens),
            prompt_length=self.prompt_length,
            sampling=self.sampling,
            stop=self.request.stop,
            draft_prefix=length if draft_prefix is None else min(draft_prefix, length),
            speculate=self.speculate,
            cache_salt=self.request.cache_salt,
            want_logprobs=self.request.want_logprobs,
            priority=self.request.priority,
            age_ms=self._age_ms(),
            draft_absent=self.speculate and draft_prefix is None,
        )

    def _age_ms(self) -> int:
        """Since it first got a place: of equal priority the target takes pages from the youngest."""
        since = self._created if self.admitted_at is None else self.admitted_at
        return min(max(int((self._now() - since) * 1000), 0), 2**32 - 1)

    def draft_open(self, *, recapture: bool) -> DraftOpen:
        return DraftOpen(
            session=self.key,
            tokens=tuple(self.tokens),
            prompt_length=self.prompt_length,
            sampling=self.sampling,
            cache_salt=self.request.cache_salt,
            recapture=recapture,
            kv_length=self.base if recapture else 0,
        )

    def draft_closed(self, retry_at: float) -> None:
        """The draft has no session for us (any more)."""
        if self.draft is not DraftStanding.OFF:
            self.draft = DraftStanding.CLOSED
            self.draft_retry_at = retry_at
            self.not_ready = self.skip_rounds = 0

    # ---- tokens in --------------------------------------------------------------------------

    def _take(self, result: TargetResult) -> None:
        self.tokens.extend(result.tokens)
        self._logprobs.extend(result.logprobs)
        self.has_context = result.draft_has_context
        self.outage_since = None
        self.failures = 0
        self._last_at = self._now()
        if self._first_at is None and result.tokens:
            self._first_at = self._last_at
        if result.finish_reason is not FinishReason.RUNNING:
            self._finish = result.finish_reason

    def take_first(self, result: TargetResult) -> None:
        """A prefill's result. The reader is not woken (see wake)."""
        if self._first_at is None:
            self.cached_tokens = result.cached_tokens
        self.ledger.add_plain(len(result.tokens))
        self.rows_deferred = False
        self._take(result)

    def take_round(self, result: TargetResult, drafted: int) -> None:
        """A round's result; `drafted` nodes were verified. The reader is not woken (see wake)."""
        self.ledger.add_round(tokens=len(result.tokens), drafted=drafted, accepted=len(result.accepted))
        self._take(result)

    @property
    def finished(self) -> bool:
        return self._finish is not FinishReason.RUNNING

    def set_error(self, error: BaseException) -> None:
        if self._error is None and not self.finished:
            self._error = error

    def wake(self) -> None:
        """Let the reader run, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the reader's side ------------------------------------------------------------------

    @property
    def reported(self) -> bool:
        return self._reported

    async def next_event(self) -> TokenEvent | None:
        """The next event, or None after the last one. Raises the request's error."""
        if not self.request.hold_back:
            self._settle(self._handed)
        while True:
            if self._closed or self._final_handed:
                return None
            if self.ledger.output > self._handed or self.finished:
                return self._event()
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _event(self) -> TokenEvent:
        start = len(self.tokens) - (self.ledger.output - self._handed)
        tokens = tuple(self.tokens[start:])
        self._handed = self.ledger.output
        logprobs, self._logprobs = tuple(self._logprobs), []
        stats = None
        if self.finished:
            self._final_handed = True
            stats = self.ledger.stats(self._handed, self.num_spec_tokens)
        return TokenEvent(tokens, self._finish, self.cached_tokens, self.seed, stats, logprobs)

    def deliver(self, output_tokens: int) -> None:
        if not self._closed:
            self._settle(min(output_tokens, self._handed))

    def _settle(self, limit: int, *, final: bool = False) -> None:
        """The first `limit` output tokens count as delivered from here on."""
        tokens = limit - self.ledger.settled
        if tokens <= 0 and not final:
            return
        rounds = self.ledger.settle(limit, final=final)
        if tokens <= 0 and not rounds:
            return
        now = self._last_at
        record = DeliveredRecord(
            tokens, not self._first_delivered, max(0.0, now - self._intervals_from), rounds
        )
        self._first_delivered = True
        self._intervals_from = now
        self._observer.on_delivered(record)

    def close(
        self, *, output_tokens: int | None = None, finish_reason: FinishReason | None = None
    ) -> SpecStats:
        """End the account, once: at the reader's stop (`output_tokens`, `finish_reason`), close or error."""
        self._closed = True
        limit = self._handed if output_tokens is None else min(output_tokens, self._handed)
        limit = max(limit, self.ledger.settled)
        stats = self.ledger.stats(limit, self.num_spec_tokens)
        if not self._reported:
            self._reported = True
            self._settle(limit, final=True)
            if finish_reason is None:
                finish_reason = self._finish if self._final_handed else FinishReason.ABORT
            now = self._now()
            admitted = self.admitted_at if self.admitted_at is not None else now
            self._observer.on_request(
                RequestRecord(
                    request_id=self.request.request_id,
                    finish_reason=finish_reason,
                    prompt_tokens=self.prompt_length,
                    output_tokens=limit,
                    cached_tokens=self.cached_tokens,
                    stats=stats,
                    queue_s=admitted - self._created,
                    first_token_s=None if self._first_at is None else self._first_at - self._created,
                    total_s=now - self._created,
                    reopens=self.reopens,
                    error=self._error if finish_reason is FinishReason.ABORT else None,
                )
            )
        return stats


def longest_stall(sessions: Iterable[Session], now: float) -> float:
    """Seconds since the last token, or the admission, of the one that waits longest; 0 without any."""
    return max((now - since for s in sessions if (since := s.waits_since) is not None), default=0.0)
