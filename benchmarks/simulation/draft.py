"""A simulated draft: one engine that appends rows, drafts ahead and answers proposals, as the real desk does.

Owns the order of work of draft_service.desk and ingest: proposals wait for rows on their way, ready ones
wait a moment for others (one pass instead of two), sessions whose rows have come are drafted for before they
are asked for, and rows that nobody asks about are appended together later. Trees come from texts. Not
simulated: pages, the ring's slots, a channel that breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.costs import Curve
from benchmarks.simulation.texts import VOCAB, Text
from benchmarks.simulation.world import Service, World
from draft_service.desk import AWAIT_S, BEHIND_S, COALESCE_S
from draft_service.ingest import EAGER_APPEND_ROWS, MAX_APPEND_ROWS, RECAPTURE_RETRY_S, LazyLimits
from specbridge.errors import NotReady, SpecBridgeError, Stale
from specbridge.rounds import (
    DraftInfo,
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    DraftTimings,
    Propose,
    SessionKey,
)
from specbridge.tree import DraftTree

PAGE = 16


@dataclass(slots=True, eq=False)
class _Session:
    """length: rows in the context; end: and those that have come. The rest as in draft_service.session."""

    key: SessionKey
    text: Text
    length: int = 0
    end: int = 0
    since: float = 0.0
    urgent: bool = False
    awaiting: bool = False
    proposed_at: float = 0.0
    fresh: bool = False
    latest: Propose | None = None
    eager: Ahead | None = None
    recapture_at: float | None = None
    behind_since: float | None = None
    anchored_end: int = 0
    arrived: float = 0.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """A tree drawn before it was asked for."""

    base: int
    max_nodes: int
    max_depth: int
    tree: DraftTree

    def answers(self, base: int, nodes: int, depth: int) -> bool:
        return (base, depth) == (self.base, self.max_depth) and nodes <= self.max_nodes


@dataclass(slots=True, eq=False)
class _Batch:
    batch_id: int
    received: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    batch: _Batch
    propose: Propose
    deadline: float
    ahead: bool = False
    arrived: float = 0.0


class SimDraft(Service[DraftRequest]):
    """See the module. recapture: asks the target for a session's rows from one on."""

    def __init__(self, world: World, *, eager: bool = True, instance: bytes = b"draft") -> None:
        super().__init__(world)
        self.recapture: Callable[[SessionKey, int], None] = lambda key, first: None
        self.passes: Counter[str] = Counter()
        """Block passes and appends, by trigger."""
        self._instance = instance
        self._eager = eager
        self._sessions: dict[tuple[bytes, int], _Session] = {}
        self._waiting: list[_Waiting] = []
        self._fresh: dict[_Session, None] = {}
        self._coalesce_until: float | None = None
        self._draft = Curve(world.costs.draft)
        self._append = Curve(world.costs.append)
        self._lazy = LazyLimits()

    def make_info(self) -> DraftInfo:
        costs = self.world.costs
        return DraftInfo(
            drafter_id=costs.name, fingerprint="simulated", block_size=costs.block_size, mask_token_id=0,
            target_layer_ids=(), max_nodes=costs.max_tree_nodes, vocab_size=VOCAB, instance=self._instance,
            draft_cost=costs.draft_points(), attached=True,
            simulated_acceptance=self.world.drafter.acceptance.name, on_arrival=self._eager,
        )  # fmt: skip

    def sessions_of(self, message: Any) -> int:
        if isinstance(message, DraftReply):
            return len(message.results)
        return len(message.proposes) + len(message.opens) + len(message.releases)

    def rows_came(self, key: SessionKey, first: int, count: int, anchored: bool) -> None:
        """The channel's end: rows [first, first + count) of a session."""
        session = self._sessions.get((key.gateway, key.number))
        if session is None or session.key != key:
            return
        if first > session.end:
            self._recapture(session)
            return
        session.recapture_at = session.behind_since = None
        if first + count <= session.end:
            return
        if session.end == session.length:
            session.since = self.world.now()
        fresh_rows = first + count - session.end
        session.end = first + count
        session.eager = None
        session.fresh = anchored and session.awaiting
        if anchored:
            session.anchored_end, session.arrived = session.end, self.world.now()
        session.awaiting = False
        session.urgent = session.urgent or not anchored or fresh_rows > EAGER_APPEND_ROWS
        if self._eager and session.fresh:
            self._fresh[session] = None
        self._wake.set()

    # ---- the engine ---------------------------------------------------------------------------

    async def _engine(self) -> None:
        while True:
            self._wake.clear()
            while self._inbox:
                request, received = self._inbox.popleft()
                await self._take(request, received)
            await self._serve()
            if self._inbox or await self._draft_ahead() or await self._append_due():
                continue
            if not self._inbox:
                await self._sleep()

    async def _sleep(self) -> None:
        times = [waiting.deadline for waiting in self._waiting if not waiting.ahead]
        times += [s.since + self._lazy.age_s for s in self._sessions.values() if s.end > s.length]
        if self._coalesce_until is not None:
            times.append(self._coalesce_until)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(times) if times else None):
                await self._wake.wait()

    async def _take(self, request: DraftRequest, received: float) -> None:
        results: list[DraftResult] = []
        for key in request.releases:
            session = self._sessions.get((key.gateway, key.number))
            if session is not None and session.key.incarnation <= key.incarnation:
                if session.end // PAGE > session.length // PAGE:
                    await self._append_rows([session], "close")
                del self._sessions[key.gateway, key.number]
                self._fresh.pop(session, None)
                self._take_back({key})
            results.append(DraftResult(key, DraftResultKind.RELEASED))
        results += [self._open(item) for item in request.opens]
        if results:
            self.answer(DraftReply(request.batch_id, tuple(results)))
        batch = _Batch(request.batch_id, received)
        deadline = self.world.now() + self.world.costs.propose_wait_ms / 1e3
        self._take_back({propose.session for propose in request.proposes})
        self._waiting += [
            _Waiting(batch, propose, math.inf if propose.on_arrival else deadline, propose.on_arrival)
            for propose in request.proposes
        ]

    def _take_back(self, keys: set[SessionKey]) -> None:
        self._waiting = [w for w in self._waiting if not (w.ahead and w.propose.session in keys)]

    def _open(self, item: DraftOpen) -> DraftResult:
        session = _Session(item.session, self.world.texts[item.sampling.seed])
        self._sessions[item.session.gateway, item.session.number] = session
        if item.recapture:
            self._recapture(session)
        return DraftResult(item.session, DraftResultKind.OPENED)

    def _recapture(self, session: _Session) -> None:
        now = self.world.now()
        if session.recapture_at is None or now >= session.recapture_at + RECAPTURE_RETRY_S:
            session.recapture_at = now
            asyncio.get_running_loop().call_later(
                self.world.costs.channel_ms / 1e3, self.recapture, session.key, session.end
            )

    # ---- answers ------------------------------------------------------------------------------

    async def _serve(self) -> None:
        now = self.world.now()
        ready: list[tuple[_Waiting, _Session]] = []
        behind: list[_Waiting] = []
        for waiting in self._waiting:
            key, base = waiting.propose.session, waiting.propose.base
            session = self._sessions.get((key.gateway, key.number))
            if session is not None and session.key == key and waiting.propose.on_arrival:
                if session.anchored_end == session.end > base:
                    here = replace(waiting.propose, base=session.end, on_arrival=False)
                    ready.append((replace(waiting, propose=here, arrived=session.arrived), session))
                elif session.recapture_at is None:
                    behind.append(waiting)
                else:
                    self._not_ready(waiting, session)
            elif session is None or session.key != key or base < session.end:
                self._refuse(waiting, Stale(f"base {base} of {key}"))
            elif base == session.end:
                ready.append((waiting, session))
            elif now < waiting.deadline and session.recapture_at is None:
                behind.append(waiting)
            else:
                self._not_ready(waiting, session)
        here_too = {waiting.batch for waiting, _ in ready}
        if ready and any(not waiting.ahead or waiting.batch in here_too for waiting in behind):
            if self._coalesce_until is None:
                self._coalesce_until = now + COALESCE_S
            if now < self._coalesce_until:
                self._waiting = [waiting for waiting, _ in ready] + behind
                return
        self._coalesce_until = None
        self._waiting = behind
        if ready:
            await self._propose(ready)

    def _not_ready(self, waiting: _Waiting, session: _Session) -> None:
        now = self.world.now()
        if session.behind_since is None:
            session.behind_since = now
        elif now - session.behind_since > BEHIND_S:
            self._recapture(session)
        self._refuse(waiting, NotReady(f"the context ends at row {session.end}"))

    def _refuse(self, waiting: _Waiting, error: SpecBridgeError) -> None:
        propose = waiting.propose
        result = DraftResult(propose.session, DraftResultKind.ERROR, propose.base, error=error)
        self.answer(DraftReply(waiting.batch.batch_id, (result,)))

    async def _propose(self, ready: list[tuple[_Waiting, _Session]]) -> None:
        begun = self.world.now()
        append_s = await self._append_rows([session for _, session in ready], "propose")
        made: list[tuple[_Waiting, _Session, DraftTree]] = []
        asked: list[tuple[_Waiting, _Session]] = []
        for waiting, session in ready:
            propose = waiting.propose
            session.latest = propose
            self._fresh.pop(session, None)
            eager, session.eager = session.eager, None
            if eager is not None and eager.answers(propose.base, propose.max_nodes, propose.max_depth):
                self.passes["used ahead"] += 1
                made.append((waiting, session, eager.tree.prefix(propose.max_nodes)))
            else:
                asked.append((waiting, session))
        forward_s = await self._pass([session for _, session in asked], "asked")
        for waiting, session in asked:
            p = waiting.propose
            made.append((waiting, session, session.text.tree(p.base, p.max_nodes, p.max_depth)))
        now = self.world.now()
        results: dict[_Batch, list[DraftResult]] = {}
        for waiting, session, tree in made:
            session.fresh, session.behind_since = False, None
            session.awaiting, session.proposed_at = session.awaiting or bool(tree), now
            base = waiting.propose.base
            result = DraftResult(
                session.key, DraftResultKind.PROPOSED, base, tree, anchor=session.text.token(base)
            )
            results.setdefault(waiting.batch, []).append(result)
        for batch, items in results.items():
            came = [waiting.arrived for waiting, _ in ready if waiting.ahead and waiting.batch is batch]
            received = min(came, default=batch.received)
            timings = DraftTimings(
                queue_ns=0 if came else round(1e9 * (begun - received)),
                append_ns=round(1e9 * append_s),
                forward_ns=round(1e9 * forward_s),
                service_ns=max(1, round(1e9 * (now - received))),
            )
            self.answer(DraftReply(batch.batch_id, tuple(items), timings))

    async def _pass(self, sessions: list[_Session], trigger: str) -> float:
        """A block pass for these; seconds."""
        if not sessions:
            return 0.0
        self.passes[trigger] += 1
        context = sum(session.length for session in sessions) // len(sessions)
        return await self.world.run("draft", self._draft(len(sessions), context))

    async def _draft_ahead(self) -> bool:
        """Draft for sessions whose rows have come, unless others of their round are still at the target."""
        if not self._fresh or any(not waiting.ahead for waiting in self._waiting):
            return False
        now = self.world.now()
        if any(s.awaiting and now - s.proposed_at < AWAIT_S for s in self._sessions.values()):
            return False
        chosen = [s for s in self._fresh if s.fresh and s.end > s.length]
        self._fresh.clear()
        await self._append_rows(chosen, "ahead")
        asks = [(s, s.latest) for s in chosen if s.latest is not None]
        await self._pass([s for s, _ in asks], "ahead")
        for s, latest in asks:
            base, nodes, depth = s.length, latest.max_nodes, latest.max_depth
            s.eager = Ahead(base, nodes, depth, s.text.tree(base, nodes, depth))
        return bool(chosen)

    # ---- appends ------------------------------------------------------------------------------

    async def _append_rows(self, sessions: list[_Session], trigger: str) -> float:
        """Append what these have pending, in passes of a bounded size; seconds."""
        seconds = 0.0
        waiting = [session for session in sessions if session.end > session.length]
        while waiting:
            rows = 0
            part: list[tuple[_Session, int]] = []
            for session in waiting:
                if not rows or rows + session.end - session.length <= MAX_APPEND_ROWS:
                    rows += session.end - session.length
                    part.append((session, session.end))
            self.passes["append " + trigger] += 1
            seconds += await self.world.run("draft", self._append(rows))
            for session, end in part:
                session.length, session.urgent = end, False
                session.since = self.world.now()
            waiting = [session for session in waiting if session.end > session.length]
        return seconds

    async def _append_due(self) -> bool:
        """One append that nobody asked for, if it is due. False: none is."""
        pending = [session for session in self._sessions.values() if session.end > session.length]
        rows = sum(session.end - session.length for session in pending)
        urgent = [session for session in pending if session.urgent]
        if urgent and rows < self._lazy.rows:
            await self._append_rows(urgent, "prefill")
        elif pending and (
            rows >= self._lazy.rows
            or min(s.since for s in pending) + self._lazy.age_s <= self.world.now() + 1e-9
        ):
            await self._append_rows(pending, "lazy")
        else:
            return False
        return True
