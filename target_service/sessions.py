"""SessionBook: all open sessions, what was asked of them, and the results on their way out.

Owns opening, releasing, leases, preemption and the queue of verifies. Does not own the forward pass
(target_service.stepper). Everything runs on the engine's thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbridge.errors import (
    CapacityError,
    InternalError,
    NotReady,
    SpecBridgeError,
    Stale,
    mapping,
)
from specbridge.rounds import (
    SessionKey,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
)
from target_service.batching import (
    Batch,
    VerifyItem,
    error_result,
    failed_result,
    preempted_result,
)
from target_service.capture import Capture
from target_service.config import Limits
from target_service.kv_cache import PageCache
from target_service.metrics import TargetMetrics
from target_service.sampling import ChoiceRule
from target_service.session import Phase, Reply, Session, validate_open

log = logging.getLogger(__name__)


class SessionBook:
    """Sessions by (gateway, number), the verify queue and the outbox."""

    def __init__(
        self,
        limits: Limits,
        cache: PageCache,
        capture: Capture,
        metrics: TargetMetrics,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.capture = capture
        self.metrics = metrics
        self.pending: deque[VerifyItem] = deque()
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._sessions: dict[tuple[bytes, int], Session] = {}
        self._opened = 0
        self._evictions = 0
        self._replies: list[tuple[Reply, TargetReply]] = []
        self._notices: dict[Reply, list[TargetResult]] = {}
        metrics.pages_total.set(cache.num_pages)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def in_phase(self, phase: Phase) -> list[Session]:
        """Sessions in `phase`: the most urgent first, of equal priority the oldest."""
        return sorted((s for s in self._sessions.values() if s.phase is phase), key=lambda s: s.place)

    def find(self, key: SessionKey) -> Session | None:
        """The session of this key, if it is the current incarnation."""
        session = self._sessions.get((key.gateway, key.number))
        return session if session is not None and session.key.incarnation == key.incarnation else None

    # ---- requests -------------------------------------------------------------------------------

    def submit(self, request: TargetRequest, reply: Reply, *, received: int) -> None:
        """Take in one request: releases, then opens, both answered at once; verifies are queued.

        If it raises, nothing was answered or queued: see `refuse`.
        """
        acks: list[TargetResult] = []
        for key in request.releases:
            self.release(key, reply)
            acks.append(TargetResult(key, TargetResultKind.RELEASED))
        for item in request.opens:
            acks.append(self._open_result(item, reply))
        count = len(request.verifies)
        batch = Batch(request.batch_id, reply, received, [None] * count, count)
        queued: list[VerifyItem] = []
        now = time.monotonic()
        for index, verify in enumerate(request.verifies):
            session = self.find(verify.session)
            if session is not None:
                session.reply = reply
                session.lease_until = None
                session.active_at = now
            queued.append(VerifyItem(batch, index, verify))
        if acks:
            self._replies.append((reply, TargetReply(request.batch_id, tuple(acks))))
        self.pending += queued

    def refuse(self, request: TargetRequest, reply: Reply, error: SpecBridgeError, *, received: int) -> None:
        """Answer all of a request that `submit` choked on with `error`; its sessions are gone."""
        keys = [*request.releases, *(item.session for item in request.opens)]
        for key in keys:
            session = self.find(key)
            if session is not None:
                self.remove(session)
                self._drop_pending(session, error)
            self._count(error)
        if keys:
            self._replies.append(
                (reply, TargetReply(request.batch_id, tuple(failed_result(k, error) for k in keys)))
            )
        count = len(request.verifies)
        batch = Batch(request.batch_id, reply, received, [None] * count, count)
        for index, verify in enumerate(request.verifies):
            self.fail_item(VerifyItem(batch, index, verify), error)

    def release(self, key: SessionKey, reply: Reply) -> None:
        """End a session, keeping its full pages as prefixes. Unknown keys are fine."""
        session = self.find(key)
        if session is not None:
            self._end(session, Stale(f"session {key} was released; open it again to go on"), reply)

    def drop_stream(self, reply: Reply, *, now: float) -> None:
        """The stream behind `reply` broke: its queued verifies are void, its sessions get a lease."""
        self.pending = deque(item for item in self.pending if item.batch.reply != reply)
        self._notices.pop(reply, None)
        for session in self._sessions.values():
            if session.reply == reply:
                session.lease_until = now + self.limits.session_lease

    def expire(self, *, now: float) -> None:
        """Free the sessions whose lease has run out, and those that a living peer asks nothing of."""
        for session in [s for s in self._sessions.values() if self._expiry(s) <= now]:
            if session.lease_until is not None:
                log.warning(
                    "session %s freed: its stream has been gone for %.1f s",
                    session.key,
                    self.limits.session_lease,
                )
                self.metrics.lease_timeouts.inc()
                self.remove(session)
                continue
            idle = f"session {session.key} was freed: no verify came for {self.limits.idle_lease:g} s"
            log.warning("%s", idle)
            self.metrics.idle_timeouts.inc()
            self.fail(session, Stale(f"{idle}; open it again to go on"))

    def next_expiry(self) -> float:
        """When the next session is to be freed (time.monotonic); infinite if none ever is."""
        return min((self._expiry(s) for s in self._sessions.values()), default=math.inf)

    def _expiry(self, session: Session) -> float:
        if session.lease_until is not None:
            return session.lease_until
        # A prompt that has not run is our debt, not its peer's.
        return math.inf if session.phase is Phase.PREFILL else session.active_at + self.limits.idle_lease

    def _open_result(self, request: TargetOpen, reply: Reply) -> TargetResult:
        try:
            session = self._open(request, reply)
        except SpecBridgeError as error:
            self._count(error)
            return failed_result(request.session, error)
        except Exception as error:  # one open must not end the engine
            log.exception("open of session %s failed", request.session)
            wrapped = InternalError(f"open failed: {type(error).__name__}: {error}")
            self._count(wrapped)
            return failed_result(request.session, wrapped)
        return TargetResult(
            session.key,
            TargetResultKind.OPENED,
            cached_tokens=session.cached_tokens,
            draft_has_context=session.capture.following,
        )

    def _open(self, request: TargetOpen, reply: Reply) -> Session:
        key, limits = request.session, self.limits
        place = (key.gateway, key.number)
        older = self._sessions.get(place)
        if older is not None and key.incarnation <= older.key.incarnation:
            raise Stale(
                f"session {key} is open here as incarnation {older.key.incarnation}; use a higher one"
            )
        validate_open(request, vocab_size=self._vocab_size, max_length=limits.max_length)
        if older is not None:
            error = Stale(f"session {older.key} was re-opened as incarnation {key.incarnation}")
            self._end(older, error, reply)
        if len(self._sessions) >= limits.max_sessions:
            raise CapacityError(
                f"{len(self._sessions)} sessions are open, --max-sessions allows {limits.max_sessions}; "
                "try again later",
                retry_after=1.0,
            )
        needed = self.cache.pages_for(len(request.tokens) + 1)
        if needed > self.cache.num_pages:
            raise CapacityError(
                f"{len(request.tokens)} tokens need {needed} KV pages and there are {self.cache.num_pages}; "
                "raise --kv-tokens"
            )
        stop = request.stop
        now = time.monotonic()
        eos = tuple(token for token in self._eos if token < self._vocab_size)
        self._opened += 1
        session = Session(
            key=key,
            tokens=list(request.tokens),
            prompt_length=request.prompt_length,
            rule=ChoiceRule(
                request.sampling,
                masked_ids=tuple(dict.fromkeys((*eos, *stop.stop_token_ids))) if stop.min_tokens else (),
                masked_below=request.prompt_length + stop.min_tokens,
            ),
            stop_ids=frozenset((*stop.stop_token_ids, *(() if stop.ignore_eos else eos))),
            max_tokens=stop.max_tokens,
            max_length=limits.max_length,
            table=self.cache.open((), salt=request.cache_salt, limit=0),
            capture=self.capture.open(
                speculate=request.speculate, draft_prefix=request.draft_prefix, absent=request.draft_absent
            ),
            reply=reply,
            order=self._opened,
            priority=request.priority,
            born=now - request.age_ms / 1000,
            active_at=now,
            want_logprobs=request.want_logprobs,
            salt=request.cache_salt,
        )
        self._sessions[place] = session
        self.take_prefix(session)
        return session

    def take_prefix(self, session: Session) -> None:
        """Look the session's tokens up in the index (again), as long as none of its rows have run.

        No position is taken from a cached page that the draft has no context for: that is what
        capture.position says while the session follows. At most tokens - 1: the last one always runs.
        """
        limit = session.num_tokens - 1
        if session.capture.following:
            limit = min(limit, session.capture.position)
        if session.matched == (self.cache.index_version, limit):
            return  # a prompt that waits asks at every turn; hashing it anew would find the same
        session.matched = (self.cache.index_version, limit)
        self.cache.release(session.table)
        session.table = self.cache.open(session.tokens, salt=session.salt, limit=limit)
        session.cached_tokens = session.kv_length = session.table.found

    def _end(self, session: Session, error: Stale, reply: Reply) -> None:
        """The stream behind `reply` ends a session; whoever waits for its results elsewhere is told."""
        self.remove(session)
        told = self._drop_pending(session, error)
        if session.phase is Phase.PREFILL and not told and session.reply != reply:
            self.notify(session.reply, failed_result(session.key, error))

    # ---- ends -----------------------------------------------------------------------------------

    def remove(self, session: Session, *, keep_pages: bool = True) -> None:
        """Forget a session and let go of its pages."""
        place = (session.key.gateway, session.key.number)
        if self._sessions.get(place) is session:
            del self._sessions[place]
        self.capture.close(session.capture, keep=keep_pages)
        self.cache.release(session.table, keep=keep_pages)

    def fail(self, session: Session, error: SpecBridgeError) -> None:
        """End a session by an error: queued verifies get it, else the stream is told."""
        self.remove(session)
        self._count(error)
        if not self._drop_pending(session, error):
            self.notify(session.reply, failed_result(session.key, error))

    def preempt(self, session: Session, cause: str, item: VerifyItem | None = None) -> None:
        """Take a session's pages away; the gateway may re-open it from the tokens it holds.

        cause: label of the metric. item: its verify, if it has been taken off the queue.
        """
        log.info("session %s preempted: KV pages ran short (%s)", session.key, cause)
        self.metrics.preemptions.labels(cause).inc()
        self.remove(session)
        told = self._drop_pending(session, None)
        if item is not None:
            self.finish_item(item, preempted_result(session.key))
        elif not told:
            self.notify(session.reply, preempted_result(session.key))

    def victim(self) -> Session | None:
        """Who is preempted next: the least urgent session that holds pages, of those the youngest."""
        return max((s for s in self._sessions.values() if s.table.pages), key=lambda s: s.place, default=None)

    def unpin_waiting(self, but: Session) -> bool:
        """Let go of the prefixes that prompts hold which wait anyway; they look them up again later. False if
        there were none.
        """
        found = [s for s in self._sessions.values() if s.waiting and s.table.pages and s is not but]
        for session in found:
            self.cache.release(session.table)
            session.table = self.cache.open((), salt=session.salt, limit=0)
            session.cached_tokens = session.kv_length = 0
            session.matched = (-1, -1)
        return bool(found)

    def _drop_pending(self, session: Session, error: SpecBridgeError | None) -> bool:
        """Answer the session's queued verifies with `error` (None: PREEMPTED). True if there were any."""
        gone = [item for item in self.pending if item.verify.session == session.key]
        if gone:
            self.pending = deque(item for item in self.pending if item.verify.session != session.key)
        for item in gone:
            if error is None:
                self.finish_item(item, preempted_result(session.key))
            else:
                self.finish_item(item, error_result(item, error))
        return bool(gone)

    # ---- results --------------------------------------------------------------------------------

    def finish_item(self, item: VerifyItem, result: TargetResult) -> None:
        """One verify is done; the reply goes out with the last of its batch."""
        batch = item.batch
        batch.put(item.index, result)
        if not batch.missing:
            reply = batch.build_reply()
            assert reply.timings is not None
            self.metrics.queue_time.observe(reply.timings.queue_ns / 1e9)
            self.metrics.service_time.observe(reply.timings.service_ns / 1e9)
            self._replies.append((batch.reply, reply))

    def fail_item(self, item: VerifyItem, error: SpecBridgeError) -> None:
        """Answer a verify with an error. The session, if current, is gone unless the error is NotReady."""
        session = self.find(item.verify.session)
        self._count(error)
        if session is not None and not isinstance(error, NotReady):
            self.remove(session)
            self._drop_pending(session, error)
        self.finish_item(item, error_result(item, error))

    def notify(self, reply: Reply, result: TargetResult) -> None:
        """A result of its own, not tied to a request."""
        self._notices.setdefault(reply, []).append(result)

    def flush(self) -> None:
        """Send what has piled up."""
        replies, self._replies = self._replies, []
        notices, self._notices = self._notices, {}
        replies += [(reply, TargetReply(0, tuple(results))) for reply, results in notices.items()]
        available = self.cache.available
        for reply, message in replies:
            try:
                reply(replace(message, available_pages=available))
            except Exception:  # a broken stream is that stream's matter
                log.exception("a reply could not be delivered")

    def fail_all(self, error: SpecBridgeError) -> None:
        """End every session and queued verify by `error`."""
        for session in list(self._sessions.values()):
            self.fail(session, error)
        while self.pending:
            self.fail_item(self.pending.popleft(), error)

    def update_gauges(self) -> None:
        metrics = self.metrics
        metrics.sessions.set(len(self._sessions))
        metrics.running.set(sum(s.phase is not Phase.FINISHED for s in self._sessions.values()))
        metrics.pages_used.set(self.cache.used)
        metrics.pages_cached.set(self.cache.cached)
        metrics.page_evictions.inc(self.cache.evictions - self._evictions)
        self._evictions = self.cache.evictions

    def _count(self, error: SpecBridgeError) -> None:
        self.metrics.errors.labels(mapping(error).code.removeprefix("ERROR_CODE_").lower()).inc()
