"""Hidden-state capture: which rows the draft still needs, and getting them into the channel.

Owns each session's capture position (the first row that the draft has not been sent) and the reservations of
the step being run. The draft's context must grow without gaps, so rows are published only if they start at
that position. When slots run out, the session is *suspended*: it decodes on, and the target re-captures the
missing rows by itself when slots are free again. When the draft goes away or loses state, the session is
*lost* until the draft asks for a first row. A re-capture is a chain of committed rows that reads pages and
commits nothing. Does not own the ring (specbridge.channel) or the order of work (target_service.engine).

Rounds whose rows nobody waits for are *deferred*: their rows are written to the ring at once, into a span
with room for several rounds, and announced in one chunk when the span is full or the draft is about to be
asked.
A chunk a round costs a message, a wake-up and an acknowledgement on both ends; under load, when the budget
skips the draft, that was several percent of the target's time.

What a turn of the engine announces leaves with `flush`, after the answers: these take two hops until the
draft is asked, so the rows are there in time, and nobody waits for the announcing.

Everything here runs on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from specbridge.rounds import SessionKey
from target_service.metrics import RECAPTURE_CAUSES, TargetMetrics

log = logging.getLogger(__name__)

RETRY_S = 0.02
"""Pause before a suspended session asks for slots again."""
ROWS_PER_TOKEN = 32
"""A re-capture of more rows than this for each token still to come costs more than speculation can save."""
MIN_REMAINING = 4
HOLD_ROWS = 16
"""Rows of a session that are announced together while they are deferred."""


class Slots(Protocol):
    """A reservation: contiguous slots of `ring`."""

    @property
    def first_slot(self) -> int: ...

    @property
    def ring(self) -> torch.Tensor: ...


class HiddenStateSink(Protocol):
    """The producer end of the hidden-state channel, as the engine's thread sees it."""

    @property
    def attached(self) -> bool: ...

    @property
    def ring_slots(self) -> int: ...

    @property
    def ring_used(self) -> int: ...

    @property
    def ring(self) -> torch.Tensor | None: ...

    def reserve(self, rows: int) -> Any | None: ...

    def mark_written(self, *, over: bool = False) -> None: ...

    def publish(
        self,
        reservation: Any,
        *,
        session: SessionKey,
        first_position: int,
        count: int,
        tokens: Sequence[int],
        anchor: int | None,
    ) -> Any: ...

    def cancel(self, reservation: Any) -> None: ...


class CaptureState(Enum):
    OFF = "off"
    """Speculation is off for the request."""
    FOLLOWING = "following"
    """Rows from `position` on are published as they are committed."""
    SUSPENDED = "suspended"
    """Rows from `position` on are missing; the target re-captures them."""
    LOST = "lost"
    """The draft's context is unknown here, or it has none; it has to ask."""


@dataclass(slots=True)
class Held:
    """Rows [first, first + len(tokens)) of a session: written to the ring, not yet announced."""

    handle: Any
    key: SessionKey
    first: int
    tokens: list[int]
    anchor: int | None


