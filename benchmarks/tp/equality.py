"""Part equality: token streams of N ranks are those of one, through the whole stack, in fp32, drafting.

Every stack gets the same requests, all at once: each prompt greedily, and at a temperature with a seed. The
reference is `--tp 1`, and it is compared with itself without speculation first. On GPUs every number of ranks
runs with CUDA graphs and without, the draft on GPU 0 beside rank 0, and once with the draft on a GPU that no
rank has. Of each stack: which transport the hidden states took and why, what was accepted, what collectives
took. Owns these stacks. Does not own what a difference means (compare).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import Budget
from benchmarks.gpu.setup import Part
from benchmarks.tp import models, stacks
from benchmarks.tp.compare import Ask, Difference, Judge, compare, compared
from benchmarks.tp.models import Model
from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams
from target_service.parallel import check_split

HEADER = (
    "model", "stack", "tokens", "equal", "near-ties", "wrong", "accepted", "of drafted", "transport",
    "collectives ms / pass", "start s",
)  # fmt: skip
TEMPERATURE = 0.8
NODES = 16
NO_DRAFT = "tp 1, no speculation"
FAILURES = "failures"


@dataclass(frozen=True, slots=True)
class Options:
    """device: of ranks and draft, `cpu` or `cuda`. gpus: how many there are. flags: more of every stack's."""

    device: str
    gpus: int
    tp: tuple[int, ...]
    models: tuple[str, ...]
    prompts: int
    max_tokens: int
    near_tie: float
    kill_tokens: int = 160
    """Of each text of part killed: enough that a rank dies in their middle."""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """A stack that is compared with the reference."""

    name: str
    tp: int
    flags: tuple[str, ...] = ()


def variants(options: Options) -> list[Variant]:
    """Those that this machine can run, the reference not among them."""
    if options.device == "cpu":
        return [Variant(f"tp {tp}", tp) for tp in options.tp]
    found = []
    for tp in options.tp:
        found.append(Variant(f"tp {tp}, graphs", tp))
        found.append(Variant(f"tp {tp}, no graphs", tp, ("--no-cuda-graphs",)))
    own = max((tp for tp in (*options.tp, 1) if tp < options.gpus), default=0)
    if own:
        found.append(
            Variant(f"tp {own} + 1: draft on a GPU of its own", own, (f"--draft-device=cuda:{own}",))
        )
    return found


def legal(model: Model, wanted: Iterable[Variant]) -> tuple[list[Variant], list[str]]:
    """Those that can split the model, and a sentence for each other."""
    fit, notes = [], []
    for variant in wanted:
        try:
            check_split(model.heads, model.kv_heads, model.vocab, variant.tp)
            fit.append(variant)
        except ConfigError as error:
            notes.append(f"{model.name}, {variant.name}: left out: {error}")
    return fit, notes


def asks_of(model: Model, temperature: float = TEMPERATURE) -> list[Ask]:
    """Each prompt greedily and sampled."""
    greedy = [Ask(prompt, SamplingParams()) for prompt in model.prompts]
    warm = [
        Ask(prompt, SamplingParams(temperature=temperature, seed=100 + n))
        for n, prompt in enumerate(model.prompts)
    ]
    return [*greedy, *warm]


def flags_of(model: Model, options: Options, tp: int, streams: int, max_tokens: int) -> list[str]:
    """Of `serve`, for so many streams at once."""
    length = max(map(len, model.prompts)) + max_tokens + 16
    flags = [
        *model.flags,
        f"--device={options.device}",
        "--dtype=float32",
        f"--tp={tp}",
        f"--max-length={length}",
        f"--kv-tokens={streams * -(-length // 16) * 16}",
        f"--max-sessions={streams + 4}",
        f"--max-running={streams}",
        # Every session may be drafted for in every round: it is the trees that are to be compared.
        f"--max-verify-rows={streams * (NODES + 1)}",
        f"--target-max-verify-rows={max(streams * (NODES + 1), 256)}",
        f"--max-tree-nodes={NODES}",
        f"--tree-budget={NODES}",
        "--min-tree=1",
        "--selfcheck-rounds=0",
    ]
    return [*flags, *(["--warmup-repeats=0"] if options.device == "cpu" else []), *options.flags]


