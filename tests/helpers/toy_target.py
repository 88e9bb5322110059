"""A target model made of integers, and helpers that drive an Engine in process.

ToyRunner stands in for target_service.runner: each row's "K/V" is an integer made of token and position, a
row's logits depend on the exact sum over everything it may see. Wrong pages, masks, positions or slots change
the text; the order of summation can't.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from specbridge.rounds import (
    FinishReason,
    SamplingParams,
    SessionKey,
    StopParams,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    Verify,
)
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.config import Limits
from target_service.engine import Engine, Identity
from target_service.metrics import TargetMetrics
from target_service.sampling import ChoiceRule, RowGroup, choose
from target_service.step import NO_SLOT, Segment, Step, StepOutput

GATEWAY = bytes(range(16))


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 12
    hidden_size: int = 4
    num_layers: int = 6
    max_position_embeddings: int = 512
    eos_token_ids: tuple[int, ...] = ()


def kv_of(token: int, position: int) -> int:
    return (token + 1) * 7919 + (position + 1) * 104729 + (token + 3) * (position + 5) * 31


@dataclass
class ToyRunner:
    num_pages: int = 64
    page_size: int = 16
    config: ToyConfig = field(default_factory=ToyConfig)
    states: int = 997
    seed: int = 0
    activation_dtype: torch.dtype = torch.float32
    fingerprint: str = "toy"
    before_forward: Callable[[Step], None] | None = None
    spoil: Callable[[Step, torch.Tensor], None] | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.table = torch.randn(self.states, self.config.vocab_size, generator=generator) * 2
        self.slots: list[int | None] = [None] * (self.num_pages * self.page_size)
        self.taps: tuple[int, ...] = ()
        self.steps: list[Step] = []
        self.closed = False
        self.dead: Exception | None = None
        self.ring: torch.Tensor | None = None

    def set_taps(self, layer_ids: tuple[int, ...], *, normed_last_layer: bool) -> None:
        self.taps = layer_ids

    def set_ring(self, ring: torch.Tensor | None) -> None:
        self.ring = ring

    def warm_up(self, steps: Sequence[Step]) -> None: ...

    def run(self, step: Step) -> StepOutput:
        if self.dead is not None:
            raise self.dead
        self.steps.append(step)
        if self.before_forward is not None:
            self.before_forward(step)
        tokens, positions = step.tokens.tolist(), step.positions.tolist()
        assert len(tokens) == len(positions) == sum(s.rows for s in step.segments)
        staged = [kv_of(t, p) for t, p in zip(tokens, positions, strict=True)]
        sums = [0] * len(tokens)
        for segment in step.segments:
            assert max(positions) < self.config.max_position_embeddings
            context = 0
            for p in range(segment.context_length):
                value = self.slots[segment.pages[p // self.page_size] * self.page_size + p % self.page_size]
                context += value if value is not None else 0
            base = segment.first_row
            for i in range(segment.rows):
                parent = i - 1 if segment.parents is None else segment.parents[i]
                assert parent < i
                above = context if parent < 0 else sums[base + parent]
                sums[base + i] = above + staged[base + i]
        logits = self.table[[sums[r] % self.states for r in step.logit_rows.tolist()]]
        if not len(step.logit_rows):
            logits = self.table[:0]
        if self.spoil is not None:
            logits = logits.clone()
            self.spoil(step, logits)
        taps = None
        if self.taps:
            width = len(self.taps) * self.config.hidden_size
            rows = [
                [float(t), float(p), float(s % 65536)]
                for t, p, s in zip(tokens, positions, sums, strict=True)
            ]
            taps = torch.zeros(len(tokens), width)
            taps[:, :3] = torch.tensor(rows)
        chosen = choose(logits[: sum(len(g.positions) for g in step.groups)], step.groups).tolist()
        after = dict(zip(step.logit_rows.tolist(), chosen, strict=False))
        self._finish(step, tokens, staged, after, taps)
        return StepOutput(logits, taps, tuple(chosen))

    def _finish(
        self, step: Step, tokens: list[int], staged: list[int], after: dict[int, int], taps: Any
    ) -> None:
        """Commit and capture what the choices accept."""
        targets = step.slots.tolist() if step.slots is not None else [NO_SLOT] * len(tokens)
        written: set[int] = set()
        for segment in step.segments:
            rows = _accepted(segment, tokens, after)
            for row in rows:
                if targets[row] != NO_SLOT:
                    assert targets[row] not in written
                    written.add(targets[row])
                    self.slots[targets[row]] = staged[row]
            if segment.ring is not None and self.ring is not None:
                for place, row in enumerate(rows[segment.ring.skip :]):
                    self.ring[segment.ring.first_slot + place] = taps[row]

    def check(self) -> None:
        if self.dead is not None:
            raise self.dead

    def close(self) -> None:
        self.closed = True

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """[1, vocab], by definition: no pages, no trees."""
        total = sum(kv_of(t, p) for p, t in enumerate(tokens))
        return self.table[total % self.states].unsqueeze(0)


def _accepted(segment: Segment, tokens: list[int], after: dict[int, int]) -> list[int]:
    """Rows of the step that the choices accept, in order; all of a chain's."""
    first, end = segment.first_row, segment.first_row + segment.rows - segment.padding
    if segment.parents is None:
        return list(range(first, end))
    rows = [first]
    while True:
        children = [
            first + i for i, p in enumerate(segment.parents) if first + p == rows[-1] and i < end - first
        ]
        taken = [row for row in children if tokens[row] == after[rows[-1]]]
        if not taken:
            return rows
        rows.append(taken[0])


