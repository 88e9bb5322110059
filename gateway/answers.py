"""What clients read back: OpenAI's error objects, response objects and stream events.

Owns their JSON. The hot path is one small json.dumps per event. Does not own what requests may say (openai)
nor when which event goes out (rest).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.completion import Summary
from gateway.generation import SpecStats
from gateway.openai import ModelNotFound, shortened
from gateway.params import ContextLengthExceeded
from specbridge import errors
from specbridge.errors import CapacityError, InvalidRequest, SpecBridgeError, Unavailable, Unsupported

# ---- errors ---------------------------------------------------------------------------------


def http_status(error: BaseException) -> int:
    return 404 if isinstance(error, ModelNotFound) else errors.mapping(error).http_status


def retry_after_s(error: SpecBridgeError) -> int | None:
    """Whole seconds for a Retry-After header; None where trying again is no help."""
    if isinstance(error, CapacityError):
        return max(1, round(error.retry_after or 1))
    return 1 if isinstance(error, Unavailable) else None


def error_object(error: BaseException) -> dict[str, Any]:
    """OpenAI's error JSON. What is not a typed error keeps its text to itself: it may hold anything."""
    mapping = errors.mapping(error)
    code: str | None = None
    if isinstance(error, ModelNotFound):
        code = "model_not_found"
    elif isinstance(error, ContextLengthExceeded):
        code = "context_length_exceeded"
    elif isinstance(error, Unsupported):
        code = "unsupported_parameter"
    elif mapping.http_status == 429:
        code = "rate_limit_exceeded"
    message = (
        str(error)
        if isinstance(error, SpecBridgeError)
        else "internal error; the gateway's log has the details"
    )
    return error_json(message, mapping.openai_type, param=getattr(error, "param", None), code=code)


def from_validation(failures: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """One error for what FastAPI found wrong with a body: the first field at fault and all said of it."""
    if not failures:
        return InvalidRequest("the request is not valid")
    first = failures[0]
    kind, message = first["type"], first["msg"]
    path = _field(first["loc"])
    name = path.split(".")[0].split("[")[0] or None
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first.get('ctx', {}).get('error', message)}")
    if name is None:
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    if kind == "extra_forbidden":
        return InvalidRequest(
            f"unknown field {path}; check its spelling (nothing is silently ignored)", param=name
        )
    if kind == "missing":
        return InvalidRequest(f"{path} is missing", param=name)
    said = dict.fromkeys(str(f["msg"]) for f in failures if _field(f["loc"]) == path)
    return InvalidRequest(f"{path} is {shortened(first.get('input'))}: {', or: '.join(said)}", param=name)


def _field(loc: Sequence[str | int]) -> str:
    """A field's path as a client would write it: messages[0].content. Union tags of pydantic are left out."""
    path = ""
    for part in loc[1:] if loc and loc[0] == "body" else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            path += f".{part}" if path else part
    return path


def error_json(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# ---- responses ------------------------------------------------------------------------------


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def usage_json(summary: Summary) -> dict[str, Any]:
    return {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": summary.cached_tokens},
    }


def speculation_json(stats: SpecStats) -> dict[str, Any]:
    """The de facto `metrics.speculative_decoding` object, and `num_rounds` for the plain rounds beside it."""
    value: dict[str, Any] = {
        "mean_acceptance_length": round(stats.mean_acceptance_length, 6),
        "draft_acceptance_rate": round(stats.draft_acceptance_rate, 6),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": stats.num_spec_tokens,
        "num_rounds": stats.num_rounds,
    }
    if stats.per_step_accepted:
        value["per_step_accepted"] = list(stats.per_step_accepted)
        value["per_step_drafted"] = list(stats.per_step_drafted)
    return value


def closing_json(summary: Summary) -> dict[str, Any]:
    """What only the end of a request can say, beside usage."""
    return {"seed": summary.seed, "metrics": {"speculative_decoding": speculation_json(summary.stats)}}


def meta_info_json(summary: Summary, request_id: str) -> dict[str, Any]:
    """SGLang's per-choice `meta_info`, read by DFlash's benchmark clients."""
    stats = summary.stats
    return {
        "id": request_id,
        "finish_reason": {"type": summary.finish_reason.openai},
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "cached_tokens": summary.cached_tokens,
        "spec_verify_ct": stats.num_spec_steps,
        "spec_accept_length": stats.mean_acceptance_length,
        "spec_accept_rate": stats.draft_acceptance_rate,
        "spec_accept_token_num": stats.num_accepted_draft_tokens,
        "spec_draft_token_num": stats.num_draft_tokens,
        "spec_accept_histogram": list(stats.acceptance_histogram),
    }


class Head:
    """The fields that open every object of one response, and its stream events.

    One event costs one json.dumps of its text: all else is prepared once per request.
    """

    def __init__(
        self,
        *,
        chat: bool,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        usage_field: bool = False,
    ) -> None:
        self._chat = chat
        self._fields = {"created": created, "model": model, "system_fingerprint": fingerprint}
        self._id = response_id
        kind = "chat.completion.chunk" if chat else "text_completion"
        opening = _dumps({"id": response_id, "object": kind, **self._fields})[:-1]
        # With include_usage every chunk but the last carries a null, as OpenAI's do.
        null_usage = ',"usage":null' if usage_field else ""
        self._opening = f"data: {opening}"
        self._closing = f"{null_usage}}}\n\n"
        text_name = '"delta":{"content":' if chat else '"text":'
        self._before = f'{self._opening},"choices":[{{"index":0,{text_name}'
        self._after = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null'

    def response(self, choice: Mapping[str, Any], summary: Summary, **extra: Any) -> dict[str, Any]:
        """The whole response of a request that does not stream."""
        return {
            "id": self._id,
            "object": "chat.completion" if self._chat else "text_completion",
            **self._fields,
            "choices": [{"index": 0, **choice}],
            "usage": usage_json(summary),
            **closing_json(summary),
            **extra,
        }

    def role_event(self, **extra: Any) -> bytes:
        """First event of a chat: the role, before any text."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([choice], extra)

    def text_event(self, text: str, token_ids: Sequence[int] | None = None) -> bytes:
        ids = "" if token_ids is None else f',"token_ids":{_dumps(list(token_ids))}'
        return f"{self._before}{_dumps(text)}{self._after}{ids}}}]{self._closing}".encode()

    def finish_event(self, summary: Summary, **extra: Any) -> bytes:
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, **finish_fields(summary)}
        return self._event([choice], extra)

    def usage_event(self, summary: Summary) -> bytes:
        """Last event before [DONE] when usage was asked for: no choices."""
        tail = _dumps({"choices": [], "usage": usage_json(summary), **closing_json(summary)})[1:]
        return f"{self._opening},{tail}\n\n".encode()

    def _event(self, choices: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> bytes:
        tail = _dumps({"choices": list(choices), **extra})[1:-1]
        return f"{self._opening},{tail}{self._closing}".encode()


DONE_EVENT = b"data: [DONE]\n\n"


def error_event(error: BaseException) -> bytes:
    """An error after the stream began: the status line is gone, so it travels as an event."""
    return f"data: {_dumps(error_object(error))}\n\n".encode()


def finish_fields(summary: Summary) -> dict[str, Any]:
    return {"finish_reason": summary.finish_reason.openai, "stop_reason": summary.stop_reason}
