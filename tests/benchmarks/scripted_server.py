"""A small OpenAI-style server in a thread, whose answers the prompt scripts. For the load generator's tests.

The prompt is a JSON object: `tokens` and `chunks` of the answer, `pause` seconds before each chunk, and `do`:
refuse (429 for the first `times` requests of that `key`), break (500), drop (close in the middle), hang, cut
(end without a finish), garbage, error (an error event), silent (no text), bare (no usage), plain (JSON, no
stream).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class Scripted:
    """`url` with /v1. model: what /v1/models says of it. bodies: of all requests. most: at a time."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        self.url = ""
        self.model: dict[str, Any] = {"id": "scripted"}
        self._seen: Counter[str] = Counter()
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
            Route("/v1/completions", self._answer, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [self.model]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        try:
            script = json.loads(text)
        except ValueError:
            script = {"tokens": body["max_tokens"]}
        do = script.get("do", "")
        self._seen[script.get("key", "")] += 1
        if do == "refuse" and self._seen[script["key"]] <= script["times"]:
            return JSONResponse({"error": {"message": "full"}}, 429, headers={"retry-after": "0.01"})
        if do == "break":
            return JSONResponse({"error": {"message": "a defect"}}, 500)
        if do == "plain":
            return JSONResponse({"choices": []})
        return StreamingResponse(self._events(script, "prompt" in body), media_type="text/event-stream")

    async def _events(self, script: dict[str, Any], plain: bool) -> AsyncIterator[bytes]:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            async for event in self._told(script, plain):
                yield event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
        finally:
            self._now -= 1

    async def _told(self, script: dict[str, Any], plain: bool) -> AsyncIterator[Any]:
        def choice(text: str, finish: str | None = None) -> dict[str, Any]:
            said = {"text": text} if plain else {"delta": {"content": text}}
            return {"choices": [{"index": 0, **said, "finish_reason": finish}]}

        do, tokens = script.get("do", ""), script.get("tokens", 8)
        chunks, pause = script.get("chunks", 4), script.get("pause", 0.0)
        yield choice("")  # a role: no text yet
        for i in range(0 if do == "silent" else chunks):
            if pause:
                await asyncio.sleep(pause)
            yield b": a comment\r\n\r\n"
            yield choice(f"piece {i} ü")
            if i == 1 and do == "drop":
                raise ConnectionResetError("on purpose")
            if i == 1 and do == "hang":
                await asyncio.sleep(30)
            if i == 1 and do == "garbage":
                yield b"data: {not json\n\n"
            if i == 1 and do == "error":
                yield {"error": {"message": "went wrong"}}
                return
        if do == "cut":
            return
        yield choice("", "stop")
        if do != "bare":
            usage = {"prompt_tokens": 10, "completion_tokens": tokens}
            usage["prompt_tokens_details"] = {"cached_tokens": 4}
            stats = {"num_rounds": 4, "num_spec_steps": 2, "num_accepted_draft_tokens": 3}
            yield {"choices": [], "usage": usage, "metrics": {"speculative_decoding": stats}}
        yield b"data: [DONE]\n\n"


@contextmanager
def scripted() -> Iterator[Scripted]:
    found = Scripted()
    config = uvicorn.Config(
        found.app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        yield found
    finally:
        server.should_exit = True
        thread.join(10)
