"""Which responses a step sees, where they lie, and which positions become anchors.

Responses are packed into rows of one length, so that every step has the same shapes (and a CUDA graph can
hold it). Everything here follows from (seed, number of the batch), so a resumed run, or one on other numbers
of GPUs, goes through the same batches. Owns selection, the held-out split, packing and anchors. Does not own
the files (shards) nor any arithmetic (network, losses).
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from draft_service.training.fit_settings import Recipe
from draft_service.training.shards import Shards
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

WINDOW = 4096
"""Responses packed together: enough for full rows, few enough that an epoch stays shuffled."""
MAX_DOCUMENTS = 16
"""Most responses in one row."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch, in numpy; `rows` rows of `row_tokens` tokens, `anchors` blocks a row.

    tokens, positions int64 [rows, row_tokens]: position in its own response. documents int64 [rows,
    row_tokens]: number of the response in its row (padding has one of its own). bounds int32 [rows *
    (MAX_DOCUMENTS + 1) + 1]: where, counted over all rows, each response starts; padded with the end.
    anchors, starts, ends int64 [rows, anchors]: a block's anchor, and the span of its response, in its row;
    ends <= anchors + 1 marks a block that does not count. responses int64 [rows, anchors]: whose block it is.
    seed int64 [1]: of what is random about the batch later on.
    """

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    bounds: np.ndarray
    anchors: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    responses: np.ndarray
    seed: np.ndarray


@dataclass(frozen=True, slots=True)
class Split:
    """Indexes of responses, int64: to train on, and to estimate acceptance with."""

    train: np.ndarray
    held_out: np.ndarray


def split(shards: Shards, recipe: Recipe) -> Split:
    """Select by the recipe. Answers to one prompt all go to one side. Raises ConfigError if nothing is left.

    The held-out side does not depend on the share, mix or temperatures trained on, so that estimates of runs
    that differ in these compare.
    """
    usable = _usable(shards, recipe.row_tokens)
    if not len(usable):
        raise ConfigError(
            f"none of {len(shards)} responses has an answer within {recipe.row_tokens} tokens: "
            f"raise --row-tokens, or look at the data"
        )
    if len(usable) < len(shards):
        log.warning("%d responses do not fit --row-tokens and are left out", len(shards) - len(usable))
    ranks = np.array([_prompt_rank(shards, i) for i in usable])
    order = np.argsort(ranks, kind="stable")
    count = min(recipe.holdout, len(usable) // 10)
    if count:
        # Not through the middle of a prompt's answers.
        count = int(np.searchsorted(ranks[order], ranks[order[count - 1]], side="right"))
        count = 0 if count > len(usable) // 2 else count
    held_out, train = np.sort(usable[order[:count]]), np.sort(usable[order[count:]])
    if recipe.temperatures:
        wanted = np.array(recipe.temperatures, np.float32)
        train = train[np.isin(shards.temperatures[train], wanted)]
    rng = np.random.default_rng((recipe.seed, 1))
    if recipe.greedy_share >= 0:
        train = _mixed(train, shards.temperatures[train] == 0, recipe.greedy_share, rng)
    if recipe.data_share < 1:
        train = np.sort(rng.permutation(train)[: max(1, round(len(train) * recipe.data_share))])
    if not len(train):
        raise ConfigError(
            "no response is left to train on: --temperatures or --greedy-share leave nothing; the data has "
            f"temperatures {sorted(set(shards.temperatures.tolist()))}"
        )
    return Split(train, held_out)


def _usable(shards: Shards, row_tokens: int) -> np.ndarray:
    """Responses with an anchor and a token after it inside a row."""
    return np.flatnonzero(np.minimum(shards.lengths, row_tokens) >= shards.prompt_lengths + 2)


def _prompt_rank(shards: Shards, index: int) -> int:
    start = int(shards.starts[index])
    prompt = shards.tokens[start : start + int(shards.prompt_lengths[index])].astype(np.int64)
    return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=7).digest(), "little")


def _mixed(train: np.ndarray, greedy: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Drop responses of one kind until `share` of the rest is greedy."""
    cold, hot = train[greedy], train[~greedy]
    total = min(len(cold) / share if share > 0 else np.inf, len(hot) / (1 - share) if share < 1 else np.inf)
    keep = round(total * share), round(total * (1 - share))
    parts = [rng.permutation(part)[:n] for part, n in zip((cold, hot), keep, strict=True)]
    return np.sort(np.concatenate(parts))


