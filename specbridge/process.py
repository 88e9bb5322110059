"""This process as the operating system sees it: compute threads, waiting policy, life tied to a parent.

Owns: choosing thread counts and passive waiting before torch is loaded, and the poller before gRPC is; what
garbage collections look at; ending with the supervisor; and ending at once.
Does not own: starting or restarting processes (specbridge.stack).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from specbridge.settings import Settings, load

log = logging.getLogger(__name__)

T = TypeVar("T")

ORPHAN_GRACE_S = 10.0
# Loop turns, some tenths of a millisecond: longer than the gaps inside a forward, shorter than between two.
SPIN_COUNT = "20000"
# cgroup v2: "max 100000" or "<quota> <period>" in microseconds.
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


class SupervisedSettings(Settings):
    """Set by the supervisor for its children, not by users."""

    supervised: bool = False
    """Standard input is a pipe whose end means that the supervisor is gone."""


def available_cpus() -> int:
    """CPUs this process may use: its affinity mask, capped by a container's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: no quota
    return max(1, count)


def thread_environment(threads: int = 0, processes: int = 1) -> dict[str, str]:
    """Variables that torch's OpenMP runtime reads when loaded. threads 0: the CPUs, shared by `processes`.

    Waiting is passive after a short spin. A forward is hundreds of small parallel loops: workers that sleep
    between two of them double its time, workers that spin on after the last one take the core from the
    service whose turn it is (benchmarks/threads.py).
    """
    count = str(threads or max(1, available_cpus() // processes))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "passive",  # every runtime
        "GOMP_SPINCOUNT": SPIN_COUNT,  # libgomp (torch's wheels): spin this long first
        "KMP_BLOCKTIME": "0",  # Intel's and LLVM's runtimes, with a torch built against them
    }


def rpc_environment() -> dict[str, str]:
    """Variables gRPC's core reads when it is imported: fewer threads between a socket and the event loop.

    With its event engine three threads wake one after the other for a message; with the poller it replaces,
    the one that hands messages to Python waits on the sockets itself. Where two cores run three services a
    wake-up costs some 0.1 ms, and a round has four messages (benchmarks/gateway_round.py).
    """
    return {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"}


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collections in the body, for imports: nothing of theirs is garbage, and looking for it is an
    eighth of what loading torch takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_heap() -> None:
    """Keep what exists now out of every garbage collection. Call once, when start-up has built what stays.

    With torch loaded a full collection takes longer than a round.
    """
    gc.collect()
    gc.freeze()


def end_with_parent() -> None:
    """If a supervisor started this process: end when it does, however it ended. Call once, early.

    The supervisor holds the other end of standard input and never writes; the read returns when it dies.
    """
    if not load(SupervisedSettings).supervised:
        return
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    log.warning("the supervisor is gone: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    # Still here: the drain hangs. The supervisor made this process the leader of a group of its own, so this
    # takes processes it started (tensor-parallel ranks) with it and nobody else.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def leave(code: int) -> NoReturn:
    """End the process although threads are at work that can't be told to stop, as one that loads a model: the
    interpreter's own end would wait for them, or pull what they stand on from under them.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def run_in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """`await` work(*args) on a thread that ends with it; raises what it raises.

    Not asyncio.to_thread, for anything that computes: OpenMP keeps a team of workers for every thread that
    ever ran a parallel loop, until that thread ends. With the teams of two threads alive libgomp counts more
    workers than CPUs and turns off all spinning between loops, and each of a forward's hundreds of small
    loops then pays for a sleep and a wake-up.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():  # the waiter may have been cancelled
            set_outcome(outcome)

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:
            loop.call_soon_threadsafe(settle, future.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, future.set_result, result)

    thread = threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True)
    thread.start()
    return await future