def reference(
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    tokens: Sequence[int],
    *,
    sampling: SamplingParams,
    stop: StopParams,
    eos: Sequence[int] = (),
    max_length: int = 10**9,
) -> tuple[list[int], FinishReason]:
    """The plain loop: one token a pass, no cache. Returns the output and why it ended."""
    text = list(tokens)
    stops = {*stop.stop_token_ids, *(() if stop.ignore_eos else eos)}
    rule = ChoiceRule(
        sampling, (*eos, *stop.stop_token_ids) if stop.min_tokens else (), len(text) + stop.min_tokens
    )
    while True:
        token = int(choose(logits_after(text), [RowGroup(rule, 0, [len(text)])])[0])
        text.append(token)
        output = text[len(tokens) :]
        if token in stops:
            return output, FinishReason.STOP
        if len(output) >= stop.max_tokens or len(text) >= max_length:
            return output, FinishReason.LENGTH


def random_tree(rng: random.Random, *, nodes: int, depth: int, vocab: int) -> DraftTree:
    """Any valid tree of at most `nodes` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(nodes):
        parent = rng.randrange(-1, len(tokens))
        level = 1 if parent < 0 else depths[parent] + 1
        token = rng.randrange(vocab)
        if level > depth or (parent, token) in taken:
            continue
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        depths.append(level)
    scores = [-0.1 * (i + 1) for i in range(len(tokens))]
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def chain_tree(tokens: Sequence[int]) -> DraftTree:
    n = len(tokens)
    return DraftTree(tuple(tokens), tuple(range(-1, n - 1)), tuple(-0.01 * (i + 1) for i in range(n)))


TOY_LIMITS = Limits(
    num_pages=64,
    page_size=16,
    max_length=400,
    max_sessions=32,
    max_tree_nodes=64,
    max_verify_rows=520,
    prefill_chunk=16,
    channel_slots=256,
    session_lease=0.2,
    capture_wait=0.05,
    recapture_interval=0.0,
)


def make_engine(runner: Any, limits: Limits = TOY_LIMITS, **kwargs: Any) -> Engine:
    metrics = TargetMetrics(CollectorRegistry())
    return Engine(runner, limits, metrics, identity=Identity("toy", "float32", "cpu"), **kwargs)


class Client:
    """One gateway stream to an in-process engine: send requests, await results."""

    def __init__(self, engine: Engine, timeout: float = 20.0) -> None:
        self.engine = engine
        self.timeout = timeout
        self.replies: list[TargetReply] = []
        self._changed = threading.Condition()
        self._batch = 0
        # One bound method object for the life of the stream.
        self.sink = self._receive

    def _receive(self, reply: TargetReply) -> None:
        with self._changed:
            self.replies.append(reply)
            self._changed.notify_all()

    def send(
        self,
        *,
        opens: Sequence[TargetOpen] = (),
        verifies: Sequence[Verify] = (),
        releases: Sequence[SessionKey] = (),
    ) -> int:
        self._batch += 1
        self.engine.submit(
            TargetRequest(self._batch, tuple(opens), tuple(verifies), tuple(releases)), self.sink
        )
        return self._batch

    def wait(self, wanted: Callable[[TargetReply], bool]) -> TargetReply:
        """The first reply that matches; it is taken out."""
        with self._changed:
            found: list[TargetReply] = []

            def look() -> bool:
                found[:] = [r for r in self.replies if wanted(r)][:1]
                return bool(found)

            assert self._changed.wait_for(look, self.timeout), f"no such reply in {self.replies}"
            self.replies.remove(found[0])
        self._settle()
        return found[0]

    def result(self, key: SessionKey, *kinds: TargetResultKind) -> TargetResult:
        """The next result of one of `kinds` for `key`; it is taken out, its reply's other results stay."""
        with self._changed:
            found: list[TargetResult] = []

            def look() -> bool:
                for i, reply in enumerate(self.replies):
                    for result in reply.results:
                        if result.session == key and result.kind in kinds:
                            rest = tuple(r for r in reply.results if r is not result)
                            self.replies[i] = TargetReply(reply.batch_id, rest, reply.timings)
                            found.append(result)
                            return True
                return False

            assert self._changed.wait_for(look, self.timeout), f"no {kinds} for {key} in {self.replies}"
        self._settle()
        return found[0]

    def _settle(self) -> None:
        """Rows are announced after the answer: until the engine's turn is over, or a test keeps it busy."""
        over = threading.Event()
        self.engine._post(over.set)
        over.wait(0.5)

    def verify(self, verifies: Sequence[Verify]) -> TargetReply:
        batch = self.send(verifies=verifies)
        return self.wait(lambda r: r.batch_id == batch and r.timings is not None)

    def open(self, request: TargetOpen) -> TargetResult:
        """Open and wait for the first token (or an error)."""
        self.send(opens=[request])
        return self.result(request.session, TargetResultKind.FIRST, TargetResultKind.ERROR)

    def generate(
        self,
        request: TargetOpen,
        trees: Callable[[list[int], int], DraftTree] = lambda text, depth: EMPTY_TREE,
    ) -> Generated:
        """Run a request to its end. trees(text, max_depth) proposes below the anchor text[-1]."""
        first = self.open(request)
        if first.error is not None:
            raise first.error
        text = [*request.tokens, *first.tokens]
        out = Generated(list(first.tokens), first.finish_reason, first.cached_tokens)
        kv_length = first.kv_length
        while not out.finish_reason:
            left = request.stop.max_tokens - (len(text) - request.prompt_length)
            depth = max(min(left - 1, self.engine.info().max_length - len(text) - 1), 0)
            tree = trees(text, depth)
            (result,) = self.verify([Verify(request.session, kv_length, tree)]).results
            if result.error is not None:
                raise result.error
            assert result.kind is TargetResultKind.VERIFIED
            assert result.base == kv_length
            assert result.kv_length == kv_length + len(result.accepted) + 1
            kv_length = result.kv_length
            text += result.tokens
            out.tokens += result.tokens
            out.accepted += len(result.accepted)
            out.rounds += 1
            out.finish_reason = result.finish_reason
        self.send(releases=[request.session])
        self.result(request.session, TargetResultKind.RELEASED)
        return out


