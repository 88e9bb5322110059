"""One request as clients see it: a prompt in, text deltas and a summary out.

Owns what gRPC and REST have in common: whether requests are taken, the model's defaults, joining the
scheduler's token events with the text stream (stop strings, ends). Does not own a request's limits (params),
rounds (scheduler) nor any wire format (rest, openai, server).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.detokenize import TextDelta, TextStream
from gateway.generation import Generation, GenerationRequest, SpecStats, TokenEvent
from gateway.params import CompletionParams, ContextLengthExceeded, resolve_max_tokens
from gateway.report import GatewayReport
from gateway.text import Tokenizer
from specbridge.errors import Unavailable
from specbridge.rounds import (
    DraftInfo,
    FinishReason,
    SamplingParams,
    StopParams,
    TargetInfo,
    check_token_ids,
)

log = logging.getLogger(__name__)

_SEED_BITS = 53
"""Of a seed that is drawn here: a reported seed has to survive JSON readers that hold numbers as doubles."""
_LONG_TEXT = 8192
"""Characters (or ids) from which a text is tokenised (or decoded) on a worker thread: the event loop has
rounds to drive.
"""


class Scheduler(Protocol):
    """What the surfaces need of gateway.scheduler."""

    @property
    def target_info(self) -> TargetInfo | None: ...

    @property
    def draft_info(self) -> DraftInfo | None: ...

    @property
    def queue_length(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def target_connected(self) -> bool: ...

    def generate(self, request: GenerationRequest) -> Generation: ...

    def report(self) -> GatewayReport: ...


class Phase(enum.Enum):
    """Where the gateway is in its life. Requests are taken while SERVING only."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Summary:
    """How a request ended. `stop_reason`: the stop string or stop id (not eos) that ended it."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    stats: SpecStats


class Completion:
    """A running request. Iterate `deltas()` to its end, then read `summary`.

    Leaving the iteration early (break, cancellation, aclose of the iterator) frees the sessions.
    """

    def __init__(
        self,
        generation: Generation,
        text: TextStream,
        *,
        prompt_tokens: int,
        end_ids: frozenset[int],
        eos: frozenset[int],
        detailed: bool = False,
    ) -> None:
        self._detailed = detailed
        self._generation = generation
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._end_ids = end_ids
        self._eos = eos
        self.summary: Summary | None = None
        """Set when `deltas()` has been read to its end."""

    @property
    def completion_tokens(self) -> int:
        """Tokens delivered so far."""
        return self._text.num_tokens

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """What became final, in order; empty deltas are left out. Raises the scheduler's typed errors."""
        text, hold_back = self._text, self._text.holds_back
        async with self._generation as generation:
            async for event in generation:
                reason = event.finish_reason
                tokens = event.tokens
                ended = reason is FinishReason.STOP and bool(tokens) and tokens[-1] in self._end_ids
                delta = text.push(tokens, last_stops=ended)
                if reason is not FinishReason.RUNNING and text.matched is None:
                    tail = text.finish()
                    delta = TextDelta(delta.text + tail.text, delta.token_ids + tail.token_ids, tail.stop)
                if text.matched is not None:
                    stats = generation.stop(output_tokens=text.num_tokens)
                    self._finish(event, FinishReason.STOP, stop_reason=text.matched, stats=stats)
                elif reason is not FinishReason.RUNNING:
                    last = tokens[-1] if ended and tokens[-1] not in self._eos else None
                    self._finish(event, reason, stop_reason=last, stats=event.stats or SpecStats())
                elif hold_back:
                    generation.deliver(text.num_tokens)
                if delta.text or delta.token_ids:
                    yield delta
                if self.summary is not None:
                    return
        raise Unavailable("the request ended without a result; try again")

    async def aclose(self) -> None:
        """Free the sessions of a request whose deltas nobody will read. Idempotent."""
        await self._generation.aclose()

    def _finish(
        self, event: TokenEvent, reason: FinishReason, *, stop_reason: str | int | None, stats: SpecStats
    ) -> None:
        if not self._detailed:
            stats = replace(stats, per_step_accepted=(), per_step_drafted=())
        self.summary = Summary(
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._text.num_tokens,
            cached_tokens=event.cached_tokens,
            seed=event.seed,
            stats=stats,
        )


