"""OpenAI's vocabulary: what requests may say.

Owns the request models (unknown fields are refused by name; known ones whose feature is not built are
refused unless they carry the value that asks for nothing) and their translation to CompletionParams. Does
not own what clients read back (answers), nor routes and streaming (rest).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.params import CompletionParams
from gateway.text import unicode_bytes
from specbridge.errors import InvalidRequest, Unsupported

# Known fields whose feature is not built → the values that ask for nothing and are accepted (null always is).
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
}

MAX_MESSAGES = 20_000
"""Most messages of one chat: checking 10,000 of them holds up the event loop for a tenth of a second."""

# Hints to a hosted service that change nothing about the answer.
TOLERATED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here (HTTP 404)."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False
    """A last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Tolerated: usage comes with the last chunk only."""
    include_obfuscation: bool = False
    """Tolerated: nothing is padded."""


class SamplingBody(_Body):
    """Fields that chats and plain completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices and `prompt_token_ids` to the response."""
    return_meta_info: bool | None = None
    """Adds SGLang's `meta_info` to the choice."""
    speculation: Literal["on", "off"] | None = None
    """off: decode this request without the draft."""
    no_speculation: bool | None = None
    """The same as a flag; either turns it off."""
    max_tree_nodes: int | None = None
    """This request's cap on a draft tree."""
    priority: int | None = None
    """Lower is served first and preempted last; 0 is usual."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in TOLERATED:
                continue
            if name in UNSUPPORTED and name not in cls.model_fields:
                _refuse(name, value, UNSUPPORTED[name])
                continue
            kept[name] = value
        return kept

    def params(self, request_id: str, tenant: str = "") -> CompletionParams:
        """The request in the gateway's own terms. tenant: see params.tenant_of."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return CompletionParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            speculate=not self.no_speculation and self.speculation != "off",
            max_tree_nodes=self.max_tree_nodes,
            cache_salt=unicode_bytes(self.cache_salt or "", "cache_salt", "cache_salt"),
            priority=self.priority or 0,
            tenant=tenant,
            request_id=request_id,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _refuse(name: str, value: Any, neutral: Sequence[Any]) -> None:
    # `1 == True` in Python: a field that means a number must not take the wrong kind of nothing.
    if value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    ):
        return
    allowed = f"leave it out or at {json.dumps(neutral[0])}" if neutral else "leave it out"
    raise Unsupported(f"{name} is not supported yet (given {shortened(value)}); {allowed}", param=name)


def shortened(value: Any) -> str:
    """A client's value for a message, at most 100 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


class ChatMessage(BaseModel):
    """One message. Fields of a replayed assistant message are accepted while they are empty."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _only_text(self) -> ChatMessage:
        for name, value in (self.model_extra or {}).items():
            if name in ("name", "annotations", "reasoning", "reasoning_content") or value in (
                None,
                [],
                {},
                "",
            ):
                continue
            raise Unsupported(
                f"messages with {name} are not supported yet (given {shortened(value)})", param="messages"
            )
        for part in self.content if isinstance(self.content, list) else ():
            kind = part.get("type", "text")
            if kind != "text":
                raise Unsupported(
                    f"content parts of type {shortened(kind)} are not supported; send text", param="messages"
                )
            if not isinstance(part.get("text"), str):
                raise InvalidRequest(
                    f"a content part has no text (given {shortened(part)})", param="messages"
                )
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"the {self.role} message has no content; give it a string", param="messages"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: parts joined by newlines."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        extra = {
            k: v for k, v in (self.model_extra or {}).items() if k in ("name", "reasoning_content") and v
        }
        return {"role": self.role, "content": content or "", **extra}


class ChatRequest(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, request_id: str, tenant: str = "") -> CompletionParams:
        params = super().params(request_id, tenant)
        if self.max_completion_tokens is None:
            return params
        if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens}; give one",
                param="max_completion_tokens",
            )
        values = {name: getattr(params, name) for name in CompletionParams.__slots__}
        values.update(max_tokens=self.max_completion_tokens, max_tokens_name="max_completion_tokens")
        return CompletionParams(**values)


class PlainRequest(SamplingBody):
    """Body of POST /v1/completions: one prompt, as text or token ids (or a list of one)."""

    prompt: str | list[int] | list[str] | list[list[int]]
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one(cls, prompt: Any) -> Any:
        # Before a look at each: millions of them would hold up the event loop for seconds.
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise Unsupported(
                f"prompt holds {len(prompt)} prompts; more than one is not supported yet: send them apart",
                param="prompt",
            )
        return prompt

    def single(self) -> str | list[int]:
        """The prompt. Raises InvalidRequest for none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if prompt and isinstance(prompt[0], int):
            return [item for item in prompt if isinstance(item, int)]
        if not prompt:
            raise InvalidRequest("prompt is empty; it must give at least one token", param="prompt")
        first = prompt[0]
        assert not isinstance(first, int)
        return first


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
