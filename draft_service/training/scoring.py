"""How a drafter's marginals and the target's own noise make the scores that a tree is grown from.

The target commits v = argmax(z + g) at a sampled position, g known to both sides. With the drafter's belief q
about softmax(z), a node's value is the probability that its tokens are the committed ones given g. If the
drafter knew z, the best score was log q + g; it does not, so

    score = log_softmax(a_d log q' + b_d g),      q' = (1 - e) q + e / vocab

at depth d, with a_d, b_d below 1 where the drafter is unsure. a = b = 1, e = 0 is what is served; b = 0,
a = 1 is the tree without shared noise. Scores of best-first trees add up over depths, so calibrated ones make
the best trees.

Owns the rules. Does not own serving (draft_service.tree, kernels.marginals).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.conditional_tree import Conditioning, by_depth
from specbridge.errors import ConfigError
from specbridge.rounds import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class ScoringRule:
    """a, b: by depth, the last value for all that are deeper. floor: e. conditioning: trees are grown by
    draft_service.conditional_tree, whose l are these scores.
    """

    name: str
    a: tuple[float, ...] = (1.0,)
    b: tuple[float, ...] = (1.0,)
    floor: float = 0.0
    conditioning: Conditioning | None = None

    @property
    def noisy(self) -> bool:
        return any(value != 0.0 for value in self.b)

    def scores(self, logits: torch.Tensor, temperature: float, noise: torch.Tensor | None) -> torch.Tensor:
        """logits fp32 [anchors, depths, vocab] -> log-probabilities, likewise. noise fp32, the same shape.

        Greedy texts take neither temperature nor noise nor a.
        """
        if temperature < GREEDY_BELOW:
            return logits.log_softmax(-1)
        scores = logits / temperature
        if self.floor or any(value != 1.0 for value in self.a):
            scores = scores.log_softmax(-1)
            if self.floor:
                scores = torch.logaddexp(
                    scores + math.log1p(-self.floor),
                    torch.tensor(math.log(self.floor / logits.shape[-1]), device=logits.device),
                )
            scores = scores * _by_depth(self.a, logits)
        if noise is not None and self.noisy:
            scores = scores + noise * _by_depth(self.b, logits) if self._scaled else scores + noise
        return scores.log_softmax(-1)

    @property
    def _scaled(self) -> bool:
        return any(value != 1.0 for value in self.b)


PLAIN = ScoringRule("plain", b=(0.0,))
SHARED = ScoringRule("shared noise")
BIGRAM = ScoringRule("bigrams", conditioning=Conditioning())
BIGRAM_PLAIN = ScoringRule("plain bigrams", b=(0.0,), conditioning=Conditioning(noise=(1.0,)))
_NAMED = {"plain": PLAIN, "shared": SHARED, "bigrams": BIGRAM, "plain-bigrams": BIGRAM_PLAIN}


def parse_rule(text: str) -> ScoringRule:
    """A rule as options give it: plain, shared, bigrams, plain-bigrams, or a=1:0.9,b=0.8,floor=1e-4 (between
    colons: by depth), or bigrams,b=1:0.8,c=0:0.6, with name=… if wanted.

    Raises ConfigError for anything else.
    """
    if text in _NAMED:
        return _NAMED[text]
    bigrams = text.startswith("bigrams,")
    keys = ("b", "c", "name") if bigrams else ("a", "b", "floor", "name")
    given: dict[str, str] = {}
    for part in text.split(",")[bigrams:]:
        key, found, value = part.partition("=")
        if not found or key not in keys:
            raise ConfigError(
                f"scoring rule {text!r}: {part!r} is none of {', '.join(keys)}; or say {', '.join(_NAMED)}"
            )
        given[key] = value
    try:
        a, b = (tuple(float(v) for v in given.get(key, "1").split(":")) for key in ("a", "b"))
        if bigrams:
            c = tuple(float(v) for v in given["c"].split(":")) if "c" in given else Conditioning().pairs
            own = Conditioning(b if "b" in given else Conditioning().noise, c)
            return ScoringRule(given.get("name", text), conditioning=own)
        floor = float(given.get("floor", "0"))
    except ValueError:
        raise ConfigError(f"scoring rule {text!r}: values must be numbers") from None
    if not 0.0 <= floor < 1.0 or min(a) <= 0.0 or min(b) < 0.0:
        raise ConfigError(f"scoring rule {text!r}: a above 0, b from 0 and floor in [0, 1) are possible")
    return ScoringRule(given.get("name", text), a, b, floor)


def _by_depth(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return by_depth(values, logits.shape[1], device=logits.device, dtype=logits.dtype).unsqueeze(1)
