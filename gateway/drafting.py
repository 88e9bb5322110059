"""The draft half of a round: who may speculate, asking for trees, and what came back.

Owns the draft standing of running sessions: re-opening them after a loss (rate-limited, with re-capture),
backing off from sessions whose context lags, counting every session that decodes without a tree by cause.
Fails closed: whatever goes wrong here gives empty trees. Does not own the first open (opening.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.budget import BudgetPolicy, Candidate, Plan, depth_limit, fit_tree
from gateway.generation import RoundObserver
from gateway.limits import SchedulerLimits
from gateway.link import DraftLink, Exchange
from gateway.session import DraftStanding, Session
from specbridge.errors import InvalidRequest, NotReady, Stale, Unavailable
from specbridge.rounds import (
    DraftInfo,
    DraftResult,
    DraftResultKind,
    DraftTimings,
    Propose,
    SessionKey,
    TargetInfo,
)
from specbridge.tree import EMPTY_TREE, DraftTree

log = logging.getLogger(__name__)

MAX_SKIP_ROUNDS = 15
LOST_AFTER = 24
"""NOT_READY answers in a row after which the session's draft context is given up and asked for anew."""
ASK_BLIND_EVERY = 16
RETRY_FIRST_S = 0.25
RETRY_MAX_S = 10.0


@dataclass(slots=True)
class Entry:
    """One session's part of one round; `key` and `base` as they were when it began."""

    session: Session
    key: SessionKey
    base: int
    max_depth: int
    tree: DraftTree = EMPTY_TREE
    defer_rows: bool = False


@dataclass(slots=True)
class DraftPhase:
    """What the draft half of a round took. Seconds."""

    wait_s: float = 0.0
    timings: DraftTimings | None = None
    skipped: str = ""


