"""A session of the draft service, and the table of them with their gateways' leases.

Owns which sessions exist and whose they are. Does not own how chunks become context (ingest), trees
(proposer) or requests (engine). Everything here runs on the engine's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from specbridge.paging import PagedSequence
from specbridge.rounds import Propose, SamplingParams, SessionKey
from specbridge.tree import DraftTree


class Chunk(Protocol):
    """Hidden states of committed rows [first_position, first_position + count), as the channel delivers them.

    rows: [count, taps * hidden], a view that stays readable until the chunk is acknowledged. tokens: ids of
    the rows. anchor: the session's anchor after these rows, None while a prefill goes on.
    """

    @property
    def chunk_id(self) -> int: ...
    @property
    def session(self) -> SessionKey: ...
    @property
    def first_position(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def anchor(self) -> int | None: ...
    @property
    def rows(self) -> torch.Tensor: ...
    def valid(self) -> bool:
        """False once the ring's slots may hold other rows."""
        ...


@dataclass(frozen=True, slots=True)
class Pending:
    """A chunk whose rows wait to be appended; its first `skip` rows are in the context already."""

    chunk: Chunk
    skip: int
    received_s: float

    @property
    def rows(self) -> int:
        return self.chunk.count - self.skip


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree grown for (base, anchor) with room for `max_nodes` nodes of depth `max_depth`."""

    base: int
    anchor: int
    max_nodes: int
    max_depth: int
    tree: DraftTree
    at_s: float

    def answers(self, anchor: int, base: int, max_nodes: int, max_depth: int) -> bool:
        """Whether a prefix of it is the tree that is wanted."""
        wanted = (anchor, base, max_depth)
        return wanted == (self.anchor, self.base, self.max_depth) and max_nodes <= self.max_nodes


class Arrival(NamedTuple):
    """A chunk that came: the row behind its last one, the anchor there, perf_counter_ns of its coming."""

    end: int
    anchor: int
    at_ns: int


@dataclass(slots=True, eq=False)
class Session:
    """Mutable state of one session.

    sequence: committed context rows in pages; rows in `pending` follow it without a gap.
    recapture_at: when missing rows were asked for, None if they are not missing.
    behind_since: since when proposals have found the context too short, None if the latest did not.
    awaiting: a tree was handed out and no chunk has come since; fresh_anchor: the anchor of the chunk that
    then came.
    starved: context could not grow for want of pages; `parked` holds the tokens it had.
    proposed: the latest tree handed out, until the text that follows has been seen.
    eager: a tree grown before it was asked for; latest: the latest proposal, whose caps it goes by.
    noise: Gumbel rows by position, each used by several rounds.
    arrived: the latest chunk that extended it and named an anchor.
    asked: somebody has looked it up since `idle_since`, when that was last found out.
    """

    key: SessionKey
    sampling: SamplingParams
    salt: bytes
    sequence: PagedSequence
    pending: deque[Pending] = field(default_factory=deque)
    pending_rows: int = 0
    recapture_at: float | None = None
    behind_since: float | None = None
    starved_at: float | None = None
    parked: list[int] = field(default_factory=list)
    proposed: Drafted | None = None
    awaiting: bool = False
    fresh_anchor: int | None = None
    eager: Drafted | None = None
    latest: Propose | None = None
    noise: dict[int, torch.Tensor] = field(default_factory=dict)
    arrived: Arrival | None = None
    asked: bool = True
    idle_since: float = 0.0

    @property
    def end(self) -> int:
        """Rows that are appended or can be at once."""
        return self.sequence.length + self.pending_rows

    def arrived_behind(self, base: int) -> Arrival | None:
        """The chunk that the rows end with, if they reach beyond `base` and it names the anchor there."""
        arrived = self.arrived
        return arrived if arrived is not None and base < arrived.end == self.end else None


class SessionTable:
    """Sessions by (gateway, number), since when each gateway has no stream, and which sessions are idle.

    lease_s: seconds that sessions outlive their stream. idle_s: and a peer's last word, or row, about them.
    """

    def __init__(self, lease_s: float, *, idle_s: float = math.inf) -> None:
        self._lease_s = lease_s
        self._idle_s = idle_s
        self._next_look = 0.0
        self._sessions: dict[tuple[bytes, int], Session] = {}
        self._stream_of: dict[bytes, object] = {}
        self._expires: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> Session | None:
        """The session of exactly this incarnation."""
        session = self.peek(key)
        if session is not None:
            session.asked = True
        return session

    def peek(self, key: SessionKey) -> Session | None:
        """The same, although nobody has asked for it."""
        session = self._sessions.get((key.gateway, key.number))
        return session if session is not None and session.key == key else None

    def any_incarnation(self, key: SessionKey) -> Session | None:
        return self._sessions.get((key.gateway, key.number))

    def add(self, session: Session) -> None:
        assert (session.key.gateway, session.key.number) not in self._sessions
        self._sessions[session.key.gateway, session.key.number] = session

    def remove(self, session: Session) -> None:
        del self._sessions[session.key.gateway, session.key.number]

    def traffic(self, apart_from: bytes) -> int:
        """Sessions of gateways that have a stream, those of gateway `apart_from` not counted."""
        return sum(
            session.key.gateway != apart_from and session.key.gateway not in self._expires for session in self
        )

    # ---- leases ------------------------------------------------------------------------------

    def seen(self, gateway: bytes, stream: object) -> None:
        """A message of `gateway` came over `stream`: its sessions belong to that stream now."""
        self._stream_of[gateway] = stream
        self._expires.pop(gateway, None)

    def stream_closed(self, stream: object, now: float) -> None:
        """The gateways of `stream` have `lease_s` seconds to come back; those without a session are
        forgotten at once.
        """
        here = {session.key.gateway for session in self}
        for gateway in [g for g, owner in self._stream_of.items() if owner is stream]:
            if gateway in here:
                self._expires.setdefault(gateway, now + self._lease_s)
            else:
                del self._stream_of[gateway]

    def next_expiry(self) -> float | None:
        times = list(self._expires.values())
        if self._sessions and self._idle_s < math.inf:
            times.append(self._next_look)
        return min(times, default=None)

    def idle(self, now: float) -> list[Session]:
        """Sessions that nobody has spoken of for `idle_s`, to be closed by the caller. Looks now and then."""
        if now < self._next_look or self._idle_s == math.inf:
            return []
        self._next_look = now + self._idle_s / 4
        for session in self:
            if session.asked:
                session.asked, session.idle_since = False, now
        return [session for session in self if now - session.idle_since >= self._idle_s]

    def expired(self, now: float) -> dict[bytes, list[Session]]:
        """Gateways whose lease ran out, with their sessions; they are forgotten, the sessions are the
        caller's to close.
        """
        gone: dict[bytes, list[Session]] = {g: [] for g, at in self._expires.items() if at <= now}
        if not gone:
            return gone
        for gateway in gone:
            del self._expires[gateway]
            self._stream_of.pop(gateway, None)
        for session in self:
            if session.key.gateway in gone:
                gone[session.key.gateway].append(session)
        return gone
