"""Part killed: one rank is SIGKILLed while streams go on, and everything comes back by itself.

    rank dies -> rank 0 says which and ends the service -> the supervisor starts it again -> the gateway opens
    its sessions anew from the tokens it holds -> the streams go on with the text they would have had

Owns the killing and the checks: the service ends by itself, with a sentence that names the rank; streams end
with the undisturbed text (a near-tie excepted, since tokens are recomputed in other batches); drafting comes
back; no rank of before is left, nor a session, page, process or segment. Does not own what a difference means
(compare).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.clock import Budget
from benchmarks.gpu.setup import Part
from benchmarks.gpu.stack import Stream
from benchmarks.tp import models, stacks
from benchmarks.tp.compare import Ask, compared
from benchmarks.tp.equality import FAILURES, Options, Variant, asks_of, flags_of, judged, legal, variants
from benchmarks.tp.models import Model

HEADER = (
    "model", "stack", "rank killed", "streams", "tokens", "equal", "near-ties", "wrong", "reopened",
    "service ended after s", "serving again after s", "longest pause s",
)  # fmt: skip
PROMPTS = 4
AFTER_EVENTS = 4
"""Of each stream, before the rank is killed."""
BACK_S = 300.0
_DIED = re.compile(r"tensor-parallel rank (\d+) died \(exit code -9\)")
_AGAIN = re.compile(r"target (exited with code \d+|was killed by \w+)[^;]*; starting it again")


@dataclass(frozen=True, slots=True)
class Told:
    """What the log says. died: ranks that were named. ended: how the service did, in the supervisor's
    words."""

    died: tuple[int, ...]
    ended: tuple[str, ...]

    @staticmethod
    def read(log: str) -> Told:
        died = dict.fromkeys(int(found[1]) for found in _DIED.finditer(log))
        return Told(tuple(died), tuple(found[1] for found in _AGAIN.finditer(log)))

    def wrong(self, rank: int) -> list[str]:
        """What is not as it should be after `rank` was killed, a sentence each."""
        found = []
        if self.died != (rank,):
            found.append(f"the log names {list(self.died) or 'no rank'} as dead, not rank {rank}")
        if len(self.ended) != 1 or not self.ended[0].startswith("exited with code"):
            how = ", ".join(self.ended) or "nothing of its end"
            found.append(f"the supervisor was to see the target exit by itself once, and says: {how}")
        return found


def longest_pause(streams: Sequence[Stream], since: float) -> float:
    """Seconds between two events of one stream, the second of them after `since`."""
    pauses = [
        b - a
        for stream in streams
        for (a, _), (b, _) in zip(stream.events, stream.events[1:], strict=False)
        if b > since
    ]
    return max(pauses, default=0.0)


class Killing:
    """One stack, one rank."""

    def __init__(self, stack: stacks.Stack, asks: Sequence[Ask], tokens: int, budget: Budget) -> None:
        self._stack, self._asks, self._tokens, self._budget = stack, asks, tokens, budget
        ranks = stack.ranks()
        self.rank = (len(ranks) + 1) // 2
        self._ranks, self._victim = ranks, ranks[self.rank - 1]
        self._target = psutil.Process(stack.pid("target"))
        self.ended_s = self.again_s = self.pause_s = float("nan")

    async def go(self) -> list[Stream]:
        """The streams, from their begin over the kill to their end. Raises RuntimeError for a broken one."""
        kept = [Stream() for _ in self._asks]
        limit = max(self._budget.left_s, 10.0)
        task = asyncio.create_task(
            stacks.streams(self._stack.url, self._asks, self._tokens, timeout_s=limit, kept=kept)
        )
        while not task.done() and any(len(stream.events) < AFTER_EVENTS for stream in kept):
            await asyncio.sleep(0.01)
        self._victim.kill()
        killed = time.perf_counter()
        watch = asyncio.create_task(asyncio.to_thread(self._watch, killed))
        done = await task
        await watch
        self.pause_s = longest_pause(done, killed)
        return done

    def _watch(self, killed: float) -> None:
        limit = min(BACK_S, max(self._budget.left_s, 10.0))
        stacks.until(lambda: not self._target.is_running(), limit, "the target's process ended")
        self.ended_s = time.perf_counter() - killed
        stacks.until(self._stack.serving, limit, "the target came back")
        self.again_s = time.perf_counter() - killed

    def left(self) -> list[str]:
        """Ranks of before that still run."""
        return [f"rank {n}" for n, rank in enumerate(self._ranks, 1) if rank.is_running()]


def go(model: Model, variant: Variant, options: Options, budget: Budget, part: Part) -> None:
    """One row of the table. Raises RuntimeError for a stack or a stream that breaks."""
    greedy_and_warm = asks_of(model)
    asks = [*greedy_and_warm[:PROMPTS], greedy_and_warm[-1]]
    rows = part.tables["a rank killed"][1]
    failures: list[str] = []
    words = [*flags_of(model, options, variant.tp, len(asks), options.kill_tokens), *variant.flags]
    with stacks.running(*words, timeout_s=min(stacks.START_S, budget.left_s)) as stack:
        limit = max(budget.left_s, 10.0)
        undisturbed = asyncio.run(stacks.streams(stack.url, asks, options.kill_tokens, timeout_s=limit))
        killing = Killing(stack, asks, options.kill_tokens, budget)
        disturbed = asyncio.run(killing.go())
        stacks.until(stack.drafts, min(BACK_S, max(budget.left_s, 10.0)), "the stack drafted again")
        reopened = stack.samples("gateway").total("specbridge_gateway_session_reopens_total")
        after = asyncio.run(stacks.streams(stack.url, asks, options.kill_tokens, timeout_s=limit))
        told = Told.read(stack.log())
        failures += told.wrong(killing.rank)
        if not sum(stream.drafted for stream in after):
            failures.append("nothing was drafted after the restart")
        if not reopened:
            failures.append("no session was opened anew: the rank was killed after the streams")
        failures += [f"{name} was left by the restart" for name in killing.left()]
        if held := stack.idle():
            failures.append(f"still held when idle: {held}")
    failures += [f"the stack left {what}" for what in stack.left]
    expected = [stream.ids for stream in undisturbed]
    for name, got in (("rank killed", disturbed), ("after it", after)):
        found = judged(model, asks, expected, [stream.ids for stream in got], options)
        wrong = sum(not difference.near for difference in found)
        part.notes += [f"{model.name}, {variant.name}, {name}: {difference.text()}" for difference in found]
        part.figures[FAILURES] += wrong
        shared: list[Any] = [sum(map(len, expected)), compared(expected, found), len(found) - wrong, wrong]
        if got is disturbed:
            times = [reopened, killing.ended_s, killing.again_s, killing.pause_s]
            rows.append([model.name, variant.name, killing.rank, len(asks), *shared, *times])
        else:
            rows.append([model.name, f"{variant.name}, once more", "-", len(asks), *shared, *["-"] * 4])
    part.notes += [f"failed: {model.name}, {variant.name}: {text}" for text in failures]
    part.notes.append(
        f"{model.name}, {variant.name}: the target {', '.join(told.ended)}; rank {killing.rank} named"
    )
    part.figures[FAILURES] += len(failures)


def measure(options: Options, budget: Budget, folder: Path) -> Part:
    """Table `a rank killed`, of the first model; figure FAILURES counts what must not be."""
    part = Part()
    part.tables["a rank killed"] = (HEADER, [])
    part.figures[FAILURES] = 0
    model = models.make(options.models[0], folder, PROMPTS)
    wanted, notes = legal(model, [v for v in variants(options) if v.tp > 1 and not _own_gpu(v.flags)])
    part.notes += notes
    for variant in wanted:
        if not budget.fits(30.0):
            part.notes.append(f"{variant.name}: left out for want of time")
            continue
        try:
            go(model, variant, options, budget, part)
        except RuntimeError as error:
            part.figures[FAILURES] += 1
            part.notes.append(f"failed: {model.name}, {variant.name}: {error}")
    return part


def _own_gpu(flags: Sequence[str]) -> bool:
    return any(flag.startswith("--draft-device") for flag in flags)
