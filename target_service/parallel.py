"""Tensor parallelism: which part of each matrix a rank holds, and the collectives of the forward pass.

Owns the split rules, the rendezvous on this host and the message channel from rank 0. It does not own reading
weights (weights.py) or what a message means (worker.py). The ranks share one host; collectives are gloo on
the CPU and NCCL on GPUs, messages always gloo.

Split rules: query heads in equal shares; key/value heads in equal shares, or, with more ranks than heads, one
head repeated on neighbouring ranks; MLP channels and vocabulary in shares that differ by at most one.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed

from specbridge.errors import ConfigError, Unavailable

# The classes below are torch.distributed's documented ones and their options, but not in its typed exports.
dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"
_FOREVER = datetime.timedelta(days=3650)
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


def check_split(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Raises ConfigError if `size` ranks can't share these heads, naming sizes that can."""
    if _splits(num_heads, num_kv_heads, size):
        return
    legal = [n for n in range(1, num_heads + 1) if _splits(num_heads, num_kv_heads, n)]
    raise ConfigError(
        f"--tp {size} can't split {num_heads} attention heads over {num_kv_heads} key/value heads evenly; "
        f"this model runs with --tp {', '.join(map(str, legal))}"
    )


def _splits(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return size >= 1 and num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


class Group(Protocol):
    """The collectives a forward pass needs."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over the ranks, in place."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """Equal-width columns [n, c] of every rank side by side, [n, size * c]; None on ranks other than
        0."""


class SingleRank:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        return None

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        return x


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: a store that rank 0 serves on this host."""

    port: int
    size: int


def open_store(size: int, timeout_s: float) -> Any:
    """Rank 0's side of the rendezvous, on a port the system picks; `.port` tells it."""
    return dist.TCPStore(
        LOOPBACK,
        0,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


class RankGroup:
    """Several ranks of this host. Errors of a collective (a peer died, a timeout) become Unavailable.

    timeout_s bounds one collective of a forward pass and rank 0's sending of a message. The other ranks wait
    for the next message without limit, since an idle service sends none (a dead peer closes its socket, which
    ends the wait).
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, *, device: torch.device, timeout_s: float, store: Any = None
    ) -> None:
        self.rank, self.size = rank, rendezvous.size
        self._timeout = timeout = datetime.timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(LOOPBACK, rendezvous.port, self.size, is_master=False, timeout=timeout)
        self._store = store
        with _peer_errors(rank):
            self._messages = self._gloo(dist.PrefixStore("messages", store), _FOREVER, timeout)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._data: Any = dist.ProcessGroupNCCL(
                    dist.PrefixStore("data", store), rank, self.size, options
                )
            else:
                self._data = self._gloo(dist.PrefixStore("data", store), timeout, timeout)

    def _gloo(self, store: Any, timeout: datetime.timedelta, connect: datetime.timedelta) -> Any:
        # The generic constructor picks the interface by host name, which containers often can't resolve.
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        store.set_timeout(connect)
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_reduce(self, x: torch.Tensor) -> None:
        with _peer_errors(self.rank):
            self._data.allreduce([x]).wait()

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        x = x.contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        with _peer_errors(self.rank):
            if self.rank:
                self._data.gather([], [x], options).wait()
                return None
            parts = [torch.empty_like(x) for _ in range(self.size)]
            self._data.gather([parts], [x], options).wait()
        return torch.cat(parts, -1)

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
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with _peer_errors(self.rank):
            work = self._messages.broadcast([x], options)
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


@contextlib.contextmanager
def _peer_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unavailable(f"tensor-parallel rank {rank} lost its peers: {first_line}") from error
