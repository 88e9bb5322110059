"""Planner: what the next forward pass runs, with its pages and ring slots taken beforehand.

Owns the order of work within a step: verifies of all streams first, then a prompt chunk, then (if there is no
prompt to run) a re-capture; and who is preempted when pages run short. Nothing can run short after the
forward. Does not own the forward or its outcome (target_service.stepper).
"""

from __future__ import annotations

import time

from specbridge.errors import CapacityError, NotReady, SpecBridgeError, Stale
from target_service.batching import ChainItem, StepPlan, VerifyItem
from target_service.capture import CaptureState, Reserved
from target_service.session import Phase, Session
from target_service.sessions import SessionBook
from target_service.verify import max_depth, tree_rows


class Planner:
    """Plans steps over the sessions of `book`."""

    def __init__(self, book: SessionBook, *, vocab_size: int) -> None:
        self._book = book
        self._limits = book.limits
        self._cache = book.cache
        self._capture = book.capture
        self._metrics = book.metrics
        self._vocab_size = vocab_size
        self._prefill_turn = False

    def plan(self) -> StepPlan:
        """The next step; empty if nothing can run now. Answers verifies that can't run."""
        plan = StepPlan()
        alone = self._limits.deterministic
        if not (alone and self._prefill_turn):
            self._take_verifies(plan)
        # One session a forward in deterministic mode: prompts and rounds take turns, so that neither starves.
        if not (alone and plan.verifies):
            self._take_prefills(plan)
        if not plan and alone and self._prefill_turn:
            self._take_verifies(plan)
        self._prefill_turn = bool(plan.verifies)
        self._reserve(plan)
        if not plan.prefills and not (alone and plan.verifies):
            self._take_recapture(plan)
        return plan

    def _take_verifies(self, plan: StepPlan) -> None:
        rows = 0
        taken: set[int] = set()
        while self._book.pending:
            item = self._book.pending[0]
            try:
                session = self._check(item)
            except SpecBridgeError as error:
                self._book.pending.popleft()
                self._book.fail_item(item, error)
                continue
            count = len(item.verify.tree) + 1
            full = rows + count > self._limits.max_verify_rows or self._limits.deterministic
            if session.order in taken or (plan.verifies and full):
                break
            self._book.pending.popleft()
            item.session = session
            item.rows = tree_rows(session.anchor, session.kv_length, item.verify.tree)
            plan.verifies.append(item)
            if self._grow_for_round(plan, item):
                taken.add(session.order)
                rows += count

    def _check(self, item: VerifyItem) -> Session:
        """The session of a verify. Raises Stale, NotReady or InvalidRequest."""
        verify = item.verify
        session = self._book.find(verify.session)
        if session is None:
            raise Stale(f"session {verify.session} is not open here; open it with a higher incarnation")
        if session.phase is Phase.PREFILL:
            raise NotReady(f"session {session.key} is still in its prefill; wait for its first token")
        if session.phase is Phase.FINISHED:
            raise Stale(f"session {session.key} has ended; release it")
        if verify.base != session.kv_length:
            raise Stale(
                f"session {session.key} has kv_length {session.kv_length} and the verify says {verify.base}; "
                "re-open it"
            )
        verify.tree.validate(
            vocab_size=self._vocab_size,
            max_nodes=self._limits.max_tree_nodes,
            max_depth=max_depth(
                num_tokens=session.num_tokens, remaining=session.remaining, max_length=session.max_length
            ),
        )
        return session

    def _grow_for_round(self, plan: StepPlan, item: VerifyItem) -> bool:
        """Pages for the worst case of a round, preempting the youngest sessions if need be. False: item is
        gone.
        """
        session, rows = item.session, item.rows
        assert session is not None and rows is not None
        while True:
            try:
                self._cache.grow(session.table, session.kv_length + rows.depth + 1)
                return True
            except CapacityError as error:
                victim = self._book.youngest()
                assert victim is not None
                if victim is session and self._cache.used == len(session.table.pages):
                    plan.verifies.remove(item)
                    self._book.fail_item(item, error)
                    return False
                self._preempt(plan, victim)
                if victim is session:
                    return False

    def _preempt(self, plan: StepPlan, victim: Session) -> None:
        mine = next((item for item in plan.verifies if item.session is victim), None)
        if mine is None:
            plan.prefills = [chunk for chunk in plan.prefills if chunk.session is not victim]
            self._book.preempt(victim)
            return
        plan.verifies.remove(mine)
        self._metrics.preemptions.inc()
        self._book.remove(victim)
        self._book.preempt_item(mine)

    def _take_prefills(self, plan: StepPlan) -> None:
        left = self._limits.prefill_chunk
        for session in self._book.in_phase(Phase.PREFILL):
            if left <= 0 or (self._limits.deterministic and plan.prefills):
                break
            if session.kv_length == session.cached_tokens:
                self._book.take_prefix(session)  # another session may have computed this prompt meanwhile
            first = session.kv_length
            count = min(session.num_tokens - first, left)
            if self._limits.deterministic:
                # Chunk borders at fixed positions, wherever the reused prefix ends.
                count = min(count, left - first % left)
            elif self._capture.wants(session.capture, first, count):
                count = min(count, self._capture.slots)
            if not self._grow_for_chunk(plan, session, first + count):
                break
            plan.prefills.append(ChainItem(session, first, count, final=first + count == session.num_tokens))
            left -= count

    def _grow_for_chunk(self, plan: StepPlan, session: Session, length: int) -> bool:
        """Pages for a prompt chunk. A prompt waits for older sessions and preempts younger ones."""
        while True:
            try:
                self._cache.grow(session.table, length)
                return True
            except CapacityError as error:
                if self._cache.used == len(session.table.pages):
                    self._book.fail(session, error)
                    return False
                victim = self._book.youngest()
                if victim is None or victim.order <= session.order:
                    return False
                self._preempt(plan, victim)

    def _reserve(self, plan: StepPlan) -> None:
        """Ring slots for the worst case. Verifies never wait for them; a prompt chunk does, for a bounded
        time.
        """
        for item in plan.verifies:
            session, rows = item.session, item.rows
            assert session is not None and rows is not None
            item.reserved = self._reserve_rows(
                session, session.kv_length, rows.depth + 1, defer=item.verify.defer_rows
            )
            if item.reserved is None and self._capture.wants(
                session.capture, session.kv_length, rows.depth + 1
            ):
                self._capture.suspend(session.capture, "slots")
        now = time.monotonic()
        kept: list[ChainItem] = []
        for chunk in plan.prefills:
            capture = chunk.session.capture
            chunk.reserved = self._reserve_rows(chunk.session, chunk.first, chunk.count)
            if chunk.reserved is None and self._capture.wants(capture, chunk.first, chunk.count):
                if capture.waiting_since is None:
                    capture.waiting_since = now
                if now - capture.waiting_since < self._limits.capture_wait:
                    continue
                self._capture.suspend(capture, "slots")
            capture.waiting_since = None
            kept.append(chunk)
        plan.prefills = kept

    def _reserve_rows(
        self, session: Session, first: int, count: int, *, defer: bool = False
    ) -> Reserved | None:
        capture = session.capture
        if capture.following and capture.position < first:
            # Rows were committed that never got published; they have to run again first.
            self._capture.suspend(capture, "gap")
        return self._capture.reserve(capture, first, count, defer=defer)

    def _take_recapture(self, plan: StepPlan) -> None:
        """At most one re-captured chunk a step, of the oldest session that misses rows."""
        now = time.monotonic()
        for session in self._book.in_phase(Phase.READY):
            capture = session.capture
            if capture.state is not CaptureState.SUSPENDED:
                continue
            count = self._capture.recapture_rows(
                capture,
                kv_length=session.kv_length,
                remaining=min(session.remaining, session.room),
                limit=self._limits.prefill_chunk,
                now=now,
            )
            if not count:
                continue
            reserved = self._capture.reserve_recapture(capture, count, now=now)
            if reserved is None:
                continue
            plan.recaptures.append(ChainItem(session, capture.position, count, reserved=reserved))
            # If that closes the gap, the round of this very step may follow on.
            for item in plan.verifies:
                if item.session is session and item.rows is not None:
                    item.reserved = self._capture.reserve(capture, session.kv_length, item.rows.depth + 1)
            return
