"""A long prompt that arrives while streams are running: what it does to them, and they to it.

    python -m benchmarks.spike --streams 64 --prompt 16384 --flags='--target DIR' --out spike.json
    python -m benchmarks.spike --streams 0 --prompt 16384 32768 --flags='--target DIR'

Each arm (as benchmarks.serve's) is a stack of its own, one after the other. In it the prompt is asked alone a
few times, then beside `--streams` streams that began long before; `--streams 0` leaves that out. All prompts
begin differently, so that nothing is found in a prefix cache.

    ITL       between one event of a running stream and its next, in ms. before: while nothing else was asked;
              during: of those gaps that touch the time from the newcomer's sending to its first text
    TTFT      of the newcomer, from its sending to its first text, in ms, median of the repeats
    chunk     prompt rows of one pass, by the target's own count
    same      TTFT alone of another stack whose largest chunk is the mean one that the streams left to the
              newcomer: by it the waiting is told from the smaller chunks (--no-same leaves it out)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import common
from benchmarks.gpu.stack import Metrics
from benchmarks.load.arms import Arm, parse_arm
from benchmarks.load.figures import percentile
from benchmarks.load.http import StreamClient
from benchmarks.load.request import Outcome, Reader, Style, perform
from benchmarks.load.work import Ask, Prompts, load_texts, tokens_of
from specbridge.errors import ConfigError, SpecBridgeError

HEADER = (
    "arm", "prompt", "streams", "ITL p50 before", "p95 before", "p95 during", "max during", "p95 ratio",
    "TTFT alone", "TTFT beside", "ratio", "chunk alone", "chunk beside", "TTFT same", "ratio same",
)  # fmt: skip
SETTLE_S = 0.3
"""After a newcomer, until its traces in the streams' gaps are gone."""
STEADY_CHUNKS = 8
"""Events of every stream before anything is measured."""


