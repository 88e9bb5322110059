"""What is asked: prompts and their lengths, output lengths, seeds, arrival times. All of it from one seed.

Owns the plan of a turn, which is the same for every arm. Does not own sending it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import common
from specbridge import models
from specbridge.errors import ConfigError

Mix = tuple[tuple[int, float], ...]
"""(tokens, share) each; shares add up to 1."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the plan. seed None: the server draws its own."""

    index: int
    prompt: str
    max_tokens: int
    seed: int | None = None


class Tokens(Protocol):
    """A tokenizer, as far as cutting texts needs one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokens:
    """One token a byte: the stand-in tokenizer of models that have none (`--tokenizer bytes`)."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "ignore")


class FileTokens:
    """A tokenizer.json. Raises ConfigError if `place` is neither one nor a folder with one."""

    def __init__(self, place: Path) -> None:
        from tokenizers import Tokenizer

        path = place / "tokenizer.json" if place.is_dir() else place
        if not path.is_file():
            raise ConfigError(
                f"--tokenizer {str(place)!r}: no such file; name a tokenizer.json, its folder, or `bytes`"
            )
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def tokens_of(place: str) -> Tokens:
    """What --tokenizer names: `bytes`, a folder or file; empty: the built-in model's. Raises ConfigError."""
    if place == "bytes":
        return ByteTokens()
    return FileTokens(Path(place).expanduser() if place else models.resolve_target(models.DEFAULT_TARGET))


def parse_mix(words: Sequence[str], flag: str) -> Mix:
    """`32:0.6 512:0.3 4096:0.1` or `128` → a Mix. Raises ConfigError naming `flag` and the word."""
    found = []
    for word in words:
        length, _, share = word.partition(":")
        try:
            tokens, weight = int(length), float(share or 1)
        except ValueError:
            raise ConfigError(f"{flag} {word!r} is not TOKENS or TOKENS:SHARE, as in 512:0.3") from None
        if tokens < 1 or not 0 < weight < math.inf:
            raise ConfigError(f"{flag} {word!r}: tokens must be 1 or more and the share above 0")
        found.append((tokens, weight))
    total = sum(weight for _, weight in found)
    return tuple((tokens, weight / total) for tokens, weight in found)


def spread(mix: Mix, count: int, rng: random.Random) -> list[int]:
    """`count` lengths in the mix's shares, as near as whole numbers come to them, in random order.

    Not drawn one by one: two turns of the same mix are the same amount of work.
    """
    exact = [share * count for _, share in mix]
    numbers = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(mix)), key=lambda i: numbers[i] - exact[i])
    for i in by_remainder[: count - sum(numbers)]:
        numbers[i] += 1
    lengths = [tokens for (tokens, _), number in zip(mix, numbers, strict=True) for _ in range(number)]
    rng.shuffle(lengths)
    return lengths


def arrivals(rate: float, count: int, rng: random.Random) -> list[float]:
    """Times, in seconds from the start, of `count` Poisson arrivals at `rate` a second, the first at 0."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


class Prompts:
    """Real prompts, as they stand or joined and cut to a length."""

    def __init__(self, texts: Sequence[str], tokens: Callable[[], Tokens]) -> None:
        self._texts = list(texts)
        self._tokens = tokens
        self._tokenizer: Tokens | None = None
        self._ids: dict[int, list[int]] = {}

    def make(self, index: int, length: int | None, mark: str = "") -> str:
        """The prompt number `index`; length None: as it stands.

        Else some `length` tokens: this prompt and those after it, cut. (The seam may make a token more or
        less.) mark: put in front, and counted.
        """
        start = index % len(self._texts)
        if length is None:
            return mark + self._texts[start]
        if self._tokenizer is None:
            self._tokenizer = self._tokens()
        ids = self._tokenizer.encode(mark) if mark else []
        at = start
        while len(ids) < length:
            ids = ids + self._encoded(at)
            at = (at + 1) % len(self._texts)
        return self._tokenizer.decode(ids[:length])

    def _encoded(self, at: int) -> list[int]:
        if at not in self._ids:
            assert self._tokenizer is not None
            self._ids[at] = self._tokenizer.encode(self._texts[at] + "\n\n")
            if not self._ids[at]:
                raise ConfigError(f"the tokenizer makes nothing of prompt {at}; give another --tokenizer")
        return self._ids[at]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plan of a turn. inputs None: prompts as they stand. fresh: no prompt begins like another."""

    prompts: Prompts
    outputs: Mix
    inputs: Mix | None = None
    seed: int = 0
    sampled: bool = False
    fresh: bool = False

    def plan(self, turn: str, count: int) -> list[Ask]:
        """`count` requests; `turn` names the turn: another name, other random choices (and, fresh, texts)."""
        rng = random.Random(f"{self.seed} {turn}")
        outputs = spread(self.outputs, count, rng)
        inputs: list[int | None] = list(spread(self.inputs, count, rng)) if self.inputs else [None] * count
        asks = []
        for index in range(count):
            mark = f"[{rng.getrandbits(40):010x}] " if self.fresh else ""
            prompt = self.prompts.make(index, inputs[index], mark)
            seed = rng.getrandbits(31) if self.sampled else None
            asks.append(Ask(index, prompt, outputs[index], seed))
        return asks

    def arrivals(self, turn: str, rate: float, count: int) -> list[float]:
        return arrivals(rate, count, random.Random(f"{self.seed} {turn} arrivals"))


def load_texts(names: Sequence[str]) -> list[str]:
    """All prompts of the named sets of benchmarks/prompts or JSON-lines paths, drawn in turn.

    Raises ConfigError naming what is no such file, or has no `prompt`.
    """
    for name in names:
        if name not in common.SETS and not Path(name).is_file():
            raise ConfigError(f"--prompts {name!r}: no such set or file; sets: {', '.join(common.SETS)}")
    try:
        texts = common.load_prompts(names, 1_000_000)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--prompts {' '.join(names)}: each line must be a JSON object with `prompt` ({error!r})"
        ) from None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"--prompts {' '.join(names)}: every set needs prompts, and none may be empty")
    return texts
