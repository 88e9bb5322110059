"""What one round costs in the gateway itself: scripted services, real scheduler, one table.

    python -m benchmarks.gateway_round [--streams 1 8 32] [--rounds 300] [--nodes 15] [--service-ms 5]

The target and the draft are scripted: they answer after `--service-ms` with a tree of `--nodes` nodes or with
accepted tokens, and report the time they took, stamped as the real ones do (from gRPC, back to gRPC). Two
set-ups: "in process" (no sockets, no protobuf) and "gRPC" (both services in one other process, each with an
engine thread, over a Unix socket, as in production). Columns, medians in ms:

    gateway   time of a round outside the two waits: building batches, applying results
    rpc       time of the waits that the services do not account for: protobuf here, sockets, wake-ups
    sum       round − draft's own time − target's own time: all that is not the services'

"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.common import arguments, report
from gateway.clients import GrpcDraftClient, GrpcTargetClient
from gateway.generation import GenerationRequest, NullObserver, RoundRecord
from gateway.limits import SchedulerLimits
from gateway.scheduler import Scheduler
from protos import draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.errors import Unavailable
from specbridge.rounds import (
    DraftInfo,
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    DraftTimings,
    SamplingParams,
    StopParams,
    TargetInfo,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
    TargetTimings,
)
from specbridge.rounds_stream import RoundsStream
from specbridge.server import server_options
from specbridge.tree import DraftTree

VOCAB = 49152
ACCEPTED = 3


def tree_of(nodes: int, max_depth: int) -> DraftTree:
    """A chain of a few nodes with siblings behind it."""
    depth = min(ACCEPTED + 1, nodes, max_depth)
    if depth <= 0:
        return DraftTree()
    parents = [*range(-1, depth - 1), *((i % depth) - 1 for i in range(nodes - depth))]
    return DraftTree(
        tuple(range(100, 100 + nodes)), tuple(parents), tuple(-0.1 * (i + 1) for i in range(nodes))
    )


class ScriptedTarget:
    """Answers at once; the caller adds the delay. received: perf_counter_ns of a request's arrival."""

    opened = TargetResultKind.OPENED

    def info(self) -> TargetInfo:
        return TargetInfo(
            model_id="scripted", fingerprint="x", vocab_size=VOCAB, eos_token_ids=(2,), hidden_size=576,
            num_layers=30, page_size=16, max_length=1 << 20, tp_size=1,
            max_sessions=256, max_tree_nodes=256, total_pages=0,
            dtype="bfloat16", device="cpu", instance=b"t" * 16,
        )  # fmt: skip

    def answer(self, request: TargetRequest, received: int) -> list[TargetReply]:
        replies = []
        results = [TargetResult(key, TargetResultKind.RELEASED) for key in request.releases]
        for o in request.opens:
            first = TargetResult(o.session, TargetResultKind.FIRST, kv_length=len(o.tokens), tokens=(5,))
            results += [TargetResult(o.session, TargetResultKind.OPENED), first]
        if results:
            replies.append(TargetReply(0, tuple(results)))
        if request.verifies:
            verified = []
            for v in request.verifies:
                accepted = tuple(range(min(ACCEPTED, len(v.tree))))
                tokens = tuple(range(7, 8 + len(accepted)))
                verified.append(
                    TargetResult(
                        v.session, TargetResultKind.VERIFIED, base=v.base, kv_length=v.base + len(tokens),
                        tokens=tokens, accepted=accepted,
                    )
                )  # fmt: skip
            rows = sum(len(v.tree) + 1 for v in request.verifies)
            timings = TargetTimings(rows=rows, service_ns=time.perf_counter_ns() - received)
            replies.append(TargetReply(request.batch_id, tuple(verified), timings))
        return replies


class ScriptedDraft:
    opened = None

    def info(self) -> DraftInfo:
        return DraftInfo(
            drafter_id="scripted", fingerprint="x", block_size=16, mask_token_id=1, target_layer_ids=(1,),
            max_nodes=256, vocab_size=VOCAB, instance=b"d" * 16, attached=True,
        )  # fmt: skip

    def answer(self, request: DraftRequest, received: int) -> list[DraftReply]:
        replies = []
        results = [DraftResult(key, DraftResultKind.RELEASED) for key in request.releases]
        results += [DraftResult(o.session, DraftResultKind.OPENED) for o in request.opens]
        if results:
            replies.append(DraftReply(request.batch_id, tuple(results)))
        if request.proposes:
            proposed = tuple(
                DraftResult(
                    p.session, DraftResultKind.PROPOSED, base=p.base, tree=tree_of(p.max_nodes, p.max_depth)
                )
                for p in request.proposes
            )
            timings = DraftTimings(service_ns=time.perf_counter_ns() - received)
            replies.append(DraftReply(request.batch_id, proposed, timings))
        return replies


class InProcess:
    """A Client without sockets."""

    def __init__(self, service: Any, delay_s: float) -> None:
        self.service = service
        self.delay_s = delay_s
        self.connected = False
        self._listener: Any = None

    def start(self, listener: Any) -> None:
        self._listener = listener
        self.connected = True
        asyncio.get_running_loop().call_soon(listener.on_connected, self.service.info())

    async def info(self, timeout_s: float) -> Any:
        return self.service.info()

    def send(self, request: Any) -> None:
        if not self.connected:
            raise Unavailable("closed")
        loop = asyncio.get_running_loop()
        slow = bool(getattr(request, "verifies", ()) or getattr(request, "proposes", ()))
        loop.call_later(self.delay_s if slow else 0.0, self._answer, request, time.perf_counter_ns())

    def _answer(self, request: Any, sent_ns: int) -> None:
        for reply in self.service.answer(request, sent_ns):
            if self.connected:
                self._listener.on_reply(reply)

    def reset(self, reason: str) -> None: ...

    async def close(self) -> None:
        self.connected = False


