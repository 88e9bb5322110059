"""The budget by measured costs: what is drafted and verified is what brings the most tokens per second.

Owns putting the parts together: values (calibration, forecast), costs (cost_model), the search (pool) and
the choice between drafting and plain decoding (steering), and what observed rounds correct of all that
(accounts). The intent is docs/architecture.md's "Budget by cost". Pure: no I/O, no clock, no randomness; the
tests' simulator runs this very code.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.accounts import Best, Both, Calm, Found, LoadState
from gateway.budget import (
    WANTED_ROUNDS,
    Beside,
    Candidate,
    Chosen,
    Expected,
    Outcome,
    Plan,
)
from gateway.calibration import Calibration, Mode
from gateway.cost_model import CostModel, own_seconds
from gateway.forecast import Forecast
from gateway.generation import RoundRecord
from gateway.pool import best_cut, extended, gain_curve, session_counts
from gateway.report import BudgetReport, LoadReport
from gateway.steering import Load, Steering, load_class
from specbridge.rounds import DraftInfo, TargetInfo
from specbridge.tree import DraftTree

ASKS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
"""Sizes of trees asked for: few, since a draft made ahead of the question must still fit it."""
MAX_ASKED = ASKS[-1]
"""Most nodes asked of the draft for one tree, whatever the services allow."""
REPLAN = 16
"""Rounds of a load that go by one forecast."""
_REPLAN_ROUGH = 4
"""The same while that is a rough one and no tree has come since."""
EXPLORE = 32
"""Every so many drafting rounds one verifies more than pays, so that what is never verified stays known."""
JUDGED = 8
"""Trees of one round that calibration and forecast learn from: more would only cost time."""
FORECAST_TREES = 24
"""A forecast is made with about so many trees, at least one for each session; the next with others."""
_ROUGH_TREES = 8
"""The same while little is known, or at once for a load that was never met."""
POOL = 2048
"""Nodes of all sessions' trees that one search looks at: each takes about a microsecond."""
_STEP = 0.5
SPARED_GAIN, SPARED_ROUNDS = 0.95, 32
"""A load with a lower gain that has decoded plainly for so many rounds spares new sessions the draft."""
CAPTURE_MARGIN = 1.5
"""What is saved must be so many times what running a session's rows again takes."""
TRUSTED_ROUNDS = 8
"""From so many drafting rounds on, what they brought counts more than the forecast."""


