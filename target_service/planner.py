"""Planner: what the next forward pass runs, with its pages and ring slots taken beforehand.

Owns the order of work within a step: verifies of all streams first, then prompt chunks, then (if there is no
prompt to run) a re-capture; whose prompt runs; and who is preempted when pages run short. Nothing can run
short after the forward. Does not own how many prompt rows the streams put up with (target_service.chunks),
the forward or its outcome (target_service.stepper).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from specbridge.errors import CapacityError, NotReady, SpecBridgeError, Stale
from specbridge.rounds import CostPoint
from target_service.batching import ChainItem, StepPlan, VerifyItem
from target_service.capture import CaptureState, Reserved
from target_service.chunks import ChunkPolicy, PassTimes
from target_service.session import Phase, Session
from target_service.sessions import SessionBook
from target_service.verify import max_depth, tree_rows

LEAST_CHUNK = 8
"""Prompt rows below which a pass's own cost is not worth it."""
ROOM_TOKENS = 8
"""Tokens that every running session must have pages for when a prompt begins: a round's worth. The gateway
looks further ahead; this is for what it could not know.
"""
PAUSE_S = 0.25
"""A stream whose last round is at least so long ago is not held up by a pass."""


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
        self._latest_token = -math.inf
        self._chunks = ChunkPolicy(
            most=self._limits.prefill_chunk,
            smallest=LEAST_CHUNK,
            goal_s=self._limits.max_itl_ms / 1000,
        )

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
        """Pages for the worst case of a round, preempting others if need be. False: item is gone."""
        session, rows = item.session, item.rows
        assert session is not None and rows is not None
        while True:
            try:
                self._cache.grow(session.table, session.kv_length + rows.depth + 1)
                return True
            except CapacityError as error:
                if self._book.unpin_waiting(session):
                    continue
                victim = self._book.victim()
                assert victim is not None
                if victim is session and self._cache.used == len(session.table.pages):
                    plan.verifies.remove(item)
                    self._book.fail_item(item, error)
                    return False
                self._preempt(plan, victim, "round")
                if victim is session:
                    return False

    def _preempt(self, plan: StepPlan, victim: Session, cause: str) -> None:
        mine = next((item for item in plan.verifies if item.session is victim), None)
        if mine is not None:
            plan.verifies.remove(mine)
        plan.prefills = [chunk for chunk in plan.prefills if chunk.session is not victim]
        self._book.preempt(victim, cause, mine)

    # ---- prompts ----------------------------------------------------------------------------------

    def _take_prefills(self, plan: StepPlan) -> None:
        prompts = self._book.in_phase(Phase.PREFILL)
        started: list[Session] = []
        for session in prompts:
            if not self._start(plan, session):
                break  # whoever comes later would take the pages that it waits for
            started.append(session)
        if not started:
            return
        left = self._limits.prefill_chunk
        if self._limits.deterministic:
            # Chunk borders at fixed positions, wherever the reused prefix ends.
            self._add_chunk(plan, started[0], left - started[0].kv_length % left)
            return
        for session, count in shares(started, self._chunk_limit(plan, started[0].kv_length)).items():
            if session.kv_length == session.cached_tokens:
                self._book.take_prefix(session)  # another session may have computed this prompt meanwhile
                self._cache.grow(session.table, session.num_tokens)
            if self._capture.wants(session.capture, session.kv_length, count):
                count = min(count, self._capture.slots)
            self._add_chunk(plan, session, count)

    def _add_chunk(self, plan: StepPlan, session: Session, most: int) -> None:
        first = session.kv_length
        count = min(session.num_tokens - first, most)
        plan.prefills.append(ChainItem(session, first, count, final=first + count == session.num_tokens))

    def _start(self, plan: StepPlan, session: Session) -> bool:
        """Pages for the whole prompt, so that none can run short half-way. A newcomer leaves room for the
        running sessions' next pages, lest one of them be preempted at once; it takes pages from less urgent
        ones, and waits for all others.
        """
        if session.started:
            return True
        while True:
            # At every look: pages may have been given up, or the prefix computed, meanwhile.
            self._book.take_prefix(session)
            missing = self._cache.missing(session.table, session.num_tokens)
            alone = self._cache.used == len(session.table.pages)
            if self._cache.available >= missing + (0 if alone else self._watermark()):
                break
            if self._book.unpin_waiting(session):
                continue
            victim = self._book.victim()
            if victim is None or victim.priority <= session.priority:
                return False
            self._preempt(plan, victim, "prompt")
        self._cache.grow(session.table, session.num_tokens)
        session.started = True
        return True

    def _watermark(self) -> int:
        """Pages that a newcomer leaves free: those of the running sessions' next tokens, and one in a
        hundred.
        """
        soon = sum(
            self._cache.missing(session.table, session.kv_length + 1 + min(ROOM_TOKENS, session.remaining))
            for session in self._book
            if session.phase is Phase.READY
        )
        return soon + self._cache.num_pages // 100

    def _chunk_limit(self, plan: StepPlan, context: int) -> int:
        """Prompt rows (or rows run again) that the streams put up with in this pass."""
        rows = plan.verify_rows
        waited = 0
        if plan.verifies:
            waited = time.perf_counter_ns() - min(item.batch.received for item in plan.verifies)
        return self._chunks.rows(
            verify_rows=rows,
            waited_s=waited / 1e9,
            running=bool(rows) or self._streaming(),
            context=context,
        )

    def _streaming(self) -> bool:
        """Whether there are streams that a pass could hold up: some go on, and one had a token a moment
        ago."""
        if not any(session.phase is Phase.READY for session in self._book):
            return False
        pause = max(PAUSE_S, 4 * self._chunks.goal_s(1)) if self._chunks.times is not None else PAUSE_S
        return time.monotonic() < self._latest_token + pause

    def ran(self, plan: StepPlan, seconds: float, *, cold: bool) -> None:
        """The pass of `plan` took so long; chunks to come follow from it, unless it was cold (StepOutput)."""
        chains = [*plan.prefills, *plan.recaptures]
        if plan.verifies or any(chunk.final for chunk in plan.prefills):
            self._latest_token = time.monotonic()
        self._chunks.observe(
            verify_rows=plan.verify_rows,
            rows=sum(chunk.count for chunk in chains),
            context=max((chunk.first for chunk in chains), default=0),
            seconds=None if cold else seconds,
            waiting=bool(chains)
            or plan.held_back
            or any(s.phase is Phase.PREFILL and s.started for s in self._book),
        )

    def set_times(self, verify: Sequence[CostPoint], prefill: Sequence[CostPoint]) -> None:
        """What passes took at warm-up; until told, all chunks are the largest."""
        self._chunks.times = PassTimes(verify, prefill)

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
        limit: int | None = None
        for session in self._book.in_phase(Phase.READY):
            capture = session.capture
            if capture.state is not CaptureState.SUSPENDED:
                continue
            count = self._capture.recapture_rows(
                capture,
                kv_length=session.kv_length,
                remaining=min(session.remaining, session.room),
                now=now,
            )
            if not count:
                continue
            if limit is None:
                limit = self._chunk_limit(plan, capture.position)
            count = min(count, limit)
            if not count:
                plan.held_back = True
                return
            reserved = self._capture.reserve_recapture(capture, count, now=now)
            if reserved is None:
                continue
            plan.recaptures.append(ChainItem(session, capture.position, count, reserved=reserved))
            # If that closes the gap, the round of this very step may follow on.
            for item in plan.verifies:
                if item.session is session and item.rows is not None:
                    item.reserved = self._capture.reserve(capture, session.kv_length, item.rows.depth + 1)
            return


def shares(prompts: Sequence[Session], rows: int) -> dict[Session, int]:
    """Who gets how many of `rows` prompt rows. prompts: the most urgent first, of equal priority the oldest.

    The most urgent come first. Among equals the oldest gets half, so that no stream of newcomers can hold up
    a long prompt; the rest goes to those with the least left, so that a long prompt does not hold up short
    ones.
    """
    given: dict[Session, int] = {}
    left = rows

    def give(session: Session, most: int) -> None:
        nonlocal left
        missing = session.num_tokens - session.kv_length - given.get(session, 0)
        count = min(missing, most, left)
        if count > 0:
            given[session] = given.get(session, 0) + count
            left -= count

    for priority in sorted({session.priority for session in prompts}):
        equals = [session for session in prompts if session.priority == priority]
        give(equals[0], -(-left // 2))
        for session in sorted(equals, key=lambda s: s.num_tokens - s.kv_length):
            give(session, left)
    return given
