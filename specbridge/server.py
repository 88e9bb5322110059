"""gRPC server lifecycle shared by the three services.

Owns: binding, health (NOT_SERVING until warm, NOT_SERVING first on shutdown), reflection, message limits
and keepalive, request ids, the mapping of typed errors to status codes, drain on SIGTERM. Does not own:
what the services do (their servicers are passed in).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specbridge import errors
from specbridge.logs import request_id

log = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
RETRY_AFTER_KEY = "retry-after"
"""Trailing metadata of RESOURCE_EXHAUSTED: whole seconds until trying again makes sense."""
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
KEEPALIVE_S = 10.0

_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]


def server_options(keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, Any]]:
    """Channel arguments of a server whose clients ping every `keepalive_s` seconds, idle or not."""
    ms = int(keepalive_s * 1000)
    return [
        *_LIMITS,
        # A server less patient than its clients' keepalive answers GOAWAY "too_many_pings" in a long prefill.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ms // 2),
        ("grpc.http2.min_ping_interval_without_data_ms", ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", ms),
        ("grpc.keepalive_timeout_ms", ms),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, Any]]:
    """Channel arguments of a client; the counterpart of `server_options`."""
    ms = int(keepalive_s * 1000)
    return [
        *_LIMITS,
        ("grpc.keepalive_time_ms", ms),
        ("grpc.keepalive_timeout_ms", ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Proxies of the environment have no business between services of one machine.
        ("grpc.enable_http_proxy", 0),
    ]


class RequestIds(grpc.aio.ServerInterceptor):
    """Puts the caller's x-request-id (or a new one) into the log context of the call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = dict(handler_call_details.invocation_metadata or ())
        request_id.set(str(metadata.get(REQUEST_ID_KEY) or secrets.token_hex(8)))
        return await continuation(handler_call_details)


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    """End a call with the status the error maps to. The caller gets the message, the log a traceback."""
    if isinstance(error, DecodeError):  # on a stream, it is the handler that reads the messages
        error = errors.InvalidRequest(f"{error}; send the messages of this version's protos")
    mapping = errors.mapping(error)
    if not isinstance(error, errors.SpecBridgeError):
        log.exception("unexpected error in a call", exc_info=error)
    hint: list[tuple[str, str]] = []
    if isinstance(error, errors.CapacityError) and error.retry_after is not None:
        hint = [(RETRY_AFTER_KEY, str(max(1, math.ceil(error.retry_after))))]
    await context.abort(grpc.StatusCode[mapping.grpc_status], errors.message_of(error), tuple(hint))


@contextlib.asynccontextmanager
async def typed_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Wrap a handler's body: typed errors become status codes, an internal cancellation becomes ABORTED.

    A handler that lets asyncio.CancelledError out on its own account leaves the client hanging (grpc#29248),
    so a cancellation that the client did not cause is answered.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the call itself was cancelled (client gone, server stopping): nobody waits for a status
        await context.abort(grpc.StatusCode.ABORTED, "the request was cancelled inside the service")
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as error:  # the boundary of the process: everything becomes a status
        if context.done():
            # The status was on its way, or the call over, when the peer went: nobody is left to be told.
            log.debug("a call ended before its status had reached the peer: %s", error)
            return
        await abort(context, error)


class Server:
    """One gRPC server: `await start()`, `set_serving()` when warm, `await stop()`.

    address: "unix:/path" or "host:port" (port 0 picks one; see `bound`).
    services: full names of the services the servicers implement, for health and reflection.
    """

    def __init__(
        self,
        address: str,
        services: Iterable[str],
        *,
        add: Callable[[grpc.aio.Server], None],
        drain_s: float = 5.0,
        keepalive_s: float = KEEPALIVE_S,
        interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.address = address
        self.bound = address
        self.drain_s = drain_s
        self._services = tuple(services)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=server_options(keepalive_s), interceptors=[RequestIds(), *interceptors]
        )
        self._credentials = credentials
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Bind and answer health checks (NOT_SERVING). Raises ConfigError if the address is taken or
        wrong."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self.address)
            else:
                port = self._server.add_secure_port(self.address, self._credentials)
        except RuntimeError as error:
            raise errors.ConfigError(
                f"cannot listen on {self.address!r}: {error}; choose another address"
            ) from error
        if not self.address.startswith("unix:"):
            self.bound = f"{self.address.rsplit(':', 1)[0]}:{port}"
        await self._server.start()

    async def set_serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def set_not_serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace: float | None = None) -> None:
        """NOT_SERVING first, then no new calls, then up to `drain_s` seconds for those under way."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self.drain_s if grace is None else grace)

    async def _set(self, status: int) -> None:
        for name in ("", *self._services):
            await self._health.set(name, status)


def stop_event() -> asyncio.Event:
    """An event set by SIGTERM or SIGINT; call from the running loop of the main thread."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, event.set)
    return event


async def until_signal(work: Awaitable[None]) -> None:
    """Run `work` until it ends or SIGINT/SIGTERM comes; raises what it raises."""
    await ended_before(stop_event(), work)


async def first_of(*works: Awaitable[None]) -> None:
    """Run all until the first ends, cancel the others; raises what that one raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ended_before(stop: asyncio.Event, work: Awaitable[object]) -> bool:
    """Whether `work` ended before `stop` was set; if not it is cancelled. Raises what `work` raised."""
    ended = False

    async def whole() -> None:
        nonlocal ended
        await work
        ended = True

    async def stopped() -> None:
        await stop.wait()

    await first_of(whole(), stopped())
    return ended
