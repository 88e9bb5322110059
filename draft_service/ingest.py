"""From hidden-state chunks to context rows.

Owns the order rule (a chunk must reach the context's end without a gap), what happens when it is broken
(re-capture), lazy coalesced appends, acknowledgements, and running out of pages. Does not own the channel
(specbridge.channel), pages (context_cache) nor when proposals need the rows (engine).

Appends are lazy because a round that skips the draft still sends its rows: on their own they would cost a
pass over the append weights each, together they cost one. Rows of a prefill are appended at once: a proposal
follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draft_service.context_cache import AppendFailures, ContextCache, NewRows
from draft_service.metrics import DraftMetrics
from draft_service.selfcheck import AcceptanceMonitor
from draft_service.session import Arrival, Chunk, Pending, Session, SessionTable
from specbridge.rounds import SessionKey

log = logging.getLogger(__name__)

MAX_APPEND_ROWS = 512
"""Rows of one append pass: bounds how long a proposal can wait behind it."""
EAGER_APPEND_ROWS = 16
"""A chunk of more rows than this is appended at once, not lazily."""
RECAPTURE_RETRY_S = 2.0
"""A re-capture that brought nothing for so long is asked for again."""
STARVED_RETRY_S = 2.0
"""A session without pages tries again after so long."""


class Channel(Protocol):
    """The consumer end of the hidden-state channel, as the engine's thread sees it."""

    def ack(self, chunk_ids: Sequence[int]) -> None:
        """These chunks' rows have been read; their slots may be reused."""
        ...

    def recapture(self, session: SessionKey, first: int, cause: str) -> object:
        """Ask for the rows from `first` on. cause: attach, gap, restart, slots."""
        ...


@dataclass(frozen=True, slots=True)
class LazyLimits:
    """Pending rows in all, and seconds, after which rows are appended although nobody asked."""

    rows: int = 64
    age_s: float = 1.0


