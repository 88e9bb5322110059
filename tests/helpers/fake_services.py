"""Target and draft services as scripted in-process objects with the real semantics of the contract.

The "model" is a hash of the whole prefix and the seed, so that any lost, repeated or reordered token changes
everything after it. The draft follows the target through a fake hidden-state channel, refuses bases it has
not caught up with, and forgets everything when it dies. Both can be killed, restarted, cut off, slowed down
and told to answer with any error.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbridge.errors import CapacityError, NotReady, SpecBridgeError, Stale, Unavailable
from specbridge.rounds import (
    DraftInfo,
    DraftOpen,
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    DraftTimings,
    FinishReason,
    Propose,
    SessionKey,
    StopParams,
    TargetInfo,
    TargetOpen,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    TargetTimings,
    Verify,
)
from specbridge.tree import EMPTY_TREE, DraftTree

VOCAB = 97
EOS = 0
MAX_LENGTH = 512


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The one right token after `tokens`; about one in 80 is the end."""
    digest = hashlib.blake2b(repr((tuple(tokens), seed)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    return EOS if value % 80 == 0 else 1 + value // 80 % (VOCAB - 1)


@dataclass(frozen=True)
class Text:
    tokens: tuple[int, ...]
    finish_reason: FinishReason


def plain(prompt: Sequence[int], stop: StopParams, seed: int, *, max_length: int = MAX_LENGTH) -> Text:
    """What plain decoding gives: the oracle of all tests."""
    tokens = list(prompt)
    while True:
        reason = _ends(tokens, len(prompt), stop, max_length)
        if reason is not FinishReason.RUNNING and len(tokens) > len(prompt):
            return Text(tuple(tokens[len(prompt) :]), reason)
        tokens.append(next_token(tokens, seed))


def _ends(tokens: Sequence[int], prompt_length: int, stop: StopParams, max_length: int) -> FinishReason:
    count = len(tokens) - prompt_length
    last = tokens[-1]
    if count >= max(1, stop.min_tokens) and (
        (last == EOS and not stop.ignore_eos) or last in stop.stop_token_ids
    ):
        return FinishReason.STOP
    if count >= stop.max_tokens or len(tokens) >= max_length:
        return FinishReason.LENGTH
    return FinishReason.RUNNING


class _Service:
    """What both fakes share: one listener, sending it things later, dying and coming back."""

    def __init__(self, *, delay: float = 0.0) -> None:
        self.delay = delay
        self.alive = True
        self.instance = secrets.token_bytes(16)
        self.connected = False
        self.opens: list[SessionKey] = []
        self.releases: Counter[int] = Counter()
        self.resets: list[str] = []
        self.hang = False
        self._listener: Any = None
        self._epoch = 0
        self._due = 0.0
        self._under_way = 0

    # Client side -----------------------------------------------------------------------------

    def start(self, listener: Any) -> None:
        self._listener = listener
        asyncio.get_running_loop().call_soon(self._connect)

    def _connect(self) -> None:
        if self.alive and not self.connected and self._listener is not None:
            self.connected = True
            self._listener.on_connected(self.make_info())

    def make_info(self) -> Any:
        raise NotImplementedError

    async def info(self, timeout_s: float) -> Any:
        if not self.alive:
            raise Unavailable("down")
        return self.make_info()

    def send(self, request: Any) -> None:
        if not self.connected:
            raise Unavailable("not connected")
        loop = asyncio.get_running_loop()
        if self.delay or self._under_way:
            # A stream keeps its order, also when the delay has just been lowered.
            self._due = max(self._due + 1e-6, loop.time() + self.delay)
            loop.call_at(self._due, self._take, request, self._epoch)
        else:
            loop.call_soon(self._take, request, self._epoch)
        self._under_way += 1

    def _take(self, request: Any, epoch: int) -> None:
        self._under_way -= 1
        self._handle(request, epoch)

    def reset(self, reason: str) -> None:
        self.resets.append(reason)
        self.break_stream()

    async def close(self) -> None:
        # A real stream drains before it closes.
        await asyncio.sleep(self.delay + 0.01)
        self._listener = None
        self.connected = False

    # Fault injection -------------------------------------------------------------------------

    def break_stream(self, *, back_after: float = 0.005) -> None:
        """The stream breaks; the process and its sessions live on."""
        self._epoch += 1
        if self.connected:
            self.connected = False
            self._listener.on_disconnected("broken by the test")
        asyncio.get_running_loop().call_later(back_after, self._connect)

    def kill(self) -> None:
        self.alive = False
        self._epoch += 1
        self.forget()
        if self.connected:
            self.connected = False
            if self._listener is not None:
                self._listener.on_disconnected("killed by the test")

    def restart(self) -> None:
        if self.alive:
            self.kill()
        self.alive = True
        self.instance = secrets.token_bytes(16)
        self._connect()

    def forget(self) -> None:
        raise NotImplementedError

    def _handle(self, request: Any, epoch: int) -> None:
        raise NotImplementedError

    def _reply(self, reply: Any, epoch: int) -> None:
        if self._listener is not None and epoch == self._epoch and not self.hang:
            self._listener.on_reply(reply)


@dataclass
class _TargetSession:
    key: SessionKey
    tokens: list[int]
    prompt_length: int
    stop: StopParams
    seed: int
    speculate: bool
    ready: bool = False
    published: int = 0

    @property
    def base(self) -> int:
        return len(self.tokens) - 1


class FakeTarget(_Service):
    """A target. `script(verify)` may return an error (or PREEMPTED) instead of running a verify."""

    def __init__(
        self,
        *,
        delay: float = 0.0,
        prefill_delay: float = 0.0,
        max_sessions: int = 64,
        max_length: int = MAX_LENGTH,
        max_tree_nodes: int = 64,
        token: Callable[[Sequence[int], int], int] = next_token,
    ) -> None:
        super().__init__(delay=delay)
        self.prefill_delay = prefill_delay
        self.max_sessions = max_sessions
        self.max_length = max_length
        self.max_tree_nodes = max_tree_nodes
        self.token = token
        self.has_context = True
        self.fingerprint = "fake-target"
        self.sessions: dict[tuple[bytes, int], _TargetSession] = {}
        self.draft: FakeDraft | None = None
        self.script: Callable[[Verify], SpecBridgeError | str | None] = lambda _verify: None
        self.open_script: Callable[[TargetOpen], SpecBridgeError | None] = lambda _open: None
        self.in_flight = 0
        self.most_in_flight = 0
        self.verified: list[Verify] = []
        self.verified_nodes: list[int] = []
        self.most_rows = 0
        self.opened: list[TargetOpen] = []

    def make_info(self) -> TargetInfo:
        return TargetInfo(
            model_id="fake", fingerprint=self.fingerprint, vocab_size=VOCAB, eos_token_ids=(EOS,),
            hidden_size=8, num_layers=2, page_size=16, max_length=self.max_length, tp_size=1,
            max_sessions=self.max_sessions,
            max_tree_nodes=self.max_tree_nodes, total_pages=1000, dtype="float32", device="cpu",
            instance=self.instance,
        )  # fmt: skip

    def forget(self) -> None:
        self.sessions.clear()
        self.in_flight = 0

    def send(self, request: TargetRequest) -> None:
        super().send(request)
        if request.verifies:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _handle(self, request: TargetRequest, epoch: int) -> None:
        if not self.alive or epoch != self._epoch:
            return
        for key in request.releases:
            self.releases[key.number] += 1
            session = self.sessions.get((key.gateway, key.number))
            if session is not None and session.key.incarnation <= key.incarnation:
                del self.sessions[key.gateway, key.number]
            released = TargetResult(key, TargetResultKind.RELEASED)
            self._reply(TargetReply(request.batch_id, (released,)), epoch)
        for item in request.opens:
            self._open(item, request.batch_id, epoch)
        if request.verifies:
            if self.hang:
                return
            self.in_flight -= 1
            results = tuple(self._verify(v) for v in request.verifies)
            rows = sum(len(v.tree) + 1 for v in request.verifies)
            self.most_rows = max(self.most_rows, rows)
            timings = TargetTimings(rows=rows, service_ns=int(self.delay * 1e9) + 1)
            self._reply(TargetReply(request.batch_id, results, timings), epoch)

    def _open(self, item: TargetOpen, batch_id: int, epoch: int) -> None:
        self.opens.append(item.session)
        self.opened.append(item)
        place = (item.session.gateway, item.session.number)
        old = self.sessions.get(place)
        error = self.open_script(item)
        if error is None and old is not None and old.key.incarnation >= item.session.incarnation:
            error = Stale("an older incarnation")
        if error is None and old is None and len(self.sessions) >= self.max_sessions:
            error = CapacityError("too many sessions")
        if error is not None:
            self._reply(
                TargetReply(0, (TargetResult(item.session, TargetResultKind.ERROR, error=error),)), epoch
            )
            return
        session = _TargetSession(
            item.session, list(item.tokens), item.prompt_length, item.stop, item.sampling.seed, item.speculate
        )
        self.sessions[place] = session
        self._reply(TargetReply(batch_id, (TargetResult(item.session, TargetResultKind.OPENED),)), epoch)
        loop = asyncio.get_running_loop()
        loop.call_later(
            self.prefill_delay, self._first, session, min(item.draft_prefix, len(item.tokens)), epoch
        )

    def _first(self, session: _TargetSession, draft_prefix: int, epoch: int) -> None:
        key = session.key
        if self.sessions.get((key.gateway, key.number)) is not session or not self.alive:
            return
        rows = len(session.tokens)
        session.tokens.append(self.token(session.tokens, session.seed))
        session.ready = True
        self._publish(session, 0, rows)
        reason = _ends(session.tokens, session.prompt_length, session.stop, self.max_length)
        result = TargetResult(
            key, TargetResultKind.FIRST, kv_length=rows, tokens=(session.tokens[-1],), finish_reason=reason,
            cached_tokens=draft_prefix // 16 * 16 if draft_prefix < rows else 0,
        )  # fmt: skip
        self._reply(TargetReply(0, (result,)), epoch)

    def _publish(self, session: _TargetSession, first: int, count: int) -> None:
        session.published = first + count
        if self.draft is not None and session.speculate:
            rows, anchor = session.tokens[first : first + count], session.tokens[first + count]
            self.draft.rows(session.key, first, rows, anchor)

    def recapture(self, key: SessionKey) -> list[int] | None:
        """Committed tokens of a session for a draft that lacks them."""
        session = self.sessions.get((key.gateway, key.number))
        return None if session is None or session.key != key or not session.ready else session.tokens[:-1]

    def _verify(self, item: Verify) -> TargetResult:
        key = item.session
        session = self.sessions.get((key.gateway, key.number))
        answer = self.script(item)
        if answer == "preempt" and session is not None:
            del self.sessions[key.gateway, key.number]
            return TargetResult(key, TargetResultKind.PREEMPTED)
        if isinstance(answer, SpecBridgeError):
            if not isinstance(answer, NotReady):
                self.sessions.pop((key.gateway, key.number), None)
            return TargetResult(key, TargetResultKind.ERROR, base=item.base, error=answer)
        if session is None or session.key != key or not session.ready or session.base != item.base:
            return TargetResult(
                key, TargetResultKind.ERROR, base=item.base, error=Stale("unknown session or base")
            )
        # The receiver validates: a gateway that lets a bad tree through fails the test loudly.
        limit = max(0, session.prompt_length + session.stop.max_tokens - len(session.tokens) - 1)
        item.tree.validate(vocab_size=VOCAB, max_nodes=self.max_tree_nodes, max_depth=limit)
        self.verified.append(item)
        self.verified_nodes.append(len(item.tree))
        return self._walk(session, item)

    def _walk(self, session: _TargetSession, item: Verify) -> TargetResult:
        base = item.base
        children = {
            (p, t): i for i, (p, t) in enumerate(zip(item.tree.parents, item.tree.tokens, strict=True))
        }
        accepted: list[int] = []
        tokens: list[int] = []
        node = -1
        reason = FinishReason.RUNNING
        while True:
            token = self.token(session.tokens, session.seed)
            session.tokens.append(token)
            tokens.append(token)
            child = children.get((node, token))
            if child is not None:
                accepted.append(child)
            reason = _ends(session.tokens, session.prompt_length, session.stop, self.max_length)
            if reason is not FinishReason.RUNNING or child is None:
                break
            node = child
        if not item.defer_rows:
            self._publish(session, session.published, len(session.tokens) - 1 - session.published)
        return TargetResult(
            item.session, TargetResultKind.VERIFIED, base=base, kv_length=base + len(accepted) + 1,
            tokens=tuple(tokens), accepted=tuple(accepted), finish_reason=reason,
            draft_has_context=self.has_context,
        )  # fmt: skip


Drafter = Callable[[list[int], int, int, int], DraftTree]
"""(tokens with the anchor last, seed, max_nodes, max_depth) -> tree."""


@dataclass
class _DraftSession:
    key: SessionKey
    seed: int
    context: list[int] = field(default_factory=list)
    anchor: int | None = None


class FakeDraft(_Service):
    """A draft. `drafter` grows the trees; `script(propose)` may return an error instead."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        delay: float = 0.0,
        block_size: int = 8,
        max_nodes: int = 64,
        on_arrival: bool = True,
    ) -> None:
        super().__init__(delay=delay)
        self.on_arrival = on_arrival
        self.ahead: dict[tuple[bytes, int], tuple[Propose, int, int]] = {}
        self.asked_ahead = 0
        self.answered_ahead = 0
        self.passes_ahead = 0
        self.drafter = drafter
        self.block_size = block_size
        self.max_nodes = max_nodes
        self.target: FakeTarget | None = None
        self.vocab_size = VOCAB
        self.target_fingerprint = ""
        self.channel_delay = 0.0
        self.sessions: dict[tuple[bytes, int], _DraftSession] = {}
        self.script: Callable[[Propose], SpecBridgeError | None] = lambda _propose: None
        self.open_script: Callable[[DraftOpen], SpecBridgeError | None] = lambda _open: None
        self.proposes = 0
        self.recaptures = 0
        self.in_flight = 0
        self.most_in_flight = 0

    def make_info(self) -> DraftInfo:
        return DraftInfo(
            drafter_id="fake", fingerprint="fake-draft", block_size=self.block_size, mask_token_id=1,
            target_layer_ids=(0,), max_nodes=self.max_nodes, vocab_size=self.vocab_size,
            instance=self.instance, target_fingerprint=self.target_fingerprint, attached=True,
            on_arrival=self.on_arrival,
        )  # fmt: skip

    def forget(self) -> None:
        self.sessions.clear()
        self.ahead.clear()
        self.in_flight = 0

    def rows(self, key: SessionKey, first: int, tokens: Sequence[int], anchor: int) -> None:
        """The channel: rows of committed tokens arrive, perhaps late."""
        arrives = self._rows, key, first, list(tokens), anchor
        if self.channel_delay:
            asyncio.get_running_loop().call_later(self.channel_delay, *arrives)
        else:
            self._rows(key, first, tokens, anchor)

    def _rows(self, key: SessionKey, first: int, tokens: Sequence[int], anchor: int | None = None) -> None:
        place = (key.gateway, key.number)
        session = self.sessions.get(place)
        if session is None or session.key != key or first > len(session.context):
            return
        session.context[first:] = tokens
        session.anchor = anchor
        self._arrived(place)

    def _arrived(self, place: tuple[bytes, int]) -> None:
        """Answer a question asked ahead once its rows are here, after the time that a pass takes."""
        session = self.sessions.get(place)
        question = self.ahead.get(place)
        if session is None or question is None or session.anchor is None:
            return
        propose, batch_id, epoch = question
        if len(session.context) <= propose.base or self.hang:
            return
        del self.ahead[place]
        self.passes_ahead += 1
        resolved = replace(propose, base=len(session.context), anchor=session.anchor)
        asyncio.get_running_loop().call_later(self.delay, self._answer_ahead, resolved, batch_id, epoch)

    @property
    def at_work(self) -> bool:
        return self.in_flight > 0 or self.passes_ahead > 0

    def _answer_ahead(self, propose: Propose, batch_id: int, epoch: int) -> None:
        self.passes_ahead -= 1
        if self.alive and epoch == self._epoch:
            self.answered_ahead += 1
            timings = DraftTimings(service_ns=int(self.delay * 1e9) + 1)
            self._reply(DraftReply(batch_id, (self._propose(propose),), timings), epoch)

    def send(self, request: DraftRequest) -> None:
        super().send(request)
        if any(not p.on_arrival for p in request.proposes):
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _handle(self, request: DraftRequest, epoch: int) -> None:
        if not self.alive or epoch != self._epoch:
            return
        for key in request.releases:
            self.releases[key.number] += 1
            session = self.sessions.get((key.gateway, key.number))
            if session is not None and session.key.incarnation <= key.incarnation:
                del self.sessions[key.gateway, key.number]
                self.ahead.pop((key.gateway, key.number), None)
            self._reply(DraftReply(request.batch_id, (DraftResult(key, DraftResultKind.RELEASED),)), epoch)
        for item in request.opens:
            self._open(item, request.batch_id, epoch)
        for item in request.proposes:
            place = (item.session.gateway, item.session.number)
            self.ahead.pop(place, None)
            if item.on_arrival:
                self.asked_ahead += 1
                self.ahead[place] = item, request.batch_id, epoch
                self._arrived(place)
        asked = [p for p in request.proposes if not p.on_arrival]
        if asked:
            if self.hang:
                return
            self.in_flight -= 1
            results = tuple(self._propose(p) for p in asked)
            timings = DraftTimings(service_ns=int(self.delay * 1e9) + 1)
            self._reply(DraftReply(request.batch_id, results, timings), epoch)

    def _open(self, item: DraftOpen, batch_id: int, epoch: int) -> None:
        self.opens.append(item.session)
        place = (item.session.gateway, item.session.number)
        error = self.open_script(item)
        old = self.sessions.get(place)
        if error is None and old is not None and old.key.incarnation > item.session.incarnation:
            error = Stale("an older incarnation")
        if error is not None:
            result = DraftResult(item.session, DraftResultKind.ERROR, error=error)
            self._reply(DraftReply(batch_id, (result,)), epoch)
            return
        session = _DraftSession(item.session, item.sampling.seed)
        self.sessions[place] = session
        if item.recapture:
            self.recaptures += 1
            asyncio.get_running_loop().call_later(0.002, self._recapture, session)
        self._reply(DraftReply(batch_id, (DraftResult(item.session, DraftResultKind.OPENED),)), epoch)

    def _recapture(self, session: _DraftSession) -> None:
        tokens = self.target.recapture(session.key) if self.target is not None else None
        if tokens is not None and self.alive:
            self._rows(session.key, 0, tokens)

    def _propose(self, item: Propose) -> DraftResult:
        self.proposes += 1
        key = item.session
        error = self.script(item)
        session = self.sessions.get((key.gateway, key.number))
        if error is None and (session is None or session.key != key or item.base < len(session.context)):
            error = Stale("unknown session or base")
        if error is None and session is not None and item.base > len(session.context):
            error = NotReady("the context is behind")
        if error is not None or session is None:
            return DraftResult(key, DraftResultKind.ERROR, base=item.base, error=error)
        tree = self.drafter([*session.context, item.anchor], session.seed, item.max_nodes, item.max_depth)
        return DraftResult(key, DraftResultKind.PROPOSED, base=item.base, tree=tree, anchor=item.anchor)


# ---- drafters -------------------------------------------------------------------------------


def oracle(tokens: list[int], seed: int, max_nodes: int, max_depth: int) -> DraftTree:
    """The target's own tokens as a chain: everything is accepted."""
    text = list(tokens)
    chain: list[int] = []
    for _ in range(min(max_nodes, max_depth)):
        chain.append(next_token(text, seed))
        text.append(chain[-1])
    return DraftTree(
        tuple(chain), tuple(range(-1, len(chain) - 1)), tuple(-0.1 * (i + 1) for i in range(len(chain)))
    )


def random_tree(
    tokens: list[int], seed: int, max_nodes: int, max_depth: int, *, truth: float = 0.6
) -> DraftTree:
    """A random tree that holds the right path to a random depth; deterministic in the prefix."""
    rng = random.Random(f"{tokens}{seed}")
    nodes: list[tuple[int, int]] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    for i in range(max_nodes):
        parent = rng.randrange(-1, i) if i else -1
        depth = 1 if parent < 0 else depths[parent] + 1
        path = tokens if parent < 0 else paths[parent]
        token = next_token(path, seed) if rng.random() < truth else rng.randrange(VOCAB)
        if depth > max_depth or (parent, token) in nodes:
            parent, depth, path = -1, 1, tokens
            token = rng.randrange(VOCAB)
            if max_depth < 1 or (parent, token) in nodes:
                break
        nodes.append((parent, token))
        depths.append(depth)
        paths.append([*path, token])
    return DraftTree(
        tuple(t for _, t in nodes),
        tuple(p for p, _ in nodes),
        tuple(-0.2 * (i + 1) for i in range(len(nodes))),
    )


def adversarial(tokens: list[int], seed: int, max_nodes: int, max_depth: int) -> DraftTree:
    """Misbehaves in turn: too deep, too large, malformed, wrong, siblings of the right token, empty."""
    kind = len(tokens) % 7
    right = next_token(tokens, seed)
    if kind == 0:
        return oracle(tokens, seed, max_nodes + 9, max_depth + 9)
    if kind == 1:
        return DraftTree((VOCAB + 5,), (-1,), (-0.1,))
    if kind == 2:
        return DraftTree((1, 2), (-1, 1), (-0.1, -0.2))
    if kind == 3:
        return DraftTree((right, right), (-1, -1), (-0.1, -0.2))
    if kind == 4:
        siblings = [(right + i) % VOCAB for i in range(1, max_nodes + 1)][: VOCAB - 1]
        return DraftTree(tuple(siblings), (-1,) * len(siblings), (-0.1,) * len(siblings))
    if kind == 5:
        return DraftTree((right, 5), (-1, 0), (-0.3, -0.1))
    return EMPTY_TREE


def linked(target: FakeTarget, draft: FakeDraft) -> None:
    """Join the two by the fake hidden-state channel."""
    target.draft = draft
    draft.target = target
