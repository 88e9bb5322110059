"""The draft service's engine: one thread that owns the device, the context and the sessions.

Takes requests and hidden-state chunks from any thread through one queue, answers opens and releases at once,
hands proposals to the desk, and when nothing is queued does what nobody waits for: drafting ahead, lazy
appends. Owns the order of these things; what they do is desk's, ingest's and proposer's. Knows nothing of
gRPC: replies are callables.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Counter

from draft_service.context_cache import ContextCache
from draft_service.desk import Batch, Desk, EngineLimits, Reply
from draft_service.drafter import Reading
from draft_service.ingest import Channel, Ingest
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Place, Proposer
from draft_service.selfcheck import AcceptanceMonitor
from draft_service.session import Chunk, Session, SessionTable
from specbridge.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    SpecBridgeError,
    Stale,
    Unavailable,
)
from specbridge.rounds import (
    CostPoint,
    DraftOpen,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    SessionKey,
    check_token_ids,
)
from specbridge.tree import DraftTree

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Attached(Protocol):
    """What the channel's handshake agreed on."""

    @property
    def transport(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def slots(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ChannelState:
    """For GetInfo."""

    attached: bool = False
    transport: str = "none"
    reason: str = "not attached yet"


class Engine:
    """See the module. start() before use; the methods up to `close` are thread-safe."""

    def __init__(
        self,
        proposer: Proposer,
        cache: ContextCache,
        *,
        limits: EngineLimits,
        metrics: DraftMetrics,
        monitor: AcceptanceMonitor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.draft_cost: tuple[CostPoint, ...] = ()
        self.channel_state = ChannelState()
        self.own_gateway = secrets.token_bytes(16)
        """Gateway id of this service's own sessions: they are no traffic."""
        self.traffic = 0
        """Open sessions of gateways that are connected; read from any thread."""
        self._proposer = proposer
        self._cache = cache
        self._metrics = metrics
        self._clock = clock
        self._sessions = SessionTable(limits.session_lease_s, idle_s=limits.idle_lease_s)
        self._ingest = Ingest(
            cache,
            self._sessions,
            metrics=metrics,
            monitor=monitor,
            clock=clock,
            lazy=limits.lazy,
            max_position=limits.max_length,
            unjudged=self.own_gateway,
        )
        self._desk = Desk(proposer, self._ingest, self._sessions, limits=limits, metrics=metrics, clock=clock)
        proposer.meanwhile(self._ingest.flush_acks)
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closing = False
        self._draining = False
        self._evictions = 0
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)
        metrics.pages_total.set(cache.pool.num_pages)

    # ---- any thread --------------------------------------------------------------------------

    def start(self, *, warm_up_sessions: tuple[int, ...] = (), repeats: int = 3, context: int = 256) -> None:
        """Run the engine's thread; returns when the draft-cost curve at `warm_up_sessions` has been measured
        on it.

        Raises what the measurement raised.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def warm_up() -> None:
            try:
                if warm_up_sessions:
                    limits = self.limits
                    self._proposer.warm_up(max_sessions=limits.max_sessions, max_nodes=limits.max_nodes)
                    self._proposer.measure(warm_up_sessions[:1], context, 1)
                    self.draft_cost = self._proposer.measure(warm_up_sessions, context, repeats)
            except BaseException as error:
                done.put(error)
                raise
            done.put(None)

        self._queue.put(warm_up)
        self._thread.start()
        error = done.get()
        if error is not None:
            self.close()
            raise error

    def connect(self, channel: Channel) -> None:
        """Set where acknowledgements and re-captures go."""
        self._queue.put(lambda: self._ingest.connect(channel))

    def submit(
        self, request: DraftRequest, reply: Reply, *, stream: object = None, received: int | None = None
    ) -> None:
        """Take a batch; `reply` is called from the engine's thread, once or several times with its batch_id:
        opens and releases at once, proposals as they are ready. stream: identifies the caller's stream, for
        leases. received: perf_counter_ns of the batch's arrival, if that was earlier than now.
        """
        batch = Batch(request.batch_id, reply, time.perf_counter_ns() if received is None else received)
        self._queue.put(lambda: self._take_request(request, batch, stream))

    def stream_closed(self, stream: object) -> None:
        """The stream broke: its gateways' sessions live on for the lease."""
        self._queue.put(lambda: self._sessions.stream_closed(stream, self._clock()))

    def on_attached(self, info: Attached) -> None:
        self._queue.put(lambda: self._attached(info))

    def on_chunk(self, chunk: Chunk) -> None:
        self._queue.put(lambda: self._take_chunk(chunk))

    def on_detached(self, reason: str) -> None:
        self._queue.put(lambda: self._detached(reason))

    def on_target_changed(self) -> None:
        """Another target than before has been attached: nothing its predecessor's rows made is kept."""
        changes = self._metrics.target_changes
        self._queue.put(lambda: self._start_over("another target is attached", changes))

    def on_rows_spoilt(self, reason: str) -> None:
        """Rows that were appended were not what the target sent: what holds them can't be told apart."""
        self._queue.put(lambda: self._start_over(reason, self._metrics.rows_spoilt))

    def replay(
        self, key: SessionKey, places: Sequence[Place], *, reading: Reading, max_nodes: int
    ) -> Future[tuple[DraftTree, ...]]:
        """Trees at earlier places of an open session under another reading of the drafter; see Proposer."""
        future: Future[tuple[DraftTree, ...]] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                session = self._sessions.get(key)
                if session is None:
                    raise Stale(f"session {key} is not open here")
                future.set_result(
                    self._proposer.replay(session, places, reading=reading, max_nodes=max_nodes)
                )
            except Exception as error:
                future.set_exception(error)

        self._queue.put(work)
        return future

    def call(self, task: Task) -> None:
        """Run a task on the engine's thread, in turn."""
        self._queue.put(task)

    def drain(self) -> None:
        """Refuse new sessions from now on; those open go on."""
        self._draining = True

    def close(self) -> None:
        """Stop the thread; what is waiting is answered NOT_READY. Idempotent."""
        self._queue.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._guard(self._proposer.take_thread)
        while not self._closing:
            self._guard(self._turn)
        self._guard(self._desk.close)
        for session in tuple(self._sessions):
            self._close_session(session)
        self._guard(self._ingest.flush_acks)

    def _turn(self) -> None:
        """Take all that is queued, answer what can be, then do one piece of work that nobody waits for."""
        self._answer(self._wait())
        self._expire()
        if not self._closing and self._queue.empty() and not self._desk.draft_ahead():
            due = self._ingest.due()
            if due is not None and due <= self._clock():
                self._ingest.append_due()
        if not self._queue.empty():  # mostly the question for what was just drafted: before the books
            self._answer(None)
        self._ingest.flush_acks()
        self._count()

    def _answer(self, task: Task | None) -> None:
        """Do `task` and all that is queued by then, and answer what can be."""
        while not self._closing:
            if task is not None:
                self._guard(task)
            if self._queue.empty():  # nobody else takes from it
                break
            task = self._queue.get()
            self._closing = task is None
        self._desk.serve()

    def _wait(self) -> Task | None:
        """The next queued task; None when a deadline comes first, or at the end."""
        times = (self._desk.next_deadline(), self._ingest.due(), self._sessions.next_expiry())
        deadline = min((at for at in times if at is not None), default=None)
        try:
            if deadline is None:
                task = self._queue.get()
            else:
                task = self._queue.get(timeout=max(0.0, deadline - self._clock()))
        except queue.Empty:
            return None
        self._closing = task is None
        return task

    def _guard(self, task: Task) -> None:
        """A defect in one task must not take the thread down with all sessions."""
        try:
            task()
        except Exception:
            self._metrics.defects.inc()
            log.exception("unexpected error in the draft engine")

    # ---- sessions ----------------------------------------------------------------------------

    def _take_request(self, request: DraftRequest, batch: Batch, stream: object) -> None:
        batch.started_ns = time.perf_counter_ns()
        keys = (
            *request.releases,
            *(o.session for o in request.opens),
            *(p.session for p in request.proposes),
        )
        for gateway in {key.gateway for key in keys}:
            self._sessions.seen(gateway, stream)
        results = [self._release(key) for key in request.releases]
        results += [self._try_open(item) for item in request.opens]
        if results:
            # Before the answer: whoever has it may ask at once who is here.
            self.traffic = self._sessions.traffic(self.own_gateway)
            batch.send(results)
        self._desk.take(batch, request.proposes)

    def _try_open(self, request: DraftOpen) -> DraftResult:
        """One bad session never fails its batch."""
        error: SpecBridgeError
        try:
            return self._open(request)
        except SpecBridgeError as typed:
            error = typed
        except Exception as defect:
            log.exception("unexpected error opening session %s", request.session)
            self._metrics.defects.inc()
            error = InternalError(f"{type(defect).__name__}: {defect}")
        return DraftResult(request.session, DraftResultKind.ERROR, error=error)

    def _open(self, request: DraftOpen) -> DraftResult:
        key, tokens = request.session, request.tokens
        key.validate()
        old = self._sessions.any_incarnation(key)
        if old is not None and old.key.incarnation > key.incarnation:
            raise Stale(f"session {key} has been re-opened as incarnation {old.key.incarnation}")
        if self._draining:
            raise Unavailable("the draft service is going down: decode without it")
        if not tokens:
            raise InvalidRequest("tokens is empty; a session begins with at least one token", param="tokens")
        if len(tokens) > self.limits.max_length:
            raise InvalidRequest(
                f"{len(tokens)} tokens exceed the drafter's {self.limits.max_length}: decode without it",
                param="tokens",
            )
        check_token_ids(tokens, self._proposer.drafter.config.vocab_size, name="tokens")
        request.sampling.validate()
        if old is not None:
            self._close_session(old)
        if len(self._sessions) >= self.limits.max_sessions:
            raise CapacityError(
                f"{len(self._sessions)} sessions are open, the most of this service: release some"
            )
        sequence = self._cache.open(tokens, salt=request.cache_salt)
        session = Session(key, request.sampling, request.cache_salt, sequence)
        self._sessions.add(session)
        self._metrics.prefix_query_tokens.inc(len(tokens))
        self._metrics.prefix_hit_tokens.inc(sequence.length)
        if request.recapture:
            self._ingest.recapture(session, "restart")
        return DraftResult(key, DraftResultKind.OPENED, draft_prefix=sequence.length)

    def _release(self, key: SessionKey) -> DraftResult:
        session = self._sessions.any_incarnation(key)
        if session is not None and session.key.incarnation <= key.incarnation:
            self._close_session(session)
        return DraftResult(key, DraftResultKind.RELEASED)

    def _close_session(self, session: Session) -> None:
        self._ingest.close(session)
        self._desk.forget(session)
        self._sessions.remove(session)

    def _expire(self) -> None:
        for gateway, sessions in self._sessions.expired(self._clock()).items():
            log.info("gateway %s has not come back: %d sessions freed", gateway[:4].hex(), len(sessions))
            self._metrics.lease_expiries.inc()
            for session in sessions:
                self._close_session(session)
        for session in self._sessions.idle(self._clock()):
            log.info("session %s freed: nobody has asked for it", session.key)
            self._close_session(session)

    # ---- channel -----------------------------------------------------------------------------

    def _attached(self, info: Attached) -> None:
        self.channel_state = ChannelState(True, info.transport, info.reason)
        self._metrics.attached.set(1)
        self._metrics.attaches.labels(info.transport).inc()
        self._metrics.transport.info({"transport": info.transport, "reason": info.reason})
        log.info("hidden states come over %s: %s", info.transport, info.reason)
        self._desk.forget_all()
        self._ingest.on_attached(info.slots)

    def _start_over(self, reason: str, counter: Counter) -> None:
        log.warning("%s: cached context is dropped, open sessions start over", reason)
        counter.inc()
        self._desk.forget_all()
        self._ingest.void()

    def _detached(self, reason: str) -> None:
        self.channel_state = ChannelState(False, "none", reason)
        self._metrics.attached.set(0)
        self._metrics.transport.info({"transport": "none", "reason": reason})
        log.warning("hidden-state channel lost: %s", reason)
        self._desk.forget_all()
        self._ingest.on_detached()

    def _take_chunk(self, chunk: Chunk) -> None:
        session = self._ingest.receive(chunk)
        if session is not None:
            self._desk.rows_came(session)

    def _count(self) -> None:
        pool, metrics = self._cache.pool, self._metrics
        self.traffic = self._sessions.traffic(self.own_gateway)
        metrics.sessions.set(len(self._sessions))
        metrics.pending_rows.set(self._ingest.pending_rows)
        metrics.pages_used.set(pool.used_pages)
        metrics.pages_cached.set(pool.cached_pages)
        metrics.evictions.inc(pool.evictions - self._evictions)
        self._evictions = pool.evictions
