"""Steering: to draft or to decode plainly at a load, without flapping, with measurement in both directions.

Owns the state of every load (how many sessions a round has, in how many cohorts), the thresholds and the
probes. Does not own the gain it is told: that is the cost model's, corrected by what was observed at that
load (cost_budget). Pure: time is counted in rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FEW = 3
"""Plain rounds of a load after which their cost is known."""


@dataclass(frozen=True, slots=True)
class Load:
    """A class of loads. sessions: of one cohort's round (a class beyond 8, see load_class)."""

    sessions: int
    cohorts: int = 1


def load_class(sessions: int) -> int:
    """The smallest number of sessions of its class: exact up to 8, then four classes an octave."""
    if sessions <= 8:
        return sessions
    return math.ceil(8 * 2 ** (math.floor(4 * math.log2(sessions / 8)) / 4))


@dataclass(frozen=True, slots=True)
class Verdict:
    """probe: "plain" (a plain round among drafting ones), "draft" (the reverse), or ""."""

    drafting: bool
    probe: str = ""


@dataclass(frozen=True, slots=True)
class SteeringRules:
    """Gains are ratios of throughput, drafting to plain; the rest counts rounds.

    start, stop  drafting begins above the one and ends below the other
    dwell        least rounds between two changes; doubled (up to max_dwell) by a change that comes soon after
                 the last one
    burst        drafting rounds of a probe from plain decoding: the first ones pay for rows held back
    pair         plain rounds of a probe from drafting: the first still shares the machine with the draft
    patience     rounds that a load must want drafting before sessions whose rows are held back catch up: a
                 gap between two requests is no change of load
    loss         share of the throughput that probes may cost
    first        rounds between the first plain rounds of a load that begins with drafting: until there are a
                 few, what they take is hearsay; above a gain of `clear` that is no matter
    """

    start: float = 1.02
    stop: float = 0.985
    dwell: int = 8
    max_dwell: int = 2048
    burst: int = 8
    pair: int = 2
    patience: int = 4
    loss: float = 0.004
    first: int = 6
    clear: float = 1.5
    least_interval: int = 48
    most_interval: int = 16384


@dataclass(slots=True)
class _State:
    drafting: bool
    dwell: int
    rounds: int = 0
    until_probe: int = 0
    burst_left: int = 0
    failed: int = 0
    changes: int = 0
    plain_seen: int = 0


@dataclass(slots=True)
class Steering:
    """`decide` once a round; see the module."""

    rules: SteeringRules = field(default_factory=SteeringRules)
    _states: dict[Load, _State] = field(default_factory=dict)
    _wanting: int = 0

    def decide(self, load: Load, gain: float, *, behind: bool = False, known: bool = True) -> Verdict:
        """What this round should do.

        behind: some session must catch up before it can be drafted for. known: something was drafted before,
        so that the gain is more than a guess; if not, a load begins with a burst.
        """
        state = self._states.get(load)
        if state is None:
            state = self._states[load] = self._begin(load, gain)
            if not state.drafting and not known:
                state.burst_left = self.rules.burst
        verdict = self._steer(state, gain)
        if not verdict.drafting:
            if verdict.probe != "plain":
                self._wanting = 0
            return verdict
        self._wanting = self._wanting + 1 if behind else self.rules.patience
        return verdict if self._wanting >= self.rules.patience else Verdict(False)

    def _begin(self, load: Load, gain: float) -> _State:
        """A load that was never met does what its gain says or, if that says little, what its nearest
        neighbour does; what plain rounds take is known from there.
        """
        rules, near = self.rules, self._nearest(load)
        unsure = near is not None and rules.stop <= gain <= rules.start
        state = _State(near.drafting if near is not None and unsure else gain > 1.0, rules.dwell)
        state.plain_seen = near.plain_seen if near is not None else 0
        state.until_probe = self._interval(state, gain)
        return state

    def _nearest(self, load: Load) -> _State | None:
        """The state of the load most like this one, of those with up to twice or half as many sessions."""

        def distance(other: Load) -> float:
            return abs(math.log2(other.sessions / load.sessions))

        near = (other for other in self._states if other.cohorts == load.cohorts and distance(other) <= 1.0)
        found = min(near, key=distance, default=None)
        return self._states[found] if found is not None else None

    def _steer(self, state: _State, gain: float) -> Verdict:
        rules = self.rules
        state.rounds += 1
        if not state.drafting:
            state.plain_seen = FEW
        if state.burst_left:
            state.burst_left -= 1
            if state.drafting:
                return Verdict(False, "plain")
            if not state.burst_left:
                self._judge(state, gain)
            return Verdict(True, "draft")
        if state.rounds >= state.dwell and (gain < rules.stop if state.drafting else gain > rules.start):
            self._change(state, gain)
            return Verdict(state.drafting)
        state.until_probe -= 1
        if state.until_probe > 0:
            return Verdict(state.drafting)
        state.plain_seen += state.drafting
        state.until_probe = self._interval(state, gain)
        state.burst_left = rules.pair - 1 if state.drafting else rules.burst
        return Verdict(not state.drafting, "plain" if state.drafting else "draft")

    def _judge(self, state: _State, gain: float) -> None:
        """A probe from plain decoding is over."""
        if gain > self.rules.start:
            self._change(state, gain)
            return
        state.failed += 1
        state.until_probe = self._interval(state, gain)

    def _change(self, state: _State, gain: float) -> None:
        soon = state.changes and state.rounds < 8 * state.dwell
        state.dwell = min(2 * state.dwell, self.rules.max_dwell) if soon else self.rules.dwell
        state.drafting = not state.drafting
        state.rounds = state.failed = state.burst_left = 0
        state.changes += 1
        state.until_probe = self._interval(state, gain)

    def _interval(self, state: _State, gain: float) -> int:
        """Rounds until the next probe, so that probes cost no more than `loss`."""
        rules = self.rules
        gain = max(gain, 1e-3)
        if state.drafting and state.plain_seen < FEW and gain < rules.clear:
            return rules.first
        if state.drafting and not state.plain_seen:
            return rules.least_interval
        if state.drafting:
            rounds = rules.pair * max(0.02, 1.0 - 1.0 / gain) / rules.loss
        else:
            rounds = (rules.burst + 1) * max(0.02, 1.0 / gain - 1.0) / rules.loss * 2 ** min(state.failed, 5)
        return int(min(max(rounds, rules.least_interval), rules.most_interval))

    def drafting(self, load: Load) -> bool | None:
        """What this load does at the moment; None if it has not been met."""
        state = self._states.get(load)
        return state.drafting if state is not None else None

    def plain_for(self, load: Load) -> int:
        """Rounds of this load since it last gave up drafting, if it has; 0 while it drafts."""
        state = self._states.get(load)
        return 0 if state is None or state.drafting else state.rounds

    def changes(self, load: Load) -> int:
        """How often it has changed."""
        state = self._states.get(load)
        return state.changes if state is not None else 0

    def until_probe(self, load: Load) -> int:
        """Rounds of this load until the next probe."""
        state = self._states.get(load)
        return state.until_probe if state is not None else 0

    def loads(self) -> list[Load]:
        """Those met so far."""
        return sorted(self._states, key=lambda load: (load.cohorts, load.sessions))
