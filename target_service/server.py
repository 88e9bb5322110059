"""gRPC side of the target service: wire ↔ domain, and the life of the process.

Owns the servicer, start-up (settings → model → engine → SERVING) and shutdown (NOT_SERVING → drain → exit
code). Does not own what requests mean (target_service.engine) nor the channel's transports
(specbridge.channel).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Callable

import grpc
import torch
import uvloop

from protos import common_pb2, target_pb2, target_pb2_grpc
from specbridge import wire
from specbridge.channel.producer import HiddenStateServer
from specbridge.errors import SpecBridgeError, Unavailable
from specbridge.metrics import new_registry, serve_metrics
from specbridge.models import resolve_target
from specbridge.rounds import SessionKey, TargetReply, TargetRequest, TargetResultKind
from specbridge.server import Server, stop_event, typed_errors
from target_service.config import TargetSettings, resolve_limits
from target_service.engine import Engine, Identity
from target_service.metrics import ChannelCollector, TargetMetrics
from target_service.model.config import ModelConfig
from target_service.runner import load_runner, resolve_device

log = logging.getLogger(__name__)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Stream:
    """One Rounds stream: replies on their way out, and how many are still owed.

    A client may close its side and wait for the answers, as command-line clients do; the stream ends when
    nothing is owed any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[TargetReply | None] = asyncio.Queue()
        self._owed = 0
        self._opening: set[SessionKey] = set()
        self._half_closed = False

    def expect(self, request: TargetRequest) -> None:
        """Count the replies that `request` will get."""
        self._owed += bool(request.opens or request.releases) + bool(request.verifies)
        self._opening.update(item.session for item in request.opens)

    def reply(self, message: TargetReply) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    def half_close(self) -> None:
        self._half_closed = True
        if not self._owed and not self._opening:
            self._queue.put_nowait(None)

    async def next(self) -> TargetReply | None:
        """The next reply; None at the end."""
        if self._half_closed and not self._owed and not self._opening:
            return None
        message = await self._queue.get()
        if message is not None:
            self._owed -= bool(message.batch_id or message.timings)
            for result in message.results:
                if result.kind is not TargetResultKind.OPENED:
                    self._opening.discard(result.session)
        return message


