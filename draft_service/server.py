"""gRPC side of the draft service: wire ↔ domain, and the life of the process.

Owns the servicer, start-up (settings → drafter → engine → SERVING), the channel's consumer end and shutdown.
Does not own what requests mean (engine) nor the channel's transports (specbridge.channel). The service
answers while the target is away: proposals are NOT_READY then, and the channel attaches again by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import AsyncIterator

import grpc
import torch
import uvloop

from draft_service.config import DraftSettings
from draft_service.loading import Loaded, load_engine
from draft_service.metrics import ChannelCollector, DraftMetrics
from protos import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.channel.base import AttachedInfo
from specbridge.channel.consumer import HiddenStateClient
from specbridge.channel.transports import TRANSPORTS
from specbridge.errors import Unavailable
from specbridge.metrics import serve_metrics
from specbridge.models import resolve_draft, resolve_target
from specbridge.rounds import DraftInfo, DraftReply, DraftRequest, TargetInfo
from specbridge.server import Server, channel_options, stop_event, typed_errors

log = logging.getLogger(__name__)

WARM_UP_SESSIONS = (1, 2, 4, 8)
INFO_TIMEOUT_S = 5.0
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Stream:
    """One Rounds stream: replies on their way out, and how many results are still owed, so that a client
    which closes its side still gets its answers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[DraftReply | None] = asyncio.Queue()
        self._owed = 0
        self._half_closed = False

    def expect(self, request: DraftRequest) -> None:
        self._owed += len(request.opens) + len(request.releases) + len(request.proposes)

    def reply(self, message: DraftReply) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    def half_close(self) -> None:
        self._half_closed = True
        if not self._owed:
            self._queue.put_nowait(None)

    async def next(self) -> DraftReply | None:
        """The next reply; None at the end."""
        if self._half_closed and not self._owed:
            return None
        message = await self._queue.get()
        if message is not None:
            self._owed -= len(message.results)
        return message


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
            stream = Stream(asyncio.get_running_loop())

            async def read() -> None:
                try:
                    async for pb in request_iterator:
                        request = wire.draft_request_from_pb(pb)
                        stream.expect(request)
                        engine.submit(request, stream.reply, stream=stream)
                finally:
                    stream.half_close()

            reader = asyncio.create_task(read())
            try:
                while (message := await stream.next()) is not None:
                    yield wire.draft_reply_to_pb(message)
            finally:
                reader.cancel()
                engine.stream_closed(stream)

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Unavailable("the draft is still loading; try again when its health check says SERVING")
        return self._loaded


class TargetLink:
    """The channel's consumer end, wired to the engine, and the target's fingerprint."""

    def __init__(self, address: str, loaded: Loaded, servicer: DraftServicer, *, transport: str) -> None:
        engine, config = loaded.engine, loaded.config
        self._address = address
        self._config = config
        self._servicer = servicer
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine = engine
        # What else the consumer has (inline, where nothing better works) stays its own choice.
        transports = tuple(TRANSPORTS) if transport == "auto" else (transport,)
        self.client = HiddenStateClient(
            address,
            target_layer_ids=config.target_layer_ids,
            normed_last_layer=config.normed_last_layer,
            device="cpu",
            on_attached=self._attached,
            on_chunk=engine.on_chunk,
            on_detached=engine.on_detached,
            instance=servicer.instance,
            transports=transports,
        )
        engine.connect(self.client)

    def start(self) -> None:
        self.client.start()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.client.close()

    def _attached(self, info: AttachedInfo) -> None:
        self._engine.on_attached(info)
        task = asyncio.get_running_loop().create_task(self._identify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _identify(self) -> None:
        """Learn which target it is. That it answers at all is not this call's matter."""
        try:
            info = await target_info(self._address)
        except grpc.aio.AioRpcError as error:
            log.warning("the target at %s does not say who it is: %s", self._address, error.code().name)
            return
        self._servicer.target_fingerprint = info.fingerprint
        for name, ours, theirs in (
            ("vocabulary", self._config.vocab_size, info.vocab_size),
            ("hidden size", self._config.hidden_size, info.hidden_size),
        ):
            if ours != theirs:
                log.error(
                    "the target has %s %d, the drafter's is %d: give both the same --target",
                    name,
                    theirs,
                    ours,
                )


async def target_info(address: str) -> TargetInfo:
    """Target.GetInfo. Raises grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        pb = await target_pb2_grpc.TargetStub(channel).GetInfo(
            common_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S
        )
    return wire.target_info_from_pb(pb)


def run(settings: DraftSettings) -> int:
    """Serve until SIGTERM; returns the exit code. Raises ConfigError for settings that can't work."""
    logging.basicConfig(level=settings.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return uvloop.run(_serve(settings))


async def _serve(settings: DraftSettings) -> int:
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
    )
    loaded: Loaded | None = None
    link: TargetLink | None = None
    try:
        await server.start()
        log.info("draft listening on %s, loading %s", server.bound, settings.draft)
        loaded = await asyncio.to_thread(_load, settings, metrics)
        link = TargetLink(settings.target_address, loaded, servicer, transport=settings.transport)
        metrics.registry.register(ChannelCollector(link.client.stats.snapshot))
        warm_up = WARM_UP_SESSIONS if settings.warmup_repeats else ()
        await asyncio.to_thread(
            loaded.engine.start, warm_up_sessions=warm_up, repeats=max(1, settings.warmup_repeats)
        )
        servicer.serve(loaded)
        link.start()
        await server.set_serving()
        log.info("draft ready: %s", server.bound)
        await stop.wait()
        await server.set_not_serving()
    finally:
        if link is not None:
            await link.close()
        if loaded is not None:
            await asyncio.to_thread(loaded.engine.close)
        # Proposals under way have been answered; streams have no end of their own to wait for.
        await server.stop(grace=min(0.5, settings.drain))
        if endpoint is not None:
            endpoint.shutdown()
            endpoint.server_close()
    return 0


def _load(settings: DraftSettings, metrics: DraftMetrics) -> Loaded:
    progress = sys.stderr.isatty()
    target = resolve_target(settings.target, progress=progress)
    draft = resolve_draft(settings.draft, settings.target, progress=progress)
    return load_engine(settings, draft, target, metrics)
