"""Part stack: whole rounds through the real gateway, services in processes of their own on one GPU.

Arms: plain (--no-draft), chain (the drafter's best token at each depth), tree (of so many nodes). Each is a
stack of its own, one after the other. Owns loading them and reading their metrics. A client's round is the
time from a request's first token to its last, divided by its rounds; of n clients, tokens/s are those that
arrive while all n are decoding. Contexts grow while decoding: prompts are as much shorter as half the output.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import common
from benchmarks.gpu.setup import Part, Setup, Stage

HEADER = (
    "arm", "streams", "tokens/s", "ms / token", "round ms", "of plain", "tokens / round", "nodes",
    "draft ms", "verify ms", "outside ms", "rpc ms", "gateway ms",
)  # fmt: skip
SERVICE_HEADER = (
    "arm", "streams", "target queue", "target forward", "target commit", "target service", "draft queue",
    "draft channel wait", "draft append", "draft pass", "draft service",
)  # fmt: skip
TARGET_MS, DRAFT_MS = "tree round: target service, ms", "tree round: draft service, ms"
START_S = 240.0
WARM_TOKENS = 64
ATTACHED = "specbridge_draft_channel_attached"


@dataclass(frozen=True, slots=True)
class Options:
    """model: served with its own weights and prompts, and `draft`; empty: dummy weights. simulate: acceptance
    file or mean, for dummy weights. arms: of plain, chain, tree. flags: more of `serve`'s."""

    model: str
    draft: str
    simulate: str
    arms: tuple[str, ...]
    max_tokens: int
    bursts: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    """A stack. nodes: sizes of the trees that its requests ask for, in turn; (0,): without a draft."""

    name: str
    nodes: tuple[int, ...]
    flags: tuple[str, ...] = ()

    @property
    def budget(self) -> int:
        return max(self.nodes)


@dataclass(slots=True)
class Stream:
    """One request. events: when how many tokens came. ids: these tokens. drafted, accepted: nodes."""

    events: list[tuple[float, int]] = field(default_factory=list)
    rounds: int = 0
    ids: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def first(self) -> float:
        return self.events[0][0]

    @property
    def last(self) -> float:
        return self.events[-1][0]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.events)

    @property
    def round_ms(self) -> float:
        return (self.last - self.first) / max(self.rounds, 1) * 1e3


@dataclass(frozen=True, slots=True)
class Burst:
    """What the clients saw."""

    streams: tuple[Stream, ...]

    @property
    def window(self) -> tuple[int, float]:
        """Tokens that came while all were decoding, and how many seconds that was."""
        begin, end = max(s.first for s in self.streams), min(s.last for s in self.streams)
        inside = sum(count for s in self.streams for at, count in s.events if begin < at <= end)
        if end <= begin or not inside:  # they hardly met: everything over everything
            begin, end = min(s.first for s in self.streams), max(s.last for s in self.streams)
            inside = sum(stream.tokens - 1 for stream in self.streams)
        return inside, max(end - begin, 1e-9)


def tokens_per_s(bursts: Sequence[Burst]) -> float:
    """Over all of them."""
    windows = [one.window for one in bursts]
    return sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)


