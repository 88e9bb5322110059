"""gRPC side of the draft service: wire ↔ domain, and the life of the process.

Owns the servicer, start-up (settings → drafter → engine → SERVING) and shutdown (NOT_SERVING → drain → end).
Does not own what requests mean (engine) nor the tie to the target (link). The service answers while the
target is away: proposals are NOT_READY then, and the channel attaches again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import torch
import uvloop

from draft_service.config import DraftSettings
from draft_service.drafter_files import find_places
from draft_service.engine import Engine
from draft_service.link import TargetLink
from draft_service.loading import Loaded, load_engine, resolve_device
from draft_service.metrics import ChannelCollector, DraftMetrics
from draft_service.startup_check import StartupCheck
from protos import common_pb2, draft_pb2, draft_pb2_grpc
from specbridge import wire
from specbridge.errors import Unavailable
from specbridge.logs import configure_logging
from specbridge.metrics import serve_metrics
from specbridge.process import freeze_heap, leave, run_in_own_thread
from specbridge.rounds import DraftInfo, DraftReply
from specbridge.rounds_stream import RoundsStream
from specbridge.rpc_metrics import CountCalls
from specbridge.server import Server, ended_before, stop_event, typed_errors

log = logging.getLogger(__name__)

WARM_UP_SESSIONS = {"cpu": (1, 2, 4, 8), "cuda": (1, 2, 4, 8, 16, 32, 64)}
"""Points of the draft-cost curve."""
DRAIN_POLL_S = 0.02
STREAM_GRACE_S = 0.5
YIELD_TO_TARGET = 5


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """The Draft service. Answers UNAVAILABLE until `serve` has been called."""

    def __init__(self, drafter_id: str) -> None:
        self.instance = secrets.token_bytes(16)
        self.target_fingerprint = ""
        self._drafter_id = drafter_id
        self._loaded: Loaded | None = None

    def serve(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def info(self) -> DraftInfo:
        loaded = self._ready()
        config, channel = loaded.config, loaded.engine.channel_state
        return DraftInfo(
            drafter_id=self._drafter_id,
            fingerprint=loaded.fingerprint,
            # What clients derive from it is the largest depth, block_size - 1.
            block_size=config.horizon + 1,
            mask_token_id=config.mask_token_id,
            target_layer_ids=config.target_layer_ids,
            max_nodes=loaded.max_nodes,
            vocab_size=config.vocab_size,
            instance=self.instance,
            target_fingerprint=self.target_fingerprint if channel.attached else "",
            draft_cost=loaded.engine.draft_cost,
            channel_transport=channel.transport,
            channel_reason=channel.reason,
            attached=channel.attached,
            dummy_weights=loaded.dummy_weights,
            simulated_acceptance=loaded.simulated_acceptance,
            footprint=loaded.footprint,
            on_arrival=loaded.engine.limits.eager,
        )

    async def GetInfo(
        self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.DraftInfo:
        async with typed_errors(context):
            return wire.draft_info_to_pb(self.info())
        raise AssertionError("typed_errors lets no error pass")

    async def Rounds(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.DraftReply]:
        async with typed_errors(context):
            engine = self._ready().engine
            stream: RoundsStream[DraftReply] = RoundsStream()

            def take(pb: draft_pb2.DraftRequest) -> int:
                received = time.perf_counter_ns()
                request = wire.draft_request_from_pb(pb)
                engine.submit(request, stream.reply, stream=stream, received=received)
                return len(request.opens) + len(request.releases) + len(request.proposes)

            try:
                async with contextlib.aclosing(stream.answers(request_iterator, take)) as messages:
                    async for message in messages:
                        reply = wire.draft_reply_to_pb(message)
                        if message.timings is not None:
                            reply.timings.service_ns += stream.since_reply()
                        yield reply
            finally:
                engine.stream_closed(stream)

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Unavailable("the draft is still loading; try again when its health check says SERVING")
        return self._loaded


def _yield_to_target() -> None:
    """Lower the priority of this thread, the engine's, and of the compute threads it will make.

    Not of those that take in requests. A draft pass runs while the target waits for it and loses nothing;
    what runs beside a forward of the target (context appends) must not take a core from it.
    """
    os.nice(YIELD_TO_TARGET)


def run(settings: DraftSettings) -> int:
    """Serve until SIGTERM; returns the exit code. Raises ConfigError for settings that can't work."""
    configure_logging(settings.log_level, "draft")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if uvloop.run(_serve(settings)):
        return 0
    leave(0)


