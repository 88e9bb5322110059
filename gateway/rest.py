"""The OpenAI-style REST API: routes, streaming, and what happens when a client goes away.

Owns the FastAPI application. A request whose client disconnects, streaming or not, is cancelled, which frees
its sessions. Does not own the JSON (openai, answers), what a request becomes (completion) or the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import specbridge
from gateway import answers
from gateway import openai as oa
from gateway.completion import Completion, CompletionService, Phase
from gateway.debug import add_debug_routes
from gateway.detokenize import TextDelta
from gateway.http import Surface
from gateway.metrics import GatewayMetrics
from specbridge.errors import SpecBridgeError

log = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS_AFTER_S = 1.0
"""How long a stream's status line waits for the first token, so that a refusal still gets its status code."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def create_app(
    service: CompletionService,
    metrics: GatewayMetrics,
    *,
    api_key: str = "",
    max_body: int = 32 * 1024 * 1024,
) -> FastAPI:
    """The application. Routes answer 503 while `service.phase` is not SERVING."""
    app = FastAPI(
        title="SpecBridge",
        version=specbridge.__version__,
        description="Lossless speculative decoding behind an OpenAI-style API.",
        strict_content_type=False,
        max_body_size=max_body,
    )
    _add_error_handlers(app)
    _add_status_routes(app, service, metrics)
    _add_text_routes(app, service)
    _add_generation_routes(app, service)
    add_debug_routes(app, service.scheduler.report)
    app.add_middleware(Surface, metrics=metrics, api_key=api_key)
    return app


# ---- errors ---------------------------------------------------------------------------------


