"""Acceptance files: how often, and how surely, a drafter is right, so that large shapes run without weights.

Owns the file's schema, its checks, and what a file promises: the acceptance length of a chain or a tree under
it. Does not own how a simulated drafter draws from it on a device (kernels.simulate), recording and fitting
(benchmarks.acceptance), nor the family of curves behind a bare mean (specbridge.acceptance_model).

The model of a file. Rounds come in classes (the spread of confidence from round to round); a round's class is
drawn by weight. In a round of class c the true token of depth d has rank r, among the drafter's candidates at
that depth, with probability

    true[d][r]         while the true tokens of all smaller depths had rank 0 (the greedy path was right),
    after_miss[d][r]   from the first one on that had another rank,

whatever else happened, and the drafter itself gives the candidate of rank r the probability draft[d][r]: that
is what trees are grown from. The three differ where a drafter is over-confident. What a row lacks to 1 lies
beyond the last rank.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError

FORMAT = "specbridge-acceptance-1"
_SLACK = 1e-3
"""By how much a row or the weights may miss their sum, for rounded numbers."""
_KEYS = {"format", "name", "provenance", "depths", "ranks", "classes"}
_CLASS_KEYS = {"weight", "true", "after_miss", "draft"}

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class RoundClass:
    """One kind of round; the tables are [depths][ranks], see the module."""

    weight: float
    true: Rows
    after_miss: Rows
    draft: Rows

    def node_probability(self, ranks: Sequence[int]) -> float:
        """Probability that the true tokens of depths 1.. have just these ranks."""
        chance, on_path = 1.0, True
        for depth, rank in enumerate(ranks):
            chance *= (self.true if on_path else self.after_miss)[depth][rank]
            on_path = on_path and rank == 0
        return chance


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A whole file. depths: largest depth it speaks of (block size - 1); ranks: candidates per depth."""

    name: str
    depths: int
    ranks: int
    classes: tuple[RoundClass, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and a hash of the numbers: equal labels mean equal simulations."""
        numbers = [[c.weight, c.true, c.after_miss, c.draft] for c in self.classes]
        digest = hashlib.blake2b(json.dumps(numbers).encode(), digest_size=4).hexdigest()
        return f"{self.name} ({digest})"

    def chain_length(self, depths: int | None = None) -> float:
        """Mean acceptance length (bonus included) of a chain of `depths` greedy drafts; None: all of them."""
        used = self.depths if depths is None else min(depths, self.depths)
        return 1.0 + sum(c.weight * _chain_sum([row[0] for row in c.true[:used]]) for c in self.classes)

    def tree_length(self, nodes: int, depths: int | None = None) -> float:
        """Mean acceptance length of the tree of the `nodes` most probable prefixes, as the draft grows it."""
        used = self.depths if depths is None else min(depths, self.depths)
        return 1.0 + sum(
            c.weight * sum(c.node_probability(path) for path in best_paths(c.draft[:used], nodes))
            for c in self.classes
        )

    def to_json(self) -> str:
        """The file's text: one table row a line, five significant digits."""
        parts = []
        for c in self.classes:
            tables = [
                f'   "{name}": [\n' + ",\n".join("    " + _row_text(row) for row in rows) + "\n   ]"
                for name, rows in (("true", c.true), ("after_miss", c.after_miss), ("draft", c.draft))
                if name == "true" or rows != c.true  # which is what an absent table means
            ]
            parts.append("  {\n" + ",\n".join([f'   "weight": {c.weight:.6g}', *tables]) + "\n  }")
        head: dict[str, Any] = {"format": FORMAT, "name": self.name, "provenance": dict(self.provenance)}
        head |= {"depths": self.depths, "ranks": self.ranks}
        text = json.dumps(head, indent=1, ensure_ascii=False)
        return text[: text.rindex("\n")] + ',\n "classes": [\n' + ",\n".join(parts) + "\n ]\n}\n"


def best_paths(draft: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` most probable paths of ranks under draft[depth][rank], best first: DDTree on ranks."""
    logs = [[math.log(p) if p > 0 else -math.inf for p in row] for row in draft]
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...], float]] = []

    def push(path: tuple[int, ...], above: float) -> None:
        score = above + logs[len(path) - 1][path[-1]]
        if score > -math.inf:
            heapq.heappush(heap, (-score, len(path), path, above))

    if logs and nodes > 0:
        push((0,), 0.0)
    while heap and len(found) < nodes:
        negative, depth, path, above = heapq.heappop(heap)
        found.append(path)
        if path[-1] + 1 < len(logs[depth - 1]):
            push((*path[:-1], path[-1] + 1), above)
        if depth < len(logs):
            push((*path, 0), -negative)
    return found


def read(path: Path) -> Acceptance:
    """An acceptance file. Raises ConfigError naming the file, the key, its value and what is legal."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"acceptance file {path} does not exist; record or fit one with `python -m benchmarks.acceptance`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"acceptance file {path} does not parse as JSON: {error}") from error
    return parse(value, where=f"acceptance file {path}")


def parse(value: Any, *, where: str) -> Acceptance:
    """The object of a file. `where` begins the messages. Raises ConfigError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise ConfigError(f"{where}: format is {found!r}; this build reads {FORMAT!r}")
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        raise ConfigError(f"{where}: key {unknown[0]!r} is not known; legal are {', '.join(sorted(_KEYS))}")
    depths, ranks = (_count(value, name, where) for name in ("depths", "ranks"))
    classes = value.get("classes")
    if not isinstance(classes, list) or not classes:
        raise ConfigError(f"{where}: classes is {classes!r}; it must be a list of at least one class")
    parsed = [_class(c, depths, ranks, f"{where}: classes[{i}]") for i, c in enumerate(classes)]
    total = math.fsum(c.weight for c in parsed)
    if abs(total - 1.0) > _SLACK:
        raise ConfigError(f"{where}: the weights of the classes sum to {total:.6g}; they must sum to 1")
    provenance = value.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise ConfigError(f"{where}: provenance is {provenance!r}; it must be an object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is {name!r}; it must be a text that tells what was recorded")
    return Acceptance(name, depths, ranks, tuple(parsed), provenance)


def _count(value: Mapping[str, Any], key: str, where: str) -> int:
    number = value.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 1024:
        raise ConfigError(f"{where}: {key} is {number!r}; it must be an integer in [1, 1024]")
    return number


def _class(value: Any, depths: int, ranks: int, where: str) -> RoundClass:
    if not isinstance(value, dict) or set(value) - _CLASS_KEYS:
        raise ConfigError(f"{where} must be an object with the keys {', '.join(sorted(_CLASS_KEYS))}")
    weight: Any = value.get("weight")
    if not _number(weight) or not 0 < weight <= 1 + _SLACK:
        raise ConfigError(f"{where}.weight is {weight!r}; it must be a number in (0, 1]")
    true = _table(value.get("true"), depths, ranks, f"{where}.true")
    missed = value.get("after_miss")
    after_miss = true if missed is None else _table(missed, depths, ranks, f"{where}.after_miss")
    drafted = value.get("draft")
    # A calibrated drafter, unless the file says otherwise. It ranks by what it believes.
    name = "true, which stands for the draft too," if drafted is None else "draft"
    draft = true if drafted is None else _table(drafted, depths, ranks, f"{where}.draft")
    for depth, row in enumerate(draft):
        for rank in range(1, ranks):
            if not 0 <= row[rank] <= row[rank - 1]:
                raise ConfigError(
                    f"{where}.{name}[{depth}][{rank}] is {row[rank]:g} after {row[rank - 1]:g}; a drafter's "
                    "candidates are ranked by its own probability, so a row must not rise"
                )
        if row[0] <= 0:
            raise ConfigError(
                f"{where}.{name}[{depth}][0] is {row[0]:g}; the best candidate needs more than 0"
            )
    return RoundClass(float(weight), true, after_miss, draft)


def _table(value: Any, depths: int, ranks: int, where: str) -> Rows:
    if not isinstance(value, list) or len(value) != depths:
        size = f"{len(value)} rows" if isinstance(value, list) else f"{value!r}"
        raise ConfigError(f"{where} has {size}; one row for each of {depths} depths is needed")
    return tuple(_row(row, ranks, f"{where}[{depth}]") for depth, row in enumerate(value))


def _row(value: Any, ranks: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != ranks:
        size = f"{len(value)} entries" if isinstance(value, list) else f"{value!r}"
        raise ConfigError(f"{where} has {size}; a probability for each of {ranks} ranks is needed")
    for rank, p in enumerate(value):
        if not _number(p) or not 0 <= p <= 1:
            raise ConfigError(f"{where}[{rank}] is {p!r}; it must be a probability in [0, 1]")
    total = math.fsum(value)
    if total > 1 + _SLACK:
        raise ConfigError(f"{where} sums to {total:.6g}; probabilities of one depth sum to 1 at most")
    return tuple(p / max(total, 1.0) for p in value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _chain_sum(chances: Sequence[float]) -> float:
    total, product = 0.0, 1.0
    for chance in chances:
        product *= chance
        total += product
    return total


def _row_text(row: Sequence[float]) -> str:
    return "[" + ", ".join(f"{p:.5g}" for p in row) + "]"
