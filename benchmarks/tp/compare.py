"""Token streams that should be equal, and what it means if they are not.

Other ranks sum in another order, so the logits of two runs differ in their last bits, and where the two best
candidates are that close, another token may be chosen. Owns finding the first difference and judging it: the
prefix that both runs share goes through the model once more, on one rank, in fp64 on the CPU; if both tokens
score within NEAR_TIE of the best there (logits over temperature plus the commit rule's noise), rounding
explains the difference. From then on the streams have different contexts, and nothing more is compared.
Nothing of the services that are compared takes part in the judging but the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.choice import GREEDY_BELOW
from kernels.philox import gumbel_noise
from specbridge.rounds import SamplingParams

NEAR_TIE = 1e-3
"""Of scores. fp32's own errors are some 1e-5; a mistake moves logits by tenths."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt in ids and how its tokens are chosen."""

    prompt: tuple[int, ...]
    sampling: SamplingParams

    @property
    def kind(self) -> str:
        return "greedy" if self.sampling.temperature < GREEDY_BELOW else f"T={self.sampling.temperature:g}"

    def body(self) -> dict[str, Any]:
        """Of the REST request."""
        sampling = self.sampling
        return {
            "prompt": list(self.prompt),
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": True,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Stream `stream` differs first at token `at` of its text: `got` instead of `expected` (None: it was at
    its end). near: rounding explains it. gap: how far the worse of the two is below the best."""

    stream: int
    kind: str
    at: int
    expected: int | None
    got: int | None
    gap: float
    near: bool

    def text(self) -> str:
        gap = "one text is shorter" if self.gap == float("inf") else f"gap {self.gap:.1e}"
        said = "near-tie" if self.near else "NOT A NEAR-TIE"
        return (
            f"stream {self.stream} ({self.kind}): token {self.at} is {self.got}, with one rank it is "
            f"{self.expected}; {gap}: {said}"
        )


class Scorer(Protocol):
    """Whatever scores the candidates for the next token."""

    def scores(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        """fp64 [vocab]: what the token after `tokens` is the argmax of."""
        ...


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Where the streams part; the shorter one's end if it is a beginning of the other; None: they are
    equal."""
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return i
    return None if len(expected) == len(got) else min(len(expected), len(got))


def gap_of(scores: torch.Tensor, *tokens: int) -> float:
    """How far the worst of these tokens is below the best of all. scores [vocab]."""
    return float(scores.max() - scores[list(tokens)].min())


def compare(
    asks: Sequence[Ask],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    scorer: Scorer,
    *,
    near_tie: float = NEAR_TIE,
) -> list[Difference]:
    """All first differences, judged. scorer is asked for streams that differ only."""
    found = []
    for number, (ask, a, b) in enumerate(zip(asks, expected, got, strict=True)):
        at = first_difference(a, b)
        if at is None:
            continue
        ours, theirs = (text[at] if at < len(text) else None for text in (a, b))
        gap = float("inf")
        if ours is not None and theirs is not None:
            gap = gap_of(scorer.scores([*ask.prompt, *a[:at]], ask.sampling), ours, theirs)
        found.append(Difference(number, ask.kind, at, ours, theirs, gap, gap <= near_tie))
    return found


def compared(expected: Sequence[Sequence[int]], differences: Sequence[Difference]) -> int:
    """Tokens that were compared and found equal."""
    at = {difference.stream: difference.at for difference in differences}
    return sum(at.get(number, len(text)) for number, text in enumerate(expected))


class Judge:
    """The model itself, one rank, fp64 on the CPU, without caches; loaded when first asked.

    length: tokens of its longest text. A context manager.
    """

    def __init__(self, place: Path, length: int) -> None:
        self._place, self._length = place, length
        self._stack = ExitStack()
        self._runner: Any = None

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the token after `tokens`, [vocab]."""
        from target_service.runner import load_runner
        from target_service.step import Segment, Step

        if self._runner is None:
            self._runner = self._stack.enter_context(
                load_runner(self._place, device="cpu", dtype="float64", num_pages=1, max_rows=self._length)
            )
        count = len(tokens)
        step = Step(
            torch.tensor(list(tokens)),
            torch.arange(count),
            (Segment(0, count, 0, ()),),
            torch.tensor([count - 1]),
        )
        logits: torch.Tensor = self._runner.run(step).logits[0]
        return logits.double().clone()

    def scores(self, tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
        """As the commit rule has them (kernels.choice), without its filters."""
        logits = self.logits(tokens)
        if sampling.temperature < GREEDY_BELOW:
            return logits
        noise = gumbel_noise([sampling.seed], [len(tokens)], [sampling.choice], logits.numel())[0]
        return logits / sampling.temperature + noise.double()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