def error_response(error: BaseException) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, SpecBridgeError) and (seconds := answers.retry_after_s(error)) is not None:
        headers["Retry-After"] = str(seconds)
    return JSONResponse(answers.error_object(error), status_code=answers.http_status(error), headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    async def typed(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(answers.from_validation(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path}: {error.detail}"
        body = answers.error_json(text, "invalid_request_error")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # for logs and metrics; nobody reads it

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(error)

    app.add_exception_handler(SpecBridgeError, typed)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, unexpected)


# ---- routes ---------------------------------------------------------------------------------


def _add_status_routes(app: FastAPI, service: CompletionService, metrics: GatewayMetrics) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        """200 while requests are taken and the target is connected, else 503 with the reason."""
        ok = service.healthy
        reason = service.misfit or "target disconnected"
        if service.phase is not Phase.SERVING:
            reason = service.phase.value
        body = {"status": "ok" if ok else reason}
        return JSONResponse(body, status_code=200 if ok else 503, headers={} if ok else {"Retry-After": "1"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": specbridge.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        # Some ms of text: not on the loop that drives rounds.
        text = await asyncio.to_thread(generate_latest, metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_json(service, name) for name in service.names[:1]]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _check_model(service, model)
        return _model_json(service, model)


def _model_json(service: CompletionService, name: str) -> dict[str, Any]:
    info = service.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specbridge",
        "root": info.model_id,
        "parent": None,
        "max_model_len": info.max_length,
        "dummy_weights": service.dummy_weights,
        "simulated_acceptance": service.simulated_acceptance,
    }


def _add_text_routes(app: FastAPI, service: CompletionService) -> None:
    @app.post("/tokenize")
    async def tokenize(body: oa.TokenizeRequest) -> dict[str, Any]:
        _check_model(service, body.model)
        if body.messages is not None:
            ids = await service.encode_chat(
                [message.plain() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
        else:
            ids = await service.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        names = [service.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.info.max_length,
            "tokens": ids,
            "token_strs": names,
        }

    @app.post("/detokenize")
    async def detokenize(body: oa.DetokenizeRequest) -> dict[str, Any]:
        _check_model(service, body.model)
        return {"prompt": await service.decode(body.tokens, skip_special_tokens=False)}


def _add_generation_routes(app: FastAPI, service: CompletionService) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: oa.ChatRequest, request: Request) -> Response:
        service.check_serving()
        _check_model(service, body.model)
        prompt = await service.encode_chat(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
        params = body.params(request.state.request_id, request.state.tenant)
        completion = service.start(prompt, params, prompt_name="messages")
        return await _answer(service, request, body, prompt=prompt, completion=completion)

    @app.post("/v1/completions")
    async def completions(body: oa.PlainRequest, request: Request) -> Response:
        service.check_serving()
        _check_model(service, body.model)
        prompt = body.single()
        if isinstance(prompt, str):
            prompt = await service.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        params = body.params(request.state.request_id, request.state.tenant)
        completion = service.start(prompt, params)
        return await _answer(service, request, body, prompt=prompt, completion=completion)


def _check_model(service: CompletionService, name: str | None) -> None:
    if name is not None and name not in service.names:
        served = ", ".join(service.names)
        raise oa.ModelNotFound(
            f"the model {name!r} is not served here; this gateway serves {served}", param="model"
        )


# ---- one answer -----------------------------------------------------------------------------


async def _answer(
    service: CompletionService,
    request: Request,
    body: oa.SamplingBody,
    *,
    prompt: list[int],
    completion: Completion,
) -> Response:
    chat = isinstance(body, oa.ChatRequest)
    stream = bool(body.stream)
    head = answers.Head(
        chat=chat,
        response_id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=body.model or service.name,
        fingerprint=service.fingerprint,
        usage_field=stream and body.include_usage,
    )
    prompt_ids: dict[str, Any] = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    if stream:
        deltas = _Deltas(completion)
        try:
            await _while_connected(request, deltas.prime(_HEADERS_AFTER_S))
        except BaseException:
            await deltas.aclose()
            raise
        return EventStream(_events(deltas, head, body, chat=chat, prompt_ids=prompt_ids), close=deltas.aclose)
    texts: list[str] = []
    ids: list[int] = []

    async def collect() -> None:
        async with contextlib.aclosing(completion.deltas()) as deltas:
            async for delta in deltas:
                texts.append(delta.text)
                ids.extend(delta.token_ids)

    try:
        await _while_connected(request, collect())
    finally:
        await completion.aclose()
    summary = completion.summary
    assert summary is not None
    text = "".join(texts)
    choice: dict[str, Any]
    choice = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    choice.update(logprobs=None, **answers.finish_fields(summary))
    if body.return_token_ids:
        choice["token_ids"] = ids
    if body.return_meta_info:
        choice["meta_info"] = answers.meta_info_json(summary, request.state.request_id)
    return JSONResponse(head.response(choice, summary, **prompt_ids))


class _Deltas:
    """The deltas of a completion, the first of which may be waited for before the response begins."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self._deltas = completion.deltas()
        self._first: asyncio.Task[TextDelta | None] | None = None

    async def prime(self, seconds: float) -> None:
        """Wait up to `seconds` for the first delta. Raises what the request failed with."""
        self._first = asyncio.ensure_future(self._next())
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if self._first is None:
            return await anext(self._deltas)
        delta = await self._first
        self._first = None
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Free the request's sessions, wherever the reading of the deltas is. Idempotent."""
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        await self._deltas.aclose()
        await self.completion.aclose()

    async def _next(self) -> TextDelta | None:
        return await anext(self._deltas, None)


async def _events(
    deltas: _Deltas, head: answers.Head, body: oa.SamplingBody, *, chat: bool, prompt_ids: Mapping[str, Any]
) -> AsyncGenerator[bytes]:
    """The events of one stream: role, text …, finish, usage if asked for, [DONE]; or an error instead."""
    with_ids = bool(body.return_token_ids)
    try:
        if chat:
            yield head.role_event(**prompt_ids)
        async for delta in deltas:
            if delta.text or with_ids:
                yield head.text_event(delta.text, delta.token_ids if with_ids else None)
        summary = deltas.completion.summary
        assert summary is not None
        yield head.finish_event(summary, **({} if body.include_usage else answers.closing_json(summary)))
        if body.include_usage:
            yield head.usage_event(summary)
        yield answers.DONE_EVENT
    except Exception as error:
        # The status line is out. No [DONE]: it would call the answer complete.
        if not isinstance(error, SpecBridgeError):
            log.exception("a stream failed")
        yield answers.error_event(error)


class EventStream(Response):
    """A text/event-stream response that stops its source when the client goes away.

    close: awaited once at the end, however it ends (a source that never began can't clean up itself).
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes], *, close: Callable[[], Awaitable[None]]) -> None:
        self._source = source
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, watch):
                task.cancel()
            await asyncio.wait({pump, watch})
            await self._source.aclose()
            await self._close()
        if (
            not pump.cancelled()
            and (error := pump.exception()) is not None
            and not isinstance(error, OSError)
        ):
            raise error  # an OSError is the client's going away, seen from the sending side

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait({task, watch})
