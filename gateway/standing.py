"""Standing: which sessions the draft has, and getting them back.

Owns whether the draft may be asked at all, what its answers say of a session, and opening running sessions
there again after a loss (rate-limited; the target re-captures what the draft lacks), or once they are wanted
there: while the budget expects no draft for long, new sessions are not opened at the draft. Does not own the
first open (opening) nor rounds (drafting).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from gateway.budget import BudgetPolicy
from gateway.generation import RoundObserver
from gateway.limits import SchedulerLimits
from gateway.link import DraftLink
from gateway.session import DraftStanding, Session
from specbridge.errors import NotReady, Unavailable
from specbridge.rounds import DraftInfo, DraftResult, DraftResultKind, TargetInfo

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.25
RETRY_MAX_S = 10.0
SCOUT_EVERY = 8
"""While no draft is expected, one of so many sessions is opened there all the same if the budget probes."""


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


class Standing:
    """See the module."""

    def __init__(
        self,
        link: DraftLink | None,
        policy: BudgetPolicy,
        *,
        limits: SchedulerLimits,
        observer: RoundObserver,
        running: Callable[[], int],
        expected: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """running(): sessions that have a place, opening or running. expected(): those that a session that
        opens now will mostly run beside, itself among them.
        """
        self.clock = clock
        self.link = link
        self.mismatch = ""
        self._policy = policy
        self._running = running
        self._expected = expected
        self._spared = 0
        self._limits = limits
        self._observer = observer
        self._reopens: RateLimiter | None = None

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
        """Compare the two services; a drafter made for another target is not asked. Tells the policy too."""
        info = self.info
        if target is not None:
            self._policy.measured(target, info)
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

    def spares(self, session: Session) -> bool:
        """Whether a session that opens is not to be opened at the draft, which nobody will ask for long."""
        session.draft_spared = False
        if self._policy.spares(self._expected()):
            self._spared += 1
            session.draft_spared = not self._policy.probes or self._spared % SCOUT_EVERY != 0
        return session.draft_spared

    def _worth_capturing(self, session: Session) -> bool:
        return self._policy.worth_capturing(
            rows=session.base, remaining=session.remaining, sessions=self._running()
        )

    def reopen(self, sessions: Sequence[Session], now: float) -> None:
        """Open running sessions that lost their draft session again, or never had one and are now wanted
        there; the target re-captures what the draft lacks.
        """
        if not self.available:
            return
        assert self.link is not None
        wanted = any(s.draft_spared for s in sessions) and self._policy.wants_draft(self._running())
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
            if session.draft_spared and not (wanted and self._worth_capturing(session)):
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
            cause = "error" if session.draft_failures else "disconnected"
            self._observer.on_reopen("draft", "wanted" if session.draft_spared else cause)
            session.draft_spared = False
