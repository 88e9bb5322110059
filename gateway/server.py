"""The gateway process: the gRPC Generation service, the REST server and the scheduler in one event loop.

Owns start-up order, readiness, drain, and protobuf ↔ CompletionParams. Readiness: health is NOT_SERVING and
REST answers 503 until the target was reached, again while it is away, and from the first moment of shutdown.
Does not own what a request does (completion, scheduler) nor the routes (rest).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc
import uvloop

import specbridge
from gateway.clients import GrpcDraftClient, GrpcTargetClient
from gateway.completion import CompletionService, Phase, Summary
from gateway.config import GatewaySettings
from gateway.http import LAST_WRITES_S, HttpServer
from gateway.metrics import GatewayMetrics
from gateway.params import CompletionParams, tenant_of
from gateway.policies import largest_tree
from gateway.rest import create_app
from gateway.scheduler import Scheduler
from gateway.text import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from specbridge import errors
from specbridge.errors import InvalidRequest
from specbridge.logs import configure_logging, request_id
from specbridge.metrics import new_registry, serve_metrics
from specbridge.models import resolve_target
from specbridge.process import freeze_heap
from specbridge.rpc_metrics import CountCalls
from specbridge.server import Server, stop_event, typed_errors

log = logging.getLogger(__name__)

GENERATION = gateway_pb2.DESCRIPTOR.services_by_name["Generation"].full_name


class GenerationServicer(gateway_pb2_grpc.GenerationServicer):
    """specbridge.v1.Generation."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Writes deltas, then the final message. A cancelled call or a passed deadline frees the sessions."""
        async with typed_errors(context):
            service = self._service
            service.check_serving()
            remaining = context.time_remaining()
            metadata = dict(context.invocation_metadata() or ())
            tenant = tenant_of(metadata.get("authorization", ""))
            params = _params_from_pb(request, deadline_s=remaining, tenant=tenant)
            request_id.set(params.request_id)
            name = request.WhichOneof("input")
            prompt = await self._prompt(request, name)
            completion = service.start(prompt, params, prompt_name=name or "input")
            try:
                # Written, not yielded: a cancellation then always arrives in this coroutine.
                async with contextlib.aclosing(completion.deltas()) as deltas:
                    async for delta in deltas:
                        message = gateway_pb2.Delta(text=delta.text, token_ids=delta.token_ids)
                        await context.write(gateway_pb2.GenerateReply(delta=message))
                summary = completion.summary
                assert summary is not None
                await context.write(gateway_pb2.GenerateReply(final=_final_to_pb(summary, params.request_id)))
            finally:
                await completion.aclose()

    async def GetModel(
        self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ModelInfo:
        async with typed_errors(context):
            service = self._service
            info, draft, nodes = service.info, service.scheduler.draft_info, service.tree_budget()
            return gateway_pb2.ModelInfo(
                model_id=service.name,
                max_length=info.max_length,
                vocab_size=info.vocab_size,
                drafter_id=draft.drafter_id if draft is not None else "",
                block_size=draft.block_size if draft is not None else 0,
                tree_budget=min(nodes, draft.max_nodes) if draft is not None else nodes,
                dummy_weights=service.dummy_weights,
                simulated_acceptance=service.simulated_acceptance,
            )

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.TokenizeReply:
        async with typed_errors(context):
            return gateway_pb2.TokenizeReply(ids=await self._prompt(request, request.WhichOneof("input")))

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.DetokenizeReply:
        async with typed_errors(context):
            return gateway_pb2.DetokenizeReply(text=await self._service.decode(request.ids))

    async def _prompt(self, request: Any, name: str | None) -> list[int]:
        if name == "text":
            return await self._service.encode(request.text, name=name)
        if name == "chat":
            messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
            if not messages:
                raise InvalidRequest("chat holds no messages; give at least one", param="chat")
            return await self._service.encode_chat(messages, name=name)
        if name == "token_ids":
            return list(request.token_ids.ids)
        raise InvalidRequest(
            "no input is given; set text or chat (or token_ids, where there is one)", param="input"
        )


def _params_from_pb(
    request: gateway_pb2.GenerateRequest, *, deadline_s: float | None, tenant: str
) -> CompletionParams:
    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    if deadline_s is not None and deadline_s <= 0:
        raise errors.DeadlineExceeded("the deadline had passed when the request arrived; allow it more time")
    return CompletionParams(
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=given("seed"),
        max_tokens=given("max_tokens"),
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        speculate=not request.no_speculation,
        max_tree_nodes=request.max_tree_nodes or None,
        # A client without a deadline is told "forever" in large numbers by some gRPC versions.
        deadline_s=deadline_s if deadline_s is not None and deadline_s < 1e8 else None,
        priority=request.priority,
        tenant=tenant,
        request_id=request.request_id or request_id.get(),
    )


def _final_to_pb(summary: Summary, request_id: str) -> gateway_pb2.Final:
    stats = summary.stats
    return gateway_pb2.Final(
        finish_reason=int(summary.finish_reason),  # type: ignore[arg-type]
        matched_stop=summary.stop_reason if isinstance(summary.stop_reason, str) else "",
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        cached_tokens=summary.cached_tokens,
        seed=summary.seed % 2**64,
        request_id=request_id,
        speculation=gateway_pb2.SpeculativeStats(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.acceptance_histogram,
            num_spec_steps=stats.num_spec_steps,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            num_draft_tokens=stats.num_draft_tokens,
            num_spec_tokens=stats.num_spec_tokens,
            num_rounds=stats.num_rounds,
        ),
    )


def grpc_server(
    service: CompletionService,
    metrics: GatewayMetrics,
    address: str,
    *,
    drain_s: float = LAST_WRITES_S,
    keepalive_s: float | None = None,
) -> Server:
    """The gRPC server, not started."""
    servicer = GenerationServicer(service)
    options: dict[str, Any] = {} if keepalive_s is None else {"keepalive_s": keepalive_s}
    return Server(
        address,
        [GENERATION],
        add=lambda server: gateway_pb2_grpc.add_GenerationServicer_to_server(servicer, server),
        drain_s=drain_s,
        interceptors=[CountCalls(metrics.rpc)],
        **options,
    )


class _Health:
    """Keeps the gRPC health service at what `service.healthy` says."""

    def __init__(self, service: CompletionService, server: Server | None) -> None:
        self._service = service
        self._server = server
        self._changed = asyncio.Event()
        self._shown = False

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            healthy = self._service.healthy
            if self._server is not None and healthy != self._shown:
                await (self._server.set_serving() if healthy else self._server.set_not_serving())
            if healthy != self._shown:
                log.info("serving" if healthy else "not serving")
            self._shown = healthy
            await self._changed.wait()
            self._changed.clear()


async def serve(settings: GatewaySettings, *, stop: asyncio.Event) -> None:
    """Run the gateway until `stop` is set, then drain. Raises ConfigError for settings that can't work."""
    tokenizer = await asyncio.to_thread(load_tokenizer, settings)
    limits = settings.limits()
    metrics = GatewayMetrics(new_registry())
    scheduler = Scheduler(
        GrpcTargetClient(settings.target_address),
        GrpcDraftClient(settings.draft_address) if settings.draft_address else None,
        limits=limits,
        observer=metrics,
    )
    service = CompletionService(
        scheduler,
        tokenizer,
        names=settings.names(),
        tree_budget=lambda: largest_tree(limits, scheduler.target_info) if settings.draft_address else 0,
        detailed=settings.request_stats == "detailed",
    )
    metrics.watch(
        running=lambda: scheduler.running,
        waiting=lambda: scheduler.queue_length,
        synthetic=lambda: float(service.synthetic),
        stall=scheduler.longest_stall,
        kv_usage=lambda: scheduler.kv_usage,
    )
    metrics.tell(
        model_name=service.name,
        version=specbridge.__version__,
        drafts=bool(settings.draft_address),
        vllm_aliases=settings.metrics_vllm_aliases,
    )
    grpc_side = grpc_server(service, metrics, settings.grpc_listen) if settings.grpc_listen else None
    app = create_app(service, metrics, api_key=settings.api_key, max_body=settings.max_body)
    http_side = HttpServer(app, host=settings.http_host, port=settings.http_port)
    health = _Health(service, grpc_side)
    metrics.on_connection_changed = health.changed

    async with contextlib.AsyncExitStack() as stack:
        if settings.metrics_port >= 0:
            server, _ = serve_metrics(metrics.registry, settings.metrics_port, settings.metrics_host)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        if grpc_side is not None:
            await grpc_side.start()
            stack.push_async_callback(grpc_side.stop)
            log.info("gRPC on %s", grpc_side.bound)
        await http_side.start()
        stack.push_async_callback(http_side.stop)
        log.info("REST on http://%s:%d", settings.http_host, http_side.port)
        await scheduler.start()
        stack.push_async_callback(scheduler.close)
        watcher = asyncio.create_task(health.run(), name="health")
        stack.push_async_callback(_cancel, watcher)

        if await _either(_target_up(scheduler), stop):
            freeze_heap()
            service.phase = Phase.SERVING
            health.changed()
            await stop.wait()
        service.phase = Phase.DRAINING
        health.changed()
        log.info(
            "draining %d requests for up to %g s", scheduler.running + scheduler.queue_length, settings.drain
        )
        await _drained(scheduler, settings.drain)
    log.info("stopped")


def load_tokenizer(settings: GatewaySettings) -> Tokenizer:
    """The target's tokenizer, or what --tokenizer says. Raises ConfigError."""
    if settings.tokenizer == "bytes":
        log.warning("STAND-IN TOKENIZER: one token a byte; texts are not those of a real model's tokenizer")
        place = Path(settings.target).expanduser()
        folder = place.parent if place.is_file() else place
        return Tokenizer.stand_in(folder if (folder / "config.json").is_file() else None)
    if settings.tokenizer:
        return Tokenizer.load(Path(settings.tokenizer).expanduser())
    return Tokenizer.load(resolve_target(settings.target))


async def _target_up(scheduler: Scheduler) -> None:
    waited = 0
    while True:
        try:
            await scheduler.wait_ready(10.0)
            return
        except errors.Unavailable:
            waited += 10
            log.info("waiting for the target service (%d s)", waited)


async def _either(work: Any, stop: asyncio.Event) -> bool:
    """Whether `work` ended before `stop` was set."""
    first, second = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    done = first.done() and not stop.is_set()
    await _cancel(first)
    await _cancel(second)
    return done


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _drained(scheduler: Scheduler, seconds: float) -> None:
    """Wait until no request is left, at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while scheduler.running or scheduler.queue_length:
                await asyncio.sleep(0.02)


def run(settings: GatewaySettings) -> int:
    """The gateway process, from logging to exit code. Raises ConfigError for settings that can't work."""
    configure_logging(settings.log_level, "gateway")
    uvloop.run(_main(settings))
    return 0


async def _main(settings: GatewaySettings) -> None:
    await serve(settings, stop=stop_event())
