"""The fake services behind real gRPC servers: for the gateway's clients and its benchmark.

`serve(service, address)` puts a fake_services.FakeTarget or FakeDraft (or anything with `send`, `start`,
`make_info`) behind the Rounds and GetInfo calls of its contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos import draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.server import Server

_CLOSED = object()


class _Stream:
    """The fake's listener: what it says goes out on the current stream."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] | None = None

    def on_connected(self, info: Any) -> None: ...

    def on_disconnected(self, reason: str) -> None:
        if self.queue is not None:
            self.queue.put_nowait(_CLOSED)

    def on_reply(self, reply: Any) -> None:
        if self.queue is not None:
            self.queue.put_nowait(reply)


class _Servicer:
    def __init__(self, service: Any, info_to_pb: Any, request_from_pb: Any, reply_to_pb: Any) -> None:
        self.service = service
        self.streams = 0
        self._info_to_pb = info_to_pb
        self._request_from_pb = request_from_pb
        self._reply_to_pb = reply_to_pb
        self._stream = _Stream()
        service.start(self._stream)

    async def GetInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return self._info_to_pb(self.service.make_info())

    async def Rounds(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        self.streams += 1
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._stream.queue = queue
        reader = asyncio.create_task(self._read(requests))
        try:
            while (reply := await queue.get()) is not _CLOSED:
                yield self._reply_to_pb(reply)
        finally:
            reader.cancel()
            if self._stream.queue is queue:
                self._stream.queue = None

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for pb in requests:
            self.service.send(self._request_from_pb(pb))


class TargetServicer(_Servicer, target_pb2_grpc.TargetServicer):
    def __init__(self, service: Any) -> None:
        super().__init__(
            service, wire.target_info_to_pb, wire.target_request_from_pb, wire.target_reply_to_pb
        )


class DraftServicer(_Servicer, draft_pb2_grpc.DraftServicer):
    def __init__(self, service: Any) -> None:
        super().__init__(service, wire.draft_info_to_pb, wire.draft_request_from_pb, wire.draft_reply_to_pb)


async def serve_target(service: Any, address: str) -> tuple[Server, TargetServicer]:
    servicer = TargetServicer(service)
    server = Server(
        address,
        ["specbridge.v1.Target"],
        add=lambda s: target_pb2_grpc.add_TargetServicer_to_server(servicer, s),
    )
    await server.start()
    await server.set_serving()
    return server, servicer


async def serve_draft(service: Any, address: str) -> tuple[Server, DraftServicer]:
    servicer = DraftServicer(service)
    server = Server(
        address,
        ["specbridge.v1.Draft"],
        add=lambda s: draft_pb2_grpc.add_DraftServicer_to_server(servicer, s),
    )
    await server.start()
    await server.set_serving()
    return server, servicer