async def one_stream(
    client: httpx.AsyncClient,
    asked: Mapping[str, Any],
    max_tokens: int,
    nodes: int,
    stream: Stream | None = None,
) -> Stream:
    """A completion, streamed, greedy unless `asked` says otherwise. stream: filled while it goes on.

    Raises RuntimeError for an answer that is none.
    """
    body: dict[str, Any] = {
        "temperature": 0,
        **asked,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    if nodes:
        body["max_tree_nodes"] = nodes
    stream = Stream() if stream is None else stream
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            at = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream broke off: {event['error']}")
            for choice in event.get("choices") or ():
                if choice.get("token_ids"):
                    stream.events.append((at, len(choice["token_ids"])))
                    stream.ids += choice["token_ids"]
            stats = (event.get("metrics") or {}).get("speculative_decoding") or {}
            stream.rounds = stats.get("num_rounds", stream.rounds)
            stream.drafted = stats.get("num_draft_tokens", stream.drafted)
            stream.accepted = stats.get("num_accepted_draft_tokens", stream.accepted)
    if not stream.events:
        raise RuntimeError("a request brought no token")
    return stream


async def burst(
    url: str, prompts: Sequence[Mapping[str, Any]], max_tokens: int, nodes: int, timeout_s: float
) -> Burst:
    """All prompts at once, with trees of `nodes`; 0: as the stack has it."""
    limits = httpx.Limits(max_connections=len(prompts) + 1)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        streams = await asyncio.gather(*(one_stream(client, prompt, max_tokens, nodes) for prompt in prompts))
    return Burst(tuple(streams))


class Metrics:
    """Samples of the stack's /metrics, and what came about between two of them."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._urls = {
            name.removesuffix(" metrics"): url for name, url in endpoints.items() if name.endswith(" metrics")
        }

    def read(self) -> dict[str, float]:
        """'name{labels}' -> value, of all services: their names differ."""
        found = {}
        for url in self._urls.values():
            for line in httpx.get(url, timeout=10.0).text.splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name] = float(value)
        return found

    def until_above_zero(self, name: str, timeout_s: float) -> None:
        """Gateways take requests before the draft has come: wait. Raises RuntimeError after timeout_s."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if self.read().get(name):
                    return
            except httpx.TransportError:
                pass  # its endpoint is not up either
            time.sleep(0.2)
        raise RuntimeError(f"{name} was still 0 after {timeout_s:.0f} s")


def mean(before: Mapping[str, float], after: Mapping[str, float], name: str, labels: str = "") -> float:
    """Of a histogram's samples in between; nan if there are none."""

    def grown(part: str) -> float:
        key = f"{name}_{part}{labels}"
        return after.get(key, 0.0) - before.get(key, 0.0)

    return grown("sum") / grown("count") if grown("count") else float("nan")


def arms_of(setup: Setup, options: Options) -> list[Arm]:
    """The arms that are asked for, as stacks."""
    found = []
    if "plain" in options.arms:
        found.append(Arm("plain", (0,), ("--no-draft",)))
    if setup.drafter is None:
        return found
    if "chain" in options.arms:
        found.append(Arm("chain", (setup.drafter.horizon,), ("--top-k=1",)))
    if "tree" in options.arms:
        found.append(Arm("tree", setup.nodes))
    return found


def flags_of(setup: Setup, options: Options, arm: Arm) -> list[str]:
    """Of `specbridge serve`."""
    context, streams = setup.told.context, max(setup.concurrency)
    length = min(context + options.max_tokens + 64, setup.config.max_position_embeddings)
    rows = max(streams * (arm.budget + 1), 256)
    flags = [
        f"--device={setup.device}",
        f"--dtype={str(setup.dtype).removeprefix('torch.')}",
        f"--tp={setup.tp}",
        f"--max-length={length}",
        f"--kv-tokens={max(streams, 2) * -(-length // 16) * 16}",
        f"--max-sessions={streams + 8}",
        f"--max-running={streams}",
        f"--max-verify-rows={rows}",
        f"--target-max-verify-rows={rows}",
        f"--max-tree-nodes={max(arm.budget, 1)}",
    ]
    if options.model:
        flags.append(f"--target={options.model}")
        if arm.budget:
            flags.append(f"--draft={options.draft}")
    else:
        flags += ["--load-format=dummy", f"--config={setup.place}"]
        if arm.budget:
            flags.append(f"--simulate-acceptance={options.simulate}")
    if arm.budget:
        flags += [f"--tree-budget={arm.budget}", "--min-tree=1"]
    return [*flags, *arm.flags, *options.flags]


def prompts_of(setup: Setup, options: Options, count: int, salt: int) -> list[dict[str, Any]]:
    """Real chats for a real model; for dummy weights random letters, a token each, and no end."""
    if options.model:
        texts = common.load_prompts(common.SETS, count * (salt + 1))[-count:]
        return [{"messages": [{"role": "user", "content": text}]} for text in texts]
    length = max(setup.told.context - options.max_tokens // 2, 1)
    letters = [random.Random(f"{salt}/{n}").choices(string.ascii_letters, k=length) for n in range(count)]
    return [{"prompt": "".join(text), "ignore_eos": True} for text in letters]


class Rounds:
    """Goes through the arms; keeps the rows of the tables and what plain rounds took."""

    def __init__(self, setup: Setup, options: Options, part: Part) -> None:
        self._setup, self._options, self._part = setup, options, part
        self._rows: list[list[Any]] = []
        self._services: list[list[Any]] = []
        self._plain: dict[int, float] = {}
        part.tables["rounds"] = (HEADER, self._rows)
        part.tables["inside the services, ms a round"] = (SERVICE_HEADER, self._services)

    def go(self, arm: Arm) -> None:
        """Start a stack, load it at each concurrency with each size of tree.

        Raises RuntimeError, httpx.HTTPError or SystemExit for a stack that does not start or does not answer.
        """
        setup = self._setup
        with tempfile.TemporaryDirectory(prefix="sb-") as folder:
            flags = [*flags_of(setup, self._options, arm), f"--run-dir={folder}"]
            began = time.monotonic()
            with common.serve(*flags, start_timeout_s=min(START_S, setup.budget.left_s)) as running:
                self._part.figures[f"{arm.name}: start s"] = time.monotonic() - began
                state = json.loads((Path(folder) / "stack.json").read_text())
                metrics = Metrics(state["endpoints"])
                if arm.budget:
                    metrics.until_above_zero(ATTACHED, min(START_S, setup.budget.left_s))
                for streams in setup.concurrency:
                    for nodes in arm.nodes:
                        if setup.budget.fits(5.0):
                            self._load(running.url, metrics, arm, streams, nodes)
                        else:
                            self._part.notes.append(f"{arm.name} {nodes}, {streams} streams: no time left")

    def _load(self, url: str, metrics: Metrics, arm: Arm, streams: int, nodes: int) -> None:
        setup, options = self._setup, self._options

        def once(number: int, tokens: int) -> Burst:
            prompts = prompts_of(setup, options, streams, number)
            return asyncio.run(burst(url, prompts, tokens, nodes, max(setup.budget.left_s, 5.0)))

        once(0, min(WARM_TOKENS, options.max_tokens))
        before, bursts = metrics.read(), [once(1, options.max_tokens)]
        while len(bursts) < options.bursts and setup.budget.fits(5.0):
            bursts.append(once(len(bursts) + 1, options.max_tokens))
        after = metrics.read()
        streamed = [stream for one in bursts for stream in one.streams if stream.rounds]
        if not streamed:
            raise RuntimeError("no text was longer than a token")
        round_ms = statistics.median(stream.round_ms for stream in streamed)
        # The prefill's token belongs to no round.
        per_round = sum(s.tokens - 1 for s in streamed) / sum(s.rounds for s in streamed)
        if not nodes:
            self._plain[streams] = round_ms
        base, rate = self._plain.get(streams), tokens_per_s(bursts)
        name = f"{arm.name} {nodes}" if nodes else arm.name
        split = ("draft", "verify", "outside", "rpc", "gateway")
        rounds = {key: mean(before, after, f"specbridge_gateway_round_{key}_seconds") * 1e3 for key in split}
        inside = service_times(before, after)
        self._rows.append(
            [name, streams, rate, 1e3 / rate, round_ms, round_ms / base if base else "-", per_round,
             mean(before, after, "specbridge_gateway_round_nodes") / streams, *rounds.values()]
        )  # fmt: skip
        self._services.append([name, streams, *inside])
        if (arm.name, nodes, streams) == ("tree", setup.told.nodes, setup.told.sessions):
            self._part.stages = [
                Stage("gateway: its own work", 0.0, rounds["gateway"]),
                Stage("messages between gateway and services", 0.0, rounds["rpc"]),
            ]
            self._part.figures |= {TARGET_MS: inside[3], DRAFT_MS: inside[8]}
            self._part.figures["tree round seen by the client, ms"] = round_ms
            if base:
                self._part.figures["tree round / plain round"] = round_ms / base


def service_times(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """ms by round, as SERVICE_HEADER has them."""
    names = ("queue", "forward", "commit", "service")
    target = [mean(before, after, f"specbridge_target_{name}_seconds") for name in names]
    stages = ("queue", "channel_wait", "append", "forward", "service")
    draft = [
        mean(before, after, "specbridge_draft_stage_seconds", f'{{stage="{stage}"}}') for stage in stages
    ]
    return [seconds * 1e3 for seconds in (*target, *draft)]


def measure(setup: Setup, options: Options) -> Part:
    """Tables `rounds` and what the services say; its stages are those that no other part has."""
    part = Part()
    rounds = Rounds(setup, options, part)
    for arm in arms_of(setup, options):
        if not setup.budget.fits(20.0):
            part.notes.append(f"{arm.name}: left out for want of time")
            continue
        try:
            rounds.go(arm)
        except SystemExit:
            # Its message is a command with this machine's paths.
            part.notes.append(f"{arm.name}: the stack did not start; its log lines say why")
        except (RuntimeError, httpx.HTTPError) as error:
            part.notes.append(f"{arm.name}: {type(error).__name__}: {error}")
    if not options.model:
        part.notes.append("DUMMY WEIGHTS: times are those of the shape")
        part.notes.append(f"SIMULATED ACCEPTANCE: {Path(options.simulate).name}; tokens a round are its own")
    return part
