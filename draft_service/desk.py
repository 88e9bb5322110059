"""Proposals: who is ready, who waits for rows on their way, and the pass that answers them.

Owns the waiting list, the standing of each proposal against its session's context, the caps, questions asked
ahead of their rows, drafting ahead of the question, replies and their timings. Does not own the thread
(engine), rows (ingest) nor trees (proposer).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from draft_service.ingest import Ingest, LazyLimits
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Ask, Proposer
from draft_service.session import Drafted, Session, SessionTable
from specbridge.errors import InternalError, InvalidRequest, NotReady, SpecBridgeError, Stale, mapping
from specbridge.rounds import DraftReply, DraftResult, DraftResultKind, DraftTimings, Propose, SessionKey
from specbridge.tree import EMPTY_TREE, DraftTree

log = logging.getLogger(__name__)

Reply = Callable[[DraftReply], None]

COALESCE_S = 0.001
"""Ready proposals wait so long for others whose rows are just arriving: two passes cost twice."""
BEHIND_S = 1.0
"""A context that has been too short for so long lacks rows that won't come by themselves."""
AWAIT_S = 2.0
"""A session whose round takes longer than this does not hold back drafting ahead for the others."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_length: most tokens of a session. propose_wait_s: how long a proposal waits for rows on their way.
    eager: draft ahead of the question."""

    max_sessions: int
    max_nodes: int
    max_length: int
    propose_wait_s: float
    session_lease_s: float = 10.0
    idle_lease_s: float = 600.0
    eager: bool = True
    lazy: LazyLimits = field(default_factory=LazyLimits)


