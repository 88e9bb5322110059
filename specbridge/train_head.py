"""`specbridge train head` and `train bigrams`: what the training data's tokens tell, as files for a drafter.

Owns the commands' options and what it prints; the parts are draft_service's.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError
from specbridge.train_common import say


def add_head(actions: Any, name: str) -> None:
    parser = actions.add_parser(
        name, allow_abbrev=False, help="have a drafter propose frequent tokens only: a cheaper pass on a CPU"
    )
    parser.add_argument("drafter", type=Path, help="the drafter's folder; a file is added to it")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders made by `train data`")
    parser.add_argument("--size", type=int, default=16384, help="tokens to keep (default: %(default)s)")


def add_bigrams(actions: Any, name: str) -> None:
    parser = actions.add_parser(
        name, allow_abbrev=False, help="tell a drafter's trees which token follows which: more is accepted"
    )
    parser.add_argument("drafter", type=Path, help="the drafter's folder; a file is added to it")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders made by `train data`")
    parser.add_argument(
        "--pairs", type=int, default=300_000, help="to keep, 3 bytes each (default: %(default)s)"
    )


def run_bigrams(args: argparse.Namespace) -> int:
    counting = importlib.import_module("draft_service.training.pairs")
    bigrams = importlib.import_module("draft_service.bigrams")
    shards = importlib.import_module("draft_service.training.shards")
    _check_drafter(args.drafter)
    if args.pairs < 1:
        raise ConfigError(f"--pairs is {args.pairs}; it must be 1 or more")
    pairs = counting.count_pairs(shards.Shards(args.data), args.pairs)
    path = bigrams.write_bigrams(args.drafter, pairs, {"data": ", ".join(f.name for f in args.data)})
    say(
        f"{path}: {len(pairs.first)} pairs, which are {pairs.counts.sum() / pairs.totals.sum():.2%} of all "
        f"counted; {path.stat().st_size / 1e6:.2f} MB"
    )
    return 0


def _check_drafter(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no drafter's folder: it has no config.json")


def run_head(args: argparse.Namespace) -> int:
    head = importlib.import_module("draft_service.training.head")
    vocabulary = importlib.import_module("draft_service.draft_vocabulary")
    shards = importlib.import_module("draft_service.training.shards")
    _check_drafter(args.drafter)
    ranked = head.rank_tokens(shards.Shards(args.data), args.size)
    notes = {"coverage": f"{ranked.coverage:.5f}", "data": ", ".join(folder.name for folder in args.data)}
    path = vocabulary.write_vocabulary(args.drafter, ranked.ids, notes)
    say(
        f"{path}: {args.size} tokens, which are {ranked.coverage:.2%} of those of responses that were not "
        "counted; --draft-vocabulary N of the draft service takes fewer of them"
    )
    return 0
