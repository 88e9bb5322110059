"""RankLink: rank 0's tie to the other ranks, whoever started them.

Owns telling them what to do, the time limit of a step, and turning what goes wrong (a rank died, hangs, or
fell out of step) into one Unavailable that says so. Does not own collectives (parallel) nor the processes
(worker, launched).

A GPU's collectives wait on the device: with a peer that hangs, neither an exception nor a return comes, and
the host sleeps in the read-back. So another thread looks at the clock, and gives the group up; the kernels
then end, the read-back returns, and the step is known to be worthless.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

import torch

from specbridge.errors import SpecBridgeError, Unavailable
from target_service import step_codec
from target_service.parallel import RankGroup

log = logging.getLogger(__name__)

WATCH_S = 0.5
LET_GO_S = 20.0
"""How long an aborted step may take to end, before the process does."""


class RankLink:
    """`start` it once the group is made. For one thread; the watch has its own."""

    def __init__(self, *, step_timeout_s: float | None) -> None:
        """step_timeout_s: of a step as a whole; None where every collective has a limit of its own (gloo)."""
        self.group: RankGroup | None = None
        self._step_timeout = step_timeout_s
        self._step_began: float | None = None
        self._dead: str | None = None
        self._closing = threading.Event()

    def start(self, group: RankGroup) -> None:
        self.group = group
        threading.Thread(target=self._watch, name="specbridge-rank-monitor", daemon=True).start()

    def check(self) -> None:
        """Raises Unavailable, saying why, once a rank is lost. Asks all of them, so not before each step."""
        self._check_known()
        assert self.group is not None
        with self._explained():
            self.group.broadcast_message(step_codec.encode_ping())

    def _check_known(self) -> None:
        if self._dead is None:
            self._find_dead()
        if self._dead is not None:
            raise Unavailable(self._dead)

    @contextlib.contextmanager
    def step(self, message: torch.Tensor) -> Iterator[None]:
        """Send `message`; what runs inside is rank 0's part of it. Raises Unavailable, now and from then on,
        if it does not come to its end on all ranks.
        """
        self._check_known()
        assert self.group is not None
        self._step_began = time.monotonic()
        try:
            with self._explained():
                self.group.broadcast_message(message)
                yield
        except Unavailable:
            raise
        except Exception as error:
            # The others are somewhere in the middle and wait for rank 0.
            self._dead = f"rank 0 failed within a step ({type(error).__name__}: {error}): restart the target"
            raise Unavailable(self._dead) from error
        finally:
            self._step_began = None
        if self._dead is not None:
            raise Unavailable(self._dead)

    def close(self) -> None:
        """Ask the others to stop. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self.group is not None:
            if not self._say_stop():
                self.group.abort()
            self.group.close()

    def _say_stop(self) -> bool:
        if self.group is None or self._dead is not None:
            return False
        with contextlib.suppress(SpecBridgeError):
            self.group.broadcast_message(step_codec.encode_stop())
            return True
        return False

    # ---- for those who know more about the ranks ----------------------------------------------------

    def _find_dead(self) -> None:
        """Note a lost rank in _dead, if there is a way to see it at once."""

    def _wait_death(self, seconds: float) -> None:
        """Wait for so long; note a rank that died meanwhile."""
        self._closing.wait(seconds)

    # ---- pieces ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of a collective inside, told as the death of a rank when that is what happened."""
        try:
            yield
        except Unavailable as error:
            if not self._blamed():
                self._dead = f"{error}; a rank died, is stuck or was cut off: restart the target service"
            raise Unavailable(self._dead) from error

    def _blamed(self) -> bool:
        """Whether it is known who is to blame for a collective that failed just now."""
        # The socket's end may be seen a moment before the process's.
        for _ in range(20):
            self._find_dead()
            if self._dead is not None:
                return True
            time.sleep(0.05)
        return False

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._wait_death(WATCH_S)
            began = self._step_began
            limit = self._step_timeout
            if self._dead is None and limit and began is not None and time.monotonic() - began > limit:
                self._dead = (
                    f"a step took longer than {limit:.0f} s: a tensor-parallel rank is stuck; restart the "
                    "target service"
                )
            if self._dead is not None and not self._closing.is_set():
                log.error("%s", self._dead)
                self._give_up()
                return

    def _give_up(self) -> None:
        """End a collective under way: it would wait for the lost rank for ever."""
        assert self.group is not None
        self.group.abort()
        begin = time.monotonic()
        while self._step_began is not None and self._step_timeout:
            if time.monotonic() - begin > LET_GO_S:
                log.critical("the step under way can't be ended: ending the process")
                os._exit(1)
            time.sleep(0.05)
