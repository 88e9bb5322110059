"""What the scheduler and the surfaces (gRPC, REST) say to each other about one request.

Owns the request, the events, the final statistics and the observer protocol metrics hang on. Does not
own text: everything here is token ids. Pure data; scheduler.py implements `Generation`.

    generation = scheduler.generate(GenerationRequest(tokens=ids, sampling=..., stop=...))
    async with generation:
        async for event in generation:
            ...event.tokens...                      # a stop string was found after n output tokens in all:
            stats = generation.stop(output_tokens=n)  # ends it, counts n tokens only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from specbridge.rounds import (
    DraftTimings,
    FinishReason,
    SamplingParams,
    StopParams,
    TargetTimings,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, tokenised.

    tokens           prompt ids (and output already held, if prompt_length says so)
    seed             None: the scheduler draws one, keeps it for re-opens and reports it in every event;
                     it replaces `sampling.seed`, which must stay 0
    stop             `max_tokens` is resolved: prompt + max_tokens must fit the model
    max_tree_nodes   this request's cap on a tree; None: the gateway's
    deadline_s       seconds from generate() until the request fails with DeadlineExceeded; None: none
    priority         lower is admitted first and preempted last
    tenant           whom it is for: tenants that wait share what there is by tokens
    hold_back        the reader may take tokens back (a stop string that spans events): they count as
                     delivered when `deliver` says so or at the end, not when the next event is asked for
    """

    tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    prompt_length: int | None = None
    seed: int | None = None
    speculate: bool = True
    max_tree_nodes: int | None = None
    request_id: str = "-"
    deadline_s: float | None = None
    cache_salt: bytes = b""
    want_logprobs: int = 0
    priority: int = 0
    tenant: str = ""
    hold_back: bool = False

    def __post_init__(self) -> None:
        if self.sampling.seed != 0 and self.sampling.seed != self.seed:
            raise ValueError(f"sampling.seed is {self.sampling.seed}: pass it as GenerationRequest.seed")


@dataclass(frozen=True, slots=True)
class SpecStats:
    """The numbers of `metrics.speculative_decoding` for one request, over delivered tokens only.

    acceptance_histogram  [num_spec_tokens + 1]; entry k = rounds with a tree that accepted k draft tokens
    num_spec_tokens       largest depth of a tree (block size - 1; 0 without a draft)
    num_spec_steps        rounds with a tree
    num_draft_tokens      nodes verified
    num_rounds            rounds in all, plain ones included; the prefill's token belongs to no round
    num_output_tokens     tokens delivered (= usage.completion_tokens)

    Without cut-offs inside a block, the sum over rounds of (accepted + 1), and the prefill tokens, make
    num_output_tokens.
    """

    acceptance_histogram: tuple[int, ...] = (0,)
    num_spec_tokens: int = 0
    num_spec_steps: int = 0
    num_accepted_draft_tokens: int = 0
    num_draft_tokens: int = 0
    num_rounds: int = 0
    num_output_tokens: int = 0
    per_step_accepted: tuple[int, ...] = ()
    per_step_drafted: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round with a tree, bonus included: 1 + accepted / steps; 1.0 without any such round."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / verified draft tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Newly committed tokens of a request, at least one unless it is the last event.

    Events that the reader was too slow to take are merged. The last one has a finish_reason other
    than RUNNING and carries `stats`.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason = FinishReason.RUNNING
    cached_tokens: int = 0
    seed: int = 0
    stats: SpecStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Generation(Protocol):
    """A running request: an async iterator of TokenEvent.

    Cancelling the task that reads it, aclose(), leaving `async with`, or dropping the last reference
    releases the sessions at both services.
    """

    seed: int
    request_id: str

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises the request's error: any SpecBridgeError."""
        ...

    def deliver(self, output_tokens: int) -> None:
        """With `hold_back`: the first `output_tokens` tokens are past recall and count as delivered."""
        ...

    def stop(self, *, output_tokens: int, finish_reason: FinishReason = FinishReason.STOP) -> SpecStats:
        """End the text after `output_tokens` tokens in all (a stop string); later ones count nowhere.

        Counted as a normal finish; works after the last event too. Returns the statistics up to there.
        """
        ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# ---- what metrics see -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One draft → verify → commit cycle of one cohort. Seconds on the gateway's monotonic clock.

    total_s           start of the round until its tokens are applied
    draft_wait_s      propose sent → answered (0: draft not asked); draft_service_s is what the draft reports
    verify_wait_s     verify sent → answered; verify_service_s is what the target reports
    rows, nodes       rows verified (anchors included) and tree nodes among them
    tokens, accepted  committed tokens and accepted nodes, before any stop string cuts them
    skipped           why the draft was not asked: "" | budget | draft_down | draft_busy | no_context | ...
    drafted, asked    sessions the draft was asked for, and nodes of them all
    context           committed rows of a session before the round, on average
    expected_*        what the budget policy expected, if it does
    probe             why it went otherwise: plain, draft, explore
    turn_wait_s       before its start: the other cohort was at the draft
    cohorts           in use
    """

    sessions: int
    speculating: int
    rows: int
    nodes: int
    tokens: int
    accepted: int
    total_s: float
    draft_wait_s: float = 0.0
    verify_wait_s: float = 0.0
    draft_service_s: float = 0.0
    verify_service_s: float = 0.0
    skipped: str = ""
    cohort: int = 0
    draft_timings: DraftTimings | None = None
    target_timings: TargetTimings | None = None
    drafted: int = 0
    asked: int = 0
    context: int = 0
    expected_tokens: float | None = None
    expected_s: float | None = None
    probe: str = ""
    turn_wait_s: float = 0.0
    cohorts: int = 1

    @property
    def cold(self) -> bool:
        """Its verify pass was one of the first two of its size: no measure of what such rounds take."""
        return self.target_timings is not None and self.target_timings.cold

    @property
    def gateway_s(self) -> float:
        """Time outside both services' waits: what the gateway itself added."""
        return max(0.0, self.total_s - self.draft_wait_s - self.verify_wait_s)

    @property
    def rpc_s(self) -> float:
        """Time of the two waits that the services do not account for: conversion here, sockets, wake-ups."""
        draft = self.draft_wait_s - self.draft_service_s if self.draft_service_s else 0.0
        verify = self.verify_wait_s - self.verify_service_s if self.verify_service_s else 0.0
        return max(0.0, draft) + max(0.0, verify)


