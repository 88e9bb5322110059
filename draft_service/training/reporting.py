"""What a training run says while it runs: a progress bar or log lines, and the run's log file.

Owns both. Does not own the figures (trainer, estimate).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draft_service.training.estimate import Estimate
from draft_service.training.run_folder import RunFolder
from draft_service.training.trainer import Progress as Means

log = logging.getLogger(__name__)

LINE_SECONDS = 15.0
"""Between log lines where there is no terminal for a bar."""


class Reporter:
    """folder: None on ranks that say nothing. flops, tokens, blocks: of a step, all ranks counted."""

    def __init__(self, folder: RunFolder | None, *, flops: float, tokens: int, blocks: int) -> None:
        self.tokens, self.blocks = tokens, blocks
        self._folder, self._flops = folder, flops
        self._bar: Progress | None = None
        self._task: Any = None
        self._accepted = ""
        self._last_step, self._last_seconds, self._last_line = 0, 0.0, -LINE_SECONDS

    def begin(self, step: int, total: int, seconds: float) -> None:
        self._last_step, self._last_seconds = step, seconds
        if self._folder is None or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("[bold]fit"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._bar.add_task("fit", total=total, completed=step, text="")
        self._bar.start()

    def step(self, step: int, total: int, means: Means, rate: float, seconds: float) -> None:
        """means: since the last call. seconds: of training so far."""
        if self._folder is None:
            return
        steps, passed = step - self._last_step, max(seconds - self._last_seconds, 1e-9)
        self._last_step, self._last_seconds = step, seconds
        line = {
            "step": step, "loss": round(means.loss, 5), "rate": rate, "gradient_norm": round(means.norm, 4),
            "seconds": round(seconds, 3), "step_ms": round(1e3 * passed / steps, 3),
            "tokens_per_s": round(steps * self.tokens / passed),
            "blocks_per_s": round(steps * self.blocks / passed),
            "tflops": round(steps * self._flops / passed / 1e12, 2),
        } | {f"loss/{k}": round(value, 5) for k, value in enumerate(means.depths, 1)}  # fmt: skip
        self._folder.write(line)
        text = f"loss {means.loss:.3f}{self._accepted}  {line['step_ms']:.1f} ms/step"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total, text=text)
        elif seconds - self._last_line >= LINE_SECONDS or step == total:
            self._last_line = seconds
            log.info(
                "step %d of %d: %s, %d tokens/s, %.1f TFLOP/s",
                step,
                total,
                text,
                line["tokens_per_s"],
                line["tflops"],
            )

    def estimate(self, step: int, found: Estimate) -> None:
        if self._folder is None:
            return
        self._accepted = f"  acceptance {found.best:.2f}"
        self._folder.write({"step": step, **{f"acceptance/{k}": v for k, v in found.as_dict().items()}})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._folder is not None:
            self._folder.close()
