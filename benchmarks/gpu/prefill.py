"""Part prefill: a long prompt through Runner.run, chunk by chunk, and what it is of its floor.

One session, hidden states of every row to the ring as a draft has them, chunks as the engine cuts them for a
prompt alone. The floor is the FLOPs of a prompt (products of every row, the head's of the last one, attention
of every row over what is before it) over the measured rate of a large product. Does not own the gateway's
part of a first token (benchmarks.spike has it with `--streams 0`).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.clock import release, wait
from benchmarks.gpu.floor import matrix_shapes
from benchmarks.gpu.setup import PAGE, Part, Setup
from specbridge.rounds import SamplingParams
from target_service.model.config import ModelConfig
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import RingSpan, Segment, Step
from target_service.verify import slots as slots_of

HEADER = (
    "prompt", "chunk", "s", "tokens/s", "TFLOP/s", "floor s", "of floor", "last chunk ms", "its floor ms",
    "of it",
)  # fmt: skip
TURNS = 3
"""Measured times of the whole prompt, after one that compiles and captures."""


def flops(config: ModelConfig, first: int, count: int, *, head_rows: int = 0) -> float:
    """Of a chunk of `count` rows after `first` others. head_rows: rows whose logits are computed."""
    products = sum(out * inner for out, inner in matrix_shapes(config)) * config.num_layers
    pairs = count * first + count * (count + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2.0 * products * count + attention + 2.0 * head_rows * config.vocab_size * config.hidden_size


class Prompt:
    """One prompt on a runner; pages in random order, as they are after a while."""

    def __init__(self, runner: Runner, length: int, chunk: int, *, captured: bool) -> None:
        self._runner, self.length, self.chunk, self._captured = runner, length, chunk, captured
        count = -(-length // PAGE)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self._pages = tuple(order.tolist())
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, runner.config.vocab_size, (length,), generator=generator)

    def steps(self) -> list[Step]:
        """In order; the last one chooses a token."""
        found = []
        for first in range(0, self.length, self.chunk):
            count = min(self.chunk, self.length - first)
            last = first + count == self.length
            ring = RingSpan(0) if self._captured else None
            pages = self._pages[: -(-first // PAGE)]
            found.append(
                Step(
                    self._tokens[first : first + count],
                    torch.arange(first, first + count),
                    (Segment(0, count, first, pages, ring=ring),),
                    torch.tensor([count - 1] if last else [], dtype=torch.int64),
                    slots=torch.tensor(slots_of(self._pages, PAGE, first, count)),
                    groups=(RowGroup(ChoiceRule(SamplingParams()), 0, [self.length]),) if last else (),
                    read_logits=False,
                )
            )
        return found

    def run(self) -> tuple[float, float]:
        """Seconds of all of it, and of its last full chunk."""
        steps = self.steps()
        wait(self._runner.device)
        began = mark = time.perf_counter()
        last = 0.0
        for step in steps:
            self._runner.run(step)
            wait(self._runner.device)
            now = time.perf_counter()
            if len(step.tokens) == self.chunk:
                last = now - mark
            mark = now
        return mark - began, last


def measure(setup: Setup, *, chunks: tuple[int, ...]) -> Part:
    """Table `prefill`, of each context with each largest chunk."""
    part = Part()
    rows: list[list[Any]] = []
    part.tables["prefill"] = (HEADER, rows)
    config, longest = setup.config, max(setup.contexts)
    with load_runner(
        setup.place,
        device=str(setup.device),
        dtype=str(setup.dtype).removeprefix("torch."),
        num_pages=-(-longest // PAGE) + 1,
        page_size=PAGE,
        max_rows=max(chunks),
        load_format=setup.load_format,
        tp=setup.tp,
    ) as runner:
        if setup.taps:
            runner.set_taps(setup.taps, normed_last_layer=False)
            size = (max(chunks), len(setup.taps) * config.hidden_size)
            runner.set_ring(torch.zeros(size, dtype=runner.activation_dtype, device=runner.device))
        for length in setup.contexts:
            for chunk in chunks:
                if chunk > length or not setup.budget.fits(5.0):
                    part.notes.append(f"{length} by {chunk}: too short, or left out for want of time")
                    continue
                prompt = Prompt(runner, length, chunk, captured=bool(setup.taps))
                prompt.run()
                times = [prompt.run() for _ in range(TURNS)]
                whole, last = (statistics.median(column) for column in zip(*times, strict=True))
                work = flops(config, 0, length, head_rows=1) / setup.tp
                first = (length // chunk - 1) * chunk
                ideal = flops(config, first, chunk) / setup.tp / setup.rates.flop_per_s
                floor_s = work / setup.rates.flop_per_s
                rows.append(
                    [length, chunk, whole, length / whole, work / whole / 1e12, floor_s, whole / floor_s,
                     last * 1e3, ideal * 1e3, last / ideal]
                )  # fmt: skip
    del runner
    release(setup.device)
    return part
