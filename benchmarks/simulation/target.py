"""A simulated target: one engine that runs merged passes, one after another, each as long as its curve says.

Owns the order of work of target_service.planner (verifies first, then prompt chunks by the target's own chunk
policy and shares, then a re-capture) over texts that are known beforehand; the walk is the target's own, too.
Not simulated: KV pages (there are always enough), reused prefixes, streams that break.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation.costs import Curve
from benchmarks.simulation.texts import VOCAB, Text
from benchmarks.simulation.world import Service, World
from specbridge.errors import CapacityError, NotReady, Stale
from specbridge.rounds import (
    FinishReason,
    SessionKey,
    StopParams,
    TargetInfo,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    TargetTimings,
    Verify,
)
from target_service.chunks import ChunkPolicy, PassTimes
from target_service.planner import LEAST_CHUNK, PAUSE_S, shares
from target_service.verify import walk

BLOCKED_S = 0.005
"""As target_service.engine's: the pause when there is work that waits."""

Publish = Callable[[SessionKey, int, int, bool], None]
"""(session, first row, rows, whether an anchor follows them)."""


@dataclass(slots=True, eq=False)
class _Session:
    """kv_length: rows committed. num_tokens: prompt, output so far. published: rows the draft was told of;
    missing: first row of a re-capture under way."""

    key: SessionKey
    text: Text
    stop: StopParams
    prompt_length: int
    num_tokens: int
    speculate: bool
    priority: int
    kv_length: int = 0
    published: int = 0
    missing: int | None = None
    ready: bool = False
    ended: bool = False

    @property
    def remaining(self) -> int:
        return self.prompt_length + self.stop.max_tokens - self.num_tokens


@dataclass(slots=True, eq=False)
class _Batch:
    batch_id: int
    received: float
    missing: int
    results: list[TargetResult] = field(default_factory=list)
    started: float | None = None
    forward_s: float = 0.0
    commit_s: float = 0.0
    rows: int = 0
    prefill_rows: int = 0


