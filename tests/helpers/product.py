"""The full product in one process: real engines, the real hidden-state channel, the real scheduler.

`LiveProduct` loads both services as their processes do (loaders, engines on threads of their own), joins them
by a HiddenStates stream over gRPC on a Unix socket, and runs the gateway's Scheduler over in-process clients
whose messages go through the wire types. Only the Rounds streams' sockets and process borders are missing. It
owns an event loop on a thread, so that tests stay plain functions.

`ScriptedTrees` is the draft's own tree growing with a hook behind the drafter: a script sees the real
logits and may replace them, which is how oracles and adversaries get in. Appends, context, noise and tree
build stay the real ones.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from in_process import InProcessDraftClient, InProcessTargetClient
from prometheus_client import CollectorRegistry
from scheduler_harness import Collected, Recorder, collect

from draft_service import loading
from draft_service.config import DraftSettings
from draft_service.context_cache import ContextCache
from draft_service.drafter import Drafter
from draft_service.host_trees import Ask, HostTrees
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Proposer
from draft_service.server import DraftServicer, TargetLink
from gateway.generation import GenerationRequest
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from protos import target_pb2_grpc
from specbridge.rounds import SamplingParams, StopParams
from specbridge.server import Server
from target_service.config import TargetSettings
from target_service.loading import load_engine
from target_service.metrics import TargetMetrics
from target_service.server import TargetServicer, connect_channel

Script = Callable[[Sequence[Ask], torch.Tensor], torch.Tensor]
"""(asks, the drafter's logits [asks, depth, vocab]) -> logits to grow trees from. On the draft's thread."""

PROPOSE_WAIT_S = 10.0
"""Longer than any step here takes: a fallback would be a tree that a test has not seen."""
START_S = 20.0


class ScriptedTrees(HostTrees):
    """The real thing; see the module."""

    script: Script | None = None

    def logits(self, asks: Sequence[Ask]) -> torch.Tensor:
        logits = super().logits(asks)
        return logits if self.script is None else self.script(asks, logits)

    def limit_top_k(self, top_k: int | None) -> None:
        """1 makes every tree a chain."""
        self.top_k = top_k


@dataclass(frozen=True, slots=True)
class Run:
    """What became of some requests, in their order, and what the scheduler reported of it."""

    texts: list[Collected]
    recorder: Recorder

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [text.tokens for text in self.texts]

    @property
    def tokens_per_round(self) -> float:
        """Tokens committed by a round, over all requests; the prefill's token belongs to none."""
        rounds = sum(text.stats.num_rounds for text in self.texts)
        return sum(len(text.tokens) - 1 for text in self.texts) / rounds


class LiveProduct:
    """Started on entry, closed on exit. target, draft: settings of the services beyond the tests' own."""

    def __init__(
        self,
        target_folder: Path,
        draft_folder: Path,
        *,
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
    ) -> None:
        self._target_folder, self._draft_folder = target_folder, draft_folder
        self._target_settings = TargetSettings(
            **{"target": str(target_folder), "device": "cpu", "warmup_repeats": 0, **(target or {})}
        )
        self._draft_settings = DraftSettings(
            **{
                "draft": str(draft_folder),
                "target": str(target_folder),
                "device": "cpu",
                "propose_wait": PROPOSE_WAIT_S,
                "selfcheck_rounds": 0,
                **(draft or {}),
            }
        )
        self.target_metrics = TargetMetrics(CollectorRegistry())
        self.draft_metrics = DraftMetrics(CollectorRegistry())
        self._sockets = Path(tempfile.mkdtemp(prefix="sb-"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway-loop", daemon=True)
        self._cleanups: list[Callable[[], Coroutine[Any, Any, object]]] = []
        self._engine: Any = None
        self._loaded: Any = None

    # ---- life -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._await(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._await(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def _start(self) -> None:
        address = f"unix:{self._sockets}/target.sock"
        self._engine = engine = load_engine(self._target_settings, self.target_metrics, lambda _: None)
        self._cleanups.append(lambda: asyncio.to_thread(engine.close))
        channel = connect_channel(engine, self._target_settings, self.target_metrics)
        await asyncio.to_thread(engine.start)
        servicer = TargetServicer()
        servicer.serve(engine, channel)
        server = Server(
            address,
            ["specbridge.v1.Target"],
            add=lambda s: target_pb2_grpc.add_TargetServicer_to_server(servicer, s),
        )
        await server.start()
        self._cleanups.append(lambda: server.stop(grace=0.5))
        with mock.patch.object(loading, "Proposer", self._make_proposer):
            self._loaded = loaded = loading.load_engine(
                self._draft_settings, self._draft_folder, self._target_folder, self.draft_metrics
            )
        await asyncio.to_thread(loaded.engine.start)
        self._cleanups.append(lambda: asyncio.to_thread(loaded.engine.close))
        drafts = DraftServicer("drafter")
        drafts.serve(loaded)
        link = TargetLink(address, loaded, drafts, transport=self._draft_settings.transport)
        link.start()
        self._cleanups.append(link.close)
        # Both ends know of it: the target captures from here on.
        await _until(
            lambda: loaded.engine.channel_state.attached and engine.info().channel_transport != "none"
        )

    def _make_proposer(self, drafter: Drafter, cache: ContextCache, **options: Any) -> Proposer:
        proposer = Proposer(drafter, cache, **options)
        self.trees = ScriptedTrees(
            drafter,
            cache.pages,
            top_k=options["top_k"],
            simulation=options["simulation"],
            conditioner=options["conditioner"],
        )
        proposer.trees = self.trees
        return proposer

    async def _stop(self) -> None:
        for cleanup in reversed(self._cleanups):
            await cleanup()

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- use --------------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """What the handshake chose, as the target says."""
        return str(self._engine.info().channel_transport)

    @property
    def horizon(self) -> int:
        """Largest depth of a tree: block size - 1."""
        return int(self._loaded.config.horizon)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        budget: int = 16,
        script: Script | None = None,
        timeout_s: float = 200.0,
        **limits: Any,
    ) -> Run:
        """Run all requests at once. Every session may use its whole budget unless `limits` says less."""
        rows = max(1, len(requests)) * (budget + 1)
        numbers = SchedulerLimits(
            **{
                "tree_budget": budget,
                "max_verify_rows": rows,
                "min_tree": 1,
                "draft_timeout": PROPOSE_WAIT_S + 5,
                "draft_stall": PROPOSE_WAIT_S + 10,
                **limits,
            }
        )
        self.trees.script = script
        recorder = Recorder()
        texts = self._await(self._run(requests, numbers, recorder, timeout_s))
        recorder.reconcile()
        return Run(texts, recorder)

    def run_with(
        self,
        requests: Sequence[GenerationRequest],
        meddle: Callable[[int, asyncio.Task[Collected]], Coroutine[Any, Any, None]],
        *,
        which: Sequence[int],
        timeout_s: float = 200.0,
    ) -> list[tuple[int, ...] | None]:
        """Run all requests at once, and `meddle(i, task)` beside each of `which`. Tokens; None: cancelled."""
        limits = SchedulerLimits(tree_budget=5, max_verify_rows=6 * len(requests), min_tree=1)
        recorder = Recorder()

        async def work(scheduler: Scheduler) -> list[Collected | None]:
            tasks = [asyncio.create_task(collect(scheduler, request)) for request in requests]
            meddlers = [asyncio.create_task(meddle(i, tasks[i])) for i in which]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*meddlers)
            for result in done:
                if isinstance(result, Exception):
                    raise result
            return [None if isinstance(result, BaseException) else result for result in done]

        texts = self._await(self._scheduled(work, limits, recorder, timeout_s))
        recorder.reconcile()
        return [None if text is None else text.tokens for text in texts]

    async def _run(
        self,
        requests: Sequence[GenerationRequest],
        limits: SchedulerLimits,
        recorder: Recorder,
        timeout_s: float,
    ) -> list[Collected]:
        async def work(scheduler: Scheduler) -> list[Collected]:
            return list(await asyncio.gather(*(collect(scheduler, request) for request in requests)))

        return await self._scheduled(work, limits, recorder, timeout_s)

    async def _scheduled(
        self,
        work: Callable[[Scheduler], Coroutine[Any, Any, list[Any]]],
        limits: SchedulerLimits,
        recorder: Recorder,
        timeout_s: float,
    ) -> list[Any]:
        """What `work` returns of a scheduler that lives as long."""
        target, draft = InProcessTargetClient(self._engine), InProcessDraftClient(self._loaded)
        scheduler = Scheduler(target, draft, limits=limits, observer=recorder)
        async with asyncio.timeout(timeout_s):
            await scheduler.start()
            try:
                await _until(lambda: scheduler.target_connected and scheduler.draft_connected)
                return await work(scheduler)
            finally:
                await scheduler.close()

    def forget_context(self) -> None:
        """The draft loses its cached prefixes, as when its target has been another one for a while."""
        done = threading.Event()
        engine = self._loaded.engine
        engine.call(lambda: (engine._cache.pool.clear_cache(), done.set()))
        assert done.wait(START_S)

    def leftovers(self) -> dict[str, float]:
        """Sessions, pages and ring slots in use, as /metrics would tell; kept prefixes do not count."""
        found = {
            name: self.target_metrics.registry.get_sample_value(f"specbridge_target_{name}")
            for name in ("sessions", "sessions_running", "kv_pages_used", "channel_ring_used")
        } | {
            f"draft {name}": self.draft_metrics.registry.get_sample_value(f"specbridge_draft_{name}")
            for name in ("sessions", "pages_used", "pending_rows")
        }
        assert None not in found.values(), f"a metric has another name: {found}"
        return {name: value for name, value in found.items() if value}

    def assert_idle(self, timeout_s: float = 30.0) -> None:
        """Nothing is left of any request. Releases are carried out on the engines' threads: wait a moment."""
        deadline = time.monotonic() + timeout_s
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert self.leftovers() == {}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.002)


def request_for(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    seed: int = 0,
    max_tokens: int = 32,
    speculate: bool = True,
    **stop: Any,
) -> GenerationRequest:
    """One request; the end-of-text id is a token like any other unless `stop` says otherwise."""
    return GenerationRequest(
        tokens=tuple(prompt),
        sampling=sampling,
        stop=StopParams(max_tokens=max_tokens, **{"ignore_eos": True, **stop}),
        seed=seed,
        speculate=speculate,
    )
