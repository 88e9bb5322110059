"""Cohorts: groups of sessions whose rounds go together, and whether there are one or two.

With two, one is verified while the other is drafted for. Owns who is in which, moving sessions at the end of
a round, and the choice between one and two: forecast by the cost model, decided by what both were measured to
bring. Does not own rounds (rounds.py). Pure but for the events that cohorts wait on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.budget import Beside
from gateway.generation import RoundRecord
from gateway.report import CohortReport
from gateway.session import Session
from gateway.steering import load_class

AUTO = 0
"""`allowed` of Cohorts: one or two, whatever brings more."""
_FADE = 0.95


@dataclass(slots=True)
class _Rate:
    """Tokens a second of one cohort, fading; periods include the wait for its turn."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = _FADE * self.tokens + tokens
        self.seconds = _FADE * self.seconds + seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Cohort:
    """Sessions whose rounds go together: at most one propose and one verify batch under way."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.running: dict[int, Session] = {}
        self.filled = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.tokens = 0.0
        self.verify_s = 0.0
        """Of a round, on average of late."""

    def add(self, session: Session) -> None:
        self.running[session.key.number] = session
        self.filled.set()


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """promise: forecast gain of two cohorts over one that is worth a trial. keep: measured gain that keeps
    two.

    first: rounds before the first trial of a load, and between looks at a forecast that promises nothing;
    interval: between trials, doubled by each that changes nothing, up to 64 times. trial counts sessions'
    rounds; least_trial, and settle (after a change, before any counts), rounds.
    """

    promise: float = 1.05
    keep: float = 1.02
    settle: int = 6
    trial: int = 1024
    least_trial: int = 16
    interval: int = 512
    first: int = 32


@dataclass(slots=True)
class _Choice:
    """One class of loads."""

    two: bool
    until_trial: int
    trial_left: int = 0
    failed: int = 0
    one_rate: float | None = None
    two_rate: float | None = None


class CohortChooser:
    """One cohort or two at a load; `choose` before every round, `observe` after it. Pure.

    The forecast takes draft and target for separate devices, so it says at most that two may pay: a trial
    decides. While two are kept, one is tried again from time to time.
    """

    def __init__(self) -> None:
        self._rules = ChoiceRules()
        self._choices: dict[int, _Choice] = {}
        self._rates = [_Rate(), _Rate()]
        self._since_change = 0
        self.in_use = 1
        self.reason = "start"

    def choose(self, sessions: int, forecast: Callable[[int], float | None]) -> int:
        """Cohorts for this many running sessions. forecast(cohorts): tokens a second; None: unknown."""
        if sessions < 2:
            return self._use(1, "one session")
        load = load_class(sessions)
        choice = self._choices.get(load)
        if choice is None:
            choice = self._choices[load] = _Choice(False, self._rules.first)
        if choice.trial_left > 0:
            choice.trial_left -= 1
            if choice.trial_left > 0:
                return self._use(1 if choice.two else 2, "trial")
            self._judge(choice)
        elif self.in_use == (2 if choice.two else 1) and self._settled:
            self._note(choice, self.in_use == 2)
        choice.until_trial -= 1
        if choice.until_trial <= 0:
            self._try(choice, sessions, forecast)
            if choice.trial_left > 0:
                return self._use(1 if choice.two else 2, "trial")
        return self._use(2 if choice.two else 1, "measured" if choice.two_rate else "forecast")

    def observe(self, record: RoundRecord) -> None:
        """A round of a cohort has ended."""
        self._since_change += 1
        if record.tokens and record.cohorts == self.in_use and self._settled:
            self._rates[record.cohort].add(record.tokens, record.total_s + record.turn_wait_s)

    @property
    def _settled(self) -> bool:
        return self._since_change > self._rules.settle * self.in_use

    @property
    def _rate(self) -> float:
        return sum(rate.value for rate in self._rates[: self.in_use])

    def _use(self, cohorts: int, reason: str) -> int:
        self.reason = reason
        if cohorts != self.in_use:
            self.in_use = cohorts
            self._since_change = 0
            self._rates = [_Rate(), _Rate()]
        return cohorts

    def _note(self, choice: _Choice, two: bool) -> None:
        if self._rate <= 0:
            return
        if two:
            choice.two_rate = self._rate
        else:
            choice.one_rate = self._rate

    def _try(self, choice: _Choice, sessions: int, forecast: Callable[[int], float | None]) -> None:
        rules = self._rules
        choice.until_trial = rules.interval << min(choice.failed, 6)
        if not choice.two:
            one, two = forecast(1), forecast(2)
            if one is None or two is None or two < rules.promise * one:
                choice.until_trial = rules.first
                return
        # Two cohorts have twice as many rounds in the same time.
        rounds = max(rules.least_trial, rules.trial // sessions)
        choice.trial_left = (rounds + rules.settle) * (1 if choice.two else 2)

    def _judge(self, choice: _Choice) -> None:
        """A trial is over."""
        self._note(choice, not choice.two)
        one, two = choice.one_rate, choice.two_rate
        better = two > self._rules.keep * one if one is not None and two is not None else choice.two
        choice.failed = choice.failed + 1 if better == choice.two else 0
        choice.two = better
        choice.until_trial = self._rules.interval << min(choice.failed, 6)


class Cohorts:
    """The cohorts of a scheduler. allowed: AUTO, 1 or 2."""

    def __init__(
        self,
        allowed: int,
        forecast: Callable[[int, int], float | None],
        *,
        chooser: CohortChooser | None = None,
    ) -> None:
        """forecast(sessions, cohorts): tokens a second."""
        self.allowed = allowed
        self.all = tuple(Cohort(i) for i in range(1 if allowed == 1 else 2))
        self._forecast = forecast
        self._chooser = chooser or CohortChooser()
        self.in_use = 1

    @property
    def sessions(self) -> int:
        return sum(len(cohort.running) for cohort in self.all)

    def add(self, session: Session) -> None:
        """A session begins to run: in the smaller of the cohorts in use."""
        if self.allowed == 2 and self.sessions:
            self.in_use = 2
        min(self.all[: self.in_use], key=lambda cohort: len(cohort.running)).add(session)

    def remove(self, number: int) -> None:
        for cohort in self.all:
            cohort.running.pop(number, None)

    def settle(self, cohort: Cohort) -> None:
        """Between two rounds of `cohort`: decide how many there are, give sessions away to even them out.

        Only a cohort that is between rounds gives, so that no session is in two rounds at once.
        """
        if len(self.all) == 1:
            return
        sessions = self.sessions
        if self.allowed == AUTO:
            self.in_use = self._chooser.choose(sessions, lambda cohorts: self._forecast(sessions, cohorts))
        else:
            self.in_use = 2 if sessions > 1 else 1
        other = self.all[1 - cohort.index]
        if self.in_use == 1:
            excess = len(cohort.running) if cohort.index else 0
        else:
            excess = max(0, (len(cohort.running) - len(other.running)) // 2)
        for number in list(cohort.running)[len(cohort.running) - excess :]:
            other.add(cohort.running.pop(number))

    def beside(self, cohort: Cohort) -> Beside | None:
        """The other cohort as `cohort`'s budget sees it; None if there is none at work."""
        if self.in_use == 1:
            return None
        other = self.all[1 - cohort.index]
        return Beside(other.tokens, other.verify_s) if other.running and other.verify_s else None

    def observe(self, record: RoundRecord, verify_s: float) -> None:
        """A round has ended; verify_s: of the target's pass itself."""
        cohort = self.all[record.cohort]
        fade = _FADE if cohort.verify_s else 0.0
        cohort.tokens = fade * cohort.tokens + (1 - fade) * record.tokens
        cohort.verify_s = fade * cohort.verify_s + (1 - fade) * verify_s
        if self.allowed == AUTO:
            self._chooser.observe(record)

    def report(self) -> CohortReport:
        reason = self._chooser.reason if self.allowed == AUTO else "setting"
        return CohortReport("auto" if self.allowed == AUTO else str(self.allowed), self.in_use, reason)
