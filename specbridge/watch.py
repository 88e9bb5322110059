"""Whether a process is well, by its health checks: when it serves, and when it has hung.

Owns the judgement of one process's answers. Does not own processes, nor what follows from it
(specbridge.stack).
"""

from __future__ import annotations

import asyncio
import time

from specbridge.clients import Health, HealthClient

POLL_START_S = 0.1
POLL_S = 2.0


async def until_serving(address: str, *, timeout_s: float) -> str:
    """Poll until the process is SERVING ("" then), at most `timeout_s` seconds; returns what is wrong.

    Loading may take long, and so may the imports before the first answer: neither is a hang.
    """
    began = time.monotonic()
    async with HealthClient(address) as health:
        while await health.check() is not Health.SERVING:
            if time.monotonic() - began > timeout_s:
                return f"did not become ready within {timeout_s:.0f} s"
            await asyncio.sleep(POLL_START_S)
    return ""


async def until_hung(address: str, *, timeout_s: float, mirrors_others: bool) -> str:
    """Poll a process that has served for as long as it is well; returns what is wrong with it.

    Hung is what for `timeout_s` seconds answers nothing, or NOT_SERVING; the latter does not count if the
    process only says so because another one is away (`mirrors_others`). Asked by an event loop that is
    itself held up, a process is judged by its answers, not by the time that has passed.
    """
    async with HealthClient(address) as health:
        unwell_since: float | None = None
        while True:
            await asyncio.sleep(min(POLL_S, timeout_s / 4))
            asked = time.monotonic()
            state = await health.check()
            if state is Health.SERVING or (state is Health.NOT_SERVING and mirrors_others):
                unwell_since = None
            elif unwell_since is None:
                unwell_since = asked
            elif time.monotonic() - unwell_since > timeout_s:
                silent = state is Health.SILENT
                said = "has not answered its health check" if silent else "has been NOT_SERVING"
                return f"{said} for {timeout_s:g} s"
