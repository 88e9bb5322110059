"""The draft's tie to its target: the channel's consumer end, who the target is, and the self-check.

Owns what happens at each attachment: the engine learns of it, the target is identified, cached context is
voided if it is another one than before, and a target not checked yet is. Does not own the channel
(specbridge.channel), the calls (clients) nor the check itself (startup_check).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from draft_service.clients import target_info, target_rounds
from draft_service.loading import Loaded
from draft_service.startup_check import StartupCheck
from specbridge.channel.base import AttachedInfo
from specbridge.channel.consumer import HiddenStateClient
from specbridge.channel.transports import TRANSPORTS
from specbridge.errors import Unavailable
from specbridge.rounds import TargetInfo

log = logging.getLogger(__name__)

IDENTIFY_PAUSE_S = 0.5
CHECK_TRIES = 3
CHECK_PAUSE_S = 10.0
"""A check that traffic or an error ended is tried again after so long, CHECK_TRIES times in all."""


class Owner(Protocol):
    """Who wants to know: has this process's id for the handshake, is told the target's fingerprint ("" while
    it is unknown).
    """

    instance: bytes
    target_fingerprint: str


class TargetLink:
    """`start` it on the event loop, `close` it there. check: the self-check to run, None for none."""

    def __init__(
        self,
        address: str,
        loaded: Loaded,
        owner: Owner,
        *,
        transport: str = "auto",
        take_over: bool = False,
        check: StartupCheck | None = None,
    ) -> None:
        self._address = address
        self._engine = loaded.engine
        self._config = loaded.config
        self._owner = owner
        self._check = check
        self._fingerprint = ""
        self._checked = ""
        self._task: asyncio.Task[None] | None = None
        # What else the consumer has (inline, where nothing better works) stays its own choice.
        transports = tuple(TRANSPORTS) if transport == "auto" else (transport,)
        self.client = HiddenStateClient(
            address,
            target_layer_ids=self._config.target_layer_ids,
            normed_last_layer=self._config.normed_last_layer,
            projection=loaded.projection,
            device=loaded.device,
            on_attached=self._attached,
            on_chunk=self._engine.on_chunk,
            on_detached=self._detached,
            on_spoilt=self._engine.on_rows_spoilt,
            instance=owner.instance,
            transports=transports,
            take_over=take_over,
        )
        self._engine.connect(self.client)

    def start(self) -> None:
        self.client.start()

    async def stop_check(self) -> None:
        """End a self-check under way, and begin no other."""
        self._check = None
        await self._forget()

    async def close(self) -> None:
        await self._forget()
        await self.client.close()

    async def _forget(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _attached(self, info: AttachedInfo) -> None:
        self._engine.on_attached(info)
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._settle())

    def _detached(self, reason: str) -> None:
        if self._task is not None:
            self._task.cancel()
        self._owner.target_fingerprint = ""
        self._engine.on_detached(reason)

    async def _settle(self) -> None:
        try:
            info = await self._identify()
            if self._fingerprint not in ("", info.fingerprint):
                self._engine.on_target_changed()
            self._fingerprint = info.fingerprint
            self._owner.target_fingerprint = info.fingerprint
            await self._check_once(info)
        except Exception:  # a defect here must not go unseen; the channel itself goes on
            log.exception("unexpected error after attaching to the target")

    async def _identify(self) -> TargetInfo:
        """Learn which target it is; asks until it answers."""
        said = False
        while True:
            try:
                info = await target_info(self._address)
                break
            except Unavailable as error:
                log.log(logging.DEBUG if said else logging.WARNING,
                        "the target does not say who it is: %s", error)  # fmt: skip
                said = True
                await asyncio.sleep(IDENTIFY_PAUSE_S)
        for name, ours, theirs in (
            ("vocabulary", self._config.vocab_size, info.vocab_size),
            ("hidden size", self._config.hidden_size, info.hidden_size),
        ):
            if ours != theirs:
                log.error("the target has %s %d, the drafter's is %d: give both the same --target",
                          name, theirs, ours)  # fmt: skip
        return info

    async def _check_once(self, info: TargetInfo) -> None:
        """Check a target that has not been checked."""
        for attempt in range(CHECK_TRIES):
            check = self._check
            if check is None or self._checked == info.fingerprint:
                return
            if attempt:
                await asyncio.sleep(CHECK_PAUSE_S)
            outcome = await check.run(lambda: target_rounds(self._address), info)
            if outcome.settled:
                self._checked = info.fingerprint