@dataclass(slots=True)
class SessionCapture:
    """Capture state of one session. position: first row that is not in the ring; `held` are the last before
    it."""

    state: CaptureState = CaptureState.OFF
    position: int = 0
    cause: str = "suspended"
    not_before: float = 0.0
    pending_end: int | None = None
    waiting_since: float | None = None
    skipped: bool = False
    held: Held | None = None

    @property
    def following(self) -> bool:
        return self.state is CaptureState.FOLLOWING


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room in the ring for rows [first, first + rows) of one session in the step under way, behind `offset`
    held ones; room: rows in all that may be held there (0: announce at once).
    """

    handle: Slots
    first: int
    rows: int
    offset: int = 0
    room: int = 0


class Capture:
    """The engine's side of the channel."""

    def __init__(self, metrics: TargetMetrics, *, slots: int, recapture_interval: float) -> None:
        self._slots = slots
        self._sink: HiddenStateSink | None = None
        self._metrics = metrics
        self._interval = recapture_interval
        self._ring: torch.Tensor | None = None
        self._announced: list[Held] = []

    def connect(self, sink: HiddenStateSink) -> None:
        self._sink = sink

    @property
    def slots(self) -> int:
        """Most rows that one chunk can have."""
        ring = self._sink.ring_slots if self._sink is not None else 0
        return ring or self._slots

    @property
    def live(self) -> bool:
        """A draft is attached, the model's taps are set for it and its ring is the one being written."""
        return self._ring is not None and self._sink is not None and self._sink.attached

    def attached(self, sessions: Sequence[SessionCapture]) -> torch.Tensor | None:
        """A draft attached: it knows nothing of the running sessions. Returns its ring [slots, width], into
        which the model writes from now on; None if the draft is gone again.
        """
        self._lose(sessions)
        self._ring = self._sink.ring if self._sink is not None else None
        return self._ring

    def detached(self, sessions: Sequence[SessionCapture]) -> None:
        self._ring = None
        self._lose(sessions)

    def open(self, *, speculate: bool, draft_prefix: int, absent: bool = False) -> SessionCapture:
        """State of a session that starts now, whose draft context holds rows [0, draft_prefix). absent: the
        draft has no such session.
        """
        if not speculate:
            return SessionCapture()
        state = CaptureState.FOLLOWING if self.live and not absent else CaptureState.LOST
        return SessionCapture(state, draft_prefix)

    def reserve(
        self, capture: SessionCapture, first: int, count: int, *, defer: bool = False
    ) -> Reserved | None:
        """Room for the rows of [first, first + count) that the draft lacks; None if not following or no room.

        defer: take room for further rounds too, if there is plenty. Whoever gets None for a session that
        `wants` rows suspends it or holds its chunk back.
        """
        if not self.wants(capture, first, count):
            return None
        sink = self._sink
        assert sink is not None
        start = max(first, capture.position)
        rows = first + count - start
        held = capture.held
        if held is not None:
            if len(held.tokens) + rows <= HOLD_ROWS:
                return Reserved(held.handle, start, rows, len(held.tokens), HOLD_ROWS)
            self._announce(capture)
        if defer and rows < HOLD_ROWS and 2 * (sink.ring_used + HOLD_ROWS) <= sink.ring_slots:
            handle = self._slots_for(HOLD_ROWS)
            if handle is not None:
                return Reserved(handle, start, rows, room=HOLD_ROWS)
        handle = self._slots_for(rows)
        return None if handle is None else Reserved(handle, start, rows)

    def _slots_for(self, rows: int) -> Slots | None:
        assert self._sink is not None
        handle: Slots | None = self._sink.reserve(rows)
        if handle is not None and handle.ring is not self._ring:
            # Another draft has attached, and the model does not write for it yet.
            self._sink.cancel(handle)
            return None
        return handle

    def wants(self, capture: SessionCapture, first: int, count: int) -> bool:
        """Whether rows of [first, first + count) must be published when they are committed."""
        if not self.live:
            return False
        if not capture.following:
            # A re-capture in the same step that ends just where these rows begin closes the gap.
            return capture.pending_end == first
        return capture.position < first + count

    def written(self, *, over: bool = False) -> None:
        """The step has written, or (unless the device is known to be done: `over`) told the device to write,
        all rows reserved so far.
        """
        if self.live:
            assert self._sink is not None
            self._sink.mark_written(over=over)

    def suspend(self, capture: SessionCapture, cause: str) -> None:
        """No slots: the session goes on without its draft for now."""
        if capture.state is not CaptureState.FOLLOWING:
            return
        self._announce(capture)
        capture.state = CaptureState.SUSPENDED
        capture.cause = cause
        self._metrics.suspended.inc()
        log.debug("capture suspended at row %d: %s", capture.position, cause)

    def publish(
        self,
        capture: SessionCapture,
        reserved: Reserved | None,
        *,
        key: SessionKey,
        first: int,
        tokens: Sequence[int],
        anchor: int | None,
        defer: bool = False,
    ) -> None:
        """Publish committed rows, which the step has written: tokens[i] is the id at position first + i.
        defer: the announcement may wait for further rows.

        What the reservation holds too much is given back. Without a reservation nothing is published.
        """
        if reserved is None:
            return
        end = first + len(tokens)
        start = max(first, capture.position)
        if end <= start or capture.position < first or not self.live:
            self.cancel(reserved)
            return
        self._metrics.captured_rows.inc(end - start)
        capture.position = end
        if not reserved.offset:
            capture.held = Held(reserved.handle, key, start, [], None)
        held = capture.held
        assert held is not None and held.handle is reserved.handle
        held.tokens += tokens[start - first :]
        held.anchor = anchor
        if not (defer and reserved.room > len(held.tokens)):
            self._announce(capture)

    def cancel(self, reserved: Reserved | None) -> None:
        """Give unused room back; room behind held rows stays with them."""
        if reserved is not None and not reserved.offset and self._sink is not None:
            self._sink.cancel(reserved.handle)

    def close(self, capture: SessionCapture, *, keep: bool = True) -> None:
        """The session ends. keep: its held rows go to the draft, whose prefix index may use them."""
        if keep and self.live:
            self._announce(capture)
        else:
            self._drop_held(capture)

    def flush(self) -> None:
        """Tell the draft what has been announced."""
        while self._announced:
            held = self._announced.pop(0)
            assert self._sink is not None
            self._sink.publish(
                held.handle,
                session=held.key,
                first_position=held.first,
                count=len(held.tokens),
                tokens=held.tokens,
                anchor=held.anchor,
            )

    def _announce(self, capture: SessionCapture) -> None:
        held, capture.held = capture.held, None
        if held is not None:
            self._announced.append(held)

    def _drop_held(self, capture: SessionCapture) -> None:
        held, capture.held = capture.held, None
        if held is not None and self._sink is not None:
            self._sink.cancel(held.handle)

    # ---- re-capture -----------------------------------------------------------------------------

    def request(self, capture: SessionCapture, *, first: int, kv_length: int, limit: int, cause: str) -> None:
        """The draft asks for the rows from `first` on, at most `limit` (what there is or will be)."""
        if capture.state is CaptureState.OFF or first > limit or not self.live:
            return
        if capture.held is not None and first >= capture.held.first:
            self._announce(capture)
            return
        if capture.following and first >= capture.position:
            return  # they are on their way
        self._drop_held(capture)
        capture.position = first
        capture.cause = cause
        capture.state = CaptureState.FOLLOWING if first >= kv_length else CaptureState.SUSPENDED

    def recapture_rows(self, capture: SessionCapture, *, kv_length: int, remaining: int, now: float) -> int:
        """Most rows from capture.position on to run again in this step; 0: none now."""
        if capture.state is not CaptureState.SUSPENDED or not self.live or now < capture.not_before:
            return 0
        missing = kv_length - capture.position
        if missing <= 0:
            return 0  # suspended in this very step: its rows are still to come
        if remaining < MIN_REMAINING or missing > ROWS_PER_TOKEN * remaining:
            if not capture.skipped:
                capture.skipped = True
                self._metrics.recaptures_skipped.inc()
            return 0
        return min(missing, self.slots)

    def reserve_recapture(self, capture: SessionCapture, rows: int, *, now: float) -> Reserved | None:
        """Room for `rows` re-captured rows; None (and a pause) if the ring is still full."""
        handle = self._slots_for(rows)
        if handle is None:
            capture.not_before = now + RETRY_S
            return None
        capture.pending_end = capture.position + rows
        return Reserved(handle, capture.position, rows)

    def recaptured(self, capture: SessionCapture, *, kv_length: int, rows: int, now: float) -> None:
        """After a re-captured chunk of `rows` rows was published; kv_length as it was before the step."""
        done = capture.pending_end is not None and capture.position == capture.pending_end
        capture.pending_end = None
        if not done or capture.state is not CaptureState.SUSPENDED:
            return
        self._metrics.recapture_rows.inc(rows)
        if capture.position == kv_length:
            capture.state = CaptureState.FOLLOWING
            capture.not_before = now + self._interval
            self._metrics.recaptures.labels(_cause_label(capture.cause)).inc()

    def _lose(self, sessions: Sequence[SessionCapture]) -> None:
        for capture in sessions:
            self._drop_held(capture)
            if capture.state is not CaptureState.OFF:
                capture.state = CaptureState.LOST
                capture.pending_end = None


def _cause_label(cause: str) -> str:
    """Causes come from a peer; labels must stay few."""
    return cause if cause in RECAPTURE_CAUSES else "other"