class SimTarget(Service[TargetRequest]):
    """See the module. publish: the channel's other end, called when rows have arrived there."""

    def __init__(self, world: World, *, instance: bytes = b"target") -> None:
        super().__init__(world)
        costs = world.costs
        self.publish: Publish = lambda key, first, count, anchored: None
        self.passes = 0
        self._instance = instance
        self._sessions: dict[tuple[bytes, int], _Session] = {}
        self._pending: deque[tuple[_Batch, Verify]] = deque()
        self._verify = Curve(costs.verify)
        self._shortest = min(context for _, context, _ in costs.verify)
        self._times = PassTimes(costs.verify_points(), costs.prefill_points())
        self._chunks = ChunkPolicy(
            most=costs.prefill_chunk, smallest=LEAST_CHUNK, goal_s=costs.max_itl_ms / 1e3
        )
        self._chunks.times = PassTimes(costs.verify_points(), costs.prefill_points())
        self._latest_token = -math.inf

    def make_info(self) -> TargetInfo:
        costs = self.world.costs
        return TargetInfo(
            model_id=costs.name, fingerprint="simulated", vocab_size=VOCAB, eos_token_ids=(), hidden_size=1,
            num_layers=1, page_size=16, max_length=costs.max_length, tp_size=1,
            max_sessions=costs.max_sessions, max_tree_nodes=costs.max_tree_nodes, total_pages=0,
            dtype="none", device=costs.device, instance=self._instance, verify_cost=costs.verify_points(),
            simulated_acceptance=self.world.drafter.acceptance.name,
        )  # fmt: skip

    def sessions_of(self, message: Any) -> int:
        if isinstance(message, TargetReply):
            return len(message.results)
        return len(message.verifies) + len(message.opens) + len(message.releases)

    def recapture(self, key: SessionKey, first: int) -> None:
        """The draft asks for the rows from `first` on."""
        session = self._sessions.get((key.gateway, key.number))
        if session is not None and session.key == key and session.missing is None:
            session.missing = min(first, session.kv_length)
            self._wake.set()

    # ---- the engine ---------------------------------------------------------------------------

    async def _engine(self) -> None:
        while True:
            self._wake.clear()
            while self._inbox:
                request, received = self._inbox.popleft()
                self._take(request, received)
            if not await self._step():
                await self._sleep()

    async def _sleep(self) -> None:
        # Prompts that the streams leave no room for are looked at again every few milliseconds.
        held = any(not session.ready or session.missing is not None for session in self._sessions.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCKED_S if held else None):
                await self._wake.wait()

    def _take(self, request: TargetRequest, received: float) -> None:
        results: list[TargetResult] = []
        for key in request.releases:
            session = self._sessions.get((key.gateway, key.number))
            if session is not None and session.key.incarnation <= key.incarnation:
                del self._sessions[key.gateway, key.number]
            results.append(TargetResult(key, TargetResultKind.RELEASED))
        results += [self._open(item) for item in request.opens]
        if results:
            self.answer(TargetReply(request.batch_id, tuple(results)))
        if request.verifies:
            batch = _Batch(request.batch_id, received, len(request.verifies))
            self._pending.extend((batch, verify) for verify in request.verifies)

    def _open(self, item: TargetOpen) -> TargetResult:
        if len(self._sessions) >= self.world.costs.max_sessions:
            error = CapacityError(f"{len(self._sessions)} sessions are open, the most")
            return TargetResult(item.session, TargetResultKind.ERROR, error=error)
        self._sessions[item.session.gateway, item.session.number] = _Session(
            item.session, self.world.texts[item.sampling.seed], item.stop, item.prompt_length,
            len(item.tokens), item.speculate, item.priority,
        )  # fmt: skip
        return TargetResult(item.session, TargetResultKind.OPENED)

    async def _step(self) -> bool:
        """One pass. False: nothing to run."""
        taken = self._take_verifies()
        rows = sum(len(verify.tree) + 1 for _, verify, _ in taken)
        chunks = self._take_chunks(taken, rows)
        again = None if chunks else self._take_recapture(taken, rows)
        if not taken and not chunks and again is None:
            return False
        self.passes += 1
        prompt_rows = sum(chunks.values())
        more = prompt_rows + (again[1] if again else 0)
        ahead = max([s.kv_length for s in chunks] + ([again[0].missing or 0] if again else []), default=0)
        begun = self.world.now()
        batches = {id(batch): batch for batch, _, _ in taken}.values()
        for batch in batches:
            batch.started = begun if batch.started is None else batch.started
        sessions = len(taken) + len(chunks)
        seconds = await self.world.run(
            "target", self._pass_ms(rows, more, ahead, [s for _, _, s in taken], sessions)
        )
        costs = self.world.costs
        commit_s = await self.world.run("target", costs.commit_ms + costs.commit_session_ms * sessions)
        for batch in batches:
            batch.forward_s += seconds
            batch.commit_s += commit_s
            batch.rows += rows + more
            batch.prefill_rows += prompt_rows
        if again is not None:
            self._recaptured(*again)
        firsts = [self._settle_chunk(session, count) for session, count in chunks.items()]
        for batch, verify, session in taken:
            self._finish(batch, self._settle_round(session, verify))
        if firsts := [first for first in firsts if first is not None]:
            self.answer(TargetReply(0, tuple(firsts)))
        if taken or firsts:
            self._latest_token = self.world.now()
        waiting = bool(more) or any(not s.ready or s.missing is not None for s in self._sessions.values())
        self._chunks.observe(verify_rows=rows, rows=more, context=ahead, seconds=seconds, waiting=waiting)
        return True

    def _pass_ms(
        self, rows: int, more: int, ahead: int, verified: Iterable[_Session], sessions: int
    ) -> float:
        context = sum(session.kv_length for session in verified)
        further = self.world.costs.session_ms * max(0, sessions - 1)
        if not more:
            return self._verify(rows, context) + further
        longer = self._verify(rows, context) - self._verify(rows, self._shortest) if rows else 0.0
        return 1e3 * self._times.mixed(rows, more, ahead) + longer + further

    # ---- what the next pass runs --------------------------------------------------------------

    def _take_verifies(self) -> list[tuple[_Batch, Verify, _Session]]:
        taken: list[tuple[_Batch, Verify, _Session]] = []
        seen: set[SessionKey] = set()
        rows = 0
        while self._pending:
            batch, verify = self._pending[0]
            key = verify.session
            session = self._sessions.get((key.gateway, key.number))
            if session is None or session.key != key or session.ended or session.kv_length != verify.base:
                self._pending.popleft()
                error = NotReady("in its prefill") if session and not session.ready else Stale("not open")
                self._finish(batch, TargetResult(key, TargetResultKind.ERROR, base=verify.base, error=error))
                continue
            count = len(verify.tree) + 1
            if key in seen or (taken and rows + count > self.world.costs.max_verify_rows):
                break
            self._pending.popleft()
            taken.append((batch, verify, session))
            seen.add(key)
            rows += count
        return taken

    def _chunk_rows(self, taken: list[tuple[_Batch, Verify, _Session]], rows: int, context: int) -> int:
        now = self.world.now()
        pause = max(PAUSE_S, 4 * self._chunks.goal_s(1))
        return self._chunks.rows(
            verify_rows=rows,
            waited_s=now - min((batch.received for batch, _, _ in taken), default=now),
            running=bool(rows) or now < self._latest_token + pause,
            context=context,
        )

    def _take_chunks(self, taken: list[tuple[_Batch, Verify, _Session]], rows: int) -> dict[_Session, int]:
        prompts = [session for session in self._sessions.values() if not session.ready]
        if not prompts:
            return {}
        prompts.sort(key=lambda session: session.priority)
        return shares(prompts, self._chunk_rows(taken, rows, prompts[0].kv_length))  # type: ignore[arg-type, return-value]

    def _take_recapture(
        self, taken: list[tuple[_Batch, Verify, _Session]], rows: int
    ) -> tuple[_Session, int] | None:
        for session in self._sessions.values():
            if session.missing is not None and session.ready and not session.ended:
                most = self._chunk_rows(taken, rows, session.missing)
                count = min(most, session.kv_length - session.missing)
                return (session, count) if count > 0 else None
        return None

    # ---- what becomes of it -------------------------------------------------------------------

    def _announce(self, session: _Session, first: int, count: int, *, anchored: bool) -> None:
        session.published = first + count
        if session.speculate and count:
            asyncio.get_running_loop().call_later(
                self.world.costs.channel_ms / 1e3, self.publish, session.key, first, count, anchored
            )

    def _recaptured(self, session: _Session, count: int) -> None:
        first = session.missing or 0
        # A round of the same pass may have moved the end on.
        closed = first + count >= session.kv_length
        session.missing = None if closed else first + count
        self._announce(session, first, count, anchored=closed)

    def _settle_chunk(self, session: _Session, count: int) -> TargetResult | None:
        first = session.kv_length
        session.kv_length += count
        final = session.kv_length == session.num_tokens
        self._announce(session, first, count, anchored=final)
        if not final:
            return None
        token = session.text.token(session.num_tokens)
        reason = FinishReason.RUNNING if session.remaining > 1 else FinishReason.LENGTH
        session.num_tokens += 1
        session.ready, session.ended = True, bool(reason)
        return TargetResult(
            session.key, TargetResultKind.FIRST, kv_length=session.kv_length, tokens=(token,),
            finish_reason=reason,
        )  # fmt: skip

    def _settle_round(self, session: _Session, verify: Verify) -> TargetResult:
        base, tree = verify.base, verify.tree
        choices = [session.text.token(base + 1)]
        choices += [session.text.token(base + depth + 1) for depth in tree.depths()]
        room = self.world.costs.max_length - session.num_tokens
        done = walk(tree, choices, stop_ids=frozenset(), remaining=session.remaining, room=room)
        session.kv_length = base + len(done.accepted) + 1
        session.num_tokens += len(done.tokens)
        session.ended = bool(done.finish_reason)
        following = session.missing is None
        if following and (session.ended or not verify.defer_rows):
            first = session.published
            self._announce(session, first, session.kv_length - first, anchored=not session.ended)
        return TargetResult(
            session.key, TargetResultKind.VERIFIED, base=base, kv_length=session.kv_length,
            tokens=done.tokens, accepted=done.accepted, finish_reason=done.finish_reason,
            draft_has_context=following,
        )  # fmt: skip

    def _finish(self, batch: _Batch, result: TargetResult) -> None:
        batch.results.append(result)
        if len(batch.results) < batch.missing:
            return
        now = self.world.now()
        started = now if batch.started is None else batch.started
        timings = TargetTimings(
            queue_ns=round(1e9 * (started - batch.received)),
            forward_ns=round(1e9 * batch.forward_s),
            commit_ns=round(1e9 * batch.commit_s),
            rows=batch.rows,
            prefill_rows=batch.prefill_rows,
            service_ns=max(1, round(1e9 * (now - batch.received))),
        )
        self.answer(TargetReply(batch.batch_id, tuple(batch.results), timings))
