"""What the hidden-state channel adds to a round, and the rate at which rows are read, per transport.

    python -m benchmarks.channel [--taps 5 --hidden 4096] [--rows 5] [--hand-offs 2000] [--out channel.json]

Three processes, as in the product: a gateway (this one), a target and a draft, each with its engine's thread
beside an event loop, with the product's messages between them. In a round the target writes --rows rows on
its device and reads one number back (its step), the draft copies as many rows and reads one number back (its
pass). In every other block of rounds the rows come through the channel, in the others they are the draft's
own: everything else is the same. Without a GPU shared_memory and inline are measured; with one, cuda_ipc from
GPU 0 to itself, shared_memory and inline from it to the CPU; with two also cuda_ipc from GPU 0 to GPU 1.

    adds us      a round with the hand-off minus one without it, as the gateway sees them, medians by block:
                 all that reserving, marking, announcing, receiving and acknowledging make the round longer;
                 also what other threads take from the engine's
    round us     the round without it
    reserve us   of that, in the target's engine thread: reserve before the step, mark after it
    publish us   there, after the answer, as the target's engine does it
    take us      in the draft's: the chunk's rows as a tensor, which may have to wait on its stream
    ack us       there, after the answer: the fence behind the reading (event record), the acknowledgement
    late us      asked for a tree → chunk there; 0: it came first, as it should, one message against two
    one way us   rows written → chunk in the draft's hands
    read GB/s    a chunk of --bulk-rows rows from the ring into the draft's own memory (bytes read / time)
    local GB/s   a copy of as many bytes inside of the draft's own memory in the same run: the device's rate
    of local     the one by the other

Nothing else may run beside it: a hand-off is tens of microseconds of a few threads.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
import uvloop

from benchmarks.channel_services import BLOCK, BULK, KEY, TREE, Device, DraftSide, TargetSide, now
from benchmarks.common import arguments, report
from protos import draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.channel import ChannelLayout, HiddenStateClient, HiddenStateServer
from specbridge.rounds import DraftRequest, Propose, TargetRequest, Verify
from specbridge.server import server_options

INLINE_BULK_ROWS = 256


async def serve(address: str, add: Callable[[grpc.aio.Server], None]) -> grpc.aio.Server:
    server = grpc.aio.server(options=server_options())
    add(server)
    server.add_insecure_port(address)
    await server.start()
    return server


async def target(
    folder: str, device: str, layout: ChannelLayout, args: argparse.Namespace, pipe: Connection
) -> None:
    slots = args.bulk_rows + 4 * BLOCK * args.rows
    channel = HiddenStateServer(
        b"channel-benchmark", lambda layers, normed: layout, device=device, slots=slots
    )
    side = TargetSide(channel, Device(device, layout, args), args)
    server = await serve(
        f"unix:{folder}/target", lambda to: target_pb2_grpc.add_TargetServicer_to_server(side, to)
    )
    pipe.send("serving")
    await asyncio.to_thread(pipe.recv)
    pipe.send(side.times)
    channel.close()
    await server.stop(0.1)


async def draft(
    folder: str, device: str, layout: ChannelLayout, args: argparse.Namespace, pipe: Connection
) -> None:
    side = DraftSide(Device(device, layout, args), args, device)
    attached = asyncio.Event()
    client = side.client = HiddenStateClient(
        f"unix:{folder}/target",
        target_layer_ids=(0,),
        normed_last_layer=False,
        transports=(args.transport,),
        device=device,
        on_attached=lambda info: attached.set(),
        on_chunk=side.on_chunk,
    )
    server = await serve(
        f"unix:{folder}/draft", lambda to: draft_pb2_grpc.add_DraftServicer_to_server(side, to)
    )
    await asyncio.to_thread(pipe.recv)  # the target serves
    client.start()
    try:
        await asyncio.wait_for(attached.wait(), 20.0)
        pipe.send("attached")
    except TimeoutError:
        pipe.send(client.reason)
        return
    await asyncio.to_thread(pipe.recv)
    pipe.send((side.times, side.rates))
    await client.close()
    await server.stop(0.1)


def run(service: Callable[..., Any], device: str, *args: Any) -> None:
    """Entry of the two processes."""
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)  # the cores are for the threads of the hand-off
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    uvloop.run(service(args[0], device, *args[1:]))


async def gateway(folder: str, args: argparse.Namespace) -> dict[int, int]:
    """Nanoseconds of each round, by batch."""
    times: dict[int, int] = {}
    async with (
        grpc.aio.insecure_channel(f"unix:{folder}/target") as to_target,
        grpc.aio.insecure_channel(f"unix:{folder}/draft") as to_draft,
    ):
        verifies = target_pb2_grpc.TargetStub(to_target).Rounds()
        proposes = draft_pb2_grpc.DraftStub(to_draft).Rounds()

        async def ask(batch_id: int) -> int:
            begin = now()
            request = TargetRequest(batch_id, verifies=(Verify(KEY, 0, TREE),))
            await verifies.write(wire.target_request_to_pb(request))
            wire.target_reply_from_pb(await verifies.read())
            await proposes.write(
                wire.draft_request_to_pb(DraftRequest(batch_id, proposes=(Propose(KEY, 0, 1, 16, 8),)))
            )
            wire.draft_reply_from_pb(await proposes.read())
            return now() - begin

        blocks = max(2, args.hand_offs // BLOCK)
        for batch_id in range(2 * BLOCK, 2 * BLOCK * (blocks + 1)):
            times[batch_id] = await ask(batch_id)
        await ask(BULK)
        for call in (verifies, proposes):
            call.cancel()
    return times


def measure(
    transport: str, source: str, destination: str, layout: ChannelLayout, args: argparse.Namespace
) -> list[object]:
    args = argparse.Namespace(**vars(args), transport=transport)
    if transport == "inline":  # a message has its limit
        args.bulk_rows = min(args.bulk_rows, INLINE_BULK_ROWS)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="specbridge-bench-") as folder:
        for service, device in ((target, source), (draft, destination)):
            here, there = context.Pipe()
            process = context.Process(
                target=run, args=(service, device, folder, layout, args, there), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            pipes[0].recv()
            pipes[1].send("start")
            if (said := pipes[1].recv()) != "attached":
                raise SystemExit(f"{transport} from {source} to {destination}: {said}")
            rounds = uvloop.run(gateway(folder, args))
            for pipe in pipes:
                pipe.send("stop")
            published = pipes[0].recv()
            taken, rates = pipes[1].recv()
        finally:
            for process in processes:
                process.join(5)
                process.terminate()
    return [transport, f"{source} → {destination}", *figures(rounds, published, taken, rates)]


def figures(
    rounds: dict[int, int],
    published: dict[int, tuple[int, int, int]],
    taken: dict[int, tuple[int, int, int, int]],
    rates: dict[str, float],
) -> list[float]:
    """The columns from `adds us` on."""
    blocks: dict[int, list[int]] = {}
    for batch_id, took in rounds.items():
        if batch_id % BLOCK >= BLOCK // 2:
            blocks.setdefault(batch_id // BLOCK, []).append(took)
    first = min(blocks) + len(blocks) // 10 // 2 * 2  # until everything has been touched a few times
    middle = {block: statistics.median(times) / 1e3 for block, times in blocks.items()}
    without = [middle[block + 1] for block in range(first, max(middle), 2)]
    adds = [middle[block] - middle[block + 1] for block in range(first, max(middle), 2)]
    mine = [i for i in published if first * BLOCK <= i < BULK and i % BLOCK >= BLOCK // 2]
    steps = [
        [published[i][1] for i in mine],
        [published[i][2] for i in mine],
        [taken[i][2] for i in mine],
        [taken[i][3] for i in mine],
        [taken[i][1] for i in mine],
        [taken[i][0] - published[i][0] for i in mine],
    ]
    medians = [statistics.median(adds), statistics.median(without)]
    medians += [statistics.median(step) / 1e3 for step in steps]
    found = [*medians, rates["read"], rates["local"], rates["read"] / rates["local"]]
    return [round(x, 2) for x in found]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=5, help="rows of a hand-off: an accepted path")
    parser.add_argument("--bulk-rows", type=int, default=2048, help="rows of the chunk that is timed")
    parser.add_argument("--hand-offs", type=int, default=2000)
    args = parser.parse_args()
    layout = ChannelLayout(args.taps * args.hidden, args.dtype)
    gpus = torch.cuda.device_count()
    source = "cuda:0" if gpus else "cpu"
    cases = [("cuda_ipc", source, f"cuda:{i}") for i in range(min(gpus, 2))]
    cases += [("shared_memory", source, "cpu"), ("inline", source, "cpu")]
    rows = [measure(*case, layout, args) for case in cases]
    header = ["transport", "path", "adds us", "round us", "reserve us", "publish us", "take us"]
    header += ["ack us", "late us", "one way us", "read GB/s", "local GB/s", "of local"]
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    shape = {"row_bytes": layout.row_bytes, "hand_off_rows": args.rows, "gpus": names}
    report("channel", header, rows, args.out, **shape)


if __name__ == "__main__":
    main()
