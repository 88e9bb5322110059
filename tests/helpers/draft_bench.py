"""An engine of the draft service with a scripted hidden-state channel."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_drafters import VOCAB

from draft_service.context_cache import ContextCache
from draft_service.desk import EngineLimits
from draft_service.drafter import BlockBatch
from draft_service.engine import Engine
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Proposer
from draft_service.selfcheck import AcceptanceMonitor
from draft_service.tree import build_tree_heap, noisy_log_probs
from kernels.philox import gumbel_noise
from specbridge.rounds import (
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    Propose,
    SamplingParams,
    SessionKey,
)
from specbridge.tree import DraftTree

GATEWAY = b"g" * 16
PATIENCE_S = 20.0


def key(number: int, incarnation: int = 0, gateway: bytes = GATEWAY) -> SessionKey:
    return SessionKey(gateway, number, incarnation)


@dataclass(frozen=True, slots=True)
class FakeInfo:
    transport: str = "inline"
    reason: str = "test"
    slots: int = 4096


@dataclass(slots=True)
class FakeChunk:
    chunk_id: int
    session: SessionKey
    first_position: int
    count: int
    tokens: tuple[int, ...]
    anchor: int | None
    rows: torch.Tensor
    alive: bool = True

    def valid(self) -> bool:
        return self.alive


@dataclass(slots=True)
class FakeChannel:
    acks: list[int] = field(default_factory=list)
    recaptures: list[tuple[SessionKey, int, str]] = field(default_factory=list)

    def ack(self, chunk_ids: Sequence[int]) -> None:
        self.acks.extend(chunk_ids)

    def recapture(self, session: SessionKey, first: int, cause: str) -> None:
        self.recaptures.append((session, first, cause))


def hidden_states(tokens: Sequence[int], width: int) -> torch.Tensor:
    """What this fake target's taps are at the end of `tokens`: a function of the whole prefix, one row a
    token.
    """
    rows = []
    state = 1
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 2**31
        rows.append(torch.randn(width, generator=torch.Generator().manual_seed(state)))
    return torch.stack(rows) if rows else torch.zeros(0, width)


class Bench:
    """An engine, its fake channel, and a target that only knows how to make hidden states."""

    def __init__(
        self,
        built: Any,
        *,
        tokens: int = 1024,
        attach: bool = True,
        monitor: AcceptanceMonitor | None = None,
        states: Callable[[Sequence[int], int], torch.Tensor] = hidden_states,
        **limits: Any,
    ) -> None:
        drafter = built.drafter
        defaults: dict[str, Any] = {"max_sessions": 8, "max_nodes": 16, "max_length": 400}
        defaults |= {"propose_wait_s": 0.05, "eager": False}
        self.metrics = DraftMetrics()
        self.monitor = monitor or AcceptanceMonitor(rounds=0)
        self.states = states
        self.cache = ContextCache(drafter, num_tokens=tokens, fingerprint="test")
        self.built, self.drafter = built, drafter
        self.proposer = Proposer(drafter, self.cache, top_k=None)
        self.engine = Engine(
            self.proposer, self.cache, limits=EngineLimits(**{**defaults, **limits}), metrics=self.metrics,
            monitor=self.monitor,
        )  # fmt: skip
        self.channel = FakeChannel()
        self.replies: queue.Queue[DraftReply] = queue.Queue()
        self.engine.connect(self.channel)
        self.engine.start()
        if attach:
            self.engine.on_attached(FakeInfo())
        self.ids = itertools.count(1)
        self.batches = itertools.count(1)

    def send(self, *, stream: object = "stream", **parts: Any) -> int:
        batch = next(self.batches)
        self.engine.submit(DraftRequest(batch, **parts), self.replies.put, stream=stream)
        return batch

    def results(self, count: int) -> list[DraftResult]:
        found: list[DraftResult] = []
        while len(found) < count:
            found.extend(self.replies.get(timeout=PATIENCE_S).results)
        return found

    def open(self, number: int, tokens: Sequence[int], **options: Any) -> DraftResult:
        options = {"sampling": SamplingParams(), **options}
        session = options.pop("session", key(number))
        stream = options.pop("stream", "stream")
        self.send(opens=(DraftOpen(session, tuple(tokens), len(tokens), **options),), stream=stream)
        return self.results(1)[0]

    def chunk(
        self, number: int, tokens: Sequence[int], first: int, stop: int, *, anchor: bool = True, **change: Any
    ) -> FakeChunk:
        """Rows [first, stop) of the session whose text is `tokens`; the anchor is tokens[stop]."""
        rows = self.states(tokens[:stop], self.drafter.config.feature_size)[first:]
        chunk = FakeChunk(
            next(self.ids), key(number), first, stop - first, tuple(tokens[first:stop]),
            tokens[stop] if anchor else None, rows,
        )  # fmt: skip
        for name, value in change.items():
            setattr(chunk, name, value)
        self.engine.on_chunk(chunk)
        return chunk

    def propose(
        self, number: int, tokens: Sequence[int], base: int, nodes: int = 8, depth: int = 9
    ) -> DraftResult:
        self.send(proposes=(Propose(key(number), base, tokens[base], nodes, depth),))
        return self.results(1)[0]

    def expected(
        self,
        tokens: Sequence[int],
        base: int,
        nodes: int = 8,
        depth: int = 9,
        sampling: SamplingParams | None = None,
    ) -> DraftTree:
        """The tree by the slow road: one sequential append from scratch, one pass, the heap."""
        drafter = self.drafter
        pages = drafter.new_pages(40, 16)
        drafter.append(
            pages,
            hidden_states(tokens[:base], drafter.config.feature_size),
            torch.arange(base),
            torch.arange(base),
        )
        logits = drafter.propose(pages, BlockBatch([tokens[base]], [base], [list(range(-(-base // 16)))]))[0]
        noise = None
        if sampling is not None:
            places = list(range(base + 1, base + 1 + len(logits)))
            noise = gumbel_noise(
                [sampling.seed] * len(places), places, [sampling.choice] * len(places), VOCAB
            )
        scores = noisy_log_probs(logits, sampling.temperature if sampling else 0.0, noise)
        return build_tree_heap(scores, nodes, max_depth=depth)

    def settle(self) -> None:
        """Wait until the engine has done all that is queued."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.engine.call(lambda: done.put(None))
        done.get(timeout=PATIENCE_S)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"specbridge_draft_{name}", labels) or 0.0


def text(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(tree: DraftTree, other: DraftTree) -> None:
    assert tree.tokens == other.tokens and tree.parents == other.parents
    assert tree.scores == pytest.approx(other.scores, abs=1e-4)
