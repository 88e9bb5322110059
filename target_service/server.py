"""gRPC side of the target service: wire ↔ domain, and the life of the process.

Owns the servicer, start-up (settings → model → engine → SERVING) and shutdown (NOT_SERVING → drain → exit
code). Does not own what requests mean (target_service.engine) nor the channel's transports
(specbridge.channel).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import grpc
import torch
import uvloop

from protos import common_pb2, target_pb2, target_pb2_grpc
from specbridge import wire
from specbridge.channel.producer import HiddenStateServer
from specbridge.errors import SpecBridgeError, Unavailable
from specbridge.logs import configure_logging
from specbridge.metrics import new_registry, serve_metrics
from specbridge.process import freeze_heap, leave, run_in_own_thread
from specbridge.rounds import TargetReply, TargetResultKind
from specbridge.rounds_stream import RoundsStream
from specbridge.rpc_metrics import CountCalls
from specbridge.server import Server, ended_before, stop_event, typed_errors
from target_service.config import TargetSettings
from target_service.engine import Engine
from target_service.launched import find_launch
from target_service.loading import load_engine, load_follower
from target_service.metrics import ChannelCollector, TargetMetrics
from target_service.worker import give_up

log = logging.getLogger(__name__)

FIRST_MESSAGE_S = 5.0
"""How long a call that is refused waits for its first message."""


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
            stream: RoundsStream[TargetReply] = RoundsStream(opened=TargetResultKind.OPENED)

            def take(pb: target_pb2.TargetRequest) -> int:
                received = time.perf_counter_ns()
                request = wire.target_request_from_pb(pb)
                engine.submit(request, stream.reply, received=received)
                return len(request.opens) + len(request.releases) + len(request.verifies)

            try:
                async with contextlib.aclosing(stream.answers(request_iterator, take)) as messages:
                    async for message in messages:
                        reply = wire.target_reply_to_pb(message)
                        if message.timings is not None:
                            reply.timings.service_ns += stream.since_reply()
                        yield reply
            finally:
                engine.drop_stream(stream.reply)

    async def HiddenStates(
        self, request_iterator: AsyncIterator[target_pb2.ChannelRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.ChannelReply]:
        async with typed_errors(context):
            try:
                self._ready()
            except Unavailable:
                # Not before the draft's first message is in: a write that meets the end of its call reaches
                # the draft as gRPC's "Internal error from Core", and the reason is lost.
                with contextlib.suppress(TimeoutError, StopAsyncIteration):
                    async with asyncio.timeout(FIRST_MESSAGE_S):
                        await anext(request_iterator)
                raise
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
    """Serve until SIGTERM (0) or until the model is gone (1). Of ranks that torchrun started only the first
    serves; the others follow it. Raises ConfigError for settings that can't work.
    """
    launch = find_launch(settings)
    above = launch is not None and launch.rank > 0
    configure_logging(settings.log_level, f"rank {launch.rank}" if launch is not None and above else "target")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if launch is not None and above:
        return 0 if load_follower(settings, launch).run() else 1
    code, over = uvloop.run(_serve(settings))
    if over:
        return code
    give_up()
    leave(code)


async def _serve(settings: TargetSettings) -> tuple[int, bool]:
    """The exit code, and whether all is over: not if the end came while the model was loaded or warmed, which
    goes on, on a thread that can't be interrupted.
    """
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
        interceptors=[CountCalls(metrics.rpc)],
    )
    engine: Engine | None = None
    channel: HiddenStateServer | None = None
    in_time = True

    async def load() -> None:
        nonlocal engine, channel
        engine = await run_in_own_thread(load_engine, settings, metrics, failed)
        channel = connect_channel(engine, settings, metrics)
        # Not in the loop's pool, whose threads are waited for at the end.
        await run_in_own_thread(engine.start)

    try:
        await server.start()
        log.info("target listening on %s, loading %s", server.bound, settings.target)
        in_time = await ended_before(stop, load())
        if in_time:
            assert engine is not None and channel is not None
            servicer.serve(engine, channel)
            freeze_heap()
            await server.set_serving()
            log.info("target ready: %s", server.bound)
            await stop.wait()
            await server.set_not_serving()
            if not failures:
                await _drain(engine, settings.drain)
        elif not failures:
            log.info("told to stop before it was ready: ending")
    finally:
        # An engine that is at its warm-up would have to be waited for.
        if channel is not None and in_time:
            channel.close()
        if engine is not None and in_time:
            await asyncio.to_thread(engine.close)
        # Everybody still connected has been told; streams have no end of their own to wait for.
        await server.stop(grace=0.5)
        if endpoint is not None:
            endpoint.shutdown()
            endpoint.server_close()
    if failures:
        log.error("target ends: %s", failures[0])
    return (1 if failures else 0), in_time


async def _drain(engine: Engine, seconds: float) -> None:
    """Let running sessions come to their end, at most `seconds`."""
    end = asyncio.get_running_loop().time() + seconds
    while engine.num_sessions and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)


def connect_channel(engine: Engine, settings: TargetSettings, metrics: TargetMetrics) -> HiddenStateServer:
    """The producer end of the hidden-state channel, wired to `engine`. Before engine.start()."""
    channel = HiddenStateServer(
        engine.info().instance,
        engine.prepare_taps,
        on_attach_projected=engine.prepare_taps,
        hidden_size=engine.info().hidden_size,
        on_attached=engine.channel_attached,
        on_detached=engine.channel_detached,
        on_recapture=engine.request_recapture,
        slots=settings.channel_slots,
        device=engine.info().device,
        lease_s=settings.channel_lease,
    )
    metrics.registry.register(ChannelCollector(channel, channel.stats.snapshot))
    engine.connect_channel(channel)
    return channel