async def _serve(settings: DraftSettings) -> bool:
    """False if told to stop while the drafter was loaded or warmed, which goes on, on a thread that can't be
    interrupted.
    """
    stop = stop_event()
    metrics = DraftMetrics()
    endpoint = None
    if settings.metrics_port >= 0:
        endpoint, _ = serve_metrics(metrics.registry, settings.metrics_port, settings.metrics_host)
    servicer = DraftServicer(settings.draft if settings.draft != "auto" else f"{settings.target}-dflash")
    server = Server(
        settings.listen,
        [draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name],
        add=lambda s: draft_pb2_grpc.add_DraftServicer_to_server(servicer, s),
        drain_s=settings.drain,
        interceptors=[CountCalls(metrics.rpc)],
    )
    loaded: Loaded | None = None
    link: TargetLink | None = None
    try:
        await server.start()
        log.info("draft listening on %s, loading %s", server.bound, settings.draft)

        async def prepare() -> None:
            nonlocal loaded, link
            loaded, link = await _prepare(settings, servicer, metrics)

        if not await ended_before(stop, prepare()):
            log.info("told to stop before it was ready: ending")
            return False
        assert loaded is not None and link is not None
        servicer.serve(loaded)
        freeze_heap()
        link.start()
        await server.set_serving()
        log.info("draft ready: %s", server.bound)
        await stop.wait()
        await server.set_not_serving()
        await link.stop_check()
        await drain(loaded.engine, settings.drain)
    finally:
        if link is not None:
            await link.close()
        if loaded is not None:
            await asyncio.to_thread(loaded.engine.close)
        # Proposals under way have been answered; streams have no end of their own to wait for.
        await server.stop(grace=min(STREAM_GRACE_S, settings.drain))
        if endpoint is not None:
            endpoint.shutdown()
            endpoint.server_close()
    return True


async def _prepare(
    settings: DraftSettings, servicer: DraftServicer, metrics: DraftMetrics
) -> tuple[Loaded, TargetLink]:
    """The drafter, warm, and its tie to the target, not begun yet."""
    loaded = await run_in_own_thread(_load, settings, metrics)
    check = None
    if settings.selfcheck and not settings.synthetic:
        check = StartupCheck(
            loaded.engine,
            loaded.config,
            loaded.check_text,
            threshold=settings.selfcheck_acceptance,
            metrics=metrics,
        )
    link = TargetLink(
        settings.target_address,
        loaded,
        servicer,
        transport=settings.transport,
        take_over=settings.take_over,
        check=check,
    )
    metrics.registry.register(ChannelCollector(link.client.stats.snapshot))
    if resolve_device(settings.device) == "cpu":
        loaded.engine.call(_yield_to_target)
    curve = WARM_UP_SESSIONS[loaded.device.split(":")[0]] if settings.warmup_repeats else ()
    warm_up = tuple(n for n in curve if n <= max(settings.max_sessions, curve[0]))
    start = partial(loaded.engine.start, warm_up_sessions=warm_up, repeats=max(1, settings.warmup_repeats))
    # Not in the loop's pool, whose threads are waited for at the end.
    try:
        await run_in_own_thread(start)
    except Exception:
        await asyncio.to_thread(loaded.engine.close)
        raise
    return loaded, link


async def drain(engine: Engine, seconds: float) -> None:
    """Let the sessions of connected gateways come to their end, at most `seconds`; no new ones begin."""
    engine.drain()
    end = asyncio.get_running_loop().time() + seconds
    if engine.traffic:
        log.info("draining: %d sessions are open, at most %g s for them", engine.traffic, seconds)
    while engine.traffic and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(DRAIN_POLL_S)


def _load(settings: DraftSettings, metrics: DraftMetrics) -> Loaded:
    places = find_places(settings, progress=sys.stderr.isatty())
    return load_engine(settings, places.draft, places.target, metrics)
