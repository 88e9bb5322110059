"""Plain decoding on transformers, by the letter of the commit rule: the oracle of the lossless tests.

Logits come from transformers' model, filters are its warpers, the noise is kernels.philox's (pinned by
published vectors in tests/kernels): nothing of the services takes part. Also: the gap that tells a rounding
from a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.philox import gumbel_noise
from specbridge.rounds import SamplingParams

NEAR_TIE = 1e-3
MAX_NEAR_TIES = 2


def perturbed(logits: torch.Tensor, sampling: SamplingParams, seed: int, position: int) -> torch.Tensor:
    """What the committed token at `position` is the argmax of. logits [vocab] -> [vocab], fp32."""
    scores = logits.float().unsqueeze(0)
    if sampling.temperature < 1e-5:
        return scores[0]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    filtered = warpers(torch.zeros(1, 1, dtype=torch.int64), scores)
    return (filtered + gumbel_noise([seed], [position], [sampling.choice], scores.shape[1]))[0]


class PlainDecoding:
    """Texts of one model: a forward over everything for each token, without a cache. Texts are kept."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, model: Any = None) -> None:
        """model: what the folder holds, if it has been read already."""
        self.model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._texts: dict[tuple[object, ...], tuple[int, ...]] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab]: row i is what chooses the token at position i + 1. fp32."""
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def texts(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int], count: int
    ) -> list[tuple[int, ...]]:
        """The `count` tokens after each prompt, whatever they are."""
        keys = [(tuple(p), repr(sampling), seed) for p, seed in zip(prompts, seeds, strict=True)]
        short = [key for key in keys if len(self._texts.get(key, ())) < count]
        rows = [[*key[0]] for key in short]
        for _ in range(count if rows else 0):
            for row, scores, (_, _, seed) in zip(rows, self._next_logits(rows), short, strict=True):
                row.append(int(perturbed(scores, sampling, seed, len(row)).argmax()))
        for key, row in zip(short, rows, strict=True):
            self._texts[key] = tuple(row[len(key[0]) :])
        return [self._texts[key][:count] for key in keys]

    def text(
        self, prompt: Sequence[int], sampling: SamplingParams, *, seed: int, count: int
    ) -> tuple[int, ...]:
        """`texts` of one prompt."""
        return self.texts([prompt], sampling, seeds=[seed], count=count)[0]

    @torch.inference_mode()
    def _next_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[rows, vocab], fp32. Padding lies to the right, where a causal model does not look."""
        width = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        logits = self.model(ids, use_cache=False).logits
        return torch.stack([of[len(row) - 1] for of, row in zip(logits, rows, strict=True)]).float()

    def gap(self, tokens: Sequence[int], sampling: SamplingParams, *, seed: int) -> float:
        """Distance of the two best candidates for the token after `tokens`."""
        best = perturbed(self.logits(tokens)[-1], sampling, seed, len(tokens)).topk(2).values
        return float(best[0] - best[1])


@dataclass(frozen=True, slots=True)
class NearTies:
    """The suite's allowance of differences that rounding explains; a file, since workers share it."""

    ledger: Path

    def explain(
        self,
        name: str,
        model: Callable[[], PlainDecoding],
        prompt: Sequence[int],
        *,
        expected: Sequence[int],
        got: Sequence[int],
        sampling: SamplingParams,
        seed: int = 0,
    ) -> None:
        """Pass if the texts are equal or first differ at a near-tie; fail, with the gap, otherwise.

        model() judges: the same weights in transformers, in fp32. Asked for when there is a difference.
        """
        if tuple(expected) == tuple(got):
            return
        pairs = list(zip(expected, got, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert at is not None, f"{name}: {len(got)} tokens, {len(expected)} expected, equal as far as they go"
        gap = model().gap([*prompt, *expected[:at]], sampling, seed=seed)
        said = f"{name}: token {at} is {got[at]}, expected {expected[at]}; top-two gap {gap:.2e} in fp32"
        print(said)
        assert gap < NEAR_TIE, said
        with self.ledger.open("a") as file:
            file.write(said + "\n")
        lines = self.ledger.read_text().splitlines()
        assert len(lines) <= MAX_NEAR_TIES, (
            f"more than {MAX_NEAR_TIES} near-ties in the suite:\n" + "\n".join(lines)
        )