class TargetServicer(target_pb2_grpc.TargetServicer):
    """The Target service. Answers UNAVAILABLE until `serve` has been called."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._channel: HiddenStateServer | None = None

    def serve(self, engine: Engine, channel: HiddenStateServer) -> None:
        self._engine, self._channel = engine, channel

    async def GetInfo(
        self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext
    ) -> target_pb2.TargetInfo:
        async with typed_errors(context):
            return wire.target_info_to_pb(self._ready().info())
        raise AssertionError("typed_errors lets no error pass")

    async def Rounds(
        self, request_iterator: AsyncIterator[target_pb2.TargetRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.TargetReply]:
        async with typed_errors(context):
            engine = self._ready()
            stream = Stream(asyncio.get_running_loop())
            # One bound method for the life of the stream: the engine knows the stream by it.
            reply = stream.reply

            async def read() -> None:
                try:
                    async for pb in request_iterator:
                        request = wire.target_request_from_pb(pb)
                        stream.expect(request)
                        engine.submit(request, reply)
                finally:
                    stream.half_close()

            reader = asyncio.create_task(read())
            try:
                while (message := await stream.next()) is not None:
                    yield wire.target_reply_to_pb(message)
            finally:
                reader.cancel()
                engine.drop_stream(reply)

    async def HiddenStates(
        self, request_iterator: AsyncIterator[target_pb2.ChannelRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.ChannelReply]:
        async with typed_errors(context):
            self._ready()
            assert self._channel is not None
            async for reply in self._channel.serve(request_iterator, context):
                yield reply

    def _ready(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise Unavailable(
                "the target is still loading its model; try again when its health check says SERVING"
            )
        if engine.failure is not None:
            raise Unavailable(f"the target has failed and is going down: {engine.failure}")
        return engine


def run(settings: TargetSettings) -> int:
    """Serve until SIGTERM (0) or until the model is gone (1). Raises ConfigError for settings that can't
    work.
    """
    logging.basicConfig(level=settings.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return uvloop.run(_serve(settings))


async def _serve(settings: TargetSettings) -> int:
    stop = stop_event()
    loop = asyncio.get_running_loop()
    failures: list[SpecBridgeError] = []

    def failed(error: SpecBridgeError) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(stop.set)

    metrics = TargetMetrics(new_registry())
    endpoint = None
    if settings.metrics_port >= 0:
        endpoint, _ = serve_metrics(metrics.registry, settings.metrics_port, settings.metrics_host)
    servicer = TargetServicer()
    name = target_pb2.DESCRIPTOR.services_by_name["Target"].full_name
    server = Server(
        settings.listen,
        [name],
        add=lambda s: target_pb2_grpc.add_TargetServicer_to_server(servicer, s),
        drain_s=settings.drain,
    )
    engine: Engine | None = None
    channel: HiddenStateServer | None = None
    try:
        await server.start()
        log.info("target listening on %s, loading %s", server.bound, settings.target)
        engine = await asyncio.to_thread(load_engine, settings, metrics, failed)
        channel = connect_channel(engine, settings, metrics)
        await asyncio.to_thread(engine.start)
        servicer.serve(engine, channel)
        await server.set_serving()
        log.info("target ready: %s", server.bound)
        await stop.wait()
        await server.set_not_serving()
        if not failures:
            await _drain(engine, settings.drain)
    finally:
        if channel is not None:
            channel.close()
        if engine is not None:
            await asyncio.to_thread(engine.close)
        # Everybody still connected has been told; streams have no end of their own to wait for.
        await server.stop(grace=0.5)
        if endpoint is not None:
            endpoint.shutdown()
            endpoint.server_close()
    if failures:
        log.error("target ends: %s", failures[0])
        return 1
    return 0


async def _drain(engine: Engine, seconds: float) -> None:
    """Let running sessions come to their end, at most `seconds`."""
    end = asyncio.get_running_loop().time() + seconds
    while engine.num_sessions and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)


def load_engine(
    settings: TargetSettings, metrics: TargetMetrics, on_failure: Callable[[SpecBridgeError], None]
) -> Engine:
    """Load the model and build an engine, not yet started. Raises ConfigError."""
    folder = resolve_target(settings.target, progress=sys.stderr.isatty())
    config = ModelConfig.from_folder(folder)
    device = resolve_device(settings.device, settings.tp)
    dtype = settings.dtype
    if dtype == "auto" and config.dtype == torch.float16 and device == "cpu":
        log.info("the checkpoint is float16, which overflows on a CPU: running it in float32")
        dtype = "float32"
    limits = resolve_limits(settings, model_length=config.max_position_embeddings, device=device)
    runner = load_runner(
        folder,
        device=device,
        dtype=dtype,
        tp=settings.tp,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_rows=limits.max_rows,
        threads=settings.threads or None,
    )
    identity = Identity(
        model_id=settings.target,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        tp_size=settings.tp,
        instance=secrets.token_bytes(16),
    )
    return Engine(runner, limits, metrics, identity=identity, on_failure=on_failure)


def connect_channel(engine: Engine, settings: TargetSettings, metrics: TargetMetrics) -> HiddenStateServer:
    """The producer end of the hidden-state channel, wired to `engine`. Before engine.start()."""
    channel = HiddenStateServer(
        engine.info().instance,
        engine.prepare_taps,
        on_attached=engine.channel_attached,
        on_detached=engine.channel_detached,
        on_recapture=engine.request_recapture,
        slots=settings.channel_slots,
        lease_s=settings.channel_lease,
    )
    metrics.registry.register(ChannelCollector(channel, channel.stats.snapshot))
    engine.connect_channel(channel)
    return channel