@dataclass(slots=True, eq=False)
class Batch:
    """One request's place to answer to. Times are perf_counter_ns."""

    batch_id: int
    reply: Reply
    received_ns: int
    started_ns: int = 0

    def send(self, results: Sequence[DraftResult], timings: DraftTimings | None = None) -> None:
        try:
            self.reply(DraftReply(self.batch_id, tuple(results), timings))
        except Exception:  # the caller's stream is gone; its sessions have their lease
            log.exception("a reply could not be delivered")


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A proposal that has not been answered. ahead: asked before its rows came; arrived_ns: when they did, by
    perf_counter_ns.
    """

    batch: Batch
    propose: Propose
    deadline_s: float
    ahead: bool = False
    arrived_ns: int = 0

    @property
    def wants_nothing(self) -> bool:
        return self.propose.max_nodes <= 0 or self.propose.max_depth <= 0


class Desk:
    """All proposals of the service; see the module. Runs on the engine's thread."""

    def __init__(
        self,
        proposer: Proposer,
        ingest: Ingest,
        sessions: SessionTable,
        *,
        limits: EngineLimits,
        metrics: DraftMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._proposer = proposer
        self._ingest = ingest
        self._sessions = sessions
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._waiting: list[Waiting] = []
        self._fresh: dict[Session, None] = {}
        self._coalesce_until: float | None = None

    # ---- questions ---------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Proposals not answered yet."""
        return len(self._waiting)

    def take(self, batch: Batch, proposes: Sequence[Propose]) -> None:
        """Put proposals on the waiting list. One asked ahead of its rows is taken back by the session's next;
        it waits for as long as its round is verified, which only the gateway knows.
        """
        for propose in proposes:
            self._sessions.get(propose.session)  # asked for
        self._take_back({propose.session for propose in proposes})
        deadline = self._clock() + self._limits.propose_wait_s
        self._waiting.extend(
            Waiting(batch, propose, math.inf if propose.on_arrival else deadline, propose.on_arrival)
            for propose in proposes
        )

    def _take_back(self, sessions: Collection[SessionKey]) -> None:
        if any(waiting.ahead for waiting in self._waiting):
            self._waiting = [w for w in self._waiting if not (w.ahead and w.propose.session in sessions)]

    def next_deadline(self) -> float | None:
        """When `serve` has something to do although nothing new has come."""
        times = [waiting.deadline_s for waiting in self._waiting if not waiting.ahead]
        if self._coalesce_until is not None:
            times.append(self._coalesce_until)
        return min(times, default=None)

    def rows_came(self, session: Session) -> None:
        """New rows of a session: its proposal will follow, if its round had a tree."""
        if self._limits.eager and session.fresh_anchor is not None:
            self._fresh[session] = None

    def forget(self, session: Session) -> None:
        self._fresh.pop(session, None)
        self._take_back({session.key})

    def forget_all(self) -> None:
        self._fresh.clear()

    def close(self) -> None:
        """Answer what is left: the service goes down."""
        for waiting in self._waiting:
            self._answer_error(waiting, NotReady("the draft service is going down"))
        self._waiting.clear()

    # ---- answers -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer the proposals that can be answered now; the others stay."""
        if not self._waiting:
            self._coalesce_until = None  # those that it was for may have been taken back
            return
        now = self._clock()
        ready: list[tuple[Waiting, Session]] = []
        behind: list[Waiting] = []
        refused: dict[Batch, list[DraftResult]] = {}
        for waiting in self._waiting:
            try:
                session = self._standing(waiting.propose)
            except SpecBridgeError as error:
                refused.setdefault(waiting.batch, []).append(self._error_result(waiting.propose, error))
                continue
            if session is not None:
                ready.append((waiting, session))
            elif now < waiting.deadline_s and self._may_still_come(waiting):
                behind.append(waiting)
            else:
                self._not_ready(waiting)
        for batch, results in refused.items():
            batch.send(results)
        # Rows of one round come together; other rounds than theirs are not waited for.
        here = {waiting.batch for waiting, _ in ready}
        if ready and any(not waiting.ahead or waiting.batch in here for waiting in behind):
            if self._coalesce_until is None:
                self._coalesce_until = now + COALESCE_S
            if now < self._coalesce_until:
                self._waiting = [waiting for waiting, _ in ready] + behind
                return
        self._coalesce_until = None
        self._waiting = behind
        if not ready:
            return
        ready = [(_on_arrival(w, session) if w.ahead else w, session) for w, session in ready]
        try:
            self._propose(ready)
        except Exception as error:
            log.exception("the propose pass failed")
            self._metrics.defects.inc()
            for waiting, _ in ready:
                self._answer_error(waiting, InternalError(f"propose failed: {type(error).__name__}: {error}"))

    def draft_ahead(self) -> bool:
        """Draft for sessions whose rows have come and whose proposals will, in a moment. False: nothing to
        do.
        """
        if not self._fresh or self._coalesce_until is not None:
            return False
        if any(not waiting.ahead for waiting in self._waiting):
            return False
        now = self._clock()
        for session in self._sessions:
            # With sessions of the same round still at the target, a pass now would make theirs a second one.
            if session.awaiting and session.proposed is not None and now - session.proposed.at_s < AWAIT_S:
                return False
        chosen = [s for s in self._fresh if s.fresh_anchor is not None and s.pending]
        self._fresh.clear()
        self._ingest.append(chosen, "eager")
        asks = []
        for session in chosen:
            anchor, latest = session.fresh_anchor, session.latest
            if anchor is None or latest is None:
                continue
            ask = self._ask(session, anchor, latest.max_nodes, latest.max_depth)
            if ask.max_nodes > 0 and ask.max_depth > 0:
                asks.append(ask)
        if not asks:
            return bool(chosen)
        for ask, tree in zip(asks, self._proposer.propose(asks).trees, strict=True):
            ask.session.eager = _drafted(ask, tree, self._clock())
        return True

    def _standing(self, propose: Propose) -> Session | None:
        """The session if its context reaches exactly to the base; None if it is still shorter. Raises Stale
        and InvalidRequest.
        """
        # A question may wait as long as its session lives: looking for its rows is no word of a peer.
        session = self._sessions.peek(propose.session)
        if session is None:
            raise Stale(f"session {propose.session} is not open here: re-open it")
        if propose.on_arrival:
            starved = session.starved_at is not None
            return None if starved or session.arrived_behind(propose.base) is None else session
        vocab = self._proposer.drafter.config.vocab_size
        if not 0 <= propose.anchor < vocab:
            raise InvalidRequest(
                f"anchor {propose.anchor} is outside the vocabulary of {vocab}", param="anchor"
            )
        if propose.base > self._limits.max_length:
            raise InvalidRequest(
                f"base {propose.base} is beyond the drafter's {self._limits.max_length} positions",
                param="base",
            )
        if propose.base < session.end:
            raise Stale(
                f"base {propose.base} is behind the context of {session.end} rows of session {session.key}"
            )
        return session if propose.base == session.end and session.starved_at is None else None

    def _may_still_come(self, waiting: Waiting) -> bool:
        """Whether waiting for a session's rows makes sense."""
        session = self._sessions.peek(waiting.propose.session)
        return (
            session is not None
            and self._ingest.attached
            and session.recapture_at is None
            and session.starved_at is None
            and not waiting.wants_nothing
        )

    def _not_ready(self, waiting: Waiting) -> None:
        session = self._sessions.get(waiting.propose.session)
        assert session is not None
        base = waiting.propose.base
        if waiting.wants_nothing:
            # Nothing is wanted, so nothing is missing.
            self._metrics.proposed(EMPTY_TREE)
            waiting.batch.send([DraftResult(session.key, DraftResultKind.PROPOSED, base)])
            return
        now = self._clock()
        self._ingest.revive(session)
        if session.behind_since is None:
            session.behind_since = now
        elif now - session.behind_since > BEHIND_S:
            self._ingest.recapture(session, "gap")
        if not self._ingest.attached:
            why = "the hidden-state channel is down"
        elif session.starved_at is not None:
            why = "no context pages are left: start the draft with more kv tokens"
        elif session.recapture_at is not None:
            why = "missing rows are being captured again"
        else:
            why = f"they did not come within {self._limits.propose_wait_s:g} s"
        self._answer_error(waiting, NotReady(f"the context ends at row {session.end}, base is {base}: {why}"))

    def _propose(self, ready: Sequence[tuple[Waiting, Session]]) -> None:
        begun = time.perf_counter_ns()
        self._ingest.append((session for _, session in ready), "propose")
        appended = time.perf_counter_ns()
        made: list[tuple[Waiting, Drafted]] = []
        asked: list[tuple[Waiting, Ask]] = []
        for waiting, session in ready:
            propose = waiting.propose
            session.latest = propose
            self._fresh.pop(session, None)
            eager, session.eager = session.eager, None
            again = session.proposed  # asked ahead and once more, since the answer took long
            if session.sequence.length != propose.base:
                self._not_ready(waiting)  # the append failed: no pages, or the ring was faster
                continue
            ask = self._ask(session, propose.anchor, propose.max_nodes, propose.max_depth)
            wanted = ask.anchor, propose.base, ask.max_nodes, ask.max_depth
            if again is not None and again.answers(*wanted):
                made.append((waiting, again))
                continue
            if eager is not None and eager.answers(*wanted):
                self._metrics.eager.labels("used").inc()
                made.append((waiting, eager))
                continue
            if eager is not None:
                self._metrics.eager.labels("wasted").inc()
            asked.append((waiting, ask))
        proposed = self._proposer.propose([ask for _, ask in asked])
        now = self._clock()
        made += [
            (waiting, _drafted(ask, tree, now))
            for (waiting, ask), tree in zip(asked, proposed.trees, strict=True)
        ]
        if asked:
            self._metrics.pass_sessions.observe(len(asked))
        results: dict[Batch, list[DraftResult]] = {}
        for waiting, drafted in made:
            results.setdefault(waiting.batch, []).append(self._hand_out(waiting, drafted))
        for batch, items in results.items():
            # Of questions asked ahead the time begins with the rows: before, nobody waited for this service.
            came = [waiting.arrived_ns for waiting, _ in ready if waiting.ahead and waiting.batch is batch]
            received, started = (min(came), min(came)) if came else (batch.received_ns, batch.started_ns)
            timings = DraftTimings(
                queue_ns=started - received,
                channel_wait_ns=max(0, begun - started),
                append_ns=appended - begun,
                forward_ns=proposed.forward_ns,
                tree_ns=proposed.tree_ns,
                service_ns=time.perf_counter_ns() - received,
            )
            self._metrics.timings(timings)
            batch.send(items, timings)

    def _hand_out(self, waiting: Waiting, drafted: Drafted) -> DraftResult:
        propose = waiting.propose
        session = self._sessions.get(propose.session)
        assert session is not None
        tree = drafted.tree.prefix(max(0, propose.max_nodes))
        self._metrics.proposed(tree)
        session.behind_since = session.fresh_anchor = None
        if tree.tokens:
            session.proposed = Drafted(
                drafted.base,
                drafted.anchor,
                min(drafted.max_nodes, propose.max_nodes),
                drafted.max_depth,
                tree,
                self._clock(),
            )
            session.awaiting = True
        return DraftResult(session.key, DraftResultKind.PROPOSED, propose.base, tree, anchor=propose.anchor)

    def _ask(self, session: Session, anchor: int, max_nodes: int, max_depth: int) -> Ask:
        """What is grown for what is asked: within the drafter's horizon, the session's length and this
        service's cap.
        """
        room = self._limits.max_length - session.sequence.length - 1
        depth = max(0, min(max_depth, self._proposer.drafter.config.horizon, room))
        return Ask(session, anchor, min(max_nodes, self._limits.max_nodes), depth)

    def _answer_error(self, waiting: Waiting, error: SpecBridgeError) -> None:
        waiting.batch.send([self._error_result(waiting.propose, error)])

    def _error_result(self, propose: Propose, error: SpecBridgeError) -> DraftResult:
        self._metrics.proposals.labels(_label(error)).inc()
        return DraftResult(propose.session, DraftResultKind.ERROR, propose.base, error=error)


def _on_arrival(waiting: Waiting, session: Session) -> Waiting:
    """A question asked ahead as it would be asked now that its rows are here."""
    propose = waiting.propose
    arrived = session.arrived_behind(propose.base)
    assert arrived is not None
    resolved = replace(propose, base=arrived.end, anchor=arrived.anchor, on_arrival=False)
    return replace(waiting, propose=resolved, arrived_ns=arrived.at_ns)


def _drafted(ask: Ask, tree: DraftTree, now: float) -> Drafted:
    return Drafted(ask.session.sequence.length, ask.anchor, ask.max_nodes, ask.max_depth, tree, now)


def _label(error: SpecBridgeError) -> str:
    code = mapping(error).code.removeprefix("ERROR_CODE_").lower()
    return {"invalid_argument": "invalid", "unimplemented": "invalid", "resource_exhausted": "capacity"}.get(
        code, code
    )
