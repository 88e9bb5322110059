"""Questions asked ahead: what the next round will want of the draft, sent while this one is verified.

The draft answers when the round's rows have reached it, so that a tree is one message away, not a question
and an answer. Owns what is asked ahead, which of the answers are for the round that then comes, and asking
again for rows that stay away. Does not own what a round may ask for (budget) nor judging what comes
(drafting).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from gateway.budget import depth_limit
from gateway.link import DraftLink, Exchange
from gateway.session import Session
from specbridge.rounds import DraftResult, DraftResultKind, DraftTimings, Propose, SessionKey

DraftExchange = Exchange[DraftResult, DraftTimings]

PATIENCE = 0.5
"""Part of `draft_timeout` after which the draft is asked again in the ordinary way, which it answers even if
rows have been lost. If it was just slow, it answers from what it has made.
"""


class Asked(Protocol):
    """One session's part of a round. asked: nodes that the draft was asked for in it."""

    @property
    def session(self) -> Session: ...
    @property
    def key(self) -> SessionKey: ...
    @property
    def base(self) -> int: ...
    @property
    def asked(self) -> int: ...
    @property
    def defer_rows(self) -> bool: ...


@dataclass(slots=True)
class Answers:
    """Results by session; why those that lack do, and what the draft took."""

    results: dict[SessionKey, DraftResult]
    failure: str = ""
    timings: DraftTimings | None = None
    unanswered: DraftExchange | None = None


class Ahead:
    """One per scheduler. What was asked ahead is good for the round that follows, and forgotten then."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        self._exchange: DraftExchange | None = None
        self._bases: dict[SessionKey, int] = {}

    def ask(self, entries: Sequence[Asked], *, block_size: int, max_length: int) -> None:
        """Ask ahead for the sessions that were drafted for in the round that is being verified."""
        self._forget()
        info = self._link.info
        if not self._link.up or info is None or not info.on_arrival:
            return
        proposes = []
        for entry in entries:
            session = entry.session
            if not entry.asked or entry.defer_rows or not session.has_context:
                continue
            # The round commits a token at least; a deeper tree than can then be used is cut.
            depth = depth_limit(
                block_size=block_size,
                remaining=session.remaining - 1,
                max_length=max_length,
                num_tokens=len(session.tokens) + 1,
            )
            if depth:
                proposes.append(Propose(entry.key, entry.base, 0, entry.asked, depth, on_arrival=True))
        if proposes:
            self._exchange = self._link.send(tuple(proposes), [p.session for p in proposes])
            self._bases = {p.session: p.base for p in proposes}

    def covers(self, key: SessionKey, base: int) -> bool:
        """Whether a tree for `base` will come without being asked for."""
        if self._exchange is None or self._exchange.failure:
            return False
        asked = self._bases.get(key)
        return asked is not None and asked < base  # one that has not moved has no rows on their way

    async def gather(
        self, proposes: Sequence[Propose], timeout_s: float, *, meanwhile: Callable[[], None]
    ) -> Answers:
        """The answers to `proposes` that come within `timeout_s`: those asked ahead as they come, the others
        by asking now; `meanwhile` is called when that has been sent.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        expected = [p for p in proposes if self.covers(p.session, p.base)]
        exchange, self._exchange = self._exchange, None
        keys = {p.session for p in expected}
        now = self._ask(p for p in proposes if p.session not in keys)
        meanwhile()
        answers = Answers({})
        if exchange is not None:
            exchange.missing &= keys
            if expected and (exchange.missing or exchange.failure):
                await self._link.wait(exchange, timeout_s * PATIENCE)
            self._link.forget(exchange)
            if expected:
                # A tree for another place would be one for rows that were not all there.
                exchange.results = {
                    p.session: exchange.results[p.session]
                    for p in expected
                    if p.session in exchange.results and _answers(exchange.results[p.session], p)
                }
                self._add(answers, exchange)
            late = self._ask(p for p in expected if p.session not in exchange.results)
            if late is not None:
                await self._wait(answers, late, max(0.0, deadline - clock()))
        if now is not None:
            await self._wait(answers, now, max(0.0, deadline - clock()))
        self._bases = {}
        return answers

    def _ask(self, proposes: Iterable[Propose]) -> DraftExchange | None:
        batch = tuple(proposes)
        return self._link.send(batch, [p.session for p in batch]) if batch else None

    async def _wait(self, answers: Answers, exchange: DraftExchange, timeout_s: float) -> None:
        complete = await self._link.wait(exchange, timeout_s)
        self._add(answers, exchange)
        if not complete and self._link.pending(exchange):
            answers.unanswered = exchange

    @staticmethod
    def _add(answers: Answers, exchange: DraftExchange) -> None:
        answers.results |= exchange.results
        answers.failure = answers.failure or exchange.failure
        answers.timings = _sum(answers.timings, exchange.timings)

    def _forget(self) -> None:
        if self._exchange is not None:
            self._link.forget(self._exchange)
            self._exchange = None
        self._bases = {}


def _answers(result: DraftResult, propose: Propose) -> bool:
    proposed = result.kind is DraftResultKind.PROPOSED
    return not proposed or (result.base, result.anchor) == (propose.base, propose.anchor)


def _sum(one: DraftTimings | None, two: DraftTimings | None) -> DraftTimings | None:
    """Passes of one thread: their times add up."""
    if one is None or two is None:
        return one or two
    return DraftTimings(*(getattr(one, f.name) + getattr(two, f.name) for f in fields(DraftTimings)))
