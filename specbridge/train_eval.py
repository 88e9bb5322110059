"""`specbridge train eval`: what rounds of chains and trees commit on prompt files, by drafter.

Owns the command's options and what it prints. The texts come from target_service's offline generator, their
replay is draft_service.training's. Does not own either.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from specbridge.checkpoint import writable_folder
from specbridge.errors import ConfigError
from specbridge.train_common import Bar, add_target, check_at_least, load_generator, load_tokenizer, say

DEFAULT_NODES = "0,4,8,16,32,64"


def add_eval(actions: Any, name: str) -> None:
    parser = actions.add_parser(
        name, allow_abbrev=False, help="count what rounds of chains and trees commit, on prompts"
    )
    parser.add_argument("prompts", nargs="+", type=Path, help="prompt files; each is a group of the tables")
    add_target(parser)
    parser.add_argument(
        "--draft", action="append", default=[], metavar="[NAME=]FOLDER[@N]",
        help="a drafter; several are compared on the same texts (default: the one shipped for the target). "
        "@N: it proposes the N most frequent tokens of its draft_vocabulary.safetensors only, 0: all",
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=56, help="prompts of each file (default: %(default)s)")
    parser.add_argument(
        "--skip", type=int, default=0, help="prompts of each file that come before (default: 0)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of a text (default: %(default)s)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T")
    parser.add_argument(
        "--rules", nargs="+", default=["plain", "shared"], metavar="RULE",
        help="how positions are scored: plain, shared, bigrams (served, given its table), plain-bigrams, "
        "or a=..,b=..,floor=.. (draft_service/training/scoring.py) (default: plain shared)",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", default=DEFAULT_NODES, help="sizes of trees, 0 for the chain (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampled texts (default: 0)")
    parser.add_argument("--out", type=Path, default=None, help="write everything to this JSON file, too")


def run_eval(args: argparse.Namespace) -> int:
    from specbridge.models import resolve_draft, resolve_target

    made = importlib.import_module("draft_service.training.generate")
    reading = importlib.import_module("draft_service.training.prompts")
    replaying = importlib.import_module("draft_service.training.evaluation")
    running = importlib.import_module("draft_service.training.evaluation_run")
    scoring = importlib.import_module("draft_service.training.scoring")
    offline = importlib.import_module("target_service.offline")
    check_at_least(args, count=1, skip=0, max_tokens=2)
    if args.out is not None:  # said now, not after the work
        writable_folder(args.out.parent, "--out")
        if args.out.is_dir():
            raise ConfigError(f"--out {str(args.out)!r} is a folder: name the JSON file to write")
    rules = [scoring.parse_rule(text) for text in args.rules]
    nodes = _nodes(args.nodes)
    folder = resolve_target(args.target, progress=sys.stderr.isatty())
    drafts = {}
    for item in args.draft or ["auto"]:
        name, named, place = item.rpartition("=")
        folder_name, at, size = place.rpartition("@")
        sized = bool(at) and size.isdecimal()
        found = resolve_draft(folder_name if sized else place, args.target)
        drafts[name if named else Path(place).name] = (found, int(size) if sized else -1)
    if len(drafts) < len(args.draft):
        raise ConfigError(
            "two drafters have the same name; give them names: --draft new=FOLDER --draft old=FOLDER"
        )
    tokenizer = load_tokenizer(folder)
    groups: dict[tuple[int, ...], str] = {}
    for path in args.prompts:
        for prompt in reading.read_prompts(path)[args.skip : args.skip + args.count]:
            groups.setdefault(tuple(tokenizer.encode_chat(prompt.messages)), prompt.source)
    asked: list[tuple[float, Any]] = []
    for temperature in dict.fromkeys(args.temperatures):
        mix = made.parse_mix([repr(temperature)])
        encoded = [(tokens, "") for tokens in groups]
        asked += [(temperature, one) for one in made.wanted(encoded, mix=mix, samples=1, seed=args.seed)]
    if not groups:
        raise ConfigError(f"--skip {args.skip} leaves no prompt: no file has more than that")
    length = max(map(len, groups)) + args.max_tokens
    began = time.perf_counter()
    generator = load_generator(args, length)
    loaded = time.perf_counter()
    texts = []
    requests = (
        offline.OfflineRequest(place, one.tokens, one.temperature, one.seed, args.max_tokens)
        for place, (_, one) in enumerate(asked)
    )
    with Bar("texts", len(asked)) as bar:
        for text in generator.generate(requests):
            one = asked[text.key][1]
            texts.append(
                replaying.HeldOut(
                    one.tokens, text.tokens, one.temperature, one.seed, args.max_tokens, groups[one.tokens]
                )
            )
            bar.show(len(texts))
    generated = time.perf_counter()
    replays = {
        name: replaying.Replay.load(
            place, folder, device=args.device, dtype=args.dtype, length=length, vocabulary=vocabulary
        )
        for name, (place, vocabulary) in drafts.items()
    }
    order = {group: i for i, group in enumerate(dict.fromkeys(groups.values()))}
    texts.sort(key=lambda text: (text.temperature, order[text.group], text.prompt))
    with Bar("texts replayed", len(texts) * len(replays)) as bar:
        report = running.compare(
            replays, texts, generator.taps, rules=rules, nodes=nodes, report=lambda done, _: bar.show(done)
        )
    ended = time.perf_counter()
    print(report.table())
    print("\nOf the rounds that got as far, the share that accepted the next token (all prompts):\n")
    print(report.depth_table([nodes[0], nodes[-1]] if len(nodes) > 1 else nodes))
    seconds = {"load": loaded - began, "texts": generated - loaded, "replay": ended - generated}
    say(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    if args.out is not None:
        named_drafts = {name: list(map(str, told)) for name, told in drafts.items()}
        body = {"target": args.target, "drafters": named_drafts,
                "prompts": [path.name for path in args.prompts], "count": args.count, "skip": args.skip,
                "max_tokens": args.max_tokens, "seed": args.seed, "dtype": args.dtype,
                "seconds": {name: round(value, 1) for name, value in seconds.items()},
                "results": report.as_json()}  # fmt: skip
        args.out.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def _nodes(text: str) -> tuple[int, ...]:
    try:
        made = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        made = (-1,)
    if not made or made[0] < 0 or made[-1] > 256:
        raise ConfigError(f"--nodes {text!r} is not a list of sizes from 0 to 256, as in {DEFAULT_NODES}")
    return made
