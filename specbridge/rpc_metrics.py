"""gRPC calls of a process, counted: the metrics and the server interceptor that feeds them.

Owns which calls are counted and what their code is. Names and buckets of everything else are the services'
(their metrics modules); the server's life is specbridge.server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

UNKNOWN_METHOD = "other"
"""Label of calls to methods that do not exist: clients can make up as many as they like."""


class RpcMetrics:
    """`<prefix>grpc_requests_total{method,code}` and `<prefix>grpc_requests_in_flight{method}`."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._calls = Counter(
            f"{prefix}grpc_requests", "gRPC calls that ended.", ("method", "code"), registry=registry
        )
        self._in_flight = Gauge(
            f"{prefix}grpc_requests_in_flight", "gRPC calls under way.", ("method",), registry=registry
        )

    def refused(self) -> None:
        """A call to a method that does not exist."""
        self._calls.labels(UNKNOWN_METHOD, grpc.StatusCode.UNIMPLEMENTED.name).inc()

    @contextlib.contextmanager
    def call(self, method: str, code: Callable[[], object]) -> Iterator[None]:
        """A call's handler runs inside; code(): what the handler has set, if anything."""
        in_flight = self._in_flight.labels(method)
        in_flight.inc()
        ended = ""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            ended = grpc.StatusCode.CANCELLED.name
            raise
        except grpc.aio.AbortError:
            raise
        except BaseException:
            ended = grpc.StatusCode.UNKNOWN.name  # what gRPC makes of an error that no handler has mapped
            raise
        finally:
            in_flight.dec()
            self._calls.labels(method, ended or _name(code())).inc()


class CountCalls(grpc.aio.ServerInterceptor):
    """Counts every call of a server in `metrics`, from its dispatch to the end of its handler."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            self._metrics.refused()
            return handler
        method = str(handler_call_details.method).rsplit("/", 1)[-1]
        kind = (
            f"{'stream' if handler.request_streaming else 'unary'}_"
            f"{'stream' if handler.response_streaming else 'unary'}"
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            self._counted(getattr(handler, kind), method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _counted(self, behaviour: Any, method: str) -> Any:
        """`behaviour` of the same kind, counted: gRPC looks whether it is a generator or a coroutine."""
        metrics = self._metrics

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            with metrics.call(method, context.code):
                # Closed with us, so that what it holds goes when the client does.
                async with contextlib.aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        async def coroutine(request: Any, context: Any) -> Any:
            with metrics.call(method, context.code):
                return await behaviour(request, context)

        if inspect.isasyncgenfunction(behaviour):
            return generator
        return coroutine if inspect.iscoroutinefunction(behaviour) else behaviour


def _name(code: object) -> str:
    """Of a status as a context tells it: a StatusCode, its number, or nothing for OK."""
    if isinstance(code, grpc.StatusCode):
        return str(code.name)
    for status in grpc.StatusCode:
        if code == status.value[0]:
            return str(status.name)
    return grpc.StatusCode.OK.name
