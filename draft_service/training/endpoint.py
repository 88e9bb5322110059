"""Responses from an OpenAI-compatible endpoint, many at a time.

Prompts are sent to /completions as token ids and ids are asked for in return, as our gateway and vLLM give
them. A server that refuses either gets text, and its text is tokenised here: a response may then differ from
the target's own ids where its tokenizer would have cut otherwise, which costs the drafter little.

Owns the requests, their retries, and finding out what the server speaks. Does not own what is asked for
(generate).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draft_service.training.generate import Made, Wanted
from specbridge.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

RETRY_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
MOST_TRIES = 6
FIRST_PAUSE_S = 0.5
GIVE_UP_AFTER = 20
"""Failed responses in a row after which the endpoint counts as gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: with or without /v1. model: as the server calls it; "" asks it. timeout_s: of one response."""

    url: str
    model: str = ""
    key: str = ""
    concurrency: int = 64
    timeout_s: float = 600.0


class _Failed(Exception):
    """This response could not be had."""


class _Refused(_Failed):
    """The server does not take requests of this form."""


class EndpointSource:
    """A source for generate.produce. encode: text -> ids, end_id: what stands for an end-of-text, or -1.

    failed: responses that were given up.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        max_tokens: int,
        encode: Callable[[str], Sequence[int]],
        end_id: int,
        transport: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError("--endpoint needs httpx: pip install 'specbridge[train]'") from None
        self._httpx = httpx
        self._at = endpoint
        self._base = endpoint.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._max_tokens = max_tokens
        self._encode, self._end_id = encode, end_id
        self._transport = transport
        self._as_ids = True
        self.failed = 0
        self._in_a_row = 0

    def __call__(self, wanted: Iterable[Wanted]) -> Iterator[Made]:
        """Responses as they come. Raises ConfigError if the server refuses the first request, Unavailable if
        it stops answering.
        """
        found: queue.Queue[Made | BaseException | None] = queue.Queue()
        stop = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._all(iter(wanted), found, stop))
                found.put(None)
            except BaseException as error:  # handed to the thread that reads
                found.put(error)

        thread = threading.Thread(target=work, name="endpoint", daemon=True)
        thread.start()
        try:
            while (item := found.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    async def _all(
        self, wanted: Iterator[Wanted], found: queue.Queue[Made | BaseException | None], stop: threading.Event
    ) -> None:
        headers = {"Authorization": f"Bearer {self._at.key}"} if self._at.key else {}
        limits = self._httpx.Limits(max_connections=self._at.concurrency)
        async with self._httpx.AsyncClient(
            headers=headers, timeout=self._at.timeout_s, limits=limits, transport=self._transport
        ) as client:
            model = self._at.model or await self._model(client)
            first = next(wanted, None)
            if first is None:
                return
            # Alone: it tells what the server speaks.
            found.put(await self._first(client, model, first))

            async def worker() -> None:
                while not stop.is_set() and (one := next(wanted, None)) is not None:
                    try:
                        found.put(await self._ask(client, model, one))
                        self._in_a_row = 0
                    except _Failed as error:
                        self.failed += 1
                        self._in_a_row += 1
                        log.warning("a response is left out: %s", error)
                        if self._in_a_row >= GIVE_UP_AFTER:
                            raise Unavailable(
                                f"{self._base}: {self._in_a_row} requests in a row failed, the last with: "
                                f"{error}; run the same command again to go on"
                            ) from None

            tasks = [asyncio.create_task(worker()) for _ in range(self._at.concurrency)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _model(self, client: Any) -> str:
        try:
            reply = await client.get(f"{self._base}/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (self._httpx.HTTPError, LookupError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._base}/models does not tell the model ({error}); check --endpoint, or give --model"
            ) from None

    async def _first(self, client: Any, model: str, one: Wanted) -> Made:
        try:
            return await self._ask(client, model, one)
        except _Refused as error:
            log.info("%s takes no token ids (%s): prompts go as text", self._base, error)
            self._as_ids = False
        except _Failed as error:
            raise ConfigError(f"{self._base} did not answer the first request: {error}") from None
        try:
            return await self._ask(client, model, one)
        except (_Refused, _Failed) as error:
            raise ConfigError(f"{self._base} refuses completions: {error}") from None

    async def _ask(self, client: Any, model: str, one: Wanted) -> Made:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(one.tokens) if self._as_ids else one.text,
            "max_tokens": self._max_tokens,
            "temperature": one.temperature,
            "top_p": 1.0,
            "seed": one.seed,
        }
        if self._as_ids:
            body["return_token_ids"] = True
        pause = FIRST_PAUSE_S
        said = ""
        for _ in range(MOST_TRIES):
            try:
                reply = await client.post(f"{self._base}/completions", json=body)
            except self._httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if reply.status_code == 200:
                    return Made(one.key, self._tokens(reply))
                said = f"HTTP {reply.status_code}: {reply.text[:200]}"
                if reply.status_code in (400, 422):
                    raise _Refused(said)
                if reply.status_code not in RETRY_STATUS:
                    raise _Failed(said)
            await asyncio.sleep(pause)
            pause *= 2
        raise _Failed(said)

    def _tokens(self, reply: Any) -> list[int]:
        try:
            choice = reply.json()["choices"][0]
            ids = choice.get("token_ids")
            if ids is not None:
                return [int(token) for token in ids]
            made = list(self._encode(choice["text"]))
            if choice.get("finish_reason") == "stop" and self._end_id >= 0:
                made.append(self._end_id)
            return made
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise _Failed(f"a reply that is no completion ({error}): {reply.text[:200]}") from None
