"""What a client may wish for: one request's parameters, whichever surface they came by, and their limits.

Owns the checks of what the scheduler never sees (stop strings), or sees under another name than the client's.
Does not own those of what it passes on: admission's, and the ranges of specbridge.rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from specbridge.errors import InvalidRequest
from specbridge.rounds import TargetInfo, check_token_ids

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output don't fit the model's length."""


def tenant_of(authorization: str | bytes) -> str:
    """Whom a request is for: a name for the key in its Authorization header, "" without one.

    Not the key itself, which has no business in logs.
    """
    given = authorization.encode() if isinstance(authorization, str) else authorization
    return hashlib.blake2b(given.strip(), digest_size=8).hexdigest() if given.strip() else ""


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """A client's wishes; None where it left the field out. `top_k` 0 or -1: off."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    speculate: bool = True
    max_tree_nodes: int | None = None
    cache_salt: bytes = b""
    deadline_s: float | None = None
    priority: int = 0
    tenant: str = ""
    request_id: str = "-"
    max_tokens_name: str = "max_tokens"
    """The field's name in the client's request, for messages."""


def resolve_max_tokens(
    prompt: Sequence[int], params: CompletionParams, info: TargetInfo, *, prompt_name: str
) -> int:
    """Check a request against the model's limits; returns the most tokens it may give.

    prompt_name: the field the prompt came from. Raises InvalidRequest naming the field at fault.
    """
    if not prompt:
        raise InvalidRequest(f"{prompt_name} is empty; it must give at least one token", param=prompt_name)
    check_token_ids(prompt, info.vocab_size, name=prompt_name)
    left = info.max_length - len(prompt)
    if left < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; with at least one token of output it must fit the "
            f"model's length of {info.max_length} tokens; shorten it",
            param=prompt_name,
        )
    name = params.max_tokens_name
    max_tokens = left if params.max_tokens is None else params.max_tokens
    if max_tokens < 1:
        raise InvalidRequest(f"{name} is {max_tokens}; it must be at least 1", param=name)
    if max_tokens > left:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and {name} is {max_tokens}: together "
            f"{len(prompt) + max_tokens}, more than the model's length of {info.max_length} tokens; "
            f"lower {name} to {left} or shorten the prompt",
            param=name,
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise InvalidRequest(f"seed is {params.seed}; it must fit 64 bits", param="seed")
    _check_stops(params.stop)
    return max_tokens


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
        )
    for stop in stops:
        if not stop:
            raise InvalidRequest("stop holds an empty string; leave it out", param="stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop holds a string of {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed",
                param="stop",
            )
