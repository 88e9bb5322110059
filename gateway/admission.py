"""What a request must satisfy before it is queued.

Owns the checks against the target's limits; the queue itself is the scheduler's.
"""

from __future__ import annotations

from gateway.generation import GenerationRequest
from specbridge.errors import InvalidRequest
from specbridge.rounds import TargetInfo, check_token_ids


def check_request(request: GenerationRequest, info: TargetInfo) -> None:
    """Raises InvalidRequest (Unsupported) naming field, value and legal range."""
    tokens, stop = request.tokens, request.stop
    if not tokens:
        raise InvalidRequest("the prompt is empty; at least one token is needed", param="prompt")
    check_token_ids(tokens, info.vocab_size, name="prompt")
    prompt_length = len(tokens) if request.prompt_length is None else request.prompt_length
    if not 1 <= prompt_length <= len(tokens):
        raise InvalidRequest(
            f"prompt_length is {prompt_length}; it must be in [1, {len(tokens)}]", param="prompt_length"
        )
    stop.validate(vocab_size=info.vocab_size)
    if prompt_length + stop.max_tokens > info.max_length:
        raise InvalidRequest(
            f"prompt of {prompt_length} tokens + max_tokens {stop.max_tokens} is more than the model's "
            f"length of {info.max_length}",
            param="max_tokens",
        )
    pages = -(-(prompt_length + stop.max_tokens) // max(1, info.page_size))
    if 0 < info.total_pages < pages:
        # It would be preempted by itself for ever.
        raise InvalidRequest(
            f"prompt of {prompt_length} tokens + max_tokens {stop.max_tokens} need {pages} KV pages, the "
            f"target has {info.total_pages}; ask for less or start the target with more --kv-tokens",
            param="max_tokens",
        )
    if len(tokens) - prompt_length >= stop.max_tokens:
        raise InvalidRequest(
            f"{len(tokens) - prompt_length} output tokens are given already; max_tokens {stop.max_tokens} "
            "leaves none",
            param="max_tokens",
        )
    if request.max_tree_nodes is not None and request.max_tree_nodes < 0:
        raise InvalidRequest(
            f"max_tree_nodes is {request.max_tree_nodes}; it must be at least 0", param="max_tree_nodes"
        )
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise InvalidRequest(
            f"the deadline is {request.deadline_s} s; it must be positive", param="deadline_s"
        )
    request.sampling.validate()
