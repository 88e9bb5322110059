"""Opening a session at both services, and opening it again until it runs or is given up.

Owns the order (draft first, its prefix caps the target's), the incarnations, the back-off and which errors
are worth another try. One task per session runs `Opener.run`; it ends when the session runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from gateway.drafting import Drafting
from gateway.generation import RoundObserver
from gateway.limits import SchedulerLimits
from gateway.link import TargetLink
from gateway.session import MAX_FAILURES, DraftStanding, Session
from specbridge.errors import CapacityError, InternalError, InvalidRequest, SpecBridgeError, Unavailable
from specbridge.rounds import DraftResult, DraftResultKind, TargetResult, TargetResultKind

log = logging.getLogger(__name__)


class Opener:
    """See the module. on_first(session, result): the prefill is done, the session may run.
    on_preempted(session): the target took its pages for another one, before its first token.
    """

    def __init__(
        self,
        target: TargetLink,
        drafting: Drafting,
        *,
        limits: SchedulerLimits,
        observer: RoundObserver,
        target_up: asyncio.Event,
        on_first: Callable[[Session, TargetResult], None],
        on_preempted: Callable[[Session], None],
        on_failed: Callable[[Session, SpecBridgeError], None],
    ) -> None:
        self._target = target
        self._drafting = drafting
        self._limits = limits
        self._observer = observer
        self._target_up = target_up
        self._on_first = on_first
        self._on_preempted = on_preempted
        self._on_failed = on_failed

    async def run(self, session: Session) -> None:
        """Open `session` until its first token is there; reports to one of the callbacks, never raises."""
        try:
            result = await self._until_first(session)
            if result.kind is TargetResultKind.PREEMPTED:
                self._on_preempted(session)
            else:
                self._on_first(session, result)
        except SpecBridgeError as error:
            self._on_failed(session, error)
        except Exception as error:  # the task's last frame: a defect must end the request, not hang it
            log.exception("opening session %s failed", session.key)
            self._on_failed(session, InternalError(f"opening the session failed: {error}"))

    async def _until_first(self, session: Session) -> TargetResult:
        """FIRST or PREEMPTED."""
        backoff = self._limits.reopen_backoff
        while True:
            await self._wait_for_target(session)
            session.next_key()
            outcome = await self._open_once(session)
            if isinstance(outcome, TargetResult):
                return outcome
            self._judge(session, outcome)
            cause = "capacity" if isinstance(outcome, CapacityError) else "error"
            log.info("session %s: opening again after: %s", session.key, outcome)
            session.reopens += 1
            self._observer.on_reopen("target", cause)
            await asyncio.sleep(min(backoff * random.uniform(0.5, 1.5), self._left(session)))
            backoff = min(backoff * 2, self._limits.reopen_backoff_max)

    def _judge(self, session: Session, error: SpecBridgeError) -> None:
        """Raises `error` if another try is of no use."""
        if isinstance(error, InvalidRequest):
            raise error
        if isinstance(error, InternalError):
            session.failures += 1
            if session.failures >= MAX_FAILURES:
                raise error
        if self._left(session) <= 0:
            if isinstance(error, CapacityError):
                raise error
            raise Unavailable(f"the target did not serve the request for {self._limits.give_up} s: {error}")

    def _left(self, session: Session) -> float:
        """Seconds until the session is given up."""
        now = self._drafting.clock()
        if session.outage_since is None:
            session.outage_since = now
        return max(0.0, session.outage_since + self._limits.give_up - now)

    async def _wait_for_target(self, session: Session) -> None:
        if self._target.up:
            return
        try:
            async with asyncio.timeout(self._left(session)):
                await self._target_up.wait()
        except TimeoutError:
            raise Unavailable(
                f"the target has been away for {self._limits.give_up} s; the request is given up"
            ) from None

    async def _open_once(self, session: Session) -> TargetResult | SpecBridgeError:
        item = session.target_open(await self._open_draft(session))
        future: asyncio.Future[TargetResult | SpecBridgeError] = asyncio.get_running_loop().create_future()
        session.target_reply = future
        try:
            self._target.open(item)
            session.target_key = session.key
            # The wait for a prefill is long by nature; a dead stream ends it through the future.
            async with asyncio.timeout(self._limits.first_timeout):
                outcome = await future
        except Unavailable as error:
            return error
        except TimeoutError:
            return Unavailable(f"no first token within {self._limits.first_timeout} s")
        finally:
            session.target_reply = None
        if isinstance(outcome, SpecBridgeError):
            return outcome
        if outcome.kind in (TargetResultKind.FIRST, TargetResultKind.PREEMPTED):
            return outcome
        return outcome.error or InternalError(
            f"the target answered an open with {outcome.kind.name} and no error"
        )

    async def _open_draft(self, session: Session) -> int | None:
        """Open at the draft; the context length it holds, or None if it has no session now."""
        drafting = self._drafting
        if session.draft is DraftStanding.OFF:
            return None
        loop = asyncio.get_running_loop()
        session.draft_closed(drafting.clock())
        if not drafting.available:
            cause = "draft_mismatch" if drafting.mismatch else "draft_down"
            self._observer.on_fallback(cause, 1)
            return None
        if drafting.spares(session):
            return None
        assert drafting.link is not None
        future: asyncio.Future[DraftResult | None] = loop.create_future()
        session.draft_reply = future
        session.draft = DraftStanding.OPENING
        session.draft_sent_at = drafting.clock()
        result: DraftResult | None = None
        cause = "draft_down"
        try:
            drafting.link.open(session.draft_open(recapture=False))
            session.draft_key = session.key
            async with asyncio.timeout(self._limits.open_timeout):
                result = await future
        except Unavailable:
            pass
        except TimeoutError:
            cause = "draft_timeout"
        finally:
            session.draft_reply = None
        if result is not None and result.kind is DraftResultKind.OPENED:
            drafting.opened(session)
            return result.draft_prefix
        if result is not None:
            cause = "draft_error"
            log.info("session %s: the draft refused the open: %s", session.key, result.error)
        self._observer.on_fallback(cause, 1)
        drafting.lost(session, drafting.clock())
        return None
