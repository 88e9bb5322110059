"""How the two sides settle on a transport: by what each can really do.

The producer proposes the wanted transports in turn, best first; each that the identities do not rule out is
created, offered and tried: the consumer opens it and echoes the random bytes it found there. Owns that order
and the reason that is reported. Does not own the messages (producer.py, consumer.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specbridge.channel.base import ChannelLayout, ConsumerMemory, Identity, MemoryOffer, ProducerMemory
from specbridge.channel.transports import TRANSPORTS
from specbridge.errors import SpecBridgeError, Unavailable

FIRST_CHOICE = "first choice"
MAX_REASON = 200
"""Most characters kept of what a peer says: reasons end up in messages, logs and metrics."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the consumer found when it tried an offer."""

    opened: bool
    nonce: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The producer's side of the outcome: the memory in use, and why not a better one."""

    memory: ProducerMemory
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The consumer's side of one try; memory is None if it failed."""

    memory: ConsumerMemory | None
    probe: ProbeResult


async def agree(
    wanted: Sequence[str],
    probe: Callable[[MemoryOffer], Awaitable[ProbeResult]],
    *,
    slots: int,
    layout: ChannelLayout,
    device: str,
    own: Identity,
    peer: Identity,
) -> Agreed:
    """Try the `wanted` transports in their order; `probe` sends an offer and awaits the consumer's answer.

    Raises Unavailable, with each transport's reason, if none works; and whatever `probe` raises. However it
    ends, no name of shared memory is left behind.
    """
    declined: list[str] = []
    unknown = [name for name in wanted if name not in TRANSPORTS]
    if unknown:
        declined.append(f"{unknown[0][:MAX_REASON]}: unknown here, there are {', '.join(TRANSPORTS)}")
    for name in dict.fromkeys(wanted):
        transport = TRANSPORTS.get(name)
        if transport is None:
            continue
        why = transport.why_not(own, peer)
        if why is not None:
            declined.append(f"{name}: {why}")
            continue
        try:
            memory = transport.create(slots, layout, device)
        except (OSError, RuntimeError, SpecBridgeError) as error:  # torch's, for want of GPU memory
            declined.append(f"{name}: {str(error)[:MAX_REASON]}")
            continue
        try:
            result = await probe(memory.offer)
        except BaseException:
            memory.close()
            raise
        finally:
            memory.settled()
        if result.opened and result.nonce == memory.nonce:
            return Agreed(memory, "; ".join(declined) or FIRST_CHOICE)
        memory.close()
        why = "it holds other bytes than the target wrote" if result.opened else result.reason[:MAX_REASON]
        declined.append(f"{name}: the draft can't use it: {why}")
    raise Unavailable(f"no transport works ({'; '.join(declined) or 'none was wanted'}); allow inline")


def try_offer(offer: MemoryOffer, device: str = "cpu") -> Opened:
    """The consumer's try of an offer, for reading on `device`. Never raises for what the producer or the
    machine may get wrong.
    """
    transport = TRANSPORTS.get(offer.transport)
    if transport is None:
        return Opened(None, ProbeResult(False, reason=f"transport {offer.transport!r} is unknown here"))
    try:
        memory = transport.open(offer, device)
    except (OSError, ValueError, SpecBridgeError) as error:
        return Opened(None, ProbeResult(False, reason=str(error)))
    return Opened(memory, ProbeResult(True, memory.nonce))