class Rounds:
    """A servicer's Rounds and GetInfo over a scripted service; its engine is a thread that sleeps."""

    service: Any
    info_to_pb: Any
    from_pb: Any
    to_pb: Any

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self._inbox: queue.SimpleQueue[tuple[Any, int, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            request, received, reply = self._inbox.get()
            if getattr(request, "verifies", ()) or getattr(request, "proposes", ()):
                time.sleep(self.delay_s)
            for message in self.service.answer(request, received):
                reply(message)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return self.info_to_pb(self.service.info())

    async def Rounds(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        stream: RoundsStream[Any] = RoundsStream(opened=self.service.opened)

        def take(pb: Any) -> int:
            received = time.perf_counter_ns()
            self._inbox.put((self.from_pb(pb), received, stream.reply))
            return 1  # the client does not half-close: what is owed does not matter

        async for message in stream.answers(requests, take):
            reply = self.to_pb(message)
            if message.timings is not None:
                reply.timings.service_ns += stream.since_reply()
            yield reply


class TargetRounds(Rounds, target_pb2_grpc.TargetServicer):
    service = ScriptedTarget()
    info_to_pb = staticmethod(wire.target_info_to_pb)
    from_pb = staticmethod(wire.target_request_from_pb)
    to_pb = staticmethod(wire.target_reply_to_pb)


class DraftRounds(Rounds, draft_pb2_grpc.DraftServicer):
    service = ScriptedDraft()
    info_to_pb = staticmethod(wire.draft_info_to_pb)
    from_pb = staticmethod(wire.draft_request_from_pb)
    to_pb = staticmethod(wire.draft_reply_to_pb)


def serve(folder: str, delay_s: float) -> None:
    """Entry of the other process."""

    async def main() -> None:
        server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServicer_to_server(TargetRounds(delay_s), server)
        draft_pb2_grpc.add_DraftServicer_to_server(DraftRounds(delay_s), server)
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()
        await server.wait_for_termination()

    run_loop(main())


def run_loop(main: Any) -> None:
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run(main)
        return
    asyncio.run(main)


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.rounds.append(record)


async def measure(target: Any, draft: Any, *, streams: int, rounds: int, nodes: int) -> dict[str, float]:
    """Run `streams` readers for `rounds` rounds; medians over the rounds in which all took part."""
    recorder = Recorder()
    limits = SchedulerLimits(
        tree_budget=nodes, max_verify_rows=(nodes + 1) * streams, min_tree=1, max_running=streams
    )
    scheduler = Scheduler(target, draft, limits=limits, observer=recorder)
    await scheduler.start()
    await scheduler.wait_ready(20.0)
    while not scheduler.draft_connected:
        await asyncio.sleep(0.01)

    async def read(i: int) -> None:
        request = GenerationRequest(
            tokens=tuple(range(10, 210)),
            sampling=SamplingParams(temperature=0.7),
            stop=StopParams(max_tokens=1 << 19),
            seed=i,
        )
        async with scheduler.generate(request) as generation:
            async for _ in generation:
                pass

    tasks = [asyncio.create_task(read(i)) for i in range(streams)]
    while sum(r.sessions == streams for r in recorder.rounds) < rounds:
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await scheduler.close()
    full = [r for r in recorder.rounds if r.sessions == streams and r.nodes == nodes * streams][10:]
    return {
        "streams": streams,
        "rounds": len(full),
        "gateway": statistics.median(r.gateway_s for r in full) * 1e3,
        "rpc": statistics.median(r.rpc_s for r in full) * 1e3,
        "sum": statistics.median(r.total_s - r.draft_service_s - r.verify_service_s for r in full) * 1e3,
        "round": statistics.median(r.total_s for r in full) * 1e3,
    }


async def in_process(args: argparse.Namespace, streams: int) -> dict[str, float]:
    delay = args.service_ms / 1e3
    return await measure(
        InProcess(ScriptedTarget(), delay), InProcess(ScriptedDraft(), delay),
        streams=streams, rounds=args.rounds, nodes=args.nodes,
    )  # fmt: skip


async def over_grpc(args: argparse.Namespace, streams: int, address: str) -> dict[str, float]:
    target, draft = GrpcTargetClient(address), GrpcDraftClient(address)
    return await measure(target, draft, streams=streams, rounds=args.rounds, nodes=args.nodes)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--service-ms", type=float, default=5.0)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    async def all_in_process() -> None:
        for streams in args.streams:
            rows.append({"set-up": "in process", **await in_process(args, streams)})

    run_loop(all_in_process())
    with tempfile.TemporaryDirectory(prefix="specbridge-bench-") as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, args.service_ms / 1e3), daemon=True
        )
        process.start()

        async def all_over_grpc() -> None:
            for streams in args.streams:
                rows.append({"set-up": "gRPC", **await over_grpc(args, streams, f"unix:{folder}/s")})

        try:
            run_loop(all_over_grpc())
        finally:
            process.terminate()
            process.join(5)

    columns = ("set-up", "streams", "rounds", "gateway", "rpc", "sum", "round")
    report("gateway_round", columns, [[row[c] for c in columns] for row in rows], args.out)


if __name__ == "__main__":
    main()
