"""The draft half of a round: who may speculate, asking for trees, and what came back.

Owns backing off from sessions whose context lags, and counting every session that decodes without a tree by
cause. Fails closed: whatever goes wrong here gives empty trees. Does not own which sessions the draft has
(standing).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.ahead import Ahead, DraftExchange
from gateway.budget import Beside, BudgetPolicy, Candidate, Expected, Plan, depth_limit, fit_tree
from gateway.generation import RoundObserver
from gateway.limits import SchedulerLimits
from gateway.link import DraftLink
from gateway.session import DraftStanding, Session
from gateway.standing import Standing
from specbridge.errors import InvalidRequest, NotReady, Stale
from specbridge.rounds import (
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


@dataclass(slots=True)
class Entry:
    """One session's part of one round; `key` and `base` as they were when it began. asked: nodes the draft
    was asked for.
    """

    session: Session
    key: SessionKey
    base: int
    max_depth: int
    tree: DraftTree = EMPTY_TREE
    defer_rows: bool = False
    asked: int = 0


@dataclass(slots=True)
class DraftPhase:
    """What the draft half of a round took, seconds, and what was decided in it."""

    wait_s: float = 0.0
    timings: DraftTimings | None = None
    skipped: str = ""
    drafted: int = 0
    asked: int = 0
    expected: Expected | None = None
    probe: str = ""


class Drafting(Standing):
    """The draft service as the rounds see it. One per scheduler, shared by its cohorts."""

    def __init__(
        self,
        link: DraftLink | None,
        policy: BudgetPolicy,
        *,
        limits: SchedulerLimits,
        observer: RoundObserver,
        running: Callable[[], int],
        expected: Callable[[], int],
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            link, policy, limits=limits, observer=observer, running=running, expected=expected, clock=clock
        )
        self._flush = flush
        self._pending: dict[int, DraftExchange] = {}
        self._ahead = Ahead(link) if link is not None else None

    # ---- a round ----------------------------------------------------------------------------

    def _obstacle(self, session: Session, general: str) -> str:
        """Why this session gets no tree this round; "" if it may."""
        if general:
            return general
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

    def _general_cause(self, now: float) -> str:
        """Why no session at all can have a tree this round; "" if there is no such cause."""
        if self.link is None or not self.link.up:
            return "draft_down"
        if self.mismatch:
            return "draft_mismatch"
        # A propose that one cohort has given up waiting for keeps the draft busy for the other one too.
        for cohort, pending in list(self._pending.items()):
            if not self.link.pending(pending):
                del self._pending[cohort]
            elif now - pending.sent_at > self._limits.draft_stall:
                self.link.client.reset(f"no answer to a propose for {self._limits.draft_stall} s")
        return "draft_busy" if self._pending else ""

    def candidates(
        self, entries: Sequence[Entry], *, target: TargetInfo, now: float, causes: Counter[str]
    ) -> list[Candidate]:
        info = self.info
        general = self._general_cause(now)
        most = min(info.max_nodes, target.max_tree_nodes) if info is not None else 0
        found = []
        for entry in entries:
            session = entry.session
            cap = 0
            if session.speculate and entry.max_depth > 0 and not session.draft_spared:
                cause = self._obstacle(session, general)
                if cause:
                    causes[cause] += 1
                else:
                    wish = session.request.max_tree_nodes
                    cap = most if wish is None else min(most, wish)
            found.append(
                Candidate(
                    session.key.number,
                    cap,
                    entry.max_depth,
                    entry.base,
                    sampled=not session.sampling.greedy,
                    behind=session.rows_deferred,
                )
            )
        return found

    async def run(
        self,
        entries: Sequence[Entry],
        *,
        cohort: int,
        target: TargetInfo,
        beside: Beside | None = None,
        others: int = 0,
    ) -> DraftPhase:
        """Fill in the entries' trees as far as the draft answers in time; its faults never raise. beside,
        others: as BudgetPolicy.plan has them.
        """
        phase = DraftPhase()
        causes: Counter[str] = Counter()
        candidates = self.candidates(entries, target=target, now=self.clock(), causes=causes)
        plan = self._policy.plan(candidates, beside, others=others)
        if plan.drafts:
            plan = _caught_up(plan, entries, causes)
        phase.expected, phase.probe = plan.expected, plan.probe
        for entry, held in zip(entries, plan.hold or (False,) * len(entries), strict=True):
            entry.defer_rows = held and entry.session.speculate
        if plan.drafts:
            trees = await self._propose(entries, plan, phase, cohort=cohort, target=target, causes=causes)
            chosen = self._policy.cut(candidates, plan, trees)
            phase.expected, phase.probe = chosen.expected, chosen.probe
            for entry, tree in zip(entries, chosen.trees, strict=True):
                entry.tree = tree
        elif any(c.max_nodes for c in candidates):
            phase.skipped = plan.skipped or "budget"
        elif causes:
            phase.skipped = causes.most_common(1)[0][0]
        elif any(entry.session.draft_spared for entry in entries):
            phase.skipped = "budget"
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
        assert self._ahead is not None
        for entry, nodes in zip(entries, plan.nodes, strict=True):
            entry.asked = nodes
        proposes = tuple(
            Propose(e.key, e.base, e.session.tokens[-1], e.asked, e.max_depth) for e in entries if e.asked
        )
        phase.drafted, phase.asked = len(proposes), sum(plan.nodes)
        started = self.clock()
        answers = await self._ahead.gather(proposes, self._limits.draft_timeout, meanwhile=self._flush)
        phase.wait_s = self.clock() - started
        phase.timings = answers.timings
        if answers.unanswered is not None:
            self._pending[cohort] = answers.unanswered
        now = self.clock()
        trees: list[DraftTree] = []
        for entry, nodes in zip(entries, plan.nodes, strict=True):
            tree = EMPTY_TREE
            if nodes:
                result = answers.results.get(entry.key)
                if result is None:
                    causes["draft_down" if answers.failure else "draft_timeout"] += 1
                else:
                    tree = self._tree(entry, result, nodes, target=target, causes=causes, now=now)
            trees.append(tree)
        return trees

    def ask_ahead(self, entries: Sequence[Entry], *, target: TargetInfo) -> None:
        """The round is at the target: tell the draft what the next one will ask for."""
        if self._ahead is not None:
            self._ahead.ask(entries, block_size=self.block_size, max_length=target.max_length)

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
    return replace(plan, nodes=nodes, skipped="" if any(nodes) else "deferred")


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
