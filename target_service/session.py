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
from specbridge.rounds import SessionKey, TargetOpen, TargetReply, check_token_ids
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

    order counts opens. born: when its request began (time.monotonic), earlier incarnations included.
    active_at: when its peer last asked something of it. started: it holds pages for its whole prompt.
    lease_until: when to free it, set while its stream is broken. matched: index version and limit of the
    latest look-up of its prefix.
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
    priority: int = 0
    born: float = 0.0
    active_at: float = 0.0
    salt: bytes = b""
    want_logprobs: int = 0
    kv_length: int = 0
    cached_tokens: int = 0
    started: bool = False
    phase: Phase = Phase.PREFILL
    lease_until: float | None = None
    matched: tuple[int, int] = (-1, -1)

    @property
    def place(self) -> tuple[int, float, int]:
        """Among sessions that want pages: the lowest is served first, the highest is preempted first."""
        return (self.priority, self.born, self.order)

    @property
    def waiting(self) -> bool:
        """A prompt without pages for all of it: what it may hold is a cached prefix."""
        return self.phase is Phase.PREFILL and not self.started

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
    request.session.validate()
    if count == 0:
        raise InvalidRequest("tokens is empty; a session needs at least one token", param="tokens")
    if count >= max_length:
        raise InvalidRequest(
            f"{count} tokens leave no room for output in the length of {max_length}; shorten the prompt",
            param="tokens",
        )
    check_token_ids(request.tokens, vocab_size, name="tokens")
    if not 1 <= request.prompt_length <= count:
        raise InvalidRequest(
            f"prompt_length is {request.prompt_length}; it must lie in [1, {count}], the tokens sent",
            param="prompt_length",
        )
    stop.validate(vocab_size=vocab_size)
    if count - request.prompt_length >= stop.max_tokens:
        raise InvalidRequest(
            f"{count - request.prompt_length} output tokens were sent and max_tokens is {stop.max_tokens}: "
            "nothing is left to generate",
            param="max_tokens",
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
