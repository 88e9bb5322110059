"""The rounds: draft → verify → commit, over and over, for the running sessions of a cohort.

Owns one round's course, applying its results, what a target's error means for a running session, and waking
the readers. Does not own admission, opening or releases: those are the host's (scheduler.py); who is in which
cohort is cohorts.py's.

Tokens are handed to readers while the next pass is already under way: results are applied, the next batch is
sent, and only then are rounds entered in the books and the readers woken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from gateway.budget import BudgetPolicy, Outcome
from gateway.cohorts import Cohort, Cohorts
from gateway.cost_model import verify_seconds
from gateway.drafting import Drafting, DraftPhase, Entry, entry_for
from gateway.generation import RoundObserver, RoundRecord
from gateway.limits import SchedulerLimits
from gateway.link import TargetLink
from gateway.report import Decision, DecisionLog, GatewayReport
from gateway.session import MAX_FAILURES, Phase, Session
from specbridge.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    NotReady,
    SpecBridgeError,
    Stale,
    Unavailable,
)
from specbridge.rounds import SessionKey, TargetResult, TargetResultKind, TargetTimings, Verify

log = logging.getLogger(__name__)


class RoundHost(Protocol):
    """What a round does to sessions that do not simply go on."""

    def lose(self, session: Session, cause: str) -> None:
        """The target no longer runs it: open it again."""
        ...

    def fail(self, session: Session, error: SpecBridgeError) -> None: ...

    def retire(self, session: Session) -> None: ...


class RoundRunner:
    """Runs cohorts' rounds; one task per cohort calls `run`."""

    def __init__(
        self,
        target: TargetLink,
        drafting: Drafting,
        policy: BudgetPolicy,
        cohorts: Cohorts,
        *,
        limits: SchedulerLimits,
        observer: RoundObserver,
        host: RoundHost,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._decisions = DecisionLog()
        self._cohorts = cohorts
        # Of two cohorts one is at the draft at a time: in step they would be one cohort in all but name.
        self._turn = asyncio.Lock()
        self._target = target
        self._drafting = drafting
        self._policy = policy
        self._limits = limits
        self._observer = observer
        self._host = host
        self._to_wake: list[Session] = []
        self._unbooked: list[RoundRecord] = []

    async def run(self, cohort: Cohort) -> None:
        while True:
            if not cohort.running:
                self.wake_readers()
                cohort.filled.clear()
                await cohort.filled.wait()
            try:
                self._cohorts.settle(cohort)
                if cohort.running:
                    await self._round(cohort)
            except Exception as error:  # one defect must not stop every stream for good
                log.exception("a round failed")
                for session in list(cohort.running.values()):
                    self._host.fail(session, InternalError(f"a round failed: {error}"))

    async def _round(self, cohort: Cohort) -> None:
        info = self._target.info
        assert info is not None
        asked = self._clock()
        in_use = self._cohorts.in_use
        if in_use == 1:
            started = asked
            entries, phase = await self._draft(cohort)
        else:
            if self._turn.locked():  # a wait, in which readers take tokens without being woken
                self._enter_books()
            async with self._turn:
                started = self._clock()
                entries, phase = await self._draft(cohort)
        # Readers may have gone, the target may have broken, while the draft was at work.
        entries = [e for e in entries if e.session.phase is Phase.RUNNING and e.session.key == e.key]
        if not entries:
            return
        sent = self._clock()
        exchange = self._target.send(
            tuple(Verify(e.key, e.base, e.tree, e.defer_rows) for e in entries), [e.key for e in entries]
        )
        for entry in entries:
            entry.session.rows_deferred = entry.defer_rows
        if in_use == 1:  # of two cohorts each is asked for while the other is at the target
            self._drafting.ask_ahead(entries, target=info)
        self.wake_readers()
        complete = await self._target.wait(exchange, self._limits.target_timeout)
        answered = self._clock()
        tokens, outcomes = self._apply(entries, exchange.results)
        if not complete:
            self._broken(entries, exchange.results, exchange.failure)
        record = self._record(
            cohort,
            entries,
            phase,
            exchange.timings,
            tokens=tokens,
            outcomes=outcomes,
            total_s=self._clock() - started,
            verify_wait_s=answered - sent,
            turn_wait_s=started - asked,
            cohorts=in_use,
        )
        self._unbooked.append(record)
        self._policy.observe(record, outcomes)
        if not record.cold:  # its time would speak for, or against, the number of cohorts it ran with
            self._cohorts.observe(record, verify_seconds(record))

    async def _draft(self, cohort: Cohort) -> tuple[list[Entry], DraftPhase]:
        """The draft half of a round, for the sessions that run now."""
        info = self._target.info
        assert info is not None
        block_size = self._drafting.block_size
        self._drafting.reopen(list(cohort.running.values()), self._clock())
        entries = [
            entry_for(session, block_size=block_size, max_length=info.max_length)
            for session in cohort.running.values()
        ]
        phase = await self._drafting.run(
            entries,
            cohort=cohort.index,
            target=info,
            beside=self._cohorts.beside(cohort),
            others=self._cohorts.sessions - len(entries),
        )
        return entries, phase

    def _apply(
        self, entries: list[Entry], results: dict[SessionKey, TargetResult]
    ) -> tuple[int, list[Outcome]]:
        """Apply a verify batch's results; the number of tokens and the trees' outcomes."""
        tokens = 0
        outcomes: list[Outcome] = []
        for entry in entries:
            session = entry.session
            result = results.get(entry.key)
            if result is None or session.phase is not Phase.RUNNING or session.key != entry.key:
                continue
            if result.kind is TargetResultKind.PREEMPTED:
                self._host.lose(session, "preempted")
            elif result.kind is not TargetResultKind.VERIFIED:
                self.on_error(session, result.error)
            elif result.base != session.base or not result.tokens:
                log.error("session %s: result for base %d, expected %d", entry.key, result.base, session.base)
                self._host.lose(session, "stale")
            else:
                session.take_round(result, len(entry.tree))
                tokens += len(result.tokens)
                if entry.tree:
                    outcomes.append(
                        Outcome(
                            session.key.number,
                            entry.tree,
                            result.accepted,
                            sampled=not session.sampling.greedy,
                            ended=session.finished,
                        )
                    )
                self._to_wake.append(session)
                if session.finished:
                    self._host.retire(session)
        return tokens, outcomes

    def _broken(self, entries: list[Entry], results: dict[SessionKey, TargetResult], failure: str) -> None:
        """A verify batch was not answered in full; whether the target committed it is unknown."""
        for entry in entries:
            if (
                entry.key not in results
                and entry.session.phase is Phase.RUNNING
                and entry.session.key == entry.key
            ):
                self._host.lose(entry.session, "disconnected" if failure else "timeout")
        if not failure and self._target.up:
            self._target.client.reset(f"no answer to a verify batch for {self._limits.target_timeout} s")

    def _record(
        self,
        cohort: Cohort,
        entries: list[Entry],
        phase: DraftPhase,
        timings: TargetTimings | None,
        *,
        tokens: int,
        outcomes: list[Outcome],
        total_s: float,
        verify_wait_s: float,
        turn_wait_s: float,
        cohorts: int,
    ) -> RoundRecord:
        nodes = sum(len(e.tree) for e in entries)
        return RoundRecord(
            sessions=len(entries),
            speculating=sum(1 for e in entries if e.tree),
            rows=nodes + len(entries),
            nodes=nodes,
            tokens=tokens,
            accepted=sum(len(o.accepted) for o in outcomes),
            total_s=total_s,
            draft_wait_s=phase.wait_s,
            verify_wait_s=verify_wait_s,
            draft_service_s=phase.timings.service_ns / 1e9 if phase.timings else 0.0,
            verify_service_s=timings.service_ns / 1e9 if timings else 0.0,
            skipped=phase.skipped,
            cohort=cohort.index,
            draft_timings=phase.timings,
            target_timings=timings,
            drafted=phase.drafted,
            asked=phase.asked,
            context=sum(e.base for e in entries) // len(entries),
            expected_tokens=phase.expected.tokens if phase.expected is not None else None,
            expected_s=phase.expected.seconds if phase.expected is not None else None,
            probe=phase.probe,
            turn_wait_s=turn_wait_s,
            cohorts=cohorts,
        )

    def _log(self, record: RoundRecord) -> None:
        self._decisions.add(
            Decision(
                time=time.time(),
                cohort=record.cohort,
                sessions=record.sessions,
                asked=record.asked,
                nodes=record.nodes,
                expected_tokens=record.expected_tokens,
                tokens=record.tokens,
                expected_ms=None if record.expected_s is None else 1e3 * record.expected_s,
                observed_ms=1e3 * record.total_s,
                skipped=record.skipped,
                probe=record.probe,
            )
        )

    def report(self) -> GatewayReport:
        """What the budget knows and has decided."""
        return GatewayReport(
            self._policy.report(), self._cohorts.report(), self._cohorts.sessions, self._decisions.latest()
        )

    def wake_readers(self) -> None:
        """Called when a service has been given work. The event loop takes turns: the message goes out, the
        round is entered in the books, and then the readers have its tokens.
        """
        if self._unbooked:
            asyncio.get_running_loop().call_soon(self._enter_books)
        if self._to_wake:
            ready, self._to_wake = self._to_wake, []
            for session in ready:
                session.wake()

    def _enter_books(self) -> None:
        records, self._unbooked = self._unbooked, []
        for record in records:
            try:
                self._observer.on_round(record)
                self._log(record)
            except Exception:  # one record must not cost the others their place
                log.exception("a round could not be entered in the books")

    def on_error(self, session: Session, error: SpecBridgeError | None) -> None:
        """The target answered a running session with an error; it is gone there unless NOT_READY."""
        if isinstance(error, NotReady):
            return
        if isinstance(error, Stale):
            self._host.lose(session, "stale")
        elif isinstance(error, CapacityError):
            self._host.lose(session, "capacity")
        elif isinstance(error, Unavailable):
            self._host.lose(session, "error")
        else:
            session.failures += 1
            if session.failures >= MAX_FAILURES:
                self._host.fail(
                    session, error or InternalError("the target reported an error without saying which")
                )
                return
            log.warning("session %s: the target reports %r", session.key, error)
            if isinstance(error, InvalidRequest):
                # It can only be the tree: everything else of the session was accepted before.
                session.speculate = False
            self._host.lose(session, "error")
