"""The channel's dataclasses ↔ protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from protos import target_pb2
from specbridge.channel.attachment import Published
from specbridge.channel.base import (
    AttachedInfo,
    ChannelLayout,
    ConsumerMemory,
    Identity,
    MemoryOffer,
    ReceivedChunk,
    check_tokens,
)
from specbridge.channel.handshake import ProbeResult
from specbridge.rounds import SessionKey
from specbridge.wire import error_to_pb, key_from_pb, key_to_pb


def identity_to_pb(identity: Identity) -> target_pb2.PeerIdentity:
    return target_pb2.PeerIdentity(
        boot_id=identity.boot_id,
        pid_namespace=identity.pid_namespace,
        pid=identity.pid,
        device=identity.device,
        instance=identity.instance,
    )


def identity_from_pb(pb: target_pb2.PeerIdentity) -> Identity:
    return Identity(pb.boot_id, pb.pid_namespace, pb.pid, pb.device, pb.instance)


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


def chunk_to_pb(
    published: Published,
    *,
    session: SessionKey,
    first_position: int,
    tokens: Sequence[int],
    anchor: int | None,
) -> target_pb2.ChannelReply:
    chunk = target_pb2.Chunk(
        chunk_id=published.chunk_id,
        session=key_to_pb(session),
        first_position=first_position,
        count=published.span.count,
        first_slot=published.span.first,
        generation=published.span.generation,
        tokens=tokens,
        anchor=anchor or 0,
        has_anchor=anchor is not None,
        data=published.payload,
    )
    return target_pb2.ChannelReply(chunks=target_pb2.Chunks(chunks=[chunk]))


def merged(replies: Iterable[target_pb2.ChannelReply]) -> Iterator[target_pb2.ChannelReply]:
    """The same messages with neighbouring chunks in one; rows that travel inside stay apart, for size."""
    held: target_pb2.ChannelReply | None = None
    for reply in replies:
        light = reply.HasField("chunks") and not any(chunk.data for chunk in reply.chunks.chunks)
        if held is not None and light:
            held.chunks.MergeFrom(reply.chunks)
            continue
        if held is not None:
            yield held
        held = reply if light else None
        if not light:
            yield reply
    if held is not None:
        yield held


def chunk_from_pb(pb: target_pb2.Chunk, memory: ConsumerMemory, *, slots: int) -> ReceivedChunk:
    """The chunk and its rows in `memory`, a ring of `slots`. Raises ValueError for a nonsense descriptor."""
    first_slot, count, generation = pb.first_slot, pb.count, pb.generation
    if count < 1 or first_slot + count > slots:
        raise ValueError(f"{count} rows from slot {first_slot} on, in a ring of {slots}")
    check_tokens(count, pb.tokens)
    return ReceivedChunk(
        chunk_id=pb.chunk_id,
        session=key_from_pb(pb.session),
        first_position=pb.first_position,
        count=count,
        tokens=tuple(pb.tokens),
        anchor=pb.anchor if pb.has_anchor else None,
        rows=memory.rows(first_slot, count, pb.data),
        still_valid=lambda: memory.generation_is(first_slot, count, generation),
    )


def ack_to_pb(chunk_ids: Iterable[int]) -> target_pb2.ChannelRequest:
    return target_pb2.ChannelRequest(ack=target_pb2.Ack(chunk_ids=chunk_ids))


def recapture_to_pb(session: SessionKey, first: int, cause: str) -> target_pb2.ChannelRequest:
    return target_pb2.ChannelRequest(
        recapture=target_pb2.Recapture(session=key_to_pb(session), first=first, cause=cause)
    )
