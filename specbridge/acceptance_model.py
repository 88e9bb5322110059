"""A family of acceptance curves with few parameters, for a mean or for published figures.

Owns the family and solving it for a chain's acceptance length. Does not own the file (specbridge.acceptance)
nor fitting the other parameters to trees (benchmarks.acceptance).

Round class c of C equally likely ones has ease z_c, the middle of its share of a normal distribution, and
each of its positions a normal number u_cd (a fixed low-discrepancy sequence): a text has easy and hard
places. On the greedy path the drafter's best token at depth d is right with probability

    a = sigmoid(level + spread * z_c + jitter * u_cd - drift * (d - 1)),

after a miss with sigmoid(logit(a) - penalty). A share `beyond` of what is left lies outside the candidates.
Of the rest, the second candidate has the share `second` (many places are a choice of two), and what remains
falls like (1 + r / knee)^-s over the ranks r = 1.., with the s at which rank 0 has a by the same law, so that
a sure drafter has a steep row and an unsure one a flat row. The drafter believes the first: it is calibrated
on the greedy path and over-confident off it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

from specbridge.acceptance import Acceptance, RoundClass, read
from specbridge.errors import ConfigError

DEFAULT_DEPTHS = 15
CLASSES = 8


@dataclass(frozen=True, slots=True)
class Curves:
    """The family's parameters, see the module. The defaults lie near what fits of published tables give."""

    level: float = 1.0
    spread: float = 2.0
    jitter: float = 3.0
    drift: float = 0.03
    penalty: float = 0.5
    knee: float = 20.0
    second: float = 0.7
    beyond: float = 0.2

    def acceptance(
        self, name: str, *, depths: int = DEFAULT_DEPTHS, ranks: int = 32, classes: int = CLASSES
    ) -> Acceptance:
        """The file these parameters stand for."""
        tail = _tails(self.knee, ranks)
        made = []
        for number in range(classes):
            hits = [self._hit(number, classes, depth) for depth in range(depths)]
            true = tuple(self._row(a, tail) for a in hits)
            missed = tuple(self._row(_sigmoid(_logit(a) - self.penalty), tail) for a in hits)
            made.append(RoundClass(1.0 / classes, true, missed, true))
        return Acceptance(name, depths, ranks, tuple(made))

    def chain_length(self, depths: int, classes: int) -> float:
        """Acceptance length of a chain, without building the tables."""
        total = 0.0
        for number in range(classes):
            product = 1.0
            for depth in range(depths):
                product *= self._hit(number, classes, depth)
                total += product / classes
        return 1.0 + total

    def with_chain(self, chain: float, *, depths: int, classes: int = CLASSES) -> Curves:
        """The same curves at the level where a chain of `depths` drafts has acceptance length `chain`.

        Raises ConfigError if no level has it.
        """
        if not 1.0 < chain < 1.0 + depths:
            raise ConfigError(
                f"a mean acceptance length of {chain:g} is not possible with {depths} drafts: it counts the "
                f"bonus token and must lie above 1 and below {1 + depths}"
            )
        low, high = -40.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            if replace(self, level=middle).chain_length(depths, classes) < chain:
                low = middle
            else:
                high = middle
        return replace(self, level=(low + high) / 2)

    def _hit(self, number: int, classes: int, depth: int) -> float:
        ease = _normal((number + 0.5) / classes)
        place = _normal((0.5 + (number + 1) * 0.7548776662466927 + (depth + 1) * 0.5698402909980532) % 1.0)
        logit = self.level + self.spread * ease + self.jitter * place - self.drift * depth
        # Not beyond what an fp32 row can tell from 1 and 0.
        return min(max(_sigmoid(logit), 1e-5), 1 - 1e-5)

    def _row(self, hit: float, tail: Callable[[float], Sequence[float]]) -> tuple[float, ...]:
        rest = (1.0 - hit) * (1.0 - self.beyond)
        row = [hit]
        for rank, share in enumerate(tail(hit)):
            share = (1.0 - self.second) * share + self.second * (rank == 0)
            row.append(min(rest * share, row[-1]))  # never above the rank before it
        return tuple(row)


def resolve(text: str, *, depths: int | None = None) -> Acceptance:
    """What `--simulate-acceptance` means: a number (mean acceptance length of a chain) or a file.

    depths: block size - 1 of the drafter that will use it; None where nothing is drafted. Raises ConfigError
    if the file is damaged or speaks of fewer depths.
    """
    mean = _mean(text)
    if mean is None:
        found = read(Path(text).expanduser())
        if depths is not None and found.depths < depths:
            raise ConfigError(
                f"acceptance file {text} has {found.depths} depths, the drafter goes {depths} deep: take one "
                f"recorded or fitted with a block of {depths + 1} or more"
            )
        return found
    if not math.isfinite(mean) or mean <= 1.0:
        raise ConfigError(
            f"--simulate-acceptance {text}: a mean acceptance length lies above 1; or give a file"
        )
    used = depths or max(DEFAULT_DEPTHS, math.ceil(mean))
    return Curves().with_chain(mean, depths=used).acceptance(f"mean {mean:g}", depths=used)


def label(text: str) -> str:
    """How services report a setting of --simulate-acceptance; the same on both sides. "" for none.

    Raises ConfigError like `resolve`.
    """
    if not text:
        return ""
    found = resolve(text)
    # A mean's tables depend on the drafter's block, its name does not.
    return found.label if _mean(text) is None else found.name


def _mean(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@cache
def _normal(share: float) -> float:
    """The number that a standard normal one stays below with this probability."""
    return NormalDist().inv_cdf(min(max(share, 1e-3), 1 - 1e-3))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def _tails(knee: float, ranks: int) -> Callable[[float], Sequence[float]]:
    """hit -> shares of ranks 1.. (summing to 1) of the law whose rank 0 has `hit`, from a table over s."""
    steepness = [0.0, *(0.02 * 1.06**i for i in range(140))]
    heads: list[float] = []
    shares: list[list[float]] = []
    for s in steepness:
        law = [(1.0 + r / knee) ** -s for r in range(ranks)]
        rest = math.fsum(law[1:])
        heads.append(1.0 / (1.0 + rest))
        shares.append([p / rest for p in law[1:]] if rest > 0 else [1.0, *[0.0] * (ranks - 2)])

    def tail(hit: float) -> Sequence[float]:
        return shares[min(bisect.bisect_left(heads, hit), len(shares) - 1)]

    return tail
