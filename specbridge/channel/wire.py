"""The channel's dataclasses ↔ protobuf.

Descriptors leave the engine's thread as mappings of fields; the event loop makes messages of them, as many in
one as wait together (`messages`). How to build a nested message cheaply: see specbridge.wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from protos import target_pb2
from specbridge.channel.attachment import Published
from specbridge.channel.base import (
    AttachedInfo,
    ChannelLayout,
    ConsumerMemory,
    Identity,
    MemoryOffer,
    Projection,
    ProjectionShape,
    ReceivedChunk,
    check_tokens,
    torch_dtype,
    written,
)
from specbridge.channel.handshake import ProbeResult
from specbridge.rounds import SessionKey
from specbridge.wire import error_to_pb, key_fields, key_from_pb

PROJECTION_PART_BYTES = 16 << 20

ChunkFields = dict[str, Any]
"""A target_pb2.Chunk to be, by field names."""

Announcement = target_pb2.ChannelReply | ChunkFields
"""What the target's stream has to say."""


def identity_to_pb(identity: Identity) -> target_pb2.PeerIdentity:
    return target_pb2.PeerIdentity(
        boot_id=identity.boot_id,
        pid_namespace=identity.pid_namespace,
        pid=identity.pid,
        device=identity.device,
        instance=identity.instance,
        device_ordinal=identity.ordinal,
    )


def identity_from_pb(pb: target_pb2.PeerIdentity) -> Identity:
    return Identity(pb.boot_id, pb.pid_namespace, pb.pid, pb.device, pb.instance, pb.device_ordinal)


def offer_to_pb(offer: MemoryOffer) -> target_pb2.ChannelReply:
    return target_pb2.ChannelReply(
        offer=target_pb2.Offer(
            transport=offer.transport,
            location=offer.location,
            handle=offer.handle,
            slots=offer.slots,
            row_width=offer.layout.row_width,
            dtype=offer.layout.dtype,
            data_offset=offer.data_offset,
            nonce_length=offer.nonce_length,
        )
    )


def offer_from_pb(pb: target_pb2.Offer) -> MemoryOffer:
    return MemoryOffer(
        pb.transport,
        pb.slots,
        ChannelLayout(pb.row_width, pb.dtype),
        location=pb.location,
        handle=pb.handle,
        data_offset=pb.data_offset,
        nonce_length=pb.nonce_length,
    )


def projection_to_pb(projection: Projection) -> target_pb2.Projection:
    width, columns = projection.matrix.shape
    return target_pb2.Projection(width=width, columns=columns, dtype=projection.dtype, eps=projection.eps)


def projection_shape_from_pb(pb: target_pb2.Projection) -> ProjectionShape:
    """Raises InvalidRequest for a dtype that can't cross."""
    torch_dtype(pb.dtype)
    return ProjectionShape(pb.width, pb.columns, pb.dtype, pb.eps)


def projection_parts(projection: Projection) -> Iterator[target_pb2.ChannelRequest]:
    """The weights, in messages of a size that keeps the stream's buffers small."""
    import torch

    for tensor in (projection.matrix, projection.norm):
        data = tensor.contiguous().view(torch.uint8).view(-1)
        for part in data.split(PROJECTION_PART_BYTES):
            yield target_pb2.ChannelRequest(
                projection_part=target_pb2.ProjectionPart(data=part.numpy().tobytes())
            )


def projection_from_bytes(shape: ProjectionShape, data: bytearray) -> Projection:
    """`data`: shape.bytes of them, kept by the tensors."""
    import torch

    every = torch.frombuffer(data, dtype=torch_dtype(shape.dtype))
    matrix, norm = every.split([shape.width * shape.columns, shape.width])
    return Projection(matrix.view(shape.width, shape.columns), norm, shape.eps)


def probe_to_pb(result: ProbeResult) -> target_pb2.ChannelRequest:
    probe = target_pb2.Probe(opened=result.opened, nonce=result.nonce, reason=result.reason)
    return target_pb2.ChannelRequest(probe=probe)


def probe_from_pb(pb: target_pb2.Probe) -> ProbeResult:
    return ProbeResult(pb.opened, pb.nonce, pb.reason)


def attached_to_pb(info: AttachedInfo) -> target_pb2.ChannelReply:
    return target_pb2.ChannelReply(
        attached=target_pb2.Attached(
            transport=info.transport,
            reason=info.reason,
            epoch=info.epoch,
            slots=info.slots,
            row_width=info.layout.row_width,
            dtype=info.layout.dtype,
        )
    )


def attached_from_pb(pb: target_pb2.Attached) -> AttachedInfo:
    return AttachedInfo(pb.transport, pb.reason, pb.epoch, pb.slots, ChannelLayout(pb.row_width, pb.dtype))


def refused_to_pb(error: BaseException) -> target_pb2.ChannelReply:
    return target_pb2.ChannelReply(refused=target_pb2.Refused(error=error_to_pb(error)))


def chunk_fields(
    published: Published,
    *,
    session: SessionKey,
    first_position: int,
    tokens: Sequence[int],
    anchor: int | None,
) -> ChunkFields:
    span = published.span
    return {
        "chunk_id": published.chunk_id,
        "session": key_fields(session),
        "first_position": first_position,
        "count": span.count,
        "first_slot": span.first,
        "generation": span.generation,
        "tokens": tokens,
        "anchor": anchor or 0,
        "has_anchor": anchor is not None,
        "data": published.payload,
        "mark": published.mark,
    }


def messages(announcements: Iterable[Announcement]) -> Iterator[target_pb2.ChannelReply]:
    """In order, neighbouring chunks in one message; rows that travel inside stay apart, for size."""
    light: list[ChunkFields] = []
    for item in announcements:
        if isinstance(item, dict) and not item["data"]:
            light.append(item)
            continue
        if light:
            yield _chunks(light)
            light = []
        yield _chunks([item]) if isinstance(item, dict) else item
    if light:
        yield _chunks(light)


def _chunks(chunks: list[ChunkFields]) -> target_pb2.ChannelReply:
    return target_pb2.ChannelReply(chunks={"chunks": chunks})


def chunk_from_pb(pb: target_pb2.Chunk, memory: ConsumerMemory, *, slots: int) -> ReceivedChunk:
    """The chunk and its rows in `memory`, a ring of `slots`. Raises ValueError for a nonsense descriptor."""
    first_slot, count, generation, mark = pb.first_slot, pb.count, pb.generation, pb.mark
    if count < 1 or first_slot + count > slots:
        raise ValueError(f"{count} rows from slot {first_slot} on, in a ring of {slots}")
    tokens = tuple(pb.tokens[:])
    check_tokens(count, tokens)
    return ReceivedChunk(
        chunk_id=pb.chunk_id,
        session=key_from_pb(pb.session),
        first_position=pb.first_position,
        count=count,
        tokens=tokens,
        anchor=pb.anchor if pb.has_anchor else None,
        view=memory.rows(first_slot, count, pb.data),
        await_writing=(lambda: memory.wait(mark)) if mark else written,
        still_valid=lambda: memory.generation_is(first_slot, count, generation),
    )


def ack_to_pb(chunk_ids: Iterable[int]) -> target_pb2.ChannelRequest:
    return target_pb2.ChannelRequest(ack=target_pb2.Ack(chunk_ids=chunk_ids))


def recapture_to_pb(session: SessionKey, first: int, cause: str) -> target_pb2.ChannelRequest:
    return target_pb2.ChannelRequest(
        recapture=target_pb2.Recapture(session=key_fields(session), first=first, cause=cause)
    )