def pack(lengths: np.ndarray, row_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Rows of indexes into `lengths` (each at most row_tokens): every one once, in random order.

    First fit, longest first, within windows of a random permutation.
    """
    rows: list[list[int]] = []
    order = rng.permutation(len(lengths))
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        window = window[np.argsort(-lengths[window], kind="stable")]
        # Open rows by the room they have left: the tightest that fits takes the next one.
        open_rows: list[list[int]] = []
        by_room: dict[int, list[int]] = {}
        for index in window.tolist():
            length = int(lengths[index])
            space = next((s for s in range(length, row_tokens + 1) if by_room.get(s)), None)
            if space is None:
                row, space = len(open_rows), row_tokens
                open_rows.append([])
            else:
                row = by_room[space].pop()
            open_rows[row].append(index)
            room = space - length
            if len(open_rows[row]) < MAX_DOCUMENTS and room:
                by_room.setdefault(room, []).append(row)
        rows += [[open_rows[i][j] for j in rng.permutation(len(open_rows[i]))] for i in range(len(open_rows))]
    return [rows[i] for i in rng.permutation(len(rows))]


class Batches:
    """The endless sequence of batches over `responses`; batch g is a function of g, the recipe and the data.

    Epoch after epoch, each packed anew; an epoch's last batch is filled up with its own first rows.
    """

    def __init__(self, shards: Shards, responses: np.ndarray, recipe: Recipe) -> None:
        self._shards, self._responses, self._recipe = shards, responses, recipe
        self._lengths = np.minimum(shards.lengths[responses], recipe.row_tokens)
        self._count_up = np.arange(recipe.row_tokens)
        self._firsts = [0]  # first batch of each epoch looked at so far
        self._rows: dict[int, list[list[int]]] = {}  # of the last epochs asked for

    @property
    def per_epoch(self) -> int:
        """Batches of the first epoch; those of others differ by a row or so."""
        return self._count(self._epoch(0))

    def get(self, number: int) -> Batch:
        """Batch `number`, from 0."""
        while number >= self._firsts[-1]:
            self._firsts.append(self._firsts[-1] + self._count(self._epoch(len(self._firsts) - 1)))
        epoch = bisect.bisect_right(self._firsts, number) - 1
        rows = self._epoch(epoch)
        at = (number - self._firsts[epoch]) * self._recipe.rows
        chosen = [rows[(at + i) % len(rows)] for i in range(self._recipe.rows)]
        return self._build(chosen, np.random.default_rng((self._recipe.seed, 3, number)))

    def _epoch(self, number: int) -> list[list[int]]:
        if number not in self._rows:
            rng = np.random.default_rng((self._recipe.seed, 2, number))
            for old in sorted(self._rows)[:-1]:
                del self._rows[old]
            self._rows[number] = pack(self._lengths, self._recipe.row_tokens, rng)
        return self._rows[number]

    def _count(self, rows: Sequence[object]) -> int:
        return -(-len(rows) // self._recipe.rows)

    def _build(self, rows: Sequence[Sequence[int]], rng: np.random.Generator) -> Batch:
        recipe, shards = self._recipe, self._shards
        shape = (recipe.rows, recipe.row_tokens)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        documents = np.full(shape, MAX_DOCUMENTS, np.int64)
        bounds = np.full(recipe.rows * (MAX_DOCUMENTS + 1) + 1, tokens.size, np.int32)
        blocks = (recipe.rows, recipe.anchors)
        # A block that does not count: some context to see, nothing to predict.
        anchors, starts = np.ones(blocks, np.int64), np.zeros(blocks, np.int64)
        ends, owners = np.ones(blocks, np.int64), np.full(blocks, -1, np.int64)
        seed = rng.integers(1 << 62, size=1)
        segment = 0
        for r, row in enumerate(rows):
            spans = np.empty((len(row), 3), np.int64)  # start, end, response
            at = 0
            for number, local in enumerate(row):
                index, length = int(self._responses[local]), int(self._lengths[local])
                begin = int(shards.starts[index])
                tokens[r, at : at + length] = shards.tokens[begin : begin + length]
                positions[r, at : at + length] = self._count_up[:length]
                documents[r, at : at + length] = number
                bounds[segment] = r * recipe.row_tokens + at
                segment += 1
                spans[number] = at, at + length, index
                at += length
            if at < recipe.row_tokens:
                bounds[segment] = r * recipe.row_tokens + at
                positions[r, at:] = self._count_up[: recipe.row_tokens - at]
                segment += 1
            # The anchor and the token after it are both the target's own.
            first = spans[:, 0] + shards.prompt_lengths[spans[:, 2]]
            ends_at = np.cumsum(spans[:, 1] - 1 - first)
            count = min(recipe.anchors, int(ends_at[-1]))
            drawn = np.sort(rng.choice(int(ends_at[-1]), count, replace=False))
            owner = np.searchsorted(ends_at, drawn, side="right")
            anchors[r, :count] = spans[owner, 1] - 1 - (ends_at[owner] - drawn)
            starts[r, :count], ends[r, :count], owners[r, :count] = spans[owner].T
        return Batch(tokens, positions, documents, bounds, anchors, starts, ends, owners, seed)


class Prefetch(Generic[T]):
    """Makes things in a thread, `depth` ahead of who iterates. An error there is raised here."""

    def __init__(self, make: Callable[[int], T], numbers: Iterator[int], depth: int = 4) -> None:
        self._queue: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, numbers), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self, make: Callable[[int], T], numbers: Iterator[int]) -> None:
        try:
            for number in numbers:
                item = make(number)
                while not self._stop.is_set():
                    try:
                        self._queue.put(item, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._queue.put(error)
