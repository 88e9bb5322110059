"""A draft's projection on its way to the target: whole, in parts, or refused with a reason."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from channel_peers import ChannelDraft, ChannelTarget, until

from protos import target_pb2, target_pb2_grpc
from specbridge.channel import wire
from specbridge.channel.base import ChannelLayout, Projection

HIDDEN, WIDTH = 24, 16
TAPS = (1, 3)


def projection(dtype: torch.dtype = torch.bfloat16, columns: int = 2 * HIDDEN) -> Projection:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(WIDTH, columns, generator=generator).to(dtype)
    return Projection(matrix, torch.randn(WIDTH, generator=generator).to(dtype), 1e-6)


def target(tmp_path: Path, **options: Any) -> tuple[ChannelTarget, list[tuple[Any, ...]]]:
    got: list[tuple[Any, ...]] = []

    def attach(layer_ids: tuple[int, ...], normed: bool, weights: Projection) -> ChannelLayout:
        got.append((layer_ids, normed, weights))
        return ChannelLayout(len(weights.norm), weights.dtype)

    settings = {"on_attach_projected": attach, "hidden_size": HIDDEN, **options}
    return ChannelTarget(f"unix:{tmp_path}/t.sock", **settings), got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("part", [64, 16 << 20])
async def test_weights_arrive_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, part: int
) -> None:
    monkeypatch.setattr(wire, "PROJECTION_PART_BYTES", part)
    served, got = target(tmp_path)
    sent = projection(dtype)
    async with (
        served,
        ChannelDraft(served.address, transports=["inline"], target_layer_ids=TAPS, projection=sent) as draft,
    ):
        await until(lambda: bool(draft.attached))
        ((layer_ids, normed, weights),) = got
        assert (layer_ids, normed, weights.eps) == (TAPS, True, 1e-6)
        assert torch.equal(weights.matrix, sent.matrix) and torch.equal(weights.norm, sent.norm)
        assert weights.dtype == str(dtype).removeprefix("torch.")
        assert draft.attached[0].layout.row_width == WIDTH


@pytest.mark.parametrize(
    ("options", "columns", "said"),
    [
        ({"on_attach_projected": None}, 2 * HIDDEN, "can't project hidden states; drop --project-on-target"),
        ({}, 3 * HIDDEN, r"\[16, 72\] does not fit 2 taps of 24"),
        ({}, 8, r"\[16, 8\] does not fit"),
    ],
)
@pytest.mark.parametrize("part", [1, 16 << 20], ids=["still sending", "sent at once"])
async def test_what_can_not_be_applied_is_refused_before_it_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: int,
    options: dict[str, Any],
    columns: int,
    said: str,
) -> None:
    monkeypatch.setattr(wire, "PROJECTION_PART_BYTES", part)
    served, got = target(tmp_path, **options)
    async with (
        served,
        ChannelDraft(
            served.address,
            transports=["inline"],
            target_layer_ids=TAPS,
            projection=projection(columns=columns),
        ) as draft,
    ):
        await until(lambda: draft.client.reason != "not attached yet")
        assert re.search(said, draft.client.reason) and not got and not draft.attached


@pytest.mark.parametrize("parts", [[b"x" * 10**6], [b""], [b"x" * 1000, b"x" * 10**6]])
async def test_parts_of_another_size_are_refused(tmp_path: Path, parts: list[bytes]) -> None:
    served, got = target(tmp_path)
    async with served, grpc.aio.insecure_channel(served.address) as channel:
        call = target_pb2_grpc.TargetStub(channel).HiddenStates()
        attach = target_pb2.Attach(target_layer_ids=TAPS, transports=["inline"])
        attach.projection.CopyFrom(wire.projection_to_pb(projection()))
        await call.write(target_pb2.ChannelRequest(attach=attach))
        for data in parts:
            await call.write(target_pb2.ChannelRequest(projection_part=target_pb2.ProjectionPart(data=data)))
        reply = await asyncio.wait_for(call.read(), 30)
        assert "a projection of 1568 bytes came as" in reply.refused.error.message and not got
        call.cancel()