@dataclass
class Generated:
    tokens: list[int]
    finish_reason: FinishReason
    cached_tokens: int
    accepted: int = 0
    rounds: int = 0


def open_request(
    number: int,
    tokens: Sequence[int],
    *,
    max_tokens: int = 20,
    incarnation: int = 0,
    sampling: SamplingParams | None = None,
    stop: StopParams | None = None,
    **kwargs: Any,
) -> TargetOpen:
    return TargetOpen(
        session=SessionKey(GATEWAY, number, incarnation),
        tokens=tuple(tokens),
        prompt_length=kwargs.pop("prompt_length", len(tokens)),
        sampling=sampling or SamplingParams(),
        stop=stop or StopParams(max_tokens),
        **kwargs,
    )


SAMPLED = SamplingParams(temperature=0.8, top_k=8, top_p=0.95, min_p=0.02, seed=1234)
PROMPT = [random.Random(0).randrange(12) for _ in range(37)]

Start = Callable[..., tuple[ToyRunner, Engine, Client]]
"""Type of the `start` fixture: limits, eos and Engine's keywords in; runner, started engine and a stream out.
"""


def expected(runner: ToyRunner, tokens: Sequence[int], **kwargs: Any) -> tuple[list[int], FinishReason]:
    """The toy model's own text after `tokens`; greedy and 20 tokens unless told otherwise."""
    kwargs.setdefault("sampling", SamplingParams())
    kwargs.setdefault("stop", StopParams(20))
    return reference(runner.logits_after, tokens, **kwargs)


def oracle(prompt: list[int], output: list[int], depth: int = 7) -> Callable[[list[int], int], DraftTree]:
    """Proposes what will come."""
    return lambda text, limit: chain_tree(output[len(text) - len(prompt) :][: min(depth, limit)])