class Equality:
    """Goes through the stacks of each model; keeps the table."""

    def __init__(self, options: Options, budget: Budget, part: Part) -> None:
        self._options, self._budget, self._part = options, budget, part
        self._rows: list[list[Any]] = []
        self.failures = 0
        part.tables["streams of several ranks against one"] = (HEADER, self._rows)

    def go(self, model: Model) -> None:
        wanted, notes = legal(model, variants(self._options))
        self._part.notes += notes
        asks = asks_of(model)
        try:
            reference = self._run(model, Variant("tp 1", 1), asks, None)
        except RuntimeError as error:
            self._fail(f"{model.name}, tp 1: {error}; nothing to compare with")
            return
        for variant in wanted:
            if not self._budget.fits(20.0):
                self._part.notes.append(f"{model.name}, {variant.name}: left out for want of time")
                continue
            try:
                self._run(model, variant, asks, reference)
            except RuntimeError as error:
                self._fail(f"{model.name}, {variant.name}: {error}")

    def _run(
        self, model: Model, variant: Variant, asks: Sequence[Ask], reference: list[list[int]] | None
    ) -> list[list[int]]:
        """The texts of one stack, compared with `reference`; None: with its own without speculation."""
        options, budget = self._options, self._budget
        flags = flags_of(model, options, variant.tp, len(asks), options.max_tokens)
        began = budget.left_s
        with stacks.running(*flags, *variant.flags, timeout_s=min(stacks.START_S, budget.left_s)) as stack:
            start_s = began - budget.left_s
            limit_s = max(budget.left_s, 10.0)
            found = asyncio.run(stacks.streams(stack.url, asks, options.max_tokens, timeout_s=limit_s))
            plain = None
            if reference is None:
                plain = asyncio.run(
                    stacks.streams(stack.url, asks, options.max_tokens, speculate=False, timeout_s=limit_s)
                )
            info = stack.info()
            collectives = collectives_ms(stack)
            held = stack.idle()
        self.failures += stacks.note_left(self._part, f"{model.name}, {variant.name}", stack)
        if held:
            self._fail(f"{model.name}, {variant.name}: still held when idle: {held}")
        texts = [stream.ids for stream in found]
        drafted, accepted = (sum(getattr(s, name) for s in found) for name in ("drafted", "accepted"))
        if not drafted:
            self._fail(f"{model.name}, {variant.name}: nothing was drafted")
        about = [accepted, drafted, info.channel_transport, collectives, start_s]
        how = f"hidden states by {info.channel_transport} ({info.channel_reason})"
        self._part.notes.append(f"{model.name}, {variant.name}: {how}")
        if info.tp_size != variant.tp:
            self._fail(f"{model.name}, {variant.name}: the target has {info.tp_size} ranks")
        if plain is None:
            assert reference is not None
            self._row(model, variant.name, asks, reference, texts, about)
        else:
            self._rows.append([model.name, variant.name, sum(map(len, texts)), "is the reference", "-", "-",
                               *about])  # fmt: skip
            self._row(model, NO_DRAFT, asks, texts, [s.ids for s in plain], [0, 0, "-", "-", "-"])
        return texts

    def _row(
        self,
        model: Model,
        name: str,
        asks: Sequence[Ask],
        expected: Sequence[Sequence[int]],
        got: Sequence[Sequence[int]],
        about: Sequence[Any],
    ) -> None:
        found = judged(model, asks, expected, got, self._options)
        wrong = [difference for difference in found if not difference.near]
        self._part.notes += [f"{model.name}, {name}: {difference.text()}" for difference in found]
        self.failures += len(wrong)
        self._rows.append(
            [model.name, name, sum(map(len, expected)), compared(expected, found), len(found) - len(wrong),
             len(wrong), *about]
        )  # fmt: skip

    def _fail(self, text: str) -> None:
        self.failures += 1
        self._part.notes.append(f"failed: {text}")


def judged(
    model: Model,
    asks: Sequence[Ask],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    options: Options,
) -> list[Difference]:
    """compare, with the model itself as the judge."""
    longest = max(map(len, model.prompts)) + max(options.max_tokens, options.kill_tokens) + 1
    with Judge(model.place, longest) as judge:
        return compare(asks, expected, got, judge, near_tie=options.near_tie)


def collectives_ms(stack: stacks.Stack) -> float | str:
    """ms of a pass, of those that could be measured (not replayed from a graph); `-` if there are none."""
    samples = stack.samples("target")
    steps = samples.total("specbridge_target_collective_steps_total")
    if not steps:
        return "-"
    return samples.total("specbridge_target_collective_seconds_total") / steps * 1e3


def measure(options: Options, budget: Budget, folder: Path) -> Part:
    """Table `streams of several ranks against one`; figure FAILURES counts what must not be."""
    part = Part()
    run = Equality(options, budget, part)
    for name in options.models:
        if not budget.fits(30.0):
            part.notes.append(f"{name}: left out for want of time")
            continue
        run.go(models.make(name, folder, options.prompts))
    part.figures[FAILURES] = run.failures
    return part
