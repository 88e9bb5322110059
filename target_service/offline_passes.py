"""Passes of the offline generator: a fixed number of slots, each with a text of its own that grows by a token
a step.

Owns the interface, and `HostSlots`, which steps a Runner: for devices without the ragged kernels. Tokens are
chosen by the commit rule, as for a served request without filters. Does not own the GPU's way
(offline_device), which request is in which slot, when a text ends, or what is done with it (offline).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specbridge.rounds import SamplingParams
from target_service.model.config import ModelConfig
from target_service.model.decoder import Taps
from target_service.runner import Runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import Segment, Step
from target_service.verify import slots as slots_of

PAGE = 16
PREFILL_SESSIONS = 63
"""Prompts of one pass: always so many as far as kernels can tell, or each number would be compiled."""


@dataclass(frozen=True, slots=True)
class Start:
    """A request put into a slot: its prompt and how its tokens are chosen."""

    slot: int
    tokens: Sequence[int]
    temperature: float
    seed: int


class SlotPasses(Protocol):
    """slots: texts side by side. span: steps that one `decode` had best run."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def slots(self) -> int: ...
    @property
    def span(self) -> int: ...

    def fill(self, starts: Sequence[Start]) -> None:
        """Run prompts; their slots are live from then on."""
        ...

    def decode(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """`steps` tokens more for every live slot. Returns the first token of each slot's text, int [slots],
        and the tokens chosen now, int [steps, slots]; below 0 where logits are no numbers, anything for
        slots that are not live.
        """
        ...

    def free(self, slots: Sequence[int]) -> None:
        """These slots are live no longer."""
        ...

    def taps(self, texts: Sequence[Sequence[int]], taps: Taps) -> Iterator[torch.Tensor]:
        """Captured outputs of each text's rows, [len(text), width], on the device; valid until the next."""
        ...


def chunks(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive runs of at most PREFILL_SESSIONS texts that have `most` tokens together, or one text."""
    start = total = 0
    for end, length in enumerate(lengths):
        if end > start and (total + length > most or end - start == PREFILL_SESSIONS):
            yield slice(start, end)
            start, total = end, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


class HostSlots:
    """Over a Runner with `slots` * ceil(length / PAGE) pages and max_rows of at least `length`, `slots`."""

    span = 1

    def __init__(self, runner: Runner, *, slots: int, length: int) -> None:
        self.config = runner.config
        self.slots = slots
        self._runner = runner
        each = -(-length // PAGE)
        self._pages = [tuple(range(s * each, (s + 1) * each)) for s in range(slots)]
        self._rules: dict[int, ChoiceRule] = {}
        self._lengths = [0] * slots
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._first = np.zeros(slots, dtype=np.int64)

    def fill(self, starts: Sequence[Start]) -> None:
        for part in chunks([len(start.tokens) for start in starts], self._runner.max_rows):
            self._fill(starts[part])

    def _fill(self, starts: Sequence[Start]) -> None:
        segments, groups, at, ends = [], [], [], []
        tokens: list[int] = []
        positions: list[int] = []
        for number, start in enumerate(starts):
            count = len(start.tokens)
            rule = ChoiceRule(SamplingParams(temperature=start.temperature, seed=start.seed))
            self._rules[start.slot] = rule
            segments.append(Segment(len(tokens), count, 0, ()))
            groups.append(RowGroup(rule, number, [count]))
            tokens += start.tokens
            positions += range(count)
            at += slots_of(self._pages[start.slot], PAGE, 0, count)
            ends.append(len(tokens) - 1)
        chosen = self._run(tokens, positions, segments, ends, at, groups)
        for start, token in zip(starts, chosen, strict=True):
            self._lengths[start.slot] = len(start.tokens)
            self._first[start.slot] = self._tokens[start.slot] = token

    def decode(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((steps, self.slots), dtype=np.int64)
        live = sorted(self._rules)
        for step in range(steps if live else 0):
            lengths = [self._lengths[s] for s in live]
            chosen = self._run(
                self._tokens[live].clip(min=0).tolist(),
                lengths,
                [
                    Segment(row, 1, n, self._pages[s][: -(-n // PAGE)], (-1,))
                    for row, (s, n) in enumerate(zip(live, lengths, strict=True))
                ],
                list(range(len(live))),
                [self._pages[s][n // PAGE] * PAGE + n % PAGE for s, n in zip(live, lengths, strict=True)],
                [
                    RowGroup(self._rules[s], row, [n + 1])
                    for row, (s, n) in enumerate(zip(live, lengths, strict=True))
                ],
            )
            out[step, live] = self._tokens[live] = chosen
            for slot in live:
                self._lengths[slot] += 1
        return self._first, out

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rules.pop(slot, None)

    def taps(self, texts: Sequence[Sequence[int]], taps: Taps) -> Iterator[torch.Tensor]:
        self._runner.set_taps(taps.layer_ids, normed_last_layer=taps.normed_last_layer)
        try:
            for text in texts:
                count = len(text)
                step = Step(
                    torch.tensor(list(text), dtype=torch.int64),
                    torch.arange(count),
                    (Segment(0, count, 0, ()),),
                    torch.empty(0, dtype=torch.int64),
                    read_logits=False,
                )
                captured = self._runner.run(step).taps
                assert captured is not None
                yield captured
        finally:
            self._runner.set_taps((), normed_last_layer=False)

    def _run(
        self,
        tokens: list[int],
        positions: list[int],
        segments: list[Segment],
        logit_rows: list[int],
        at: list[int],
        groups: list[RowGroup],
    ) -> tuple[int, ...]:
        step = Step(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            tuple(segments),
            torch.tensor(logit_rows, dtype=torch.int64),
            slots=torch.tensor(at, dtype=torch.int64),
            groups=tuple(groups),
            read_logits=False,
        )
        return self._runner.run(step).choices
