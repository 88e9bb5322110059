"""Load on one or several servers in turns: throughput, latencies, goodput, acceptance; closed or open loop.

Arms are stacks of SpecBridge with different flags, or any OpenAI-compatible server by its URL. Each load
point is measured `--repeats` times, the arms in turn (A B C, then C B A, …), one loaded at a time, so that a
drift of the machine hits all alike; ratios pair the turns of one repeat. What the columns mean:
docs/benchmarks.md.

    python -m benchmarks.serve --arms plain chain tree adaptive --streams 1 4 8 --plot serve.svg
    python -m benchmarks.serve --arms tree adaptive --rates 0.5 1 2 --goodput ttft:1000 tpot:100
    python -m benchmarks.serve --arm tree --arm vllm=http://127.0.0.1:8001 --streams 32 --ignore-eos
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import common
from benchmarks.load import picture
from benchmarks.load.arms import Arm, Server, assign, opened, order, parse_arm, parse_extra
from benchmarks.load.figures import (
    LATENCIES,
    RATES,
    Figures,
    collect,
    latency_row,
    parse_goals,
    rate_row,
    steady_rate,
    warnings,
)
from benchmarks.load.http import StreamClient
from benchmarks.load.loops import Load, Turn, run_turn
from benchmarks.load.request import Style, perform
from benchmarks.load.work import Planner, Prompts, load_texts, parse_mix, tokens_of
from specbridge.errors import ConfigError

DEFAULT_ARMS = ("plain", "tree")
DEFAULT_STREAMS = (1, 4, 8)
MAX_STREAMS = 1024
KEY_VARIABLE = "OPENAI_API_KEY"


def arguments() -> argparse.ArgumentParser:
    parser = common.arguments(__doc__)
    what = parser.add_argument_group("what is compared (the first arm is what the others are compared with)")
    what.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="several of --arm at once")
    what.add_argument(
        "--arm", action="append", default=[], metavar="ARM",
        help="plain, chain, tree, adaptive, chain:NODES, tree:NODES, NAME=FLAGS of `specbridge serve`, or "
        "NAME=http://host:port of an OpenAI-compatible server (default: plain and tree)",
    )  # fmt: skip
    what.add_argument("--flags", default="", help="flags of every stack, one word: --flags='--target DIR'")
    what.add_argument("--spec-flags", default="", help="flags of every stack that has a draft")
    what.add_argument("--model", action="append", default=[], metavar="[ARM=]NAME", help="of a server by URL")
    what.add_argument(
        "--api-key", action="append", default=[], metavar="[ARM=]KEY",
        help=f"for servers by URL (default: ${KEY_VARIABLE})",
    )  # fmt: skip
    what.add_argument(
        "--one-at-a-time", action="store_true",
        help="start each stack for its turn only, where memory does not hold all; every turn then warms up",
    )  # fmt: skip
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--streams", type=int, nargs="+", help="closed loop: requests at a time (default: 1 4 8)"
    )
    load.add_argument("--rates", type=float, nargs="+", help="open loop: Poisson arrivals a second")
    load.add_argument(
        "--requests", type=int, nargs="+", default=[], metavar="N",
        help="of one turn; several: of each load point (default: 4 a stream, at least 16; 30 s of arrivals, "
        "at least 16)",
    )  # fmt: skip
    load.add_argument("--repeats", type=int, default=3, help="measured turns of an arm at a load point")
    load.add_argument("--warmup", type=int, default=1, help="turns before them that do not count")
    load.add_argument(
        "--short-warmup", action="store_true", help="in a closed loop one request a stream warms up"
    )
    load.add_argument("--prompts", nargs="+", default=list(common.SETS), help="sets or JSON-lines files")
    load.add_argument(
        "--input-tokens", nargs="+", default=[], metavar="N[:SHARE]",
        help="join and cut prompts to these lengths: 32:0.6 512:0.3 4096:0.1 (default: as they stand)",
    )  # fmt: skip
    load.add_argument("--output-tokens", nargs="+", default=["96"], metavar="N[:SHARE]", help="max_tokens")
    load.add_argument(
        "--tokenizer",
        default="",
        help="for --input-tokens: a folder, file, or `bytes` (default: built-in model's)",
    )
    load.add_argument(
        "--fresh", action="store_true", help="begin each prompt with another mark: no prefix hits"
    )
    load.add_argument("--completions", action="store_true", help="/v1/completions instead of chats")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--seed", type=int, default=0, help="of lengths, arrivals, marks and requests' seeds")
    load.add_argument("--ignore-eos", action="store_true", help="send ignore_eos, for outputs of full length")
    load.add_argument(
        "--extra-body", action="append", default=[], metavar="[ARM=]JSON", help="fields added to requests"
    )
    load.add_argument(
        "--timeout", type=float, default=120.0, help="seconds without an event that end a request"
    )
    load.add_argument(
        "--retry", type=int, default=0, help="times a 429 is tried again, after its Retry-After"
    )
    out = parser.add_argument_group("what is reported")
    out.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits, of ttft, tpot, e2e: ttft:500 tpot:50",
    )
    out.add_argument("--plot", type=Path, help="draw throughput and p95 ITL over the load, .svg or .png")
    out.add_argument("--keep-requests", action="store_true", help="every request's numbers in --out, too")
    return parser


class Campaign:
    """A parsed run: its arms, load points, plans and style. Raises ConfigError for what can't work."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.loads = _loads(args)
        for name, least in (("repeats", 1), ("warmup", 0), ("retry", 0)):
            if getattr(args, name) < least:
                raise ConfigError(f"--{name} {getattr(args, name)} is below {least}; raise it")
        self.counts = _counts(args.requests, self.loads)
        if not args.timeout > 0:
            raise ConfigError(f"--timeout {args.timeout:g} must be above 0 seconds")
        self.arms = _arms(args, max(load.streams or 64 for load in self.loads))
        self.goals = parse_goals(args.goodput)
        extra = parse_extra(args.extra_body, [arm.name for arm in self.arms])
        self.styles = {
            name: Style(
                chat=not args.completions,
                temperature=args.temperature,
                ignore_eos=args.ignore_eos,
                extra=fields,
            )
            for name, fields in extra.items()
        }
        self.planner = Planner(
            prompts=Prompts(load_texts(args.prompts), partial(tokens_of, args.tokenizer)),
            outputs=parse_mix(args.output_tokens, "--output-tokens"),
            inputs=parse_mix(args.input_tokens, "--input-tokens") if args.input_tokens else None,
            seed=args.seed,
            sampled=args.temperature > 0,
            fresh=args.fresh,
        )
        if args.plot is not None:
            picture.check(args.plot)
        self.turns: list[Turn] = []
        self.synthetic: dict[str, Any] = {}

    def run(self) -> None:
        """Measure everything into `turns`, in order. KeyboardInterrupt leaves there what was measured."""
        # From 1 - warmup to repeats: what is 0 or less warms up. The counting up keeps plans apart.
        repeats = range(1 - self.args.warmup, self.args.repeats + 1)
        if self.args.one_at_a_time:
            for repeat in range(1, self.args.repeats + 1):
                for arm in order(self.arms, repeat - 1):
                    with opened(arm) as server:
                        for load in self.loads:
                            for warm in range(1 - self.args.warmup, 1):
                                self._turn(server, load, warm)
                            self._turn(server, load, repeat)
            return
        with ExitStack() as running:
            servers = {arm.name: running.enter_context(opened(arm)) for arm in self.arms}
            for load in self.loads:
                for repeat in repeats:
                    for arm in order(self.arms, repeat - 1):
                        self._turn(servers[arm.name], load, repeat)

    def _turn(self, server: Server, load: Load, repeat: int) -> None:
        self.synthetic |= server.synthetic
        count = self.counts[load]
        if repeat < 1 and self.args.short_warmup and load.streams:
            count = load.streams
        name = f"{load} {repeat}"
        asks = self.planner.plan(name, count)
        due = self.planner.arrivals(name, load.rate, count) if load.rate else []
        turn = Turn(server.arm.name, load, repeat)
        self.turns.append(turn)

        async def measure() -> None:
            async with StreamClient(server.url, headers=server.arm.headers) as client:
                await run_turn(turn, asks, partial(self._send, client, server), due)

        gc.collect()
        gc.freeze()  # what lives now need not be looked through again, least of all while times are taken
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure())
        _say(turn)

    async def _send(self, client: StreamClient, server: Server, ask: Any, due: float) -> Any:
        args, style = self.args, self.styles[server.arm.name]
        return await perform(
            client, ask, style, server.model, due=due, timeout_s=args.timeout, retries=args.retry
        )

    def figures(self) -> list[Figures]:
        return collect(self.turns, [arm.name for arm in self.arms], self.goals)


