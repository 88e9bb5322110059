"""HTTP below the routes: the server in our event loop, and what every request passes through.

Owns binding, request ids, the API key and request metrics. The middleware is plain ASGI, one wrapper around
`send`, as it runs for every event of every stream. Does not own routes (rest).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.answers import error_json
from gateway.metrics import GatewayMetrics
from gateway.params import tenant_of
from specbridge.errors import ConfigError
from specbridge.logs import request_id as request_id_context

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
_USABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KEEP_ALIVE_S = 75
LAST_WRITES_S = 5.0
"""After the requests have ended: what their answers get to leave the sockets."""
_OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")


class Surface:
    """ASGI middleware around the REST application."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, api_key: str) -> None:
        self._app = app
        self._metrics = metrics
        self._api_keys = [key.strip().encode() for key in api_key.split(",") if key.strip()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"")
        request_id = given.decode("ascii") if _USABLE_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["tenant"] = tenant_of(headers.get(b"authorization", b""))
        request_id_context.set(request_id)
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER, request_id.encode())]
            await send(message)

        try:
            if (refusal := self._refuse(scope, headers)) is not None:
                await _send_json(send_on, *refusal)
            else:
                await self._app(scope, receive, send_on)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.on_http(route, scope["method"], status=status)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, dict[str, Any]] | None:
        if self._api_keys and scope["path"] not in _OPEN_PATHS:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            # All of them, so that the time taken does not tell which one was nearly right.
            known = [hmac.compare_digest(given.strip(), key) for key in self._api_keys]
            if kind.lower() != b"bearer" or not any(known):
                text = "a valid key is needed: send it as 'Authorization: Bearer <key>'"
                return 401, error_json(text, "authentication_error", code="invalid_api_key")
        return None


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class HttpServer:
    """uvicorn inside our event loop: `await start()`, `await stop()`; `port` is the bound one."""

    def __init__(self, app: Any, *, host: str, port: int) -> None:
        self._host = host
        self.port = port
        self._server = _QuietUvicorn(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(LAST_WRITES_S),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and accept. Raises ConfigError if the address is taken or wrong."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self._host}:{self.port}: {error.strerror or error}; choose another port"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """No new connections; answers under way get a moment to leave."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})


class _QuietUvicorn(uvicorn.Server):
    """uvicorn leaves the process's signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