class Ingest:
    """Chunks in, context rows out; see the module."""

    def __init__(
        self,
        cache: ContextCache,
        sessions: SessionTable,
        *,
        metrics: DraftMetrics,
        monitor: AcceptanceMonitor,
        clock: Callable[[], float],
        lazy: LazyLimits,
        max_position: int,
        unjudged: bytes = b"",
    ) -> None:
        self.attached = False
        self.pending_rows = 0
        self._cache = cache
        self._sessions = sessions
        self._metrics = metrics
        self._monitor = monitor
        self._clock = clock
        self._lazy = lazy
        self._max_position = max_position
        # The gateway whose rounds are no traffic.
        self._unjudged = unjudged
        self._channel: Channel | None = None
        self._acks: list[int] = []
        self._urgent: dict[Session, None] = {}
        self._attaches = 0
        self._row_limit = lazy.rows

    # ---- channel state -----------------------------------------------------------------------

    def connect(self, channel: Channel) -> None:
        """Set the channel that acknowledgements and re-captures go to."""
        self._channel = channel

    def on_attached(self, slots: int) -> None:
        """A new epoch: what was pending is void, and the target knows nothing of what the sessions hold."""
        self.on_detached()
        self.attached = True
        self._attaches += 1
        # Rows held back occupy slots of the ring; most of it must stay free for the target.
        self._row_limit = max(1, min(self._lazy.rows, slots // 4))
        cause = "attach" if self._attaches == 1 else "restart"
        for session in self._sessions:
            self.recapture(session, cause)

    def void(self) -> None:
        """Another target is attached: what the old one's rows made is of no use, here or as a prefix."""
        self._cache.pool.clear_cache()
        self._monitor.reset()
        for session in self._sessions:
            session.proposed = session.eager = None
            if session.starved_at is None:
                self._reset(session)
                self.recapture(session, "restart")

    def on_detached(self) -> None:
        self.attached = False
        self._acks.clear()
        for session in self._sessions:
            self.drop_pending(session, acknowledge=False)
            session.recapture_at = None
            session.awaiting = False

    # ---- chunks ------------------------------------------------------------------------------

    def receive(self, chunk: Chunk) -> Session | None:
        """Take one chunk; returns its session if it extended it."""
        session = self._sessions.get(chunk.session)
        if session is None:
            self._drop(chunk, "unknown")
            return None
        if not chunk.valid():
            self._drop(chunk, "stale")
            self.recapture(session, "gap")
            return None
        end = session.end
        if chunk.first_position + chunk.count > self._max_position:
            self._drop(chunk, "too_long")
            return None
        if session.starved_at is not None:
            self._drop(chunk, "starved")
            return None
        if chunk.first_position > end:
            self._drop(chunk, "gap")
            self.recapture(session, "gap")
            return None
        self._judge(session, chunk)
        skip = end - chunk.first_position
        if skip and not self._agrees(session, chunk, min(skip, chunk.count)):
            # Both ends can't be right about what was committed; the target is.
            log.error("session %s: rows [%d, %d) hold other tokens than the context; starting over",
                      session.key, chunk.first_position, end)  # fmt: skip
            self._drop(chunk, "contradiction")
            self._reset(session)
            self.recapture(session, "gap")
            return None
        session.recapture_at = session.behind_since = None
        if skip >= chunk.count:
            self._drop(chunk, "known")
            return None
        now = self._clock()
        session.pending.append(Pending(chunk, skip, now))
        session.pending_rows += chunk.count - skip
        self.pending_rows += chunk.count - skip
        if session.eager is not None:  # the gateway did not ask in the round it was made for
            session.eager = None
            self._metrics.eager.labels("wasted").inc()
        session.fresh_anchor = chunk.anchor if session.awaiting else None
        if chunk.anchor is not None:
            session.arrived = Arrival(session.end, chunk.anchor, time.perf_counter_ns())
        session.awaiting = False
        if chunk.anchor is None or chunk.count - skip > EAGER_APPEND_ROWS:
            self._urgent[session] = None
        self._metrics.chunks.labels("taken").inc()
        return session

    def close(self, session: Session) -> None:
        """The session is gone: its pages stay as a prefix, its chunks are given back."""
        size = self._cache.pool.page_size
        if session.end // size > session.sequence.length // size:
            # Pages that the next turn of the chat would otherwise have the target run again.
            self.append([session], "close")
        self.drop_pending(session, acknowledge=True)
        session.sequence.close()
        session.noise.clear()

    def drop_pending(self, session: Session, *, acknowledge: bool) -> None:
        if acknowledge:
            self._acks.extend(item.chunk.chunk_id for item in session.pending)
        self.pending_rows -= session.pending_rows
        session.pending.clear()
        session.pending_rows = 0
        session.fresh_anchor = None
        self._urgent.pop(session, None)

    # ---- appending ---------------------------------------------------------------------------

    def append(self, sessions: Iterable[Session], trigger: str) -> None:
        """Append all pending rows of `sessions`. Afterwards a session's `end` is its context's length."""
        waiting = [s for s in dict.fromkeys(sessions) if s.pending]
        while waiting:
            items: list[NewRows] = []
            owners: list[Session] = []
            rows = 0
            for session in waiting:
                if rows and rows + session.pending_rows > MAX_APPEND_ROWS:
                    continue
                item = self._collect(session)
                if item is not None:
                    items.append(item)
                    owners.append(session)
                    rows += len(item.tokens)
            if not items:
                break
            failures = self._cache.append(items)
            for item, session in zip(items, owners, strict=True):
                self._appended(session, item, failures)
            self._metrics.appends.labels(trigger).inc()
            waiting = [s for s in waiting if s.pending]

    def due(self) -> float | None:
        """When the next append nobody asked for is due (a clock time; in the past: now), or None."""
        if self._urgent or self.pending_rows >= self._row_limit:
            return 0.0
        oldest = min((s.pending[0].received_s for s in self._sessions if s.pending), default=None)
        return None if oldest is None else oldest + self._lazy.age_s

    def append_due(self) -> None:
        """One append of what is due."""
        if self._urgent and self.pending_rows < self._row_limit:
            self.append(list(self._urgent), "prefill")
        elif self.pending_rows:
            self.append(list(self._sessions), "lazy")

    def flush_acks(self) -> None:
        """Send the acknowledgements gathered so far."""
        if self._acks and self._channel is not None and self.attached:
            self._channel.ack(tuple(self._acks))
        self._acks.clear()

    # ---- re-capture --------------------------------------------------------------------------

    def recapture(self, session: Session, cause: str) -> None:
        """Ask the target for the rows from the context's end on; not twice within a while."""
        now = self._clock()
        if not self.attached or self._channel is None or session.starved_at is not None:
            return
        if session.recapture_at is not None and now < session.recapture_at + RECAPTURE_RETRY_S:
            return
        session.recapture_at = now
        self._channel.recapture(session.key, session.end, cause)
        self._metrics.recaptures.labels(cause).inc()
        log.debug("session %s: asked for rows from %d on (%s)", session.key, session.end, cause)

    def revive(self, session: Session) -> None:
        """A starved session tries for pages again, from what the prefix index still has of it."""
        if session.starved_at is None or self._clock() < session.starved_at + STARVED_RETRY_S:
            return
        pool = self._cache.pool
        if pool.available_pages < pool.pages_for(len(session.parked)) + 1:
            return
        session.sequence.close()
        session.sequence = self._cache.open(session.parked, salt=session.salt)
        session.parked, session.starved_at = [], None
        self.recapture(session, "slots")

    # ---- pieces ------------------------------------------------------------------------------

    def _drop(self, chunk: Chunk, fate: str) -> None:
        self._acks.append(chunk.chunk_id)
        self._metrics.chunks.labels(fate).inc()

    def _agrees(self, session: Session, chunk: Chunk, count: int) -> bool:
        """Whether the first `count` tokens of a chunk are those held at their positions."""
        first, held = chunk.first_position, session.sequence.tokens
        known = held[first : first + count]
        for item in session.pending:
            if len(known) >= count:
                break
            offset = first + len(known) - item.chunk.first_position
            known.extend(item.chunk.tokens[offset : offset + count - len(known)])
        return list(chunk.tokens[:count]) == list(known[:count])

    def _collect(self, session: Session) -> NewRows | None:
        """The session's pending rows as one item; None if the ring has overtaken them."""
        valid: list[Pending] = []
        for item in session.pending:
            if not item.chunk.valid():
                self.drop_pending(session, acknowledge=True)
                self._metrics.chunks.labels("stale").inc()
                self.recapture(session, "gap")
                return None
            valid.append(item)
        tokens = [token for item in valid for token in item.chunk.tokens[item.skip :]]
        parts = [item.chunk.rows[item.skip :] for item in valid]
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        return NewRows(session.sequence, tokens, features, lambda: all(item.chunk.valid() for item in valid))

    def _appended(self, session: Session, item: NewRows, failures: AppendFailures) -> None:
        anchor = session.fresh_anchor
        # The rows have been read, or never will be: their slots may be reused.
        self.drop_pending(session, acknowledge=True)
        if item in failures.no_pages:
            log.warning("session %s: no context pages left at row %d; it goes on without trees",
                        session.key, session.sequence.length)  # fmt: skip
            session.parked = [*session.sequence.tokens, *item.tokens]
            session.starved_at = self._clock()
            session.sequence.close()
        elif item in failures.overtaken:
            self._metrics.chunks.labels("stale").inc()
            self.recapture(session, "gap")
        else:
            session.fresh_anchor = anchor
            self._metrics.append_rows.inc(len(item.tokens))

    def _reset(self, session: Session) -> None:
        """Forget the whole context of a session."""
        self.drop_pending(session, acknowledge=True)
        session.sequence.close()
        session.sequence = self._cache.pool.open((), salt=session.salt)
        session.recapture_at = None

    def _judge(self, session: Session, chunk: Chunk) -> None:
        """Compare the tree handed out at this chunk's first row with the text that followed."""
        drafted = session.proposed
        if drafted is None or chunk.anchor is None or chunk.first_position > drafted.base:
            return
        session.proposed = None
        text = (*chunk.tokens, chunk.anchor)[drafted.base + 1 - chunk.first_position :]
        if not text or not drafted.tree.tokens or session.key.gateway == self._unjudged:
            return
        result = self._monitor.observe(drafted.tree, text, greedy=session.sampling.greedy)
        self._metrics.accepted(drafted.tree, result.nodes, result.length)
