"""The command `specbridge explain`: its options, the stack it is about, and where the report goes.

Does not own what is measured (campaign), what it says (answers) nor how that is shown (text, html, charts).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specbridge.chat import read_prompts
from specbridge.errors import ConfigError, SpecBridgeError
from specbridge.explain import campaign, find, switches
from specbridge.explain.answers import Measured
from specbridge.explain.campaign import Tell
from specbridge.explain.find import Addresses
from specbridge.explain.measure import Bench, Load
from specbridge.explain.report import report
from specbridge.serve import StackSettings, serve, serve_settings
from specbridge.settings import load

LOCAL_KV_TOKENS = "16384"
"""K/V of a stack of our own: several of them have to fit one GPU."""
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError and what the stack's requests fail with."""
    parser = _parser()
    known, rest = parser.parse_known_args(argv)
    if rest and not known.local:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (options of `serve` need --local)")
    if known.from_file:
        made = _read(known.from_file)
    else:
        measured: list[Measured] = []
        asyncio.run(_run(known, rest, measured.append))
        if not measured:
            return INTERRUPTED
        made = report(measured[0])
    _write(known, made)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specbridge explain",
        allow_abbrev=False,
        description="What a round of a stack reads and costs, and what each part gives, measured. The stack "
        "should have nothing else to do meanwhile.",
    )
    parser.add_argument(
        "--address", default="127.0.0.1:50050", help="the gateway's gRPC address (default: %(default)s)"
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="run folder of the stack; default: looked for on this machine"
    )
    for name, text in (
        ("rest", "the gateway's REST address, http://host:port"),
        ("target", "the target's gRPC address"),
        ("draft", "the draft's gRPC address"),
        ("gateway-metrics", "URL of the gateway's /metrics"),
        ("target-metrics", "URL of the target's /metrics"),
        ("draft-metrics", "URL of the draft's /metrics"),
    ):
        parser.add_argument(f"--at-{name}", metavar="ADDRESS", default="", help=text)
    parser.add_argument(
        "--api-key", default="", metavar="KEY", help="for the gateway's budget, if it wants one"
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="start a stack for this, and others with parts switched off; takes the options of `serve`",
    )
    parser.add_argument(
        "--only",
        metavar="PART,...",
        help=f"with --local: start stacks for these alone: {', '.join(campaign.PARTS)}",
    )
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line (default: four of our own)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="of all prompts (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    parser.add_argument("--html", metavar="FILE", help="write it as one HTML page, too")
    parser.add_argument("--svg", metavar="FILE", help="write its main charts as one SVG picture, too")
    parser.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE",
        help="show a report saved with --json; nothing is measured",
    )
    parser.add_argument("--verbose", action="store_true", help="with --local: show the services' logs")
    return parser


# ---- measuring ------------------------------------------------------------------------------------


async def _run(args: argparse.Namespace, rest: Sequence[str], done: Callable[[Measured], None]) -> None:
    tell = _teller()
    load_ = _load(args)
    parts = campaign.parts(args.only)
    if not args.local:
        addresses = _addresses(args)
        async with Bench(addresses) as bench:
            run = campaign.Campaign(bench, load_, parts, tell=tell, api_key=args.api_key)
            done(await run.measure())
        return
    options = _local_options(rest, run_dir=args.run_dir, api_key=args.api_key)
    tell("starting a stack")

    async def work(made: Any) -> None:
        async with Bench(switches.addresses(made)) as bench:
            run = campaign.Campaign(bench, load_, parts, tell=tell, api_key=args.api_key, base=options)
            done(await run.measure())

    await serve(options, work=work, write=None if args.verbose else lambda line: None)


def _load(args: argparse.Namespace) -> Load:
    for name in ("max_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use at least 1")
    return Load(tuple(read_prompts(args.prompts)), args.max_tokens, args.repeats)


def _addresses(args: argparse.Namespace) -> Addresses:
    if args.run_dir:
        known = find.of_folder(Path(args.run_dir).expanduser())
    else:
        known = find.running(args.address) or Addresses(args.address)
    return find.told(
        known,
        **{
            name: getattr(args, f"at_{name}")
            for name in ("rest", "target", "draft", "gateway_metrics", "target_metrics", "draft_metrics")
        },
    )


def _local_options(rest: Sequence[str], **shared: str | None) -> StackSettings:
    """shared: options of ours that are `serve`'s as well."""
    from specbridge.flags import add_flags

    parser = argparse.ArgumentParser(prog="specbridge explain --local", allow_abbrev=False, add_help=False)
    kind = serve_settings()
    add_flags(parser, kind)
    given = vars(parser.parse_args(rest))
    given |= {name: value for name, value in shared.items() if value}
    return load(kind, **{"http_port": "0", "grpc_port": "0", "kv_tokens": LOCAL_KV_TOKENS, **given})


# ---- output ---------------------------------------------------------------------------------------


def _teller() -> Tell:
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            console.print(f"\r\x1b[K[dim]{line}[/dim]", end="")
        elif "turn" not in line:
            console.print(line)

    return tell


def _read(path: str) -> dict[str, Any]:
    try:
        made = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from {path!r} is no report saved with --json: {error}") from None
    if not isinstance(made, dict) or "schema" not in made or "round" not in made:
        raise ConfigError(f"--from {path!r} is JSON, but no report of `specbridge explain`")
    return made


def _write(args: argparse.Namespace, made: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if args.html:
        from specbridge.explain.html import page

        _save(args.html, page(made))
    if args.svg:
        from specbridge.explain.charts import excerpt

        _save(args.svg, excerpt(made))
    if args.json:
        sys.stdout.write(json.dumps(made, indent=1) + "\n")
        return
    from specbridge.explain.text import show

    show(made, Console(highlight=False, width=None if sys.stdout.isatty() else 110))


def _save(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecBridgeError(f"{path!r} can't be written: {error}") from error
