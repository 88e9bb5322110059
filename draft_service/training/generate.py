"""Training data: which responses are wanted, and writing them down as they come.

A response is asked for by (prompt, sample): its temperature, the seed of its noise and its key follow from a
hash of the prompt's tokens, the sample's number and the run's seed. So a run that was interrupted goes on
where it stopped, and the same command makes the same data. Requests come in the order of their keys: a
shuffle of all sources.

Owns the plan and its execution over any source of texts (the offline generator, endpoint). Does not own the
file format (shards), prompts (prompts) nor the models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.training.shards import ShardWriter
from specbridge.errors import ConfigError

_MASK = (1 << 63) - 1
_SEED = (1 << 53) - 1  # what JSON's numbers hold everywhere


@dataclass(frozen=True, slots=True)
class Wanted:
    """A response to be made. tokens: the prompt's; text: the same as text, for endpoints that take no ids."""

    key: int
    tokens: tuple[int, ...]
    temperature: float
    seed: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """tokens: of the response, without the prompt."""

    key: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Mix:
    """Temperatures with their shares, which sum to 1."""

    temperatures: tuple[float, ...]
    shares: tuple[float, ...]

    def at(self, place: float) -> float:
        """The temperature of a draw from [0, 1)."""
        total = 0.0
        for temperature, share in zip(self.temperatures, self.shares, strict=True):
            total += share
            if place < total:
                return temperature
        return self.temperatures[-1]

    @property
    def sampled(self) -> Mix | None:
        """The mix without its greedy part, None if nothing is left."""
        rest = [(t, s) for t, s in zip(self.temperatures, self.shares, strict=True) if t > 0.0]
        total = sum(s for _, s in rest)
        return Mix(tuple(t for t, _ in rest), tuple(s / total for _, s in rest)) if rest else None


def parse_mix(items: Sequence[str]) -> Mix:
    """["0:0.4", "0.8:0.3", "1.0:0.3"], temperature:share; shares are scaled to a sum of 1, and left out they
    are equal. Raises ConfigError for anything else."""
    temperatures, shares = [], []
    for item in items:
        heat, _, share = item.partition(":")
        try:
            temperatures.append(float(heat))
            shares.append(float(share or 1.0))
        except ValueError:
            raise ConfigError(f"--temperatures {item!r} is not TEMPERATURE:SHARE, as in 0.8:0.3") from None
        if not 0.0 <= temperatures[-1] <= 100.0 or not 0.0 < shares[-1] < float("inf"):
            raise ConfigError(f"--temperatures {item!r}: temperatures are in [0, 100], shares above 0")
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise ConfigError("--temperatures needs at least one temperature, and each once")
    total = sum(shares)
    return Mix(tuple(temperatures), tuple(share / total for share in shares))


def wanted(
    prompts: Iterable[tuple[Sequence[int], str]], *, mix: Mix, samples: int, seed: int
) -> list[Wanted]:
    """`samples` responses to each prompt (its tokens, its text), in the order of their keys.

    Greedy responses of one prompt are equal: of a prompt's samples one at most is greedy, and the others'
    temperatures are drawn from the rest of the mix, if there is a rest.
    """
    made: dict[int, Wanted] = {}
    for tokens, text in prompts:
        ids = np.asarray(tokens, dtype="<i4").tobytes()
        greedy = False
        for sample in range(samples):
            digest = hashlib.blake2b(ids, digest_size=32, salt=_salt(seed, sample)).digest()
            key, noise, draw, again = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
            temperature = mix.at(draw / 2.0**64)
            if temperature == 0.0 and greedy:
                rest = mix.sampled
                if rest is None:
                    break
                temperature = rest.at(again / 2.0**64)
            greedy = greedy or temperature == 0.0
            made[key & _MASK] = Wanted(key & _MASK, tuple(tokens), temperature, noise & _SEED, text)
    return [made[key] for key in sorted(made)]


def _salt(seed: int, sample: int) -> bytes:
    return (seed & _MASK).to_bytes(8, "little") + sample.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Progress:
    """responses, of total: written or waiting to be, those of earlier runs included. tokens: new ones, of
    responses only. failed: responses that an endpoint did not give.
    """

    responses: int
    total: int
    tokens: int
    failed: int = 0


def produce(
    plan: Sequence[Wanted],
    source: Callable[[Iterable[Wanted]], Iterable[Made]],
    writer: ShardWriter,
    report: Callable[[Progress], None] = lambda _: None,
    failed: Callable[[], int] = lambda: 0,
) -> Progress:
    """Have `source` make what of `plan` the writer does not hold yet. Empty responses are counted, not kept.

    What is complete is on disk after an exception or an interrupt, too.
    """
    open_: dict[int, Wanted] = {one.key: one for one in plan if one.key not in writer.done}
    done = len(plan) - len(open_)
    tokens = 0
    total = len(plan)
    try:
        for made in source(list(open_.values())):
            one = open_.pop(made.key)
            done += 1
            tokens += len(made.tokens)
            if len(made.tokens):
                writer.add((*one.tokens, *made.tokens), len(one.tokens), one.temperature, one.seed, one.key)
            report(Progress(done, total, tokens, failed()))
    finally:
        writer.flush()
    return Progress(done, total, tokens, failed())
