"""One request of the load: the body it sends, how its events are read, what is measured of it.

Owns the definitions of the times. Does not own transport (http.py), who sends when (loops.py) or what becomes
of many (figures.py). Of the server it asks no more than OpenAI's streaming with
`stream_options.include_usage`; what it reads beside (`metrics.speculative_decoding`, cached tokens) may be
missing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.http import BadReply, ConnectionLost, Hung, Reply, StreamClient
from benchmarks.load.work import Ask

RETRY_CAP_S = 60.0
"""Longest wait that a server's Retry-After is followed for."""
DEFAULT_RETRY_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What is known of one request. Times are time.perf_counter() seconds, 0 where they did not come.

    due: when it was to be sent (open loop: its arrival; closed: when its stream was free). first, last: the
    first and the last event that carried text. gaps: seconds between events with text. error: empty, or the
    kind of failure; message: what was said of it. refusals: 429 answers, retried ones included.
    """

    index: int
    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    usage: bool = False
    rounds: int = 0
    spec_steps: int = 0
    accepted: int = 0
    refusals: int = 0
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to the first event with text."""
        return self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: (last - first) / (tokens - 1); None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from when it was due to the end of the reply."""
        return self.ended - self.due


@dataclass(frozen=True, slots=True)
class Style:
    """How all requests of a run are put. extra: fields added to every body, winning over the others."""

    chat: bool = True
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, ask: Ask, model: str) -> bytes:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if ask.seed is not None:
            body["seed"] = ask.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps({**body, **self.extra}).encode()


class Reader:
    """Reads a request's events into its Outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.complete = False  # a finish reason or [DONE] was seen

    def __call__(self, data: bytes, now: float) -> None:
        """Raises BadReply for data that is no JSON object."""
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BadReply(f"an event is no JSON: {data[:100]!r}") from None
        if not isinstance(event, dict):
            raise BadReply(f"an event is no object: {data[:100]!r}")
        outcome = self._outcome
        if (error := event.get("error")) is not None:
            outcome.error, outcome.message = "error event", _said(error)
            return
        for choice in event.get("choices") or ():
            if _has_text(choice):
                if outcome.chunks:
                    outcome.gaps.append(now - outcome.last)
                else:
                    outcome.first = now
                outcome.last = now
                outcome.chunks += 1
            self.complete = self.complete or choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            outcome.usage = True
            outcome.prompt_tokens = usage.get("prompt_tokens") or 0
            outcome.completion_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or 0
        if stats := (event.get("metrics") or {}).get("speculative_decoding"):
            outcome.rounds = stats.get("num_rounds") or 0
            outcome.spec_steps = stats.get("num_spec_steps") or 0
            outcome.accepted = stats.get("num_accepted_draft_tokens") or 0


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _said(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:300]


async def perform(
    client: StreamClient,
    ask: Ask,
    style: Style,
    model: str,
    *,
    due: float,
    timeout_s: float,
    retries: int = 0,
) -> Outcome:
    """Send one request and read it to its end. What goes wrong is in the outcome; nothing is raised.

    timeout_s: seconds without an event after which it is given up. retries: how often a 429 is tried again,
    after its Retry-After; the wait counts as the request's own time.
    """
    body = style.body(ask, model)
    outcome = Outcome(ask.index, due, sent=time.perf_counter())
    while True:
        reader = Reader(outcome)
        try:
            reply = await client.post(style.path, body, reader, timeout_s=timeout_s)
        except ConnectionLost as error:
            outcome.error, outcome.message = "connection", str(error)
        except Hung as error:
            outcome.error, outcome.message = "timeout", str(error)
        except BadReply as error:
            outcome.error, outcome.message = "malformed", str(error)
        else:
            outcome.refusals += reply.status == 429
            if reply.status == 429 and retries > 0:
                retries -= 1
                await asyncio.sleep(_retry_after_s(reply))
                continue
            _judge(outcome, reader, reply)
        outcome.ended = time.perf_counter()
        return outcome


def _judge(outcome: Outcome, reader: Reader, reply: Reply) -> None:
    if reply.status != 200:
        outcome.error, outcome.message = f"HTTP {reply.status}", _error_text(reply.body)
    elif not reply.headers.get("content-type", "").startswith("text/event-stream"):
        outcome.error = "malformed"
        outcome.message = f"not an event stream but {reply.headers.get('content-type')!r}"
    elif outcome.error:
        pass  # an error event said it
    elif not reader.complete:
        outcome.error, outcome.message = "cut off", "the stream ended without finish_reason and [DONE]"
    elif not outcome.chunks:
        outcome.error, outcome.message = "no text", "a complete answer without text"
    elif not outcome.usage:
        outcome.completion_tokens = outcome.chunks  # the best there is; the report says so


def _error_text(body: bytes) -> str:
    try:
        parsed = json.loads(body)
        return _said(parsed.get("error", parsed))
    except (ValueError, AttributeError):
        return body[:300].decode("utf-8", "replace")


def _retry_after_s(reply: Reply) -> float:
    try:
        return min(RETRY_CAP_S, max(0.0, float(reply.headers["retry-after"])))
    except (KeyError, ValueError):
        return DEFAULT_RETRY_S
