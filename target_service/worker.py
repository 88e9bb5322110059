"""Ranks above 0: a process that loads its shard, says so, and carries out what rank 0 broadcasts.

Owns the processes' lives: spawning, acknowledgement with a time limit, noticing a death, ending. It decides
nothing: trees, tokens and commits come from rank 0.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from specbridge.errors import ConfigError, Unavailable
from target_service import step_codec
from target_service.model.config import ModelConfig
from target_service.model.decoder import Taps
from target_service.model.shard import ModelShard, ShardSpec
from target_service.parallel import RankGroup, Rendezvous, open_store
from target_service.ranks import RankLink

log = logging.getLogger(__name__)

_JOIN_S = 5.0
_starting = threading.Lock()
_given_up = threading.Event()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker needs to know; picklable."""

    shard: ShardSpec
    config: ModelConfig
    rendezvous: Rendezvous
    rank: int
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Ack:
    """kind: "ready", "config" (the settings can't work) or "error"."""

    kind: str
    message: str = ""


def step_limit(device: str, timeout_s: float) -> float | None:
    """The time limit of a step whose collectives have `timeout_s` each, where they can't see to it
    themselves."""
    return 2 * timeout_s if torch.device(device).type == "cuda" else None


def rank_device(device: str, rank: int) -> str:
    """cuda ranks take the GPUs from the given one on; CPU ranks share the CPU."""
    base = torch.device(device)
    return device if base.type != "cuda" else f"cuda:{(base.index or 0) + rank}"


class WorkerPool(RankLink):
    """Ranks 1..size-1 of this host, and rank 0's membership in their group."""

    def __init__(
        self,
        shard: ShardSpec,
        config: ModelConfig,
        *,
        size: int,
        threads: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        """Spawns the workers and joins their group; `wait_ready` collects the acknowledgements.

        Raises Unavailable if a worker dies or is silent for start_timeout_s.
        """
        super().__init__(step_timeout_s=step_limit(shard.device, timeout_s))
        store = open_store(size, start_timeout_s)
        rendezvous = Rendezvous(int(store.port), size)
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._acks: list[Connection] = []
        self._deadline = time.monotonic() + start_timeout_s
        self._collecting = threading.Lock()
        try:
            for rank in range(1, size):
                spec = WorkerSpec(
                    shard=replace(shard, device=rank_device(shard.device, rank)),
                    config=config,
                    rendezvous=rendezvous,
                    rank=rank,
                    threads=threads,
                    timeout_s=timeout_s,
                )
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=worker_main, args=(spec, theirs), name=f"specbridge-rank-{rank}", daemon=True
                )
                with _starting:
                    if _given_up.is_set():
                        raise Unavailable("the target is told to stop: no more ranks are started")
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._acks.append(ours)
            self._collect("joined")
            group = RankGroup(
                rendezvous,
                0,
                device=torch.device(rank_device(shard.device, 0)),
                timeout_s=timeout_s,
                store=store,
            )
        except BaseException:
            self.close()
            raise
        self.start(group)

    def wait_ready(self) -> None:
        """Until every worker has loaded its weights. Raises ConfigError or Unavailable, naming the rank."""
        self._collect("ready")

    def close(self) -> None:
        """Ask the workers to stop, then make them. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        told = all(p.is_alive() for p in self._processes) and self._say_stop()
        if self.group is not None and told:
            self.group.close()  # before waiting: NCCL's end can need all ranks
        deadline = time.monotonic() + (_JOIN_S if told else 0.0)
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join(_JOIN_S)
        for connection in self._acks:
            connection.close()
        if self.group is not None and not told:
            self.group.abort()  # a collective may still be waiting for a rank that is gone
            self.group.close()

    def _collect(self, stage: str) -> None:
        waiting = {connection: rank for rank, connection in enumerate(self._acks, 1)}
        while waiting:
            left = self._deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(left, 0.0))
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                raise Unavailable(f"tensor-parallel rank {late} was not {stage} in time; see its log lines")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    ack = connection.recv()
                except (EOFError, OSError):
                    process = self._processes[rank - 1]
                    process.join(1.0)
                    raise Unavailable(
                        f"tensor-parallel rank {rank} died while starting (exit code {process.exitcode})"
                    ) from None
                if ack.kind == "config":
                    raise ConfigError(f"tensor-parallel rank {rank}: {ack.message}")
                if ack.kind != stage:
                    raise Unavailable(f"tensor-parallel rank {rank} failed to start: {ack.message}")

    def _find_dead(self) -> None:
        """By its sentinel: is_alive() errs while another thread waits."""
        self._wait_death(0)

    def _wait_death(self, seconds: float) -> None:
        ranks = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        ended = multiprocessing.connection.wait(list(ranks), timeout=seconds)
        if _given_up.is_set():  # they did not die: they were ended
            self._closing.wait(seconds)
            return
        if ended and self._dead is None and not self._closing.is_set():
            rank = ranks[next(sentinel for sentinel in ended if isinstance(sentinel, int))]
            with self._collecting:
                self._processes[rank - 1].join(1.0)
                code = self._processes[rank - 1].exitcode
            self._dead = f"tensor-parallel rank {rank} died (exit code {code}): restart the target service"


def give_up() -> None:
    """End all ranks that this process has started, whatever they are at, and start no more. For a process
    that ends itself, from any thread: nobody is told, and rank 0's part of what they were at never ends.
    """
    with _starting:
        _given_up.set()
        ranks = multiprocessing.active_children()
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(_JOIN_S)


def worker_main(spec: WorkerSpec, acks: Connection) -> None:
    """A worker's process, from spawn to end."""
    # Ctrl-C goes to the whole foreground group; rank 0 ends the workers in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    try:
        torch.set_num_threads(spec.threads)
        acks.send(_Ack("joined"))
        group = RankGroup(
            spec.rendezvous, spec.rank, device=torch.device(spec.shard.device), timeout_s=spec.timeout_s
        )
        shard = ModelShard(spec.shard, spec.config, group)
    except ConfigError as error:
        acks.send(_Ack("config", str(error)))
        return
    except Exception as error:
        log.exception("rank %d could not start", spec.rank)
        acks.send(_Ack("error", f"{type(error).__name__}: {error}"))
        return
    acks.send(_Ack("ready"))
    Follower(group, shard).run()


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank above 0 that is ready."""

    group: RankGroup
    shard: ModelShard

    def run(self) -> bool:
        """Carry out what rank 0 says until it says STOP; False if it, or another rank, is lost instead."""
        try:
            serve(self.group.broadcast_message, self.shard)
        except Unavailable as error:
            log.warning("rank %d ends: %s", self.group.rank, error)
            self.group.abort()
            return False
        self.shard.close()
        self.group.close()
        return True


def serve(receive: Callable[[None], torch.Tensor], shard: ModelShard) -> None:
    """Carry out messages until STOP."""
    no_taps = Taps()
    while True:
        message = receive(None)
        if step_codec.is_ping(message):
            continue
        order = step_codec.decode(message)
        if order is None:
            return
        shard.run(order, no_taps)


def _die_with_parent() -> None:
    """A worker without its rank 0 is of no use; a killed parent can't tell it so."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="specbridge-parent-monitor", daemon=True).start()
