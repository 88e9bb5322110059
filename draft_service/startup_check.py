"""The start-up self-check: one fixed greedy text, drafted and verified through the whole stack.

The service acts as a gateway of its own: it opens a session here and at the target, goes through a few rounds
and compares. What comes out is an acceptance length; too low a one means that the checkpoint is read wrongly,
and the block's readings that can be tried on the rows at hand are tried, to name the likely cause.

Owns the text, the rounds and the report. Does not own the judgement (selfcheck), the calls (clients) nor when
to check (link). It gives way: any session of a real gateway ends it at once, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from draft_service.drafter import Reading
from draft_service.drafter_config import DrafterConfig
from draft_service.engine import Engine
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Place
from draft_service.selfcheck import SET_CONVENTION, Evidence, accepted
from specbridge.errors import NotReady, SpecBridgeError, Unavailable
from specbridge.rounds import (
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    Propose,
    SamplingParams,
    SessionKey,
    StopParams,
    TargetInfo,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    Verify,
)
from specbridge.tree import DraftTree

log = logging.getLogger(__name__)

TEXT = "The quick brown fox jumps over the lazy dog. " * 3 + "The quick"
"""Goes on in one way with any language model, and never with a token it has just had: a drafter that is off
by one position does not fit by chance.
"""
MAX_PROMPT = 64
"""Tokens of TEXT that are used: tokenizers without merges make many."""
OUTPUT_TOKENS = 24
TREE_NODES = 8
LIMIT_S = 30.0
"""A check that takes longer is given up: the machine is too busy for it to mean anything."""
NOT_READY_PAUSE_S = 0.05
TRAFFIC_POLL_S = 0.02
RELEASE_S = 1.0
CLEARLY_BETTER = 0.5
"""Tokens a round by which the other block convention must win to be taken for the right one."""
MAX_MASK_CANDIDATES = 24


class Outcome(Enum):
    """How a check ended; the metric's label."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    ERROR = "error"

    @property
    def settled(self) -> bool:
        """Whether another try would say nothing new."""
        return self in (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED)


class Rounds(Protocol):
    """A stream to the target (clients.TargetRounds)."""

    async def send(self, request: TargetRequest) -> None: ...
    async def receive(self) -> TargetReply: ...


Dial = Callable[[], AbstractAsyncContextManager[Rounds]]


