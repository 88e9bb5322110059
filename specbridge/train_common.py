"""What the training commands share: options of a target, loading it, progress.

Owns these pieces. Does not own the commands (train_cli, train_data, train_eval). Parts of services are loaded
by name, as the command line does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError

LINE_EVERY_S = 15.0
SLOW_START = 0.05
"""Share of the work before whose end no time to go is told."""


def add_target(parser: argparse.ArgumentParser) -> None:
    from specbridge.models import DEFAULT_TARGET

    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        help="folder, Hugging Face id or built-in name (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", default="auto", help="of the models: auto, bfloat16, float32, …")
    parser.add_argument(
        "--slots", type=int, default=0, help="texts side by side (default: by device and memory)"
    )
    parser.add_argument("--no-cuda-graphs", action="store_true", help="on a GPU, launch each pass anew")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (default: all)")


def load_generator(args: argparse.Namespace, length: int) -> Any:
    offline = importlib.import_module("target_service.offline")
    return offline.load_generator(
        args.target,
        device=args.device,
        dtype=args.dtype,
        length=length,
        slots=args.slots,
        cuda_graphs=not args.no_cuda_graphs,
    )


def load_tokenizer(folder: Path) -> Any:
    return importlib.import_module("gateway.text").Tokenizer.load(folder)


def check_at_least(args: argparse.Namespace, **least: int) -> None:
    for name, value in least.items():
        if getattr(args, name) < value:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {value} or more"
            )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bar:
    """Progress on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began = self._said = time.perf_counter()
        self._first = 0
        self._rich: Any = None
        self._task: Any = None

    @property
    def seconds(self) -> float:
        """Since the start; never 0."""
        return max(time.perf_counter() - self._began, 1e-9)

    def start_at(self, done: int) -> None:
        """What was done before counts as done, not as speed."""
        self._first = done

    def show(self, done: int, note: str = "") -> None:
        if self._rich is not None:
            self._rich.update(self._task, completed=done, note=note)
        elif time.perf_counter() - self._said >= LINE_EVERY_S:
            self._said = time.perf_counter()
            new = done - self._first
            # Texts run side by side and end together: the first of them tell nothing of the rest.
            told = new >= SLOW_START * (self._total - self._first)
            left = f", {(self._total - done) * self.seconds / new:.0f} s to go" if told and new else ""
            say(f"{done} of {self._total} {self._what}{', ' + note if note else ''}{left}")

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._rich = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"), console=Console(stderr=True),
            )  # fmt: skip
            self._rich.start()
            self._task = self._rich.add_task(self._what, total=self._total, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()