class CostBudget:
    """Implements gateway.budget.BudgetPolicy; see the module."""

    probes = True

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.forecast = Forecast()
        self.steering = Steering()
        self.costs = CostModel()
        self._loads: dict[Load, LoadState] = {}
        self._overall: dict[int, Both] = {}
        self._calm = Calm()
        self._rounds = 0
        self._drafting_rounds = 0
        self._wanting = 0
        self._wanting_load = Load(0)
        self._worth: dict[int, float] = {}
        self._sessions = 1
        self._mode = Mode.GREEDY
        self._last: tuple[list[list[float]], float, list[float]] | None = None

    # ---- BudgetPolicy -----------------------------------------------------------------------

    def measured(self, target: TargetInfo, draft: DraftInfo | None) -> None:
        if self.costs.measured(target, draft):
            self._loads.clear()
            self._overall.clear()

    def plan(self, candidates: Sequence[Candidate], beside: Beside | None = None, *, others: int = 0) -> Plan:
        count = len(candidates)
        none = (0,) * count
        able = [i for i, c in enumerate(candidates) if c.max_nodes > 0 and c.max_depth > 0]
        if count:
            self.costs.context = sum(c.context for c in candidates) // count
            self._sessions = count
        if not able:
            return Plan(none, beside=beside, expected=self.costs.plain(count, beside) if count else None)
        load = Load(load_class(count), 1 if beside is None else 2)
        state = self._loads.get(load)
        if state is None:
            state = self._loads[load] = LoadState()
        self._rounds += 1
        best = self._best_for(state, candidates, able, beside)
        state.gain = self._gain(state, load, beside)
        verdict = self.steering.decide(
            load,
            state.gain,
            behind=any(candidates[i].behind for i in able),
            known=self._drafting_rounds > 0,
        )
        if not verdict.drafting:
            return Plan(
                none,
                "budget",
                # After a single plain round the draft is asked again: nothing may be held back.
                hold=(not verdict.probe,) * count,
                probe=verdict.probe,
                expected=self.costs.plain(count, beside),
                beside=beside,
            )
        return self._ask(candidates, able, best, verdict.probe, beside)

    def cut(self, candidates: Sequence[Candidate], plan: Plan, trees: Sequence[DraftTree]) -> Chosen:
        count, drafted = len(candidates), sum(1 for nodes in plan.nodes if nodes)
        values: list[list[float]] = []
        factors: list[float] = []
        for place, (candidate, tree) in enumerate(zip(candidates, trees, strict=True)):
            if not tree.tokens:
                values.append([])
                factors.append(1.0)
                continue
            mode = self._mode = Mode.of(candidate.sampled)
            factor = self.forecast.factor(candidate.number)
            line = self.calibration.values(tree, mode, factor)
            if (place + self._drafting_rounds) % count < JUDGED:
                self.forecast.drafted(mode, line, factor)
            values.append(line)
            factors.append(factor)
        seconds = self.costs.seconds(count, drafted, sum(map(len, values)), plan.beside)
        tokens = count + (plan.beside.tokens if plan.beside is not None else 0.0)
        cut = best_cut(values, tokens=tokens, seconds=seconds)
        self._last = (values, tokens, seconds)
        counts, probe = cut.counts, plan.probe
        self._drafting_rounds += 1
        if not self._drafting_rounds % EXPLORE:
            counts = extended(values, cut, max(1, cut.nodes // 4))
            probe = probe or ("explore" if counts != cut.counts else "")
        chosen = tuple(tree.prefix(n) for tree, n in zip(trees, counts, strict=True))
        nodes = sum(counts)
        worth = [sum(line[:n]) for line, n in zip(values, counts, strict=True)]
        if len(self._worth) > 4096:  # of rounds that were never finished
            self._worth.clear()
        for candidate, value, factor in zip(candidates, worth, factors, strict=True):
            if value:
                self._worth[candidate.number] = value / factor
        expected = count + sum(worth)
        return Chosen(chosen, Expected(expected, seconds[nodes]), probe)

    def observe(self, record: RoundRecord, outcomes: Sequence[Outcome]) -> None:
        load = Load(load_class(record.sessions), record.cohorts)
        state = self._loads.get(load)
        calm = self._calm.judge(record)
        if record.cold:
            return self._learn(outcomes)  # what the text was like holds all the same
        expected = record.expected_tokens if record.drafted else float(record.sessions)
        if state is not None and expected is not None and calm and record.tokens >= record.sessions:
            usual = Expected(expected, self.costs.of(record))
            state.rounds.of(record.drafted > 0).add(record.tokens, own_seconds(record), usual)
            # What prompts did to rounds of one load says nothing of another's, and would stay when they are
            # through: whoever has given up drafting by it has nothing that shows otherwise.
            if self._calm.alone:
                overall = self._overall.setdefault(load.cohorts, Both())
                overall.of(record.drafted > 0).add(record.tokens, own_seconds(record), usual)
        self.costs.observe(record, calm=calm, alone=self._calm.alone)
        self._learn(outcomes)

    def throughput(self, sessions: int, cohorts: int) -> float | None:
        own = -(-sessions // cohorts)
        if own < 1:
            return None
        best = own / self.costs.paired(own, 0, 0, cohorts)[0]
        for drafted in session_counts(own) if self.costs.has_draft else ():
            found = self._average(own, [(self._mode, 1.0, self._reach(own))] * drafted, cohorts=cohorts)
            best = max(best, found.tokens / found.seconds)
        return best * cohorts

    def _gain(self, state: LoadState, load: Load, beside: Beside | None) -> float:
        """Throughput of drafting over plain decoding, by the forecast and by what late rounds were cut to."""
        gain = state.forecast
        drafted = state.rounds.drafting.expected_rate
        if drafted is not None:
            plain = self.costs.plain(load.sessions, beside)
            share = state.rounds.drafting.rounds / (state.rounds.drafting.rounds + TRUSTED_ROUNDS)
            # Rounds that count have hardly a prompt beside them.
            seconds = plain.seconds - self.costs.chunk_s
            gain = gain ** (1 - share) * (drafted * seconds / plain.tokens) ** share
        overall = self._overall.get(load.cohorts)
        return gain if overall is None else gain * state.rounds.bias(overall)

    # ---- sessions without a draft session ----------------------------------------------------

    def spares(self, sessions: int) -> bool:
        load = Load(load_class(sessions))
        state = self._loads.get(load)
        gain = state.gain if state is not None else None
        return gain is not None and gain < SPARED_GAIN and self.steering.plain_for(load) >= SPARED_ROUNDS

    def wants_draft(self, sessions: int) -> bool:
        load = Load(load_class(sessions))
        drafting = self.steering.drafting(load)
        if drafting is None:
            drafting = self._guess(sessions) > self.steering.rules.start
        # A gap between two requests is no change of load.
        self._wanting = self._wanting + 1 if drafting and load == self._wanting_load else int(drafting)
        self._wanting_load = load
        return self._wanting > WANTED_ROUNDS

    def worth_capturing(self, *, rows: int, remaining: int, sessions: int) -> bool:
        state = self._loads.get(Load(load_class(sessions)))
        gain = state.gain if state is not None else None
        gain = self._guess(sessions) if gain is None else gain
        saved = remaining * self.costs.plain(sessions).seconds * (1.0 - 1.0 / max(gain, 1.0))
        return saved > CAPTURE_MARGIN * self.costs.capture(rows)

    def _guess(self, sessions: int) -> float:
        """Gain of drafting at a load that has not been met, for sessions like the latest."""
        plain = self.costs.plain(sessions)
        rates = []
        for drafted in session_counts(sessions):
            found = self._average(sessions, [(self._mode, 1.0, self._reach(sessions))] * drafted)
            rates.append(found.tokens / found.seconds)
        return max(rates) * plain.seconds / plain.tokens

    # ---- planning ---------------------------------------------------------------------------

    def _best_for(
        self,
        state: LoadState,
        candidates: Sequence[Candidate],
        able: Sequence[int],
        beside: Beside | None,
    ) -> Best:
        """The best drafting round, looked for anew every REPLAN rounds, in steps of a round each: what it
        costs at many sessions must not be paid whenever one of them comes or goes, nor between two passes.
        """
        same = state.best is not None and load_class(state.able) == load_class(len(able))
        if not same:
            state.pending = []
        elif state.best is not None and not state.pending and self._rounds < state.until:
            return state.best
        known = self.forecast.known(self._mode)
        full = same and known >= FORECAST_TREES
        stepwise = full or (same and known == state.known)
        if not state.pending:
            state.pending, state.found = session_counts(len(able)), None
        while state.pending:
            self._search(state, candidates, able, beside, FORECAST_TREES if full else _ROUGH_TREES)
            if stepwise and state.pending and state.best is not None:
                return state.best
        assert state.found is not None
        # A forecast made with few trees, or none, is no part of the mean.
        state.forecast += (_STEP if state.informed else 1.0) * (state.found.gain - state.forecast)
        wait = REPLAN if full else 1 if known != state.known else _REPLAN_ROUGH
        state.best, state.informed, state.known = state.found, full, known
        state.until, state.able = self._rounds + wait, len(able)
        return state.best

    def _search(
        self,
        state: LoadState,
        candidates: Sequence[Candidate],
        able: Sequence[int],
        beside: Beside | None,
        trees: int,
    ) -> None:
        """One step: the next number of sessions to draft for, over all numbers of nodes for each."""
        count = len(candidates)
        drafted = min(state.pending.pop(), len(able))
        order = self.forecast.order([candidates[i].number for i in able])
        reach = self._reach(count)
        kinds = []
        for place in order[:drafted]:
            c = candidates[able[place]]
            kinds.append((Mode.of(c.sampled), self.forecast.factor(c.number), min(c.max_nodes, reach)))
        extra = beside.tokens if beside is not None else 0.0
        plain = (count + extra) / self.costs.plain(count, beside).seconds
        found = self._average(count, kinds, beside=beside, trees=trees)
        gain = (found.tokens + extra) / found.seconds / plain
        if state.found is None or gain > state.found.gain:
            state.found = Best(drafted, found.size, gain)

    def _average(
        self,
        sessions: int,
        kinds: Sequence[tuple[Mode, float, int]],
        *,
        beside: Beside | None = None,
        cohorts: int = 1,
        trees: int = FORECAST_TREES,
    ) -> Found:
        """The best cut with trees like the latest ones for sessions of these kinds (mode, factor, most
        nodes).

        Few sessions are tried with several sets, of about `trees` in all. cohorts 2: another cohort like this
        one beside it.
        """
        drafted = len(kinds)
        tokens = seconds = 0.0
        counts: list[int] = []
        tries = max(1, min(trees // drafted, self.forecast.known(kinds[0][0])))
        room = sum(most for _, _, most in kinds)
        costs = (
            self.costs.seconds(sessions, drafted, room, beside)
            if cohorts == 1
            else self.costs.paired(sessions, drafted, room, cohorts)
        )
        extra = beside.tokens if beside is not None else 0.0
        for _ in range(tries):
            lines = [self.forecast.tree(mode, most, factor) for mode, factor, most in kinds]
            cut = best_cut(lines, tokens=sessions + extra, seconds=costs, least=1)
            tokens += cut.tokens - extra
            seconds += cut.seconds
            counts += cut.counts
        # Nine of ten trees get all the nodes that they would.
        size = sorted(counts)[len(counts) * 9 // 10]
        return Found(tokens / tries, seconds / tries, size)

    def _ask(
        self,
        candidates: Sequence[Candidate],
        able: Sequence[int],
        best: Best,
        probe: str,
        beside: Beside | None,
    ) -> Plan:
        chosen = set(able)
        if best.drafted < load_class(len(able)):
            numbers = [candidates[i].number for i in able]
            order = self.forecast.order(numbers)
            chosen = {able[place] for place in order[: best.drafted]}
            self.forecast.preferred(
                (numbers[place] for place in order[: best.drafted]),
                (numbers[place] for place in order[best.drafted :]),
            )
        # A little more than is likely to pay: so it shows when more would.
        wanted = best.size + best.size // 8 + 1
        size = next((n for n in ASKS if n >= wanted), MAX_ASKED)
        nodes = tuple(min(size, c.max_nodes) if i in chosen else 0 for i, c in enumerate(candidates))
        waiting = {i for i in able if i not in chosen}
        hold = tuple(i in waiting for i in range(len(candidates)))
        return Plan(nodes, hold=hold, probe=probe, beside=beside)

    def _reach(self, sessions: int) -> int:
        """Nodes of a session's tree worth thinking about: at high load few are ever paid for."""
        return min(MAX_ASKED, max(4, POOL // max(1, sessions)))

    # ---- learning ---------------------------------------------------------------------------

    def _learn(self, outcomes: Sequence[Outcome]) -> None:
        for place, outcome in enumerate(outcomes):
            worth = self._worth.pop(outcome.number, 0.0)
            if outcome.ended:
                continue
            self.forecast.verified(outcome.number, worth, len(outcome.accepted))
            if (place + self._drafting_rounds) % len(outcomes) < JUDGED:
                self.calibration.observe(outcome.tree, outcome.accepted, Mode.of(outcome.sampled))

    # ---- for people -------------------------------------------------------------------------

    def report(self) -> BudgetReport:
        gain: tuple[tuple[int, float, float], ...] = ()
        if self._last is not None:
            values, tokens, seconds = self._last
            gain = tuple((n, t, 1e3 * s) for n, t, s in gain_curve(values, tokens=tokens, seconds=seconds))
        return BudgetReport(
            "cost",
            verify_curve=self.costs.verify_points(self._sessions),
            draft_curve=self.costs.draft_points(),
            overhead_ms=1e3 * self.costs.overhead(self._sessions),
            calibration=tuple(self.calibration.rows()),
            loads=tuple(self._load_report(load) for load in self.steering.loads()),
            gain=gain,
        )

    def _load_report(self, load: Load) -> LoadReport:
        state = self._loads.get(load)
        return LoadReport(
            load.sessions,
            load.cohorts,
            bool(self.steering.drafting(load)),
            state.gain if state is not None else None,
            state.rounds.plain.rate if state is not None else None,
            state.rounds.drafting.rate if state is not None else None,
            self.steering.until_probe(load),
        )
