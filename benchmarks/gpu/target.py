"""Part target: plain and verify steps through Runner.run, with CUDA graphs and without, and what they are of.

Sessions are prefilled, their pages interleaved with nobody's; a verify step is a spine of up to eight nodes
with the rest spread over it, of which the first ACCEPTED are accepted: their tokens are those that the model
chooses, so that walk, commit and capture have what they have in a round. `device ms` is from the copy of the
step's inputs to that of its choices, `host ms` a whole Runner.run. Does not own floors (floor) nor how ops
are timed alone (benchmarks.kernels_*).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.clock import WARM, Timed, hold, release
from benchmarks.gpu.floor import target_bytes
from benchmarks.gpu.setup import PAGE, Case, Part, Setup
from benchmarks.gpu.stages import verify_stages
from benchmarks.kernels_attention import tree_parents
from kernels.linear import PackedLinear
from specbridge.rounds import SamplingParams
from target_service.model.device_pass import DevicePass
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import NO_SLOT, RingSpan, Segment, Step
from target_service.verify import slots as slots_of

ACCEPTED = 5
SPINE = 8
PREFILL = 1024
RING_ROWS = 32
"""Ring slots a session: more than a path can be long."""
HEADER = (
    "graphs", "sessions", "context", "nodes", "rows", "accepted", "device ms", "host ms", "floor ms",
    "device / floor", "device / plain", "host / plain", "collectives ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and the model's sizes that follow. left_out: a sentence each."""

    cases: tuple[Case, ...]
    session_tokens: tuple[int, ...]
    left_out: tuple[str, ...]

    @property
    def num_pages(self) -> int:
        return sum(pages_of(tokens) for tokens in self.session_tokens)

    @property
    def max_rows(self) -> int:
        return max(PREFILL, *(case.rows for case in self.cases))