@dataclass(frozen=True, slots=True)
class CheckText:
    """tokens: ids of TEXT. masks: ids that could be the mask token, the likelier first."""

    tokens: tuple[int, ...]
    masks: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path, vocab_size: int) -> CheckText | None:
        """By the tokenizer.json of the target's folder; None without one that fits the vocabulary."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library's own, unspecific; the gateway needs the file, this does not
            log.warning("%s does not load: %s", path, error)
            return None
        tokens = tuple(tokenizer.encode(TEXT).ids)[:MAX_PROMPT]
        if not tokens or max(tokens) >= vocab_size:
            return None
        added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        # Published drafters use a mask token by name, a reserved one, or the first row without a token.
        named = [index for index, content in added.items() if "mask" in content.casefold()]
        masks = dict.fromkeys([*named, tokenizer.get_vocab_size(with_added_tokens=True), *added])
        return cls(tokens, tuple(i for i in masks if i < vocab_size)[:MAX_MASK_CANDIDATES])


@dataclass(frozen=True, slots=True)
class _Round:
    """A tree proposed at a place, and what the target committed there."""

    place: Place
    tree: DraftTree
    committed: tuple[int, ...]


class StartupCheck:
    """See the module. `run` it on the event loop, one at a time."""

    def __init__(
        self,
        engine: Engine,
        config: DrafterConfig,
        text: CheckText | None,
        *,
        threshold: float,
        metrics: DraftMetrics,
    ) -> None:
        self._engine = engine
        self._config = config
        self._text = text
        self._threshold = threshold
        self._metrics = metrics
        self._numbers = itertools.count(1)

    async def run(self, dial: Dial, target: TargetInfo) -> Outcome:
        """One check against the target that `dial` connects to. Raises nothing but CancelledError."""
        outcome = await self._run(dial, target)
        self._metrics.selfchecks.labels(outcome.value).inc()
        return outcome

    async def _run(self, dial: Dial, target: TargetInfo) -> Outcome:
        text = self._text
        room = (
            min(target.max_length, self._engine.limits.max_length) - OUTPUT_TOKENS - self._config.horizon - 1
        )
        nodes = min(TREE_NODES, target.max_tree_nodes, self._engine.limits.max_nodes)
        if text is None or room < len(text.tokens) or not nodes:
            log.info("self-check skipped: no tokenizer.json beside the target, or its length is too small")
            return Outcome.SKIPPED
        if self._engine.traffic:
            return Outcome.INTERRUPTED
        work = asyncio.create_task(self._check(dial, text, nodes))
        watch = asyncio.create_task(self._until_traffic())
        try:
            await asyncio.wait({work, watch}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if watch.done():
                log.debug("self-check gives way to traffic")
                return Outcome.INTERRUPTED
            log.info("self-check given up after %.0f s", LIMIT_S)
            return Outcome.ERROR
        except SpecBridgeError as error:
            log.info("self-check given up: %s", error)
            return Outcome.ERROR
        except Exception:
            log.exception("unexpected error in the self-check")
            return Outcome.ERROR
        finally:
            watch.cancel()
            work.cancel()
            # It still releases its sessions.
            await asyncio.wait({work}, timeout=2 * RELEASE_S)
            if work.done() and not work.cancelled():
                work.exception()  # seen already, or of no interest any more

    async def _until_traffic(self) -> None:
        while not self._engine.traffic:
            await asyncio.sleep(TRAFFIC_POLL_S)

    async def _check(self, dial: Dial, text: CheckText, nodes: int) -> Outcome:
        key = SessionKey(self._engine.own_gateway, next(self._numbers))
        draft = _Draft(self._engine)
        try:
            async with dial() as stream:
                rounds = await self._speak(key, draft, stream, text.tokens, nodes)
            return await self._report(key, rounds, text, nodes)
        finally:
            draft.release(key)

    async def _speak(
        self, key: SessionKey, draft: _Draft, stream: Rounds, prompt: tuple[int, ...], nodes: int
    ) -> list[_Round]:
        """The text, round by round, as a gateway has it made. Raises what a session can meet."""
        # No prefix of anybody's may stand in for rows that are to be tested.
        salt = secrets.token_bytes(16)
        horizon = self._config.horizon
        sampling = SamplingParams()
        opened = await draft.ask(
            DraftRequest(opens=(DraftOpen(key, prompt, len(prompt), sampling, cache_salt=salt),))
        )
        stop = StopParams(OUTPUT_TOKENS + horizon + 1, ignore_eos=True)
        item = TargetOpen(
            key, prompt, len(prompt), sampling, stop, draft_prefix=opened.draft_prefix, cache_salt=salt
        )
        rounds: list[_Round] = []
        try:
            await stream.send(TargetRequest(1, opens=(item,)))
            result = await _answer(stream, key, TargetResultKind.FIRST)
            produced = 1
            while produced < OUTPUT_TOKENS and not result.finish_reason:
                place = Place(result.kv_length, result.tokens[-1])
                tree = await draft.propose(Propose(key, place.base, place.anchor, nodes, horizon))
                await stream.send(TargetRequest(1 + produced, verifies=(Verify(key, place.base, tree),)))
                result = await _answer(stream, key, TargetResultKind.VERIFIED)
                rounds.append(_Round(place, tree, result.tokens))
                produced += len(result.tokens)
        finally:
            with suppress(SpecBridgeError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await stream.send(TargetRequest(releases=(key,)))
                    await _answer(stream, key, TargetResultKind.RELEASED)
        return rounds

    async def _report(self, key: SessionKey, rounds: list[_Round], text: CheckText, nodes: int) -> Outcome:
        evidence = Evidence(mask_token_id=self._config.mask_token_id)
        said = [token for item in rounds for token in item.committed]
        at = 0
        follows = []
        for item in rounds:
            follows.append(tuple(said[at : at + self._config.horizon + 2]))
            at += len(item.committed)
            if item.tree.tokens:
                evidence.note(item.tree, follows[-1], len(item.committed))
        mean = evidence.mean
        if math.isnan(mean):
            log.info("self-check given up: the text ended before its first round")
            return Outcome.ERROR
        replay = _Replay(self._engine, key, [item.place for item in rounds], follows, nodes)
        cause = await self._better_convention(replay, mean)
        failed = mean < self._threshold or bool(cause)
        self._metrics.selfcheck_acceptance.set(mean)
        self._metrics.selfcheck_failed.set(int(failed))
        if not failed:
            log.info("self-check: acceptance length %.2f over %d rounds", mean, evidence.rounds)
            return Outcome.PASSED
        log.warning(
            "self-check: the drafter's acceptance length is %.2f over %d rounds (at least %.2f expected); "
            "output is right but not as fast as it could be. Likely cause: %s",
            mean, evidence.rounds, self._threshold,
            cause or await self._better_mask(replay, text) or evidence.cause(),
        )  # fmt: skip
        return Outcome.FAILED

    async def _better_convention(self, replay: _Replay, mean: float) -> str:
        """A sentence if the other block convention fits the text clearly better; else empty."""
        first_row = 1 - self._config.first_row
        other = await replay.mean(Reading(first_row, self._config.mask_token_id))
        if other < max(self._threshold, mean + CLEARLY_BETTER):
            return ""
        advice = SET_CONVENTION.format("true" if first_row == 0 else "false")
        return f"block convention: read the other way, the same rows give {other:.2f}: {advice}"

    async def _better_mask(self, replay: _Replay, text: CheckText) -> str:
        """A sentence if another mask token makes the drafter pass; else empty."""
        own, best, found = self._config.mask_token_id, self._threshold, -1
        for mask in text.masks:
            if mask != own:
                mean = await replay.mean(Reading(self._config.first_row, mask))
                if mean >= best:
                    best, found = mean, mask
        if found < 0:
            return ""
        return f"mask_token_id: {own} is configured, with {found} the same rows give {best:.2f}"


@dataclass(frozen=True, slots=True)
class _Replay:
    """The check's rounds once more, under other readings of the block. follows: the text after each place."""

    engine: Engine
    key: SessionKey
    places: list[Place]
    follows: list[tuple[int, ...]]
    nodes: int

    async def mean(self, reading: Reading) -> float:
        """Mean acceptance length."""
        future = self.engine.replay(self.key, self.places, reading=reading, max_nodes=self.nodes)
        trees = await asyncio.wrap_future(future)
        lengths = [accepted(tree, said).length for tree, said in zip(trees, self.follows, strict=True)]
        return sum(lengths) / len(lengths)


