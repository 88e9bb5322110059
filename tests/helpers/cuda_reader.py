"""A channel's draft on a GPU, in a process of its own: `cuda_reader.py ADDRESS DEVICE`.

Takes each chunk on a stream of its own and never waits for it on the host, so that a stream that is never let
go hangs nobody but this process. Says, a JSON line each: {"waiting": rows} once a stream waits for the rows
of the first chunk; {"passed": seconds after the channel's end, "spoilt": [...], "sum": of what it read} once
it has passed, or {"stuck": seconds}; {"rows": [...]} for each chunk of the target that comes next.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import torch
from channel_peers import ChannelDraft

from specbridge.channel.base import ReceivedChunk

PATIENCE_S = 20.0


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(address: str, device: str) -> None:
    spoilt: list[str] = []
    taken: asyncio.Queue[torch.Tensor] = asyncio.Queue()
    torch.cuda.set_device(device)
    reading = torch.cuda.Stream(device)
    with torch.cuda.stream(reading):
        torch.zeros(5, 33, device=device).clone().sum().item()  # so that nothing is loaded or allocated later
    async with ChannelDraft(
        address, transports=["cuda_ipc"], device=device, on_spoilt=spoilt.append
    ) as draft:

        def take(chunk: ReceivedChunk) -> None:
            with torch.cuda.stream(reading):
                taken.put_nowait(chunk.rows.clone())
                draft.client.ack([chunk.chunk_id])

        draft.client._on_chunk = take  # type: ignore[assignment]
        first = await taken.get()
        await asyncio.sleep(0.2)
        assert not reading.query(), "the rows were there: nothing to wait for"
        say(waiting=len(first))
        while not draft.detached:
            await asyncio.sleep(0.002)
        end = time.monotonic()
        while not (reading.query() and spoilt):
            if time.monotonic() > end + PATIENCE_S:
                say(stuck=time.monotonic() - end)
                os._exit(1)  # the ordinary end would wait for the stream
            await asyncio.sleep(0.002)
        say(passed=time.monotonic() - end, spoilt=spoilt, sum=float(first.sum()))
        while True:
            rows = await taken.get()
            reading.synchronize()
            say(rows=rows.tolist())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