class RateLimiter:
    """A token bucket: `rate` a second, bursts up to one second's worth (at least one)."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(1.0, rate)
        self._level = self._burst
        self._at = now

    def take(self, now: float) -> bool:
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class Drafting:
    """The draft service as the rounds see it. One per scheduler, shared by its cohorts."""

    def __init__(
        self,
        link: DraftLink | None,
        *,
        limits: SchedulerLimits,
        observer: RoundObserver,
        flush: Callable[[], None],
    ) -> None:
        self.link = link
        self.mismatch = ""
        self._limits = limits
        self._observer = observer
        self._flush = flush
        self._reopens: RateLimiter | None = None
        self._pending: dict[int, Exchange[DraftResult, DraftTimings]] = {}

    @property
    def info(self) -> DraftInfo | None:
        return self.link.info if self.link is not None else None

    @property
    def available(self) -> bool:
        return self.link is not None and self.link.up and not self.mismatch

    @property
    def block_size(self) -> int:
        """Of the drafter last seen; 1 (no drafts) if there was none."""
        info = self.info
        return info.block_size if info is not None and not self.mismatch else 1

    def check(self, target: TargetInfo | None) -> None:
        """Compare the two services; a drafter made for another target is not asked."""
        info = self.info
        if info is None or target is None:
            return
        reason = ""
        if info.vocab_size != target.vocab_size:
            reason = f"the draft's vocabulary has {info.vocab_size} tokens, the target's {target.vocab_size}"
        elif info.target_fingerprint and info.target_fingerprint != target.fingerprint:
            reason = (
                f"the draft reads target {info.target_fingerprint!r}, this target is {target.fingerprint!r}"
            )
        elif info.simulated_acceptance != target.simulated_acceptance:
            reason = (
                f"the draft simulates acceptance {info.simulated_acceptance or 'nothing'!r}, the target "
                f"{target.simulated_acceptance or 'nothing'!r}; give both the same --simulate-acceptance"
            )
        elif info.block_size < 2:
            reason = f"the draft's block size is {info.block_size}, at least 2 is needed"
        if reason and reason != self.mismatch:
            log.error("speculation is off: %s; start the draft with the target's model", reason)
        self.mismatch = reason

    # ---- standing of sessions ---------------------------------------------------------------

    def lost(self, session: Session, now: float) -> None:
        """The draft refused or forgot the session; try again later, less and less often."""
        session.draft_failures += 1
        wait = min(RETRY_FIRST_S * 2 ** (session.draft_failures - 1), RETRY_MAX_S)
        session.draft_closed(now + wait)

    def opened(self, session: Session) -> None:
        if session.draft is DraftStanding.OPENING:
            session.draft = DraftStanding.OPEN
            session.not_ready = session.skip_rounds = 0

    def on_result(self, session: Session, result: DraftResult, now: float) -> None:
        """A draft result that answers no propose."""
        if session.draft_reply is not None and not session.draft_reply.done():
            if result.kind in (DraftResultKind.OPENED, DraftResultKind.ERROR):
                session.draft_reply.set_result(result)
        elif result.kind is DraftResultKind.OPENED:
            self.opened(session)
        elif result.kind is DraftResultKind.ERROR and not isinstance(result.error, NotReady):
            self.lost(session, now)

    def reopen(self, sessions: Sequence[Session], now: float) -> None:
        """Open running sessions that lost their draft session again; the target re-captures what it lacks."""
        if not self.available:
            return
        assert self.link is not None
        for session in sessions:
            if (
                session.draft is DraftStanding.OPENING
                and now - session.draft_sent_at > self._limits.open_timeout
            ):
                self.lost(session, now)
            if (
                session.draft is not DraftStanding.CLOSED
                or now < session.draft_retry_at
                or session.remaining < self._limits.draft_reopen_min_tokens
            ):
                continue
            if self._reopens is None:
                self._reopens = RateLimiter(self._limits.draft_reopens_per_s, now)
            if not self._reopens.take(now):
                return
            try:
                self.link.open(session.draft_open(recapture=True))
            except Unavailable:
                return
            session.draft = DraftStanding.OPENING
            session.draft_key = session.key
            session.draft_sent_at = now
            self._observer.on_reopen("draft", "error" if session.draft_failures else "disconnected")

    # ---- a round ----------------------------------------------------------------------------

    def _obstacle(self, session: Session, cohort_cause: str) -> str:
        """Why this session gets no tree this round; "" if it may."""
        if cohort_cause:
            return cohort_cause
        if session.draft is not DraftStanding.OPEN:
            return "no_session"
        if session.has_context:
            session.blind_rounds = 0
        else:
            session.blind_rounds += 1
            # Asking now and then lets the draft notice for itself that rows are missing.
            if session.blind_rounds % ASK_BLIND_EVERY:
                return "no_context"
        if session.skip_rounds > 0:
            session.skip_rounds -= 1
            return "backoff"
        return ""

    def _cohort_cause(self, cohort: int, now: float) -> str:
        if self.link is None or not self.link.up:
            return "draft_down"
        if self.mismatch:
            return "draft_mismatch"
        pending = self._pending.get(cohort)
        if pending is not None:
            if self.link.pending(pending):
                if now - pending.sent_at > self._limits.draft_stall:
                    self.link.client.reset(f"no answer to a propose for {self._limits.draft_stall} s")
                return "draft_busy"
            del self._pending[cohort]
        return ""

    def candidates(
        self, entries: Sequence[Entry], *, cohort: int, target: TargetInfo, now: float, causes: Counter[str]
    ) -> list[Candidate]:
        info = self.info
        cohort_cause = self._cohort_cause(cohort, now)
        most = min(info.max_nodes, target.max_tree_nodes) if info is not None else 0
        found = []
        for entry in entries:
            session = entry.session
            cap = 0
            if session.speculate and entry.max_depth > 0:
                cause = self._obstacle(session, cohort_cause)
                if cause:
                    causes[cause] += 1
                else:
                    wish = session.request.max_tree_nodes
                    cap = most if wish is None else min(most, wish)
            found.append(
                Candidate(
                    session.key.number, cap, entry.max_depth, entry.base, sampled=not session.sampling.greedy
                )
            )
        return found

    async def run(
        self, entries: Sequence[Entry], policy: BudgetPolicy, *, cohort: int, target: TargetInfo
    ) -> DraftPhase:
        """Fill in the entries' trees as far as the draft answers in time; its faults never raise."""
        phase = DraftPhase()
        causes: Counter[str] = Counter()
        candidates = self.candidates(
            entries, cohort=cohort, target=target, now=time.monotonic(), causes=causes
        )
        plan = policy.plan(candidates)
        if plan.drafts:
            plan = _caught_up(plan, entries, causes)
        if plan.drafts:
            trees = await self._propose(entries, plan, phase, cohort=cohort, target=target, causes=causes)
            for entry, tree in zip(entries, policy.cut(candidates, trees), strict=True):
                entry.tree = tree
        elif any(c.max_nodes for c in candidates):
            phase.skipped = plan.skipped or "budget"
            for entry in entries:
                entry.defer_rows = plan.skipped == "budget" and entry.session.speculate
        elif causes:
            phase.skipped = causes.most_common(1)[0][0]
        for cause, count in causes.items():
            self._observer.on_fallback(cause, count)
        return phase

    async def _propose(
        self,
        entries: Sequence[Entry],
        plan: Plan,
        phase: DraftPhase,
        *,
        cohort: int,
        target: TargetInfo,
        causes: Counter[str],
    ) -> list[DraftTree]:
        assert self.link is not None
        proposes = tuple(
            Propose(e.key, e.base, e.session.tokens[-1], nodes, e.max_depth)
            for e, nodes in zip(entries, plan.nodes, strict=True)
            if nodes
        )
        started = time.monotonic()
        exchange = self.link.send(proposes, [p.session for p in proposes])
        self._flush()
        complete = await self.link.wait(exchange, self._limits.draft_timeout)
        phase.wait_s = time.monotonic() - started
        phase.timings = exchange.timings
        if not complete and self.link.pending(exchange):
            self._pending[cohort] = exchange
        now = time.monotonic()
        trees: list[DraftTree] = []
        for entry, nodes in zip(entries, plan.nodes, strict=True):
            tree = EMPTY_TREE
            if nodes:
                result = exchange.results.get(entry.key)
                if result is None:
                    causes["draft_down" if exchange.failure else "draft_timeout"] += 1
                else:
                    tree = self._tree(entry, result, nodes, target=target, causes=causes, now=now)
            trees.append(tree)
        return trees

    def _tree(
        self,
        entry: Entry,
        result: DraftResult,
        nodes: int,
        *,
        target: TargetInfo,
        causes: Counter[str],
        now: float,
    ) -> DraftTree:
        session = entry.session
        if result.kind is DraftResultKind.PROPOSED:
            try:
                if result.base != entry.base:
                    raise InvalidRequest(f"the tree is for base {result.base}, asked for {entry.base}")
                tree = fit_tree(
                    result.tree, max_nodes=nodes, max_depth=entry.max_depth, vocab_size=target.vocab_size
                )
            except InvalidRequest as error:
                log.warning("session %s: the draft sent an invalid tree: %s", entry.key, error)
                causes["invalid_tree"] += 1
                return EMPTY_TREE
            session.not_ready = session.draft_failures = 0
            return tree
        if isinstance(result.error, NotReady):
            causes["not_ready"] += 1
            session.not_ready += 1
            session.skip_rounds = min(2 ** (session.not_ready - 1) - 1, MAX_SKIP_ROUNDS)
            if session.not_ready >= LOST_AFTER and session.key == entry.key:
                self.lost(session, now)
            return EMPTY_TREE
        causes["stale" if isinstance(result.error, Stale) else "draft_error"] += 1
        if session.key == entry.key:
            log.info("session %s: the draft says %s", entry.key, result.error)
            self.lost(session, now)
        return EMPTY_TREE


def _caught_up(plan: Plan, entries: Sequence[Entry], causes: Counter[str]) -> Plan:
    """No nodes for sessions whose last rows the draft has not been told of: this round brings them."""
    late = [bool(n and e.session.rows_deferred) for e, n in zip(entries, plan.nodes, strict=True)]
    if not any(late):
        return plan
    causes["deferred"] += sum(late)
    nodes = tuple(0 if is_late else n for is_late, n in zip(late, plan.nodes, strict=True))
    return Plan(nodes, "" if any(nodes) else "deferred")


def entry_for(session: Session, *, block_size: int, max_length: int) -> Entry:
    """This round's entry of a running session."""
    return Entry(
        session,
        session.key,
        session.base,
        depth_limit(
            block_size=block_size,
            remaining=session.remaining,
            max_length=max_length,
            num_tokens=len(session.tokens),
        ),
    )