@dataclass(frozen=True, slots=True)
class RoundShare:
    """One request's part of one round, delivered tokens only. drafted 0: a plain round."""

    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DeliveredRecord:
    """Tokens a reader has taken. Adding these up reconciles with usage and with every request's SpecStats.

    first        the request's first tokens: `interval_s` is the time since generate() (TTFT), else since
                 the previous tokens arrived
    rounds       the rounds these tokens came from (a prefill's token belongs to none)
    """

    tokens: int
    first: bool
    interval_s: float
    rounds: tuple[RoundShare, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that ended. Seconds; `finish_reason` ABORT: it went away before a finish was seen."""

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stats: SpecStats
    queue_s: float
    first_token_s: float | None
    total_s: float
    reopens: int = 0
    error: BaseException | None = None


class RoundObserver(Protocol):
    """Receives what happened; called on the event loop, must not block. See gateway.metrics."""

    def on_round(self, record: RoundRecord) -> None: ...

    def on_delivered(self, record: DeliveredRecord) -> None: ...

    def on_request(self, record: RequestRecord) -> None:
        """Once per admitted request, at its end."""
        ...

    def on_rejected(self, error: BaseException) -> None:
        """A request that was never admitted (queue full, wrong input, no target)."""
        ...

    def on_fallback(self, cause: str, count: int) -> None:
        """`count` sessions decode without a tree although they wanted one. Causes: FALLBACK_CAUSES."""
        ...

    def on_reopen(self, service: str, cause: str) -> None:
        """A session is opened again at "target" or "draft". Causes: REOPEN_CAUSES."""
        ...

    def on_connection(self, service: str, connected: bool, reason: str) -> None: ...


FALLBACK_CAUSES: Sequence[str] = (
    "draft_down",  # no stream to the draft
    "draft_mismatch",  # the draft was made for another target
    "draft_busy",  # an earlier propose is still unanswered
    "draft_timeout",  # no answer within draft_timeout
    "draft_error",  # a typed error other than the ones below
    "not_ready",  # the draft context is behind
    "stale",  # the draft does not know the session
    "no_session",  # being (re-)opened at the draft
    "no_context",  # the target says that the draft cannot follow
    "invalid_tree",  # a tree that breaks the contract
    "backoff",  # not asked after repeated NOT_READY
    "deferred",  # the draft is about to be told of rows that were held back while the budget skipped it
)
REOPEN_CAUSES: Sequence[str] = (
    "disconnected",
    "restarted",
    "stale",
    "preempted",
    "error",
    "timeout",
    "capacity",
    "wanted",  # at the draft: it was not opened there while no draft was expected to pay
)


class NullObserver:
    """Observes nothing."""

    def on_round(self, record: RoundRecord) -> None: ...

    def on_delivered(self, record: DeliveredRecord) -> None: ...

    def on_request(self, record: RequestRecord) -> None: ...

    def on_rejected(self, error: BaseException) -> None: ...

    def on_fallback(self, cause: str, count: int) -> None: ...

    def on_reopen(self, service: str, cause: str) -> None: ...

    def on_connection(self, service: str, connected: bool, reason: str) -> None: ...
