"""Scheduler: takes requests in and sees them to their end.

Owns which sessions there are, what the services say about them, and every session's one release. Who gets a
place is admission.py's, opening is opening.py's, rounds are rounds.py's, who is in which cohort cohorts.py's,
one session's state session.py's. Everything runs on one event loop: no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from gateway.admission import Admission, check_request
from gateway.budget import BudgetPolicy
from gateway.clients import DraftClient, TargetClient
from gateway.cohorts import Cohorts
from gateway.drafting import Drafting
from gateway.generation import GenerationRequest, NullObserver, RoundObserver
from gateway.limits import SchedulerLimits
from gateway.link import DraftLink, TargetLink
from gateway.opening import Opener
from gateway.policies import policy_for
from gateway.report import GatewayReport
from gateway.rounds import RoundRunner
from gateway.session import DraftStanding, Phase, Session, longest_stall
from gateway.stream import GenerationStream
from specbridge.errors import DeadlineExceeded, SpecBridgeError, Unavailable
from specbridge.logs import request_id
from specbridge.rounds import DraftInfo, DraftResult, SessionKey, TargetInfo, TargetResult, TargetResultKind

log = logging.getLogger(__name__)


class Scheduler:
    """See the module. Create and use it on one event loop: `start()`, `generate(...)`, `close()`."""

    def __init__(
        self,
        target: TargetClient,
        draft: DraftClient | None,
        *,
        limits: SchedulerLimits | None = None,
        policy: BudgetPolicy | None = None,
        observer: RoundObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds; the event loop's own where time is simulated (benchmarks.simulate)."""
        self._clock = clock
        self.limits = limits or SchedulerLimits()
        self.instance = secrets.token_bytes(16)
        self._observer: RoundObserver = observer or NullObserver()
        self._target = TargetLink(
            target,
            on_result=self._on_target_result,
            on_up=lambda info, same: self._on_target_up(info),
            on_down=self._on_target_down,
            clock=clock,
        )
        self._draft = (
            DraftLink(
                draft,
                on_result=self._on_draft_result,
                on_up=self._on_draft_up,
                on_down=self._on_draft_down,
                clock=clock,
            )
            if draft is not None
            else None
        )
        self._policy = policy or policy_for(self.limits)
        self._drafting = Drafting(
            self._draft,
            self._policy,
            limits=self.limits,
            observer=self._observer,
            running=lambda: self.running,
            expected=lambda: self._admission.expected,
            flush=lambda: self._runner.wake_readers(),
            clock=clock,
        )
        self._target_up = asyncio.Event()
        self._opener = Opener(
            self._target,
            self._drafting,
            limits=self.limits,
            observer=self._observer,
            target_up=self._target_up,
            on_first=self._on_first,
            on_preempted=self._preempted,
            on_failed=self.fail,
        )
        self._cohorts = Cohorts(self.limits.cohorts, self._policy.throughput)
        self._runner = RoundRunner(
            self._target,
            self._drafting,
            self._policy,
            self._cohorts,
            limits=self.limits,
            observer=self._observer,
            host=self,
            clock=clock,
        )
        self._sessions: dict[int, Session] = {}
        self._admission = Admission(self.limits, self._target, clock=clock)
        self._target.on_pages = self._admit
        self._next_number = 1
        self._recheck: asyncio.Task[None] | None = None
        self._closed = False

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin connecting and serving. Returns at once; see wait_ready."""
        for cohort in self._cohorts.all:
            cohort.task = asyncio.create_task(self._runner.run(cohort), name=f"rounds-{cohort.index}")
        self._target.client.start(self._target)
        if self._draft is not None:
            self._draft.client.start(self._draft)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the target's stream. Raises Unavailable after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._target_up.wait()
        except TimeoutError:
            raise Unavailable(f"the target is not there after {timeout_s} s: is it started?") from None

    async def close(self) -> None:
        """Fail what still runs, release it at both services, end the streams."""
        self._closed = True
        for session in list(self._sessions.values()):
            self.fail(session, Unavailable("the gateway is shutting down"))
        for link in (self._target, self._draft):
            if link is not None:
                link.flush()
        await self._target.client.close()
        if self._draft is not None:
            await self._draft.client.close()
        for task in (self._recheck, *(cohort.task for cohort in self._cohorts.all)):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    @property
    def target_info(self) -> TargetInfo | None:
        """Of the target last seen; None before the first connection."""
        return self._target.info

    @property
    def draft_info(self) -> DraftInfo | None:
        return self._drafting.info

    @property
    def target_connected(self) -> bool:
        return self._target.up

    @property
    def draft_connected(self) -> bool:
        return self._draft is not None and self._draft.up

    @property
    def queue_length(self) -> int:
        return self._admission.waiting

    @property
    def running(self) -> int:
        """Sessions admitted and not ended: opening, running or re-opening."""
        return self._admission.running

    @property
    def num_spec_tokens(self) -> int:
        return self._drafting.block_size - 1

    def report(self) -> GatewayReport:
        """What the budget knows and has decided."""
        return self._runner.report()

    @property
    def kv_usage(self) -> float:
        return self._target.kv_usage

    def longest_stall(self) -> float:
        """See gateway.session.longest_stall. For any thread."""
        return longest_stall(list(self._sessions.values()), self._clock())

    # ---- admission --------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> GenerationStream:
        """Admit a request. Raises CapacityError (queue full), InvalidRequest or Unavailable at once."""
        try:
            self._admissible(request)
        except SpecBridgeError as error:
            self._observer.on_rejected(error)
            raise
        loop = asyncio.get_running_loop()
        session = Session(
            request,
            key=SessionKey(self.instance, self._next_number),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            wants_draft=self._draft is not None
            and request.speculate
            and request.max_tree_nodes != 0
            and self.limits.tree_budget > 0,
            target_fingerprint=self._target.info.fingerprint if self._target.info else "",
            observer=self._observer,
            now=self._clock,
        )
        session.context.run(request_id.set, request.request_id)
        self._next_number += 1
        self._sessions[session.key.number] = session
        if request.deadline_s is not None:
            session.deadline = loop.call_later(request.deadline_s, self._expire, session)
        self._admission.put(session)
        self._admit()
        return GenerationStream(session, self.retire)

    def _admissible(self, request: GenerationRequest) -> None:
        info = self._target.info
        if self._closed:
            raise Unavailable("the gateway is shutting down")
        if info is None:
            raise Unavailable("the target has not been reached yet; try again")
        check_request(request, info)
        self._admission.check(request)

    def _admit(self) -> None:
        while not self._closed and (session := self._admission.next()) is not None:
            self._open(session)

    def _open(self, session: Session) -> None:
        session.phase = Phase.OPENING
        # Whoever's end or loss let it open: its log lines carry its own request's id.
        session.task = asyncio.create_task(
            self._opener.run(session), name=f"open-{session.key.number}", context=session.context
        )

    # ---- ends -------------------------------------------------------------------------------

    def retire(self, session: Session) -> None:
        """Take a session out of everything and release it at both services, once."""
        if session.phase is Phase.DONE:
            return
        self._admission.end(session)
        session.phase = Phase.DONE
        session.num_spec_tokens = max(session.num_spec_tokens, self.num_spec_tokens)
        del self._sessions[session.key.number]
        self._cohorts.remove(session.key.number)
        if session.deadline is not None:
            session.deadline.cancel()
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        if session.target_key is not None:
            self._target.release(session.target_key)
        if session.draft_key is not None and self._draft is not None:
            self._draft.release(session.draft_key)
        self._admit()

    def fail(self, session: Session, error: SpecBridgeError) -> None:
        session.set_error(error)
        self.retire(session)
        session.wake()

    def _expire(self, session: Session) -> None:
        where = "while it waited in the queue, " if session.phase is Phase.QUEUED else ""
        self.fail(
            session,
            DeadlineExceeded(
                f"the request's deadline of {session.request.deadline_s} s passed {where}after "
                f"{session.ledger.output} tokens"
            ),
        )

    # ---- what the services say --------------------------------------------------------------

    def _on_target_up(self, info: TargetInfo) -> None:
        self._observer.on_connection("target", True, "")
        for session in list(self._sessions.values()):
            # The prompt's ids and the text so far belong to one model; another one can't continue them.
            if session.target_fingerprint != info.fingerprint:
                self.fail(
                    session, Unavailable("the target came back with another model; send the request again")
                )
        self._check_draft()
        self._target_up.set()
        self._admit()

    def _check_draft(self) -> None:
        """Compare the services; while they do not fit, ask the draft again from time to time."""
        self._drafting.check(self._target.info)
        if self._drafting.mismatch and (self._recheck is None or self._recheck.done()):
            self._recheck = asyncio.create_task(self._until_draft_fits(), name="draft-check")

    async def _until_draft_fits(self) -> None:
        # After a change of model the draft learns of the new target later than we do.
        while self._drafting.mismatch and self._draft is not None:
            await asyncio.sleep(self.limits.recheck)
            with contextlib.suppress(Unavailable):
                self._draft.info = await self._draft.client.info(self.limits.connect_timeout)
                self._drafting.check(self._target.info)

    def _on_target_down(self, reason: str) -> None:
        self._target_up.clear()
        if self._closed:
            return
        self._observer.on_connection("target", False, reason)
        for session in list(self._sessions.values()):
            if session.phase is Phase.RUNNING:
                self.lose(session, "disconnected")
            elif session.target_reply is not None and not session.target_reply.done():
                session.target_reply.set_result(Unavailable(f"the target's stream broke: {reason}"))

    def _on_draft_up(self, info: DraftInfo, same: bool) -> None:
        self._observer.on_connection("draft", True, "")
        self._check_draft()
        now = self._clock()
        for session in self._sessions.values():
            # The same process kept its sessions (their lease); those it dropped after all answer STALE.
            if not same or session.draft is not DraftStanding.OPEN:
                session.draft_failures = 0
                session.draft_closed(now)

    def _on_draft_down(self, reason: str) -> None:
        if self._closed:
            return
        self._observer.on_connection("draft", False, reason)
        now = self._clock()
        for session in self._sessions.values():
            if session.draft_reply is not None and not session.draft_reply.done():
                session.draft_reply.set_result(None)
            elif session.draft is DraftStanding.OPENING:
                session.draft_closed(now)

    def _current(self, key: SessionKey) -> Session | None:
        session = self._sessions.get(key.number)
        return session if session is not None and session.key == key else None

    def _on_target_result(self, result: TargetResult) -> None:
        if result.kind is TargetResultKind.OPENED:
            return
        session = self._current(result.session)
        if session is None:
            return
        if session.target_reply is not None:
            if not session.target_reply.done():
                session.target_reply.set_result(result)
        elif session.phase is Phase.RUNNING and result.kind is TargetResultKind.PREEMPTED:
            self.lose(session, "preempted")
        elif session.phase is Phase.RUNNING and result.kind is TargetResultKind.ERROR:
            self._runner.on_error(session, result.error)

    def _on_draft_result(self, result: DraftResult) -> None:
        session = self._current(result.session)
        if session is not None:
            self._drafting.on_result(session, result, self._clock())

    def _on_first(self, session: Session, result: TargetResult) -> None:
        if session.phase is not Phase.OPENING:
            return
        session.take_first(result)
        session.task = None
        if session.finished:
            self.retire(session)
        else:
            session.phase = Phase.RUNNING
            self._cohorts.add(session)
            self._admit()  # what it was promised it has
        session.wake()

    def lose(self, session: Session, cause: str) -> None:
        """The target no longer runs this session: open it again from the tokens held."""
        self._cohorts.remove(session.key.number)
        if cause == "preempted":
            self._preempted(session)
            return
        session.reopens += 1
        self._observer.on_reopen("target", cause)
        session.context.run(log.info, "session %s: %s at the target, opening it again", session.key, cause)
        if session.outage_since is None:
            session.outage_since = self._clock()
        self._open(session)

    def _preempted(self, session: Session) -> None:
        """The target took its pages: it waits in the queue, holding nothing, until they can be had again."""
        session.reopens += 1
        self._observer.on_reopen("target", "preempted")
        session.context.run(log.info, "session %s: preempted at the target, waiting for pages", session.key)
        session.phase = Phase.QUEUED
        session.task = session.outage_since = None
        if session.draft_key is not None and self._draft is not None:
            self._draft.release(session.draft_key)
            session.draft_key = None
        session.draft_closed(self._clock())
        self._admission.put_back(session)
        self._admit()
