"""`specbridge chat`: stream answers from a gateway, show acceptance and speed, compare with plain decoding.

Owns the command's options and what it prints (it is a part of the command line). Does not own the wire
(specbridge.clients) or the stack that --local starts (specbridge.serve).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from specbridge.clients import Ask, GenerationClient, Message, Piece, Summary
from specbridge.errors import ConfigError, InternalError

GREETING = "What is the capital of France, and what is it known for?"
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "List five tips for staying healthy, each with one sentence of explanation.",
    "Pens cost 3 dollars each. Tom buys 4 pens and pays with 20 dollars. How much change does he get?",
    "Explain in simple words why the sky is blue.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer. Times in seconds; decode_s counts from the first tokens to the last."""

    text: str
    token_ids: tuple[int, ...]
    first_s: float
    decode_s: float
    decoded: int
    summary: Summary

    @property
    def rate(self) -> float:
        """Tokens per second after the first piece; 0 if there was nothing to measure."""
        return self.decoded / self.decode_s if self.decode_s > 0 and self.decoded > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt answered with and without speculation. difference: first position that differs, or None."""

    prompt: str
    speculative: Answer
    plain: Answer
    difference: int | None


def main(argv: Sequence[str]) -> int:
    from specbridge.flags import add_flags
    from specbridge.serve import serve, serve_settings
    from specbridge.settings import load

    parser = _parser()
    known, rest = parser.parse_known_args(argv)
    # Into a file or a pipe: wide enough for the table.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 110)
    if known.demo:
        known.compare, known.prompt = True, known.prompt or GREETING
    if not known.local:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)} (options of `serve` need --local)")
        asyncio.run(_talk(known, known.address, console))
        return 0

    serve_parser = argparse.ArgumentParser(prog="specbridge chat --local", allow_abbrev=False, add_help=False)
    kind = serve_settings()
    add_flags(serve_parser, kind)
    # A stack of our own gets ports of its own: it must not collide with one that is running.
    options = load(kind, **{"http_port": "0", "grpc_port": "0", **vars(serve_parser.parse_args(rest))})
    if known.compare and options.no_draft:
        raise ConfigError("--compare needs a draft: drop --no-draft")
    shown = sys.stderr.isatty()
    if not shown:
        console.print(f"starting target, draft and gateway for {options.target} ...")
    asyncio.run(
        serve(
            options,
            announce=lambda made: _clear_line() if shown else None,
            work=lambda made: _talk(known, made.endpoints["grpc"], console),
            write=None if known.verbose else lambda line: None,
        )
    )
    return 0


def _clear_line() -> None:
    sys.stderr.write("\r\x1b[K")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specbridge chat",
        allow_abbrev=False,
        description="Ask a gateway; without a prompt, hold a conversation.",
    )
    parser.add_argument("prompt", nargs="?", help="what to ask")
    parser.add_argument(
        "--address", default="127.0.0.1:50050", help="the gateway's gRPC address (default: %(default)s)"
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="start a stack for this, end it afterwards; takes the options of `serve`",
    )
    parser.add_argument(
        "--compare", action="store_true", help="run prompts with and without speculation, interleaved"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts for --compare, one a line (default: four of our own)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=int, default=None, metavar="N", help="most tokens of an answer (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for T > 0 (default: %(default)s)"
    )
    parser.add_argument("--no-speculation", action="store_true", help="decode without the draft")
    parser.add_argument("--verbose", action="store_true", help="with --local: show the services' logs")
    parser.add_argument("--demo", action="store_true", help="one answer, then --compare")
    return parser


async def _talk(args: argparse.Namespace, address: str, console: Console) -> None:
    async with GenerationClient(address) as client:
        model = await client.model()
        drafter = (
            f"drafter {model.drafter_id}, block {model.block_size}, trees of up to {model.tree_budget} nodes"
        )
        console.print(f"[bold]{model.model_id}[/bold], {drafter if model.drafter_id else 'no draft'}\n")
        if args.prompt and (args.demo or not args.compare):
            console.print(f"[dim]> {args.prompt}[/dim]")
            await _stream(client, _ask(args, [Message("user", args.prompt)]), console)
        elif not args.compare:
            await _converse(client, args, console)
        if args.compare:
            own = [args.prompt] if args.prompt and not args.demo else None
            await _compare(client, args, own or read_prompts(args.prompts), console)


async def _converse(client: GenerationClient, args: argparse.Namespace, console: Console) -> None:
    history: list[Message] = []
    if sys.stdin.isatty():
        console.print("[dim]an empty line or Ctrl-D ends the conversation[/dim]")
    while True:
        if sys.stdin.isatty():
            console.print("> ", end="")
        line = (await asyncio.to_thread(sys.stdin.readline)).strip()
        if not line:
            return
        history.append(Message("user", line))
        answer = await _stream(client, _ask(args, history), console)
        history.append(Message("assistant", answer.text))


async def _stream(client: GenerationClient, ask: Ask, console: Console) -> Answer:
    answer = await measure(client, ask, console)
    console.print(f"\n[dim]{describe(answer)}[/dim]\n")
    return answer


async def measure(client: GenerationClient, ask: Ask, console: Console | None = None) -> Answer:
    """One answer and its times; printed as it comes if there is a console."""
    began = time.perf_counter()
    first = last = None
    text: list[str] = []
    ids: list[int] = []
    in_first = 0
    async for part in client.generate(ask):
        if isinstance(part, Summary):
            end = time.perf_counter()
            decode = (last or end) - (first or end)
            decoded = len(ids) - in_first
            return Answer("".join(text), tuple(ids), (first or end) - began, decode, decoded, part)
        if part.token_ids:
            last = time.perf_counter()
            if first is None:
                first, in_first = last, len(part.token_ids)
        text.append(part.text)
        ids.extend(part.token_ids)
        if console:
            # The model's text, not ours: no markup in it.
            console.print(part.text, end="", markup=False)
    raise InternalError("the gateway ended the stream without a final message")


def describe(answer: Answer) -> str:
    """One line about an answer."""
    end = answer.summary
    words = [
        f"{end.completion_tokens} tokens",
        f"{answer.rate:.1f} tok/s",
        f"first after {answer.first_s * 1000:.0f} ms",
    ]
    if end.rounds:
        words.append(f"acceptance length {end.acceptance_length:.2f}")
        words.append(f"{end.accepted} of {end.drafted} drafted tokens accepted in {end.rounds} rounds")
    if end.cached_tokens:
        words.append(f"{end.cached_tokens} prompt tokens cached")
    return " · ".join([*words, end.finish_reason])


async def _compare(
    client: GenerationClient, args: argparse.Namespace, prompts: Sequence[str], console: Console
) -> None:
    console.print(f"comparing with plain decoding, {len(prompts)} prompts, interleaved")
    # Both kinds once, unmeasured: the first passes of a process are slower.
    for speculate in (True, False):
        await measure(client, _ask(args, [Message("user", "Hello")], max_tokens=16, speculate=speculate))
    pairs = []
    for i, prompt in enumerate(prompts):
        answers = {}
        for speculate in (True, False) if i % 2 == 0 else (False, True):
            answers[speculate] = await measure(
                client, _ask(args, [Message("user", prompt)], speculate=speculate)
            )
        pairs.append(Pair(prompt, answers[True], answers[False], difference(answers[True], answers[False])))
        console.print(
            f"  {i + 1}/{len(prompts)}: {answers[True].rate:.1f} against {answers[False].rate:.1f} tok/s"
        )
    console.print(table(pairs))
    same = sum(pair.difference is None for pair in pairs)
    console.print(f"speed-up {speedup(pairs):.2f}x over all tokens; {same} of {len(pairs)} answers identical")
    if same < len(pairs):
        console.print(
            "[dim]A difference is expected only where the two best logits all but tie: in bf16, "
            "passes of different sizes round differently. With --dtype float32 there should be none.[/dim]"
        )


def difference(one: Answer, other: Answer) -> int | None:
    """The first position at which the two answers' ids differ; None if they are the same."""
    for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            return i
    shorter = min(len(one.token_ids), len(other.token_ids))
    return None if len(one.token_ids) == len(other.token_ids) else shorter


