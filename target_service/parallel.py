"""Tensor parallelism: which part of each matrix a rank holds, and the collectives of the forward pass.

Owns the split rules, the rendezvous and the message channel from rank 0. It does not own reading weights
(weights.py), what a message means (worker.py), nor who starts the ranks (worker.py, launched.py). Collectives
are gloo on the CPU and NCCL on GPUs, messages always gloo.

Split rules: query heads in equal shares; key/value heads in equal shares, or, with more ranks than heads, one
head repeated on neighbouring ranks; MLP channels and vocabulary in shares that differ by at most one.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed

from specbridge.errors import ConfigError, Unavailable
from target_service.collective_clock import CollectiveClock

# The classes below are torch.distributed's documented ones and their options, but not in its typed exports.
dist: Any = torch.distributed
AllgatherOptions: Any = torch.distributed.distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
_FOREVER = datetime.timedelta(days=3650)
_WATCHDOG = datetime.timedelta(seconds=120)
_INLINE = 4096  # int64 words of the first broadcast of a message; longer ones need a second


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def share(total: int, rank: int, size: int) -> Span:
    """Rank's part of `total` things: shares differ by at most one."""
    return Span(total * rank // size, total * (rank + 1) // size)


def padded_share(total: int, rank: int, size: int) -> Span:
    """Rank's part when every share but the last has the same length (so that gathers are regular)."""
    each = -(-total // size)
    return Span(min(rank * each, total), min((rank + 1) * each, total))


def kv_share(num_kv_heads: int, rank: int, size: int) -> Span:
    """Key/value heads of a rank; neighbouring ranks repeat a head when there are more ranks than heads."""
    if size <= num_kv_heads:
        return share(num_kv_heads, rank, size)
    head = rank * num_kv_heads // size
    return Span(head, head + 1)


def check_split(num_heads: int, num_kv_heads: int, vocab_size: int, size: int) -> None:
    """Raises ConfigError if `size` ranks can't share these heads and tokens, naming sizes that can."""
    if _splits(num_heads, num_kv_heads, vocab_size, size):
        return
    legal = [n for n in range(1, num_heads + 1) if _splits(num_heads, num_kv_heads, vocab_size, n)]
    raise ConfigError(
        f"--tp {size} can't split {num_heads} attention heads over {num_kv_heads} key/value heads, and "
        f"{vocab_size} tokens, evenly; this model runs with --tp {', '.join(map(str, legal))}"
    )


def _splits(num_heads: int, num_kv_heads: int, vocab_size: int, size: int) -> bool:
    heads = size >= 1 and num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    return heads and len(padded_share(vocab_size, size - 1, size)) > 0


class Group(Protocol):
    """The collectives a forward pass needs."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over the ranks, in place."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """Equal-width columns [n, c] of every rank side by side, [n, size * c]; None on ranks other than
        0."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x to all ranks, in place."""

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, on every rank: [size, *x.shape]."""

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values (as many on each), on every rank, by the host. At the start only."""


class SingleRank:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        return None

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        return None

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: a store at host:port.

    prefix: of the keys, so that a store which outlives the ranks can be met at again. interface: the network
    interface that messages take; empty: the one that leads to `host`.
    """

    port: int
    size: int
    host: str = LOOPBACK
    prefix: str = ""
    interface: str = ""


def open_store(size: int, timeout_s: float, *, host: str = LOOPBACK, port: int = 0) -> Any:
    """Rank 0's side of the rendezvous, on `port` or one that the system picks; `.port` tells it."""
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


class RankGroup:
    """The ranks of a model, as one of them sees it. Errors of a collective (a peer died, a timeout) become
    Unavailable.

    timeout_s bounds one collective of a forward pass and rank 0's sending of a message. The other ranks wait
    for the next message without limit, since an idle service sends none (a dead peer closes its socket, which
    ends the wait). On GPUs the host does not wait for a collective, so it sees no timeout: whoever waits for
    a step's outcome has to `abort` (target_service.ranks). join_timeout_s bounds the meeting, and `exchange`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        *,
        device: torch.device,
        timeout_s: float,
        join_timeout_s: float | None = None,
        store: Any = None,
    ) -> None:
        self.rank, self.size = rank, rendezvous.size
        self.clock = CollectiveClock(device)
        self._timeout = timeout = datetime.timedelta(seconds=timeout_s)
        self._join = datetime.timedelta(seconds=join_timeout_s or timeout_s)
        self._rendezvous = rendezvous
        with _peer_errors(rank):
            if store is None:
                store = dist.TCPStore(
                    rendezvous.host, rendezvous.port, self.size, is_master=False, timeout=self._join
                )
            self._store = store
            if rendezvous.prefix:
                store = dist.PrefixStore(rendezvous.prefix, store)
            self._messages = self._gloo(dist.PrefixStore("messages", store), _FOREVER, self._join)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                options = dist.ProcessGroupNCCL.Options()
                # Its own watchdog ends the process without a word; it is the last resort.
                options._timeout = timeout + _WATCHDOG
                options.global_ranks_in_group = list(range(self.size))
                self._data: Any = dist.ProcessGroupNCCL(
                    dist.PrefixStore("data", store), rank, self.size, options
                )
            else:
                self._data = self._gloo(dist.PrefixStore("data", store), timeout, self._join)

    def _gloo(self, store: Any, timeout: datetime.timedelta, connect: datetime.timedelta) -> Any:
        # The generic constructor picks the interface by host name, which containers often can't resolve.
        options = dist.ProcessGroupGloo._Options()
        meet = self._rendezvous
        if meet.interface:
            device = dist.ProcessGroupGloo.create_device(interface=meet.interface)
        else:
            device = dist.ProcessGroupGloo.create_device(hostname=_own_address(meet.host, meet.port))
        options._devices = [device]
        options._timeout = timeout
        store.set_timeout(connect)
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_reduce(self, x: torch.Tensor) -> None:
        with _peer_errors(self.rank), self.clock:
            _done(self._data.allreduce([x], _in_stream(dist.AllreduceOptions())))

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        x = x.contiguous()
        options = _in_stream(dist.GatherOptions())
        options.rootRank = 0
        with _peer_errors(self.rank), self.clock:
            if self.rank:
                _done(self._data.gather([], [x], options))
                return None
            parts = [torch.empty_like(x) for _ in range(self.size)]
            _done(self._data.gather([parts], [x], options))
        return torch.cat(parts, -1)

    def broadcast(self, x: torch.Tensor) -> None:
        with _peer_errors(self.rank), self.clock:
            _done(self._data.broadcast([x], _from_first()))

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        # Into one tensor: a list of parts would cost a launch a rank to put together.
        out = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        with _peer_errors(self.rank), self.clock:
            _done(self._data._allgather_base(out, x.reshape(-1), _in_stream(AllgatherOptions())))
        return out.view(self.size, *x.shape)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with _peer_errors(self.rank):
            self._messages.allgather([parts], [own]).wait(self._join)
        return [part.tolist() for part in parts]

    def broadcast_message(self, message: torch.Tensor | None) -> torch.Tensor:
        """int64 [n] from rank 0 (others pass None) to all; returns it. Waits without limit on the other
        ranks."""
        first = torch.empty(_INLINE, dtype=torch.int64)
        if message is not None:
            first[0] = message.numel()
            head = message[: _INLINE - 1]
            first[1 : 1 + head.numel()] = head
        self._broadcast(first)
        length = int(first[0])
        if length <= _INLINE - 1:
            return first[1 : 1 + length]
        rest = torch.empty(length - (_INLINE - 1), dtype=torch.int64)
        if message is not None:
            rest.copy_(message[_INLINE - 1 :])
        self._broadcast(rest)
        return torch.cat((first[1:], rest))

    def _broadcast(self, x: torch.Tensor) -> None:
        with _peer_errors(self.rank):
            work = self._messages.broadcast([x], _from_first())
            if self.rank:
                work.wait()
            else:  # gloo sends only once every rank receives: a stuck one would hold rank 0 for ever
                work.wait(self._timeout)

    def close(self) -> None:
        """Leave in good order, after the last message: a library thread left running would end the process
        with an abort."""
        for group in (self._data, self._messages):
            with contextlib.suppress(RuntimeError, AttributeError):
                group.shutdown()

    def abort(self) -> None:
        """Give up collectives under way (NCCL waits for a dead peer otherwise); the group is unusable after
        it."""
        for group in (self._data, self._messages):
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()


def _in_stream(options: Any) -> Any:
    """NCCL then works in the current stream, without a stream of its own that both wait for."""
    options.asyncOp = False
    return options


def _from_first() -> Any:
    options = _in_stream(dist.BroadcastOptions())
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _done(work: Any) -> None:
    """gloo works beside its caller and has to be waited for; NCCL, in the stream, returns no work."""
    if work is not None:
        work.wait()


def _own_address(host: str, port: int) -> str:
    """This machine's address on the network that leads to `host`; nothing is sent."""
    if host == LOOPBACK:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"the first rank's host {host!r} can't be reached: {error}; check MASTER_ADDR, or name the way "
            "with --rank-interface"
        ) from None


@contextlib.contextmanager
def _peer_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unavailable(f"tensor-parallel rank {rank} lost its peers: {first_line}") from error
