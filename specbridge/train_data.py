"""`specbridge train data`: prompt files -> the target's answers in shards.

Owns the command's options, and putting its parts together: prompts and shards are draft_service's, answers
come from target_service's offline generator or an endpoint, the chat template from gateway. Does not own the
parts.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError
from specbridge.train_common import Bar, add_target, check_at_least, load_generator, load_tokenizer, say


def add_data(actions: Any, name: str) -> None:
    parser = actions.add_parser(
        name, allow_abbrev=False, help="have the target answer prompts, in files for `fit`"
    )
    parser.add_argument(
        "prompts", nargs="+", type=Path, help='JSON lines: {"prompt"} or {"messages"}; .gz too'
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the data; a run goes on there")
    add_target(parser)
    parser.add_argument(
        "--temperatures", nargs="+", default=["0:0.4", "0.8:0.3", "1:0.3"], metavar="T:SHARE",
        help="temperatures of the answers with their shares (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=512,
        help="longer prompts are left out (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, default=0, help="most answers in all (default: no limit)")
    parser.add_argument(
        "--exclude", nargs="+", type=Path, default=[], metavar="FILE",
        help="prompts that must not be trained on: equal ones and those that share 13 words in a row go",
    )  # fmt: skip
    parser.add_argument("--license", default="", help="a line about the prompts' licences, for the manifest")
    parser.add_argument("--seed", type=int, default=0, help="another one: other answers (default: 0)")
    parser.add_argument("--part", default="1/1", help="I/N: the I-th of N shares, for a process on each GPU")
    parser.add_argument(
        "--endpoint", default="", help="an OpenAI-compatible server instead of our own engine"
    )
    parser.add_argument("--endpoint-model", default="", help="as the server calls it (default: its first)")
    parser.add_argument("--endpoint-key", default="", help="its API key")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at the server (default: 64)")


def run_data(args: argparse.Namespace) -> int:
    from specbridge.checkpoint import Checkpoint
    from specbridge.models import resolve_target

    made = importlib.import_module("draft_service.training.generate")
    reading = importlib.import_module("draft_service.training.prompts")
    shards = importlib.import_module("draft_service.training.shards")
    mix = made.parse_mix(args.temperatures)
    check_at_least(args, samples=1, max_tokens=1, max_prompt_tokens=1, limit=0, concurrency=1)
    part, parts = _part(args.part)
    folder = resolve_target(args.target, progress=sys.stderr.isatty())
    with Checkpoint(folder) as checkpoint:
        fingerprint, vocab = checkpoint.fingerprint(), int(checkpoint.config["vocab_size"])
    tokenizer = load_tokenizer(folder)
    exclusions = reading.Exclusions(
        prompt.text for path in args.exclude for prompt in reading.read_prompts(path)
    )
    counts = reading.Counts()
    prompts = (prompt for path in args.prompts for prompt in reading.read_prompts(path))
    encoded = []
    for prompt in reading.select(prompts, exclusions, counts):
        text = tokenizer.render_chat(prompt.messages)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > args.max_prompt_tokens:
            counts.too_long += 1
        else:
            counts.taken[prompt.source] += 1
            encoded.append((tokens, text))
    plan = made.wanted(encoded, mix=mix, samples=args.samples, seed=args.seed)
    plan = plan[: args.limit or None][part - 1 :: parts]
    dropped = [f"{n} {what.replace('_', ' ')}" for what, n in counts.as_notes().items()][1:]
    say(f"{counts.read} prompts: {len(encoded)} taken, {', '.join(dropped)}")
    if not plan:
        raise ConfigError("no prompt is left; see the counts above")
    notes = {**counts.as_notes(), "license": args.license, "samples": args.samples, "seed": args.seed,
             "max_tokens": args.max_tokens, "max_prompt_tokens": args.max_prompt_tokens,
             "excluded_files": [path.name for path in args.exclude], "part": args.part,
             "made_by": args.endpoint or "the offline generator"}  # fmt: skip
    manifest = shards.Manifest(
        target=args.target,
        fingerprint=fingerprint,
        vocab_size=vocab,
        temperatures=mix.temperatures,
        sources=dict(counts.taken),
        notes=notes,
    )
    failed: Callable[[], int] = lambda: 0  # noqa: E731
    if args.endpoint:
        ends = [token for token in tokenizer.eos_token_ids if token < vocab]
        endpoint = importlib.import_module("draft_service.training.endpoint")
        source = endpoint.EndpointSource(
            endpoint.Endpoint(args.endpoint, args.endpoint_model, args.endpoint_key, args.concurrency),
            max_tokens=args.max_tokens,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            end_id=ends[0] if ends else -1,
        )
        failed = lambda: int(source.failed)  # noqa: E731
    else:
        longest = max(len(one.tokens) for one in plan) + args.max_tokens
        source = _OwnEngine(args, longest, made.Made)
    with shards.ShardWriter(args.out, manifest) as writer, Bar("answers", len(plan)) as bar:
        already = sum(one.key in writer.done for one in plan)
        bar.start_at(already)

        def report(at: Any) -> None:
            bar.show(at.responses, f"{at.tokens / bar.seconds:,.0f} tokens/s")

        with _terminated_like_interrupted():
            end = made.produce(plan, source, writer, report, failed)
    say(
        f"{end.responses} of {end.total} answers are in {args.out} ({end.tokens:,} tokens new"
        + (f", {end.failed} failed: run the same command again for them)" if end.failed else ")")
    )
    return 1 if end.failed else 0


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends what runs here as Ctrl-C does: answers that are complete are written first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _OwnEngine:
    """A source for generate.produce over target_service.offline; loads the model when there is work."""

    def __init__(self, args: argparse.Namespace, length: int, made: Any) -> None:
        self._args, self._length, self._made = args, length, made

    def __call__(self, wanted: Iterable[Any]) -> Iterator[Any]:
        wanted = list(wanted)
        if not wanted:
            return
        offline = importlib.import_module("target_service.offline")
        generator = load_generator(self._args, self._length)
        asked = (
            offline.OfflineRequest(one.key, one.tokens, one.temperature, one.seed, self._args.max_tokens)
            for one in wanted
        )
        for text in generator.generate(asked):
            yield self._made(text.key, text.tokens)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        made = int(part), int(parts)
    except ValueError:
        made = (0, 0)
    if not 1 <= made[0] <= made[1]:
        raise ConfigError(f"--part {text!r} is not I/N with 1 <= I <= N, as in 1/4")
    return made