class _Draft:
    """The service's own engine, asked as a gateway asks it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[DraftReply] = asyncio.Queue()

    async def ask(self, request: DraftRequest) -> DraftResult:
        """The result of a request with one item. Raises its error."""
        self._engine.submit(request, self._put, stream=self)
        result = (await self._replies.get()).results[0]
        if result.error is not None:
            raise result.error
        return result

    async def propose(self, propose: Propose) -> DraftTree:
        """A tree; waits while the rows are on their way."""
        while True:
            try:
                return (await self.ask(DraftRequest(proposes=(propose,)))).tree
            except NotReady:
                await asyncio.sleep(NOT_READY_PAUSE_S)

    def release(self, key: SessionKey) -> None:
        self._engine.submit(DraftRequest(releases=(key,)), lambda reply: None, stream=self)

    def _put(self, reply: DraftReply) -> None:
        self._loop.call_soon_threadsafe(self._replies.put_nowait, reply)


async def _answer(stream: Rounds, key: SessionKey, kind: TargetResultKind) -> TargetResult:
    """The next result of `kind`. Raises the error that comes instead of it."""
    while True:
        for result in (await stream.receive()).results:
            if result.session != key:
                continue
            if result.kind is kind:
                return result
            if result.error is not None:
                raise result.error
            if result.kind is TargetResultKind.PREEMPTED:
                raise Unavailable("the target had no room for it")