class CompletionService:
    """The model as gRPC and REST offer it.

    names        the name the model is served under, then its aliases
    tree_budget  tells the most nodes of a request's tree, which the target's device may decide
    detailed     keep the per-round lists in requests' statistics
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        names: Sequence[str],
        tree_budget: Callable[[], int] = lambda: 0,
        detailed: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.names = tuple(dict.fromkeys(names))
        self.tree_budget = tree_budget
        self.detailed = detailed
        self.created = int(time.time())
        self.phase = Phase.STARTING
        self._checked: TargetInfo | None = None
        self._misfit = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def healthy(self) -> bool:
        """Requests are taken, and the target is there and is the one our tokenizer belongs to."""
        return self.phase is Phase.SERVING and self.scheduler.target_connected and not self.misfit

    @property
    def misfit(self) -> str:
        """Why the target's model and this gateway's tokenizer don't belong together; "" if they do."""
        info = self.scheduler.target_info
        if info is not None and info is not self._checked:
            self._checked = info
            self._misfit = self.tokenizer.misfit(info.vocab_size, info.eos_token_ids)
            if self._misfit:
                log.error("not serving: %s", self._misfit)
        return self._misfit

    @property
    def info(self) -> TargetInfo:
        """Raises Unavailable while the target has not been reached."""
        info = self.scheduler.target_info
        if info is None:
            raise Unavailable("the target service has not been reached yet; try again in a moment")
        return info

    @property
    def dummy_weights(self) -> bool:
        """Target or draft has random weights: times are real, the text means nothing."""
        draft = self.scheduler.draft_info
        return self.info.dummy_weights or (draft is not None and draft.dummy_weights)

    @property
    def simulated_acceptance(self) -> str:
        """Label of the acceptance that the services make up; "" if it is real."""
        return self.info.simulated_acceptance

    @property
    def synthetic(self) -> bool:
        """Anything but times is made up. False while the target has not been reached."""
        return self.scheduler.target_info is not None and (
            self.dummy_weights or bool(self.simulated_acceptance)
        )

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes with weights, dtype and configuration of the target."""
        return f"fp_{self.info.fingerprint[:16]}"

    def check_serving(self) -> None:
        """Raises Unavailable unless requests are taken now."""
        if self.phase is Phase.DRAINING:
            raise Unavailable("the gateway is shutting down; use another one")
        if self.phase is Phase.STARTING:
            raise Unavailable(
                "the gateway is waiting for the target service to be warm; try again in a moment"
            )
        if self.misfit:
            raise Unavailable(self.misfit)

    async def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Ids of a raw prompt. Raises InvalidRequest, naming the field `name`, for a text that can't fit the
        model's length however it is tokenised: tokenising it first costs seconds and gigabytes.
        """
        info = self.scheduler.target_info
        if info is not None and len(text) > (most := info.max_length * self.tokenizer.longest_token):
            raise ContextLengthExceeded(
                f"{name} has {len(text)} characters; the model's length of {info.max_length} tokens holds "
                f"{most} at most; shorten it",
                param=name,
            )
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        name: str = "messages",
    ) -> list[int]:
        """Ids of a chat prompt. Raises InvalidRequest if the template refuses the messages, and as encode."""
        text = self.tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return await self.encode(text, add_special_tokens=False, name=name)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of any ids. Raises InvalidRequest for ids outside the vocabulary."""
        check_token_ids(ids, self.info.vocab_size, name="tokens")
        if len(ids) < _LONG_TEXT:
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)

    def start(
        self, prompt: Sequence[int], params: CompletionParams, *, prompt_name: str = "prompt"
    ) -> Completion:
        """Admit a request. Raises InvalidRequest naming the field, CapacityError, Unavailable.

        prompt_name: the field the prompt came from, for messages.
        """
        self.check_serving()
        info = self.info
        max_tokens = resolve_max_tokens(prompt, params, info, prompt_name=prompt_name)
        defaults = self.tokenizer.defaults
        top_k = defaults.top_k if params.top_k is None else params.top_k
        sampling = SamplingParams(
            temperature=defaults.temperature if params.temperature is None else params.temperature,
            top_k=0 if top_k == -1 else top_k,
            top_p=defaults.top_p if params.top_p is None else params.top_p,
            min_p=defaults.min_p if params.min_p is None else params.min_p,
        )
        sampling.validate()
        eos = frozenset(info.eos_token_ids)
        stop_ids = frozenset(params.stop_token_ids)
        generation = self.scheduler.generate(
            GenerationRequest(
                tokens=tuple(prompt),
                sampling=sampling,
                stop=StopParams(
                    max_tokens=max_tokens,
                    stop_token_ids=params.stop_token_ids,
                    min_tokens=params.min_tokens,
                    ignore_eos=params.ignore_eos,
                ),
                seed=secrets.randbits(_SEED_BITS) if params.seed is None else params.seed,
                speculate=params.speculate,
                max_tree_nodes=params.max_tree_nodes,
                request_id=params.request_id,
                deadline_s=params.deadline_s,
                cache_salt=params.cache_salt,
                priority=params.priority,
                tenant=params.tenant,
                hold_back=bool(params.stop),
            )
        )
        text = self.tokenizer.stream(
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )
        return Completion(
            generation,
            text,
            prompt_tokens=len(prompt),
            end_ids=stop_ids if params.ignore_eos else stop_ids | eos,
            eos=eos,
            detailed=self.detailed,
        )