def speedup(pairs: Sequence[Pair]) -> float:
    """Ratio of the token rates over all pairs' tokens and times; 0 if nothing was measured."""
    fast, slow = overall([pair.speculative for pair in pairs]), overall([pair.plain for pair in pairs])
    return fast / slow if slow else 0.0


def overall(answers: Sequence[Answer]) -> float:
    """Tokens per second over all answers together."""
    seconds = sum(answer.decode_s for answer in answers)
    return sum(answer.decoded for answer in answers) / seconds if seconds else 0.0


def table(pairs: Sequence[Pair]) -> Table:
    made = Table(Column("prompt", no_wrap=True, ratio=1), expand=True)
    for title in ("tokens", "plain tok/s", "spec. tok/s", "ratio", "acceptance", "same text"):
        made.add_column(title, no_wrap=True, justify="right")
    for pair in pairs:
        fast, slow = pair.speculative, pair.plain
        made.add_row(
            pair.prompt,
            str(fast.summary.completion_tokens),
            f"{slow.rate:.1f}",
            f"{fast.rate:.1f}",
            f"{fast.rate / slow.rate:.2f}x" if slow.rate else "-",
            f"{fast.summary.acceptance_length:.2f}",
            "yes" if pair.difference is None else f"until {pair.difference}",
        )
    return made


def _ask(
    args: argparse.Namespace,
    messages: Sequence[Message],
    *,
    max_tokens: int | None = None,
    speculate: bool = True,
) -> Ask:
    system = [Message("system", args.system)] if args.system else []
    return Ask(
        messages=[*system, *messages],
        max_tokens=max_tokens or args.max_tokens or 128,
        temperature=args.temperature,
        seed=args.seed,
        speculate=speculate and not args.no_speculation,
    )


def read_prompts(path: str | None) -> Sequence[str]:
    """The lines of the file that --prompts names; of our own without one. Raises ConfigError."""
    if path is None:
        return PROMPTS
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {path!r} can't be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path!r} holds no line of text")
    return lines


__all__ = [
    "Answer",
    "Pair",
    "Piece",
    "describe",
    "difference",
    "main",
    "measure",
    "overall",
    "read_prompts",
    "speedup",
    "table",
]