def _loads(args: argparse.Namespace) -> list[Load]:
    if args.streams and args.rates:
        raise ConfigError("--streams and --rates exclude each other: a loop is closed or open; drop one")
    if args.rates:
        for rate in args.rates:
            if not 0 < rate < 1e6:
                raise ConfigError(f"--rates {rate:g} must be requests a second above 0")
        return [Load(rate=rate) for rate in dict.fromkeys(args.rates)]
    streams = args.streams or DEFAULT_STREAMS
    for number in streams:
        if not 1 <= number <= MAX_STREAMS:
            raise ConfigError(f"--streams {number} must be from 1 to {MAX_STREAMS}")
    return [Load(streams=number) for number in dict.fromkeys(streams)]


def _arms(args: argparse.Namespace, most_streams: int) -> list[Arm]:
    words = [*args.arms, *args.arm] or DEFAULT_ARMS
    every = {"flags": shlex.split(args.flags), "spec_flags": shlex.split(args.spec_flags)}
    arms = [parse_arm(word, most_streams=most_streams, **every) for word in words]
    names = [arm.name for arm in arms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two arms are called {twice!r}; give one of them another name")
    chosen = assign(arms, args.model, "--model")
    keys = assign(arms, args.api_key, "--api-key")
    usual = os.environ.get(KEY_VARIABLE, "")
    return [
        replace(arm, model=chosen.get(arm.name, ""), api_key=keys.get(arm.name, usual)) if arm.url else arm
        for arm in arms
    ]


def _counts(given: Sequence[int], loads: Sequence[Load]) -> dict[Load, int]:
    """Requests of a measured turn at each load point."""
    if len(given) not in (0, 1, len(loads)):
        raise ConfigError(f"--requests has {len(given)} numbers for {len(loads)} load points; give one each")
    numbers = [*given] * len(loads) if len(given) == 1 else [*given] or [0] * len(loads)
    for load, number in zip(loads, numbers, strict=True):
        if number < 0:
            raise ConfigError(f"--requests {number} is below 0; raise it")
        if 0 < number < load.streams:
            raise ConfigError(
                f"--requests {number} is below --streams {load.streams}: so many would never run at a time; "
                "raise it"
            )
    return {
        load: number or max(16, load.streams * 4, round(load.rate * 30))
        for load, number in zip(loads, numbers, strict=True)
    }


def _say(turn: Turn) -> None:
    failed = sum(not o.ok for o in turn.outcomes)
    what = "warm-up" if turn.repeat < 1 else f"turn {turn.repeat}"
    print(
        f"{turn.load}, {turn.arm}, {what}: {turn.tokens_per_second:.1f} tok/s, {len(turn.outcomes)} requests "
        f"in {turn.seconds:.1f} s" + (f", {failed} failed" if failed else ""),
        file=sys.stderr, flush=True,
    )  # fmt: skip


# ---- the report -----------------------------------------------------------------------------


def report(campaign: Campaign, *, ended: str = "") -> None:
    """Tables on stdout, JSON with provenance to --out, the picture to --plot. ended: why too early."""
    args, found = campaign.args, campaign.figures()
    if not found:
        print("nothing was measured", file=sys.stderr)
        return
    latencies = [latency_row(f) for f in found]
    print("Latencies in ms: TTFT to the first text, ITL between chunks, TPOT a token, E2E of the request.\n")
    print(common.table(LATENCIES, latencies) + "\n")
    common.report(
        "serve", RATES, [rate_row(f) for f in found], args.out,
        synthetic=campaign.synthetic,
        arms=[arm.describe() for arm in campaign.arms],
        load={name: str(v) if isinstance(v, Path) else v for name, v in _public(args).items()},
        ended=ended,
        latencies={"header": LATENCIES, "rows": latencies, "unit": "ms"},
        turns=[_turn_json(turn, args.keep_requests) for turn in campaign.turns],
        warnings=warnings(found),
    )  # fmt: skip
    print(f"client: at most {100 * max(f.cpu for f in found):.0f} % of a core")
    for line in warnings(found):
        print(line)
    for error in _first_messages(campaign.turns):
        print(error)
    if args.plot is not None:
        picture.save(found, _caption(campaign), args.plot)


def _public(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "api_key"}


def _turn_json(turn: Turn, with_requests: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "arm": turn.arm, "streams": turn.load.streams, "rate": turn.load.rate, "repeat": turn.repeat,
        "complete": turn.complete, "seconds": turn.seconds, "tokens_per_second": turn.tokens_per_second,
        "steady_tokens_per_second": steady_rate(turn),
        "requests": len(turn.outcomes), "failed": sum(not o.ok for o in turn.outcomes),
        "client_cpu": turn.cpu,
    }  # fmt: skip
    if with_requests:
        value["outcomes"] = [asdict(outcome) for outcome in turn.outcomes]
    return value


def _first_messages(turns: Sequence[Turn]) -> list[str]:
    """The first message of each kind of failure of each arm."""
    first: dict[tuple[str, str], str] = {}
    for turn in turns:
        for o in turn.outcomes:
            if o.error:
                first.setdefault((turn.arm, o.error), o.message)
    return [f"{arm}: {kind}, for example: {message}" for (arm, kind), message in first.items()]


def _caption(campaign: Campaign) -> str:
    args = campaign.args
    inputs = "prompts as they stand" if not args.input_tokens else f"inputs {' '.join(args.input_tokens)}"
    where = common.provenance()
    unreal = f", NOT REAL: {', '.join(campaign.synthetic)}" if campaign.synthetic else ""
    turns = f"median of {args.repeats} turns" if args.repeats > 1 else "one turn"
    machine = f"{where['cpu']} ({where['cores']} cores), {where['revision']}, {where['time'][:10]}"
    outputs = " ".join(args.output_tokens)
    return f"{inputs}, outputs {outputs}, T={args.temperature:g}, {turns}, {machine}{unreal}"


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    code, ended = 0, ""
    try:
        campaign = Campaign(args)
        try:
            campaign.run()
        except KeyboardInterrupt:
            code, ended = 130, "interrupted"
        except (ConfigError, SystemExit) as error:  # a stack that doesn't start, a server that has gone
            if not campaign.turns:
                raise
            code, ended = 1, str(error)
        if ended:
            print(f"benchmarks.serve: {ended}; what was measured so far:", file=sys.stderr)
        report(campaign, ended=ended)
    except ConfigError as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    # A time limit ends a run as Ctrl-C does: by asyncio's own handler while a loop runs, since what is raised
    # in a protocol's callback is lost there.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
