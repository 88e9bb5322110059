"""`specbridge train`: data → fit → eval, which make a drafter for a target; head and bigrams add files to it.

Owns choosing the command and its process's threads. Does not own the commands (train_data, train_eval,
train_head; fitting is draft_service.training's).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from specbridge import process
from specbridge.flags import add_flags
from specbridge.logs import configure_logging
from specbridge.settings import default_environment
from specbridge.train_data import add_data, run_data
from specbridge.train_eval import add_eval, run_eval
from specbridge.train_head import add_bigrams, add_head, run_bigrams, run_head


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="specbridge train",
        allow_abbrev=False,
        description="Make a drafter for a target: have the target answer prompts (data), train on its "
        "answers (fit), and count what rounds commit (eval). docs/training.md leads through it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    add_data(actions, "data")
    _add_fit(actions, "fit", wanted=list(argv[:1]) == ["fit"])
    add_eval(actions, "eval")
    add_head(actions, "head")
    add_bigrams(actions, "bigrams")
    args = parser.parse_args(argv)
    # Before torch is imported: its OpenMP runtime reads these once, when it is loaded.
    default_environment(**process.thread_environment(int(getattr(args, "threads", 0) or 0)))
    configure_logging("info", "train")
    commands = {"data": run_data, "fit": _fit, "eval": run_eval, "head": run_head, "bigrams": run_bigrams}
    return commands[args.action](args)


def _add_fit(actions: Any, name: str, *, wanted: bool) -> None:
    parser = actions.add_parser(name, allow_abbrev=False, help="train a drafter on the target's answers")
    if wanted:  # the other commands' help does not need them
        add_flags(parser, importlib.import_module("draft_service.training.fit_settings").FitSettings)


def _fit(args: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(args).items() if name != "action"}
    settings = importlib.import_module("draft_service.training.fit_settings").load_fit(flags)
    return int(importlib.import_module("draft_service.training.fit").run(settings) or 0)