@dataclass(slots=True)
class Found:
    """Of one prompt length, seconds; a list has an item a repeat, gaps those of all. chunk: mean rows, alone
    and beside. ended: streams that had ended before the last newcomer had its text."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    chunk_alone: float = math.nan
    chunk_beside: float = math.nan
    same: list[float] = field(default_factory=list)
    ended: int = 0


def arguments() -> argparse.ArgumentParser:
    parser = common.arguments(__doc__)
    parser.add_argument("--arms", nargs="+", default=["tree"], metavar="ARM", help="as benchmarks.serve's")
    parser.add_argument("--flags", default="", help="flags of every stack, one word")
    parser.add_argument("--spec-flags", default="", help="flags of every stack that has a draft")
    parser.add_argument("--streams", type=int, default=64, help="that run already; 0: prompts alone only")
    parser.add_argument("--prompt", type=int, nargs="+", default=[16384], help="tokens of the newcomer")
    parser.add_argument("--input-tokens", type=int, default=256, help="of a running stream's prompt")
    parser.add_argument("--output-tokens", type=int, default=2048, help="that a running stream may generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=1.5, help="seconds of `before`, each time")
    parser.add_argument("--tokenizer", default="bytes", help="folder, file, or `bytes`: of prompts' lengths")
    parser.add_argument("--no-same", action="store_true", help="no second stack for the same chunks")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without an event")
    return parser


# ---- gaps -----------------------------------------------------------------------------------


def gaps(outcome: Outcome) -> Iterator[tuple[float, float]]:
    """(begin, end) of each gap between its events with text."""
    return pairwise(accumulate(outcome.gaps, initial=outcome.first))


def gaps_within(outcomes: Sequence[Outcome], begin: float, end: float) -> list[float]:
    """Of all streams: those that lie wholly between the two times."""
    return [b - a for o in outcomes if o.chunks for a, b in gaps(o) if begin <= a and b <= end]


def gaps_touching(outcomes: Sequence[Outcome], begin: float, end: float) -> list[float]:
    """Of all streams: those that have a part between the two times."""
    return [b - a for o in outcomes if o.chunks for a, b in gaps(o) if a < end and b > begin]


# ---- one stack ------------------------------------------------------------------------------


class Bench:
    """Asks one running stack."""

    def __init__(
        self, client: StreamClient, model: str, metrics: Metrics, prompts: Prompts, args: argparse.Namespace
    ) -> None:
        self._client, self._model, self._metrics, self._args = client, model, metrics, args
        self._prompts = prompts
        self._style = Style(chat=False, ignore_eos=True)
        self._asked = 0

    def _ask(self, length: int, max_tokens: int) -> Ask:
        self._asked += 1
        return Ask(self._asked, self._prompts.make(self._asked, length, f"[{self._asked}] "), max_tokens)

    async def newcomer(self, length: int) -> Outcome:
        """Raises ConfigError if it is refused or fails."""
        ask = self._ask(length, 4)
        outcome = await perform(
            self._client, ask, self._style, self._model, due=time.perf_counter(),
            timeout_s=self._args.timeout,
        )  # fmt: skip
        if not outcome.ok:
            raise ConfigError(f"the prompt of {length} tokens: {outcome.error}: {outcome.message}")
        return outcome

    async def _chunks(self) -> tuple[float, float]:
        """Prompt rows and prompt chunks that the target has run."""
        found = await asyncio.to_thread(self._metrics.read)
        return found["specbridge_target_prefill_rows_total"], found["specbridge_target_prefill_chunks_total"]

    async def alone(self, length: int) -> tuple[list[float], float]:
        """TTFTs, and the mean chunk."""
        await self.newcomer(length)  # whatever is done once
        rows, chunks = await self._chunks()
        times = [(await self.newcomer(length)).ttft for _ in range(self._args.repeats)]
        more, ran = await self._chunks()
        return times, (more - rows) / max(ran - chunks, 1.0)

    async def beside(self, length: int, found: Found) -> None:
        """Raises ConfigError if streams do not start."""
        async with self._running() as outcomes:
            await self._steady(outcomes)
            ran_rows = ran_chunks = 0.0
            for repeat in range(1 + self._args.repeats):  # the first does not count
                (
                    rows,
                    chunks,
                ) = await self._chunks()  # before the pause: a look at /metrics costs the streams time
                await asyncio.sleep(SETTLE_S + self._args.pause)
                sent = time.perf_counter()
                newcomer = await self.newcomer(length)
                more, ran = await self._chunks()
                if not repeat:
                    continue
                ran_rows, ran_chunks = ran_rows + more - rows, ran_chunks + ran - chunks
                found.beside.append(newcomer.ttft)
                found.before += gaps_within(outcomes, sent - self._args.pause, sent)
                found.during += gaps_touching(outcomes, sent, newcomer.first)
            found.chunk_beside = ran_rows / max(ran_chunks, 1.0)
            found.ended = sum(0 < o.ended < newcomer.first for o in outcomes)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[list[Outcome]]:
        """The streams, cancelled in the end."""
        args = self._args
        outcomes: list[Outcome] = []

        async def one(ask: Ask) -> None:
            outcome = Outcome(ask.index, time.perf_counter())
            outcomes.append(outcome)
            body = self._style.body(ask, self._model)
            await self._client.post(self._style.path, body, Reader(outcome), timeout_s=args.timeout)
            outcome.ended = time.perf_counter()

        asks = [self._ask(args.input_tokens, args.output_tokens) for _ in range(args.streams)]
        tasks = [asyncio.create_task(one(ask)) for ask in asks]
        try:
            yield outcomes
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _steady(self, outcomes: Sequence[Outcome]) -> None:
        end = time.monotonic() + self._args.timeout
        while len(outcomes) < self._args.streams or any(o.chunks < STEADY_CHUNKS for o in outcomes):
            if time.monotonic() > end:
                raise ConfigError("not all streams got text in time; lower --streams or raise --timeout")
            if error := next((o for o in outcomes if o.error), None):
                raise ConfigError(f"a stream failed: {error.message}")
            await asyncio.sleep(0.05)


Work = Callable[[Bench], Coroutine[Any, Any, Any]]


@contextmanager
def opened(
    arm: Arm, prompts: Prompts, args: argparse.Namespace, synthetic: dict[str, Any]
) -> Iterator[Callable[[Work], Any]]:
    """The arm's stack, as a function that runs `work(bench)` against it."""
    with (
        tempfile.TemporaryDirectory(prefix="sb-") as folder,
        common.serve(*arm.flags, f"--run-dir={folder}") as stack,
    ):
        state = json.loads((Path(folder) / "stack.json").read_text())
        synthetic |= common.synthetic(stack.url)
        model = common.model_name(stack.url)
        metrics = Metrics(state["endpoints"])

        async def asked(work: Work) -> Any:
            async with StreamClient(f"{stack.url}/v1") as client:
                return await work(Bench(client, model, metrics, prompts, args))

        def run(work: Work) -> Any:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(asked(work))

        yield run


