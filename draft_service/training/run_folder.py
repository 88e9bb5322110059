"""What a training run leaves on disk beside the drafter: its state, its recipe and its log.

    run/state.safetensors   weights, optimiser, step: what `--resume` goes on from; replaced in one step
    run/recipe.json         every choice made, defaults filled in
    run/log.jsonl           a line an interval: step, loss, loss per depth, rate, speed; estimates too
    run/tensorboard/        the same for TensorBoard, where it is installed

Owns these files. Does not own what is in the state (fit) nor the drafter's own files (network).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specbridge.checkpoint import replacing, writable_folder
from specbridge.errors import ConfigError


class RunFolder:
    """`<out>/run`."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "run"
        self.state_file = self.folder / "state.safetensors"
        self._log = self.folder / "log.jsonl"
        self._board: Any = None

    def check(self, *, resume: bool) -> None:
        """Raises ConfigError if there is a run that would be overwritten, or none to resume."""
        if resume and not self.state_file.exists():
            raise ConfigError(f"--resume: {self.state_file} does not exist; start the run without --resume")
        if not resume and self.state_file.exists():
            raise ConfigError(
                f"{self.folder} holds a run already: --resume continues it; else choose another --out"
            )

    def begin(self, recipe: Mapping[str, Any], *, resume: bool) -> None:
        """Make the folder, after `check`; a new run's recipe and an empty log."""
        self.check(resume=resume)
        writable_folder(self.folder, "--out")
        if not resume:
            (self.folder / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
            self._log.write_text("", encoding="utf-8")

    def save_state(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """facts: JSON beside the tensors, in the same file, so that they can't part."""
        from safetensors.torch import save_file

        flat = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        with replacing(self.state_file) as partial:
            save_file(flat, partial, metadata={"facts": json.dumps(facts)})

    def load_state(self, tensors: Mapping[str, torch.Tensor], recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the state into `tensors`; returns its facts. Raises ConfigError unless the recipe is equal."""
        from safetensors import safe_open

        with safe_open(str(self.state_file), framework="pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            known = facts["recipe"]
            changed = [
                # Runs of earlier versions tell less: what they do not say can't differ.
                f"{k} {known[k]!r} -> {recipe[k]!r}"
                for k in recipe
                if k in known and known[k] != recipe[k]
            ]
            if changed:
                raise ConfigError(
                    f"--resume: the recipe is not that of {self.folder}: {', '.join(changed)}; give the "
                    f"options it was started with, or start a new run with --init and another --out"
                )
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(file.get_tensor(name))
        self._forget_lines_after(int(facts["step"]))
        return facts

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; it has a "step"."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        board = self._tensorboard()
        if board is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._board:
            self._board.close()

    def _tensorboard(self) -> Any:
        if self._board is None:
            self._board = False
            if importlib.util.find_spec("tensorboard") is not None:
                # A half-installed one is no reason to stop a training run.
                with contextlib.suppress(Exception):
                    from torch.utils.tensorboard import SummaryWriter

                    self._board = SummaryWriter(str(self.folder / "tensorboard"))
        return self._board or None

    def _forget_lines_after(self, step: int) -> None:
        """What the interrupted run logged past its checkpoint is done, and logged, again."""
        if not self._log.exists():
            return
        kept = []
        for text in self._log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line cut off by the interruption
                if json.loads(text)["step"] <= step:
                    kept.append(text)
        self._log.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
