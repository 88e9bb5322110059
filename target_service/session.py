"""Session: the target's state for one request, and the checks of an open.

Owns the lengths. kv_length: rows whose K/V are in pages, which is the index of the anchor once the prefill is
done. tokens: prompt and output, the anchor last. Does not own pages (kv_cache) or capture (capture); it holds
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from specbridge.errors import InvalidRequest
from specbridge.paging import PagedSequence
from specbridge.rounds import MAX_STOP_TOKEN_IDS, SessionKey, TargetOpen, TargetReply
from target_service.capture import SessionCapture
from target_service.sampling import ChoiceRule

MAX_LOGPROBS = 21
"""The chosen token's log-probability and the 20 best others."""

Reply = Callable[[TargetReply], None]


class Phase(Enum):
    PREFILL = "prefill"
    READY = "ready"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Session:
    """One open session; the engine's thread mutates it.

    order counts opens: the highest is the youngest. lease_until: when to free it, set while its stream is
    broken. matched: index version and limit of the latest look-up of its prefix.
    """

    key: SessionKey
    tokens: list[int]
    prompt_length: int
    rule: ChoiceRule
    stop_ids: frozenset[int]
    max_tokens: int
    max_length: int
    table: PagedSequence
    capture: SessionCapture
    reply: Reply
    order: int
    salt: bytes = b""
    want_logprobs: int = 0
    kv_length: int = 0
    cached_tokens: int = 0
    phase: Phase = Phase.PREFILL
    lease_until: float | None = None
    matched: tuple[int, int] = (-1, -1)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens the request may still get."""
        return self.max_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def room(self) -> int:
        """Tokens that still fit the model's length."""
        return self.max_length - len(self.tokens)


def validate_open(request: TargetOpen, *, vocab_size: int, max_length: int) -> None:
    """Raises InvalidRequest (Unsupported for features not built) naming field, value and legal range."""
    count = len(request.tokens)
    stop = request.stop
    if count == 0:
        raise InvalidRequest("tokens is empty; a session needs at least one token", param="tokens")
    if count >= max_length:
        raise InvalidRequest(
            f"{count} tokens leave no room for output in the length of {max_length}; shorten the prompt",
            param="tokens",
        )
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"token id {wrong} is outside the vocabulary [0, {vocab_size}); check the tokenizer",
            param="tokens",
        )
    if not 1 <= request.prompt_length <= count:
        raise InvalidRequest(
            f"prompt_length is {request.prompt_length}; it must lie in [1, {count}], the tokens sent",
            param="prompt_length",
        )
    if stop.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {stop.max_tokens}; it must be at least 1", param="max_tokens")
    if count - request.prompt_length >= stop.max_tokens:
        raise InvalidRequest(
            f"{count - request.prompt_length} output tokens were sent and max_tokens is {stop.max_tokens}: "
            "nothing is left to generate",
            param="max_tokens",
        )
    if stop.min_tokens < 0 or stop.min_tokens > stop.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stop.min_tokens}; it must lie in [0, max_tokens = {stop.max_tokens}]",
            param="min_tokens",
        )
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{len(stop.stop_token_ids)} stop_token_ids were sent, at most {MAX_STOP_TOKEN_IDS} are accepted",
            param="stop_token_ids",
        )
    for token in stop.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop token id {token} is outside the vocabulary [0, {vocab_size})", param="stop_token_ids"
            )
    if not 0 <= request.draft_prefix <= count:
        raise InvalidRequest(
            f"draft_prefix is {request.draft_prefix}; it must lie in [0, {count}], the number of tokens sent",
            param="draft_prefix",
        )
    if not 0 <= request.want_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"want_logprobs is {request.want_logprobs}; it must lie in [0, {MAX_LOGPROBS}]",
            param="want_logprobs",
        )
    request.sampling.validate()