def pages_of(tokens: int) -> int:
    """Pages of a session of so many tokens and a path beyond them."""
    return -(-(tokens + RING_ROWS) // PAGE)


def make_plan(setup: Setup) -> Plan:
    """All combinations that fit into kv_tokens and max_rows, each without capture before those with."""
    cases, left_out = [], []
    for context in setup.contexts:
        for sessions in setup.concurrency:
            if sessions * context > setup.kv_tokens:
                left_out.append(f"{sessions} x {context} tokens: more K/V than --kv-tokens {setup.kv_tokens}")
                continue
            cases.append(Case(sessions, context, 0))
            for count in (0, *setup.nodes) if setup.taps else setup.nodes:
                case = Case(sessions, context, count, captured=bool(setup.taps))
                if case.rows > setup.max_rows:
                    left_out.append(f"{sessions} x {count} nodes: more rows than --max-rows {setup.max_rows}")
                else:
                    cases.append(case)
    # Another ring voids all graphs, so those that are not captured go first.
    cases.sort(key=lambda case: case.captured)
    longest = [
        max(case.context for case in cases if case.sessions > s)
        for s in range(max((case.sessions for case in cases), default=0))
    ]
    return Plan(tuple(cases), tuple(longest), tuple(left_out))


class Sessions:
    """The sessions' pages, filled by prefills."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.runner = runner
        # Scattered, as pages of sessions that grow side by side are.
        order = torch.randperm(plan.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.pages: list[tuple[int, ...]] = []
        for tokens in plan.session_tokens:
            count = pages_of(tokens)
            self.pages.append(tuple(order[:count]))
            order = order[count:]
        began = time.perf_counter()
        for number, tokens in enumerate(plan.session_tokens):
            self._prefill(number, tokens)
        self.prefill_tokens = sum(plan.session_tokens)
        self.prefill_s = time.perf_counter() - began

    def _prefill(self, number: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(number)
        vocab = self.runner.config.vocab_size
        for start in range(0, tokens, PREFILL):
            count = min(PREFILL, tokens - start)
            last = start + count == tokens
            self.runner.run(
                Step(
                    torch.randint(0, vocab, (count,), generator=generator),
                    torch.arange(start, start + count),
                    (Segment(0, count, start, self.pages[number][: -(-start // PAGE)]),),
                    torch.tensor([count - 1] if last else [], dtype=torch.int64),
                    slots=torch.tensor(slots_of(self.pages[number], PAGE, start, count)),
                    groups=(RowGroup(ChoiceRule(SamplingParams()), 0, [tokens]),) if last else (),
                    read_logits=False,
                )
            )

    def step(self, case: Case) -> Step:
        """The case's step, with random tokens."""
        rows, context = case.nodes + 1, case.context
        parents = tree_parents(rows)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        segments, slots, groups = [], [], []
        for s in range(case.sessions):
            at = slots_of(self.pages[s], PAGE, context, max(depths) + 1)
            segments.append(
                Segment(
                    s * rows,
                    rows,
                    context,
                    self.pages[s][: -(-context // PAGE)],
                    tuple(parents),
                    ring=RingSpan(s * RING_ROWS) if case.captured else None,
                )
            )
            slots += [at[depth] for depth in depths]
            rule = ChoiceRule(SamplingParams(seed=s))
            groups.append(RowGroup(rule, s * rows, [context + depth + 1 for depth in depths]))
        return Step(
            torch.randint(0, self.runner.config.vocab_size, (case.rows,)),
            torch.tensor(depths * case.sessions) + context,
            tuple(segments),
            torch.arange(case.rows),
            slots=torch.tensor(slots),
            groups=tuple(groups),
            read_logits=False,
        )

    def accepting(self, case: Case) -> Step:
        """The same, with the model's own choices along the spine, ACCEPTED deep."""
        step = self.step(case)
        rows = case.nodes + 1
        for depth in range(min(ACCEPTED, SPINE, case.nodes)):
            choices = self.runner.run(replace(step, slots=torch.full((case.rows,), NO_SLOT))).choices
            tokens = step.tokens.clone()
            for s in range(case.sessions):
                tokens[s * rows + depth + 1] = choices[s * rows + depth]
            step = replace(step, tokens=tokens)
        return step


def accepted(step: Step, choices: Sequence[int], rows: int) -> float:
    """Mean nodes a session accepts on the spine."""
    total = 0
    for first in range(0, len(choices), rows):
        for i in range(min(SPINE, rows - 1)):
            if int(step.tokens[first + i + 1]) != choices[first + i]:
                break
            total += 1
    return total / (len(choices) // rows)


class StepTimer:
    """Times Runner.run of one step again and again."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._done: torch.cuda.Event | None = None
        passes = runner._shard._pass
        if runner.device.type == "cuda" and isinstance(passes, DevicePass):
            # The pass marks its end by an event: one that tells the time, so that waking up is not in it.
            self._done = passes._done = torch.cuda.Event(enable_timing=True)

    def __call__(self, step: Step, repeats: int) -> Timed:
        run, host, device = self._runner.run, [], []
        for turn in range(repeats + WARM):  # the first is eager, the second captured
            began = time.perf_counter()
            run(step)
            if turn >= WARM:
                host.append((time.perf_counter() - began) * 1e3)
        typical = statistics.median(host)
        if self._done is None:
            return Timed(typical, typical)
        for _ in range(repeats):
            first = torch.cuda.Event(enable_timing=True)
            hold(self._runner.device, 1.5 * typical + 0.5)
            first.record()
            run(step)
            device.append(first.elapsed_time(self._done))
        return Timed(statistics.median(device), typical)


class CollectiveMean:
    """Of the passes from here on: what they spend in collectives, `-` where that can't be told, as of passes
    that are replayed from a graph (those without graphs tell it) or of one rank."""

    def __init__(self, runner: Runner, step: Step) -> None:
        self._clock = runner.collectives
        if self._clock is not None:
            for _ in range(WARM):  # what is compiled or connected first is not to be counted
                runner.run(step)
            self._seconds, self._steps = self._clock.seconds, self._clock.steps

    def ms(self) -> float | str:
        seen = self._clock.steps - self._steps if self._clock is not None else 0
        return (self._clock.seconds - self._seconds) / seen * 1e3 if self._clock is not None and seen else "-"


def linears_of(runner: Runner) -> list[PackedLinear]:
    """Every product of the model, the head last."""
    weights = runner._shard._pass._decoder._weights
    layers = [x for layer in weights.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*layers, weights.head]


class Measured:
    """Goes through a plan on one runner after the other; keeps the rows of the table."""

    def __init__(self, setup: Setup, plan: Plan, part: Part) -> None:
        self.setup, self.plan, self.part = setup, plan, part
        self.rows: list[list[Any]] = []
        self.times: dict[Case, Timed] = {}
        """With graphs."""
        self._sizes = target_bytes(setup.config, setup.act)
        part.tables["steps"] = (HEADER, self.rows)

    def go(self, runner: Runner, sessions: Sessions, *, graphs: bool) -> None:
        """Time every case of the plan."""
        setup, timer = self.setup, StepTimer(runner)
        plain: dict[tuple[int, int], Timed] = {}
        runner.set_ring(None)
        runner.set_taps((), normed_last_layer=False)
        ring = False
        for case in self.plan.cases:
            if not setup.budget.fits(1.0):
                self.part.notes.append(f"{case}, graphs {graphs}: left out for want of time")
                continue
            if case.captured and not ring:
                ring = True
                runner.set_taps(setup.taps, normed_last_layer=False)
                size = (RING_ROWS * len(sessions.pages), len(setup.taps) * runner.config.hidden_size)
                runner.set_ring(torch.zeros(size, dtype=runner.activation_dtype, device=runner.device))
            step = sessions.accepting(case)
            clock = CollectiveMean(runner, step)
            timed = timer(step, setup.repeats)
            collectives = clock.ms()
            base = plain.setdefault((case.sessions, case.context), timed)
            found = accepted(step, runner.run(step).choices, case.nodes + 1)
            bytes_read = self._sizes.step(case.rows, case.sessions * case.context)
            floor = setup.rates.read_ms(bytes_read / setup.tp)  # each GPU reads its share
            self.rows.append(
                ["on" if graphs else "off", case.sessions, case.context,
                 f"{case.nodes}{' captured' * case.captured}", case.rows, found, timed.device_ms,
                 timed.host_ms, floor, timed.device_ms / floor, timed.device_ms / base.device_ms,
                 timed.host_ms / base.host_ms, collectives]
            )  # fmt: skip
            if graphs:
                self.times[case] = timed


def measure(setup: Setup) -> Part:
    """Table `steps`; on a GPU also the stages of the step `setup.told`."""
    part, plan = Part(), make_plan(setup)
    part.notes += plan.left_out
    measured = Measured(setup, plan, part)
    for graphs in (True, False) if setup.eager and setup.on_gpu else (True,):
        if not setup.budget.fits(5.0):
            part.notes.append("without graphs: left out for want of time")
            break
        began = time.perf_counter()
        with load_runner(
            setup.place,
            device=str(setup.device),
            dtype=str(setup.dtype).removeprefix("torch."),
            num_pages=plan.num_pages,
            page_size=PAGE,
            max_rows=plan.max_rows,
            load_format=setup.load_format,
            tp=setup.tp,
            cuda_graphs=graphs,
        ) as runner:
            loaded = time.perf_counter()
            sessions = Sessions(runner, plan)
            if graphs:
                part.figures["load s"] = loaded - began
                part.figures["prefill tokens/s"] = sessions.prefill_tokens / sessions.prefill_s
            measured.go(runner, sessions, graphs=graphs)
            told = measured.times.get(setup.told)
            if graphs and told is not None and setup.on_gpu and setup.tp == 1 and setup.budget.fits(5.0):
                # Here, where the weights are loaded: products are timed on them.
                part.stages = verify_stages(setup, told, linears_of(runner))
        del sessions, runner
        release(setup.device)
    return part