def measure(
    arm: Arm,
    prompts: Prompts,
    args: argparse.Namespace,
    synthetic: dict[str, Any],
    found: dict[int, Found],
) -> None:
    """Fill what is found of each prompt length. Raises ConfigError, SystemExit for a stack that does not
    start.
    """
    with opened(arm, prompts, args, synthetic) as run:
        for length, one in found.items():
            one.alone, one.chunk_alone = run(lambda bench, n=length: bench.alone(n))
            if args.streams:
                run(lambda bench, n=length, one=one: bench.beside(n, one))
    for length, one in found.items():
        if not args.streams or args.no_same:
            continue
        chunk = max(round(one.chunk_beside), 1)
        if chunk > 0.95 * one.chunk_alone:
            one.same = one.alone
            continue
        cut = Arm(arm.name, (*arm.flags, f"--prefill-chunk={chunk}"))
        with suppress(SystemExit), opened(cut, prompts, args, synthetic) as run:
            one.same, _ = run(lambda bench, n=length: bench.alone(n))


# ---- the report -----------------------------------------------------------------------------


def row(arm: str, length: int, streams: int, found: Found) -> list[Any]:
    """Under HEADER: milliseconds, ratios, rows."""

    def ms(seconds: float) -> float | str:
        return "-" if math.isnan(seconds) else 1000 * seconds

    def over(a: float, b: float) -> float | str:
        return "-" if math.isnan(a) or not b > 0 else a / b

    middle = {
        name: statistics.median(times) if times else math.nan
        for name, times in (("alone", found.alone), ("beside", found.beside), ("same", found.same))
    }
    before, during = percentile(found.before, 95), percentile(found.during, 95)
    return [
        arm, length, streams, ms(percentile(found.before, 50)), ms(before), ms(during),
        ms(max(found.during, default=math.nan)), over(during, before), ms(middle["alone"]),
        ms(middle["beside"]), over(middle["beside"], middle["alone"]), _or_dash(found.chunk_alone),
        _or_dash(found.chunk_beside), ms(middle["same"]), over(middle["beside"], middle["same"]),
    ]  # fmt: skip


def _or_dash(value: float) -> float | str:
    return "-" if math.isnan(value) else value


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    rows: list[list[Any]] = []
    kept: dict[str, dict[int, Any]] = {}
    notes: list[str] = []
    synthetic: dict[str, Any] = {}
    try:
        prompts = Prompts(load_texts(common.SETS), partial(tokens_of, args.tokenizer))
        flags, more = shlex.split(args.flags), shlex.split(args.spec_flags)
        arms = [
            parse_arm(word, flags=flags, spec_flags=more, most_streams=args.streams + 1) for word in args.arms
        ]
        if any(arm.url for arm in arms):
            raise ConfigError("--arms: a server by URL can't be measured here; give flags of a stack")
    except ConfigError as error:
        print(f"benchmarks.spike: {error}", file=sys.stderr)
        return 2
    code = 0
    for arm in arms:
        found = {length: Found() for length in args.prompt}
        try:
            measure(arm, prompts, args, synthetic, found)
        except KeyboardInterrupt:
            code = 130
        except (SpecBridgeError, SystemExit, KeyError) as error:
            print(f"benchmarks.spike: {arm.name}: {error}", file=sys.stderr)
            code = code or 1
        rows += [row(arm.name, length, args.streams, one) for length, one in found.items() if one.alone]
        kept[arm.name] = {length: asdict(one) for length, one in found.items()}
        notes += [
            f"{arm.name}, {length}: {one.ended} streams had ended too early; raise --output-tokens"
            for length, one in found.items()
            if one.ended
        ]
        if code == 130:
            notes.append("interrupted")
            break
    load = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    described = [arm.describe() for arm in arms]
    common.report(
        "spike",
        HEADER,
        rows,
        args.out,
        synthetic=synthetic,
        arms=described,
        load=load,
        notes=notes,
        seconds=kept,
    )
    for note in notes:
        print(note)
    return code


if __name__ == "__main__":
    # A time limit ends a run as Ctrl-C does, so that what was measured is reported.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
