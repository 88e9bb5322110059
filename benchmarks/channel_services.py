"""The target and the draft of benchmarks.channel: engines that do nothing but hand rows over and take times.

Each has its engine's thread beside the event loop, and the product's messages. Owns what is timed where; not
the processes nor what becomes of the times (channel).
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

from protos import draft_pb2_grpc, target_pb2_grpc
from specbridge import wire
from specbridge.channel import ChannelLayout, HiddenStateClient, HiddenStateServer, ReceivedChunk
from specbridge.rounds import (
    DraftReply,
    DraftRequest,
    DraftResult,
    DraftResultKind,
    SessionKey,
    TargetReply,
    TargetRequest,
    TargetResult,
    TargetResultKind,
)
from specbridge.rounds_stream import RoundsStream
from specbridge.tree import DraftTree

KEY = SessionKey(b"channel-benchmark", 1, 1)
TREE = DraftTree(tuple(range(16)), tuple(range(-1, 15)), (0.5,) * 16)
BLOCK = 100
"""Rounds with the hand-off, then as many without. Acknowledgements are gathered for 20 ms, so those of the
last block come in the first half of the next, which does not count."""
REPEATS = 30
BULK = 1 << 30
"""Id of the batch whose chunk is timed."""

now = time.perf_counter_ns  # one clock for all processes


def engine(work: Callable[[], None]) -> None:
    """Do `work` again and again on a thread of its own, or end the process."""

    def loop() -> None:
        try:
            with torch.inference_mode():
                while True:
                    work()
        except BaseException:
            logging.exception("a benchmark's engine failed")
            os._exit(1)

    threading.Thread(target=loop, daemon=True).start()


def handed_off(batch_id: int) -> bool:
    return batch_id // BLOCK % 2 == 0


class Device:
    """What both services do on theirs: some work, then one number read back."""

    def __init__(self, device: str, layout: ChannelLayout, args: argparse.Namespace) -> None:
        self.rows = torch.zeros(
            args.bulk_rows, layout.row_width, dtype=getattr(torch, layout.dtype), device=device
        )
        self._number = torch.zeros(1, device=device)

    def read_back(self) -> float:
        return self._number.add_(1.0).item()


class TargetSide(target_pb2_grpc.TargetServicer):
    """times: rows written, how long reserve and mark took before the answer, publish after it; of the rounds
    that hand off.
    """

    def __init__(self, channel: HiddenStateServer, device: Device, args: argparse.Namespace) -> None:
        self.times: dict[int, tuple[int, int, int]] = {}
        self._channel = channel
        self._device = device
        self._args = args
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine(lambda: self._round(*self._queue.get()))

    async def HiddenStates(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for reply in self._channel.serve(request_iterator, context):
            yield reply

    async def Rounds(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        stream: RoundsStream[TargetReply] = RoundsStream()

        def take(pb: Any) -> int:
            self._queue.put((wire.target_request_from_pb(pb), stream.reply))
            return 1

        async for message in stream.answers(request_iterator, take):
            yield wire.target_reply_to_pb(message)

    def _round(self, request: TargetRequest, reply: Callable[[TargetReply], None]) -> None:
        channel, batch_id = self._channel, request.batch_id
        count = self._args.bulk_rows if batch_id == BULK else self._args.rows
        tokens = tuple(range(count))
        begun = now()
        reservation = channel.reserve(count) if handed_off(batch_id) else None
        reserved = now()
        into = self._device.rows if reservation is None else reservation.ring
        first = 0 if reservation is None else reservation.first_slot
        into[first : first + count].fill_(1.0)
        self._device.read_back()
        written = now()
        if reservation is not None:
            channel.mark_written(over=True)  # as after a pass whose result has been read
        marked = now()
        result = TargetResult(KEY, TargetResultKind.VERIFIED, tokens=tokens[:8], accepted=(0, 1, 2))
        reply(TargetReply(batch_id, (result,)))
        answered = now()
        if reservation is not None:
            channel.publish(
                reservation, session=KEY, first_position=0, count=count, tokens=tokens, anchor=batch_id
            )
            self.times[batch_id] = (written, marked - written + reserved - begun, now() - answered)


class DraftSide(draft_pb2_grpc.DraftServicer):
    """times: chunk received, late by, take and ack took, of the rounds that hand off."""

    def __init__(self, device: Device, args: argparse.Namespace, name: str) -> None:
        self.times: dict[int, tuple[int, int, int, int]] = {}
        self.rates: dict[str, float] = {}
        self.client: HiddenStateClient | None = None
        self._device = device
        self._own = torch.zeros_like(device.rows)
        self._args = args
        self._name = name
        self._received = 0
        self._chunk: ReceivedChunk | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine(self._take)

    def on_chunk(self, chunk: ReceivedChunk) -> None:
        self._received = now()
        self._queue.put(chunk)

    async def Rounds(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        stream: RoundsStream[DraftReply] = RoundsStream()

        def take(pb: Any) -> int:
            self._queue.put((wire.draft_request_from_pb(pb), stream.reply))
            return 1

        async for message in stream.answers(request_iterator, take):
            yield wire.draft_reply_to_pb(message)

    def _take(self) -> None:
        item = self._queue.get()
        if isinstance(item, ReceivedChunk):
            self._chunk = item
        else:
            self._round(*item)

    def _round(self, request: DraftRequest, reply: Callable[[DraftReply], None]) -> None:
        batch_id, count, client = request.batch_id, self._args.rows, self.client
        assert client is not None
        asked = now()
        chunk, self._chunk = self._chunk, None
        if handed_off(batch_id) and chunk is None:
            chunk = self._queue.get()
        came = now()
        rows = self._own[:count] if chunk is None else chunk.rows
        have = now()
        if batch_id == BULK:
            self._rate(rows)
        else:
            self._device.rows[:count].copy_(rows, non_blocking=True)
            self._device.read_back()
        reply(DraftReply(batch_id, (DraftResult(KEY, DraftResultKind.PROPOSED, tree=TREE),)))
        if chunk is not None:
            answered = now()
            client.ack([chunk.chunk_id])
            self.times[batch_id] = (self._received, came - asked, have - came, now() - answered)

    def _rate(self, rows: torch.Tensor) -> None:
        local, size = self._device.rows, rows.numel() * rows.element_size()
        self.rates["read"] = rate(self._name, size, lambda: local.copy_(rows))
        self.rates["local"] = rate(self._name, size, lambda: self._own.copy_(local))


def rate(device: str, num_bytes: int, work: Callable[[], object]) -> float:
    """GB/s of `work`, which reads `num_bytes` on `device`; the median of REPEATS."""
    times = []
    for _ in range(REPEATS + 3):
        if device == "cpu":
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(torch.cuda.current_stream(device))
        work()
        last.record(torch.cuda.current_stream(device))
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return num_bytes / statistics.median(times[3:]) / 1e9
