"""`specbridge train fit`: from responses of the target to a drafter for it.

The DFlash recipe (Algorithms: anchors drawn anew each step, strict context, blocks read in both directions,
depths weighted less and less; AdamW, cosine). Owns the run: what is loaded, the loop, the clock, checkpoints
and resuming. Does not own a step (trainer) nor the files of a run (run_folder).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draft_service.drafter_config import TargetFacts
from draft_service.training.batches import Batch, Batches, Prefetch, split
from draft_service.training.estimate import Estimate, estimate, held_out_batches
from draft_service.training.fit_settings import FitSettings, Recipe, make_recipe
from draft_service.training.frozen_target import FrozenTarget, TargetShape
from draft_service.training.mask_token import check_mask_token, choose_mask_token
from draft_service.training.network import DrafterShape, Network
from draft_service.training.optimizer import learning_rate
from draft_service.training.parallel import Meeting, Ranks, launched_outside, spawn
from draft_service.training.reporting import Reporter
from draft_service.training.run_folder import RunFolder
from draft_service.training.shards import Shards
from draft_service.training.trainer import Trainer
from kernels.device import parse_dtype
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError
from specbridge.logs import configure_logging
from specbridge.models import resolve_draft, resolve_target

log = logging.getLogger(__name__)

REPLAN_STEPS = 50
"""Steps after which a run with a time limit estimates anew how many there will be."""
ESTIMATES = 10


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a run ended: steps done, the last loss and the last estimate, seconds of training."""

    steps: int
    loss: float
    estimate: Estimate | None
    seconds: float


def run(settings: FitSettings) -> int:
    """The command. Raises ConfigError for settings, data or a target that can't be trained with."""
    if settings.gpus > 1:
        # What can be said before there are processes is said by this one.
        _check(settings)
        if launched_outside():
            raise ConfigError(
                "--gpus is for runs that start their own processes: leave it out under torchrun"
            )
        with tempfile.TemporaryDirectory(prefix="specbridge-train-") as folder:
            spawn(functools.partial(_rank, settings, Path(folder) / "meeting"), settings.gpus)
        return 0
    fit(settings)
    return 0


def _rank(settings: FitSettings, file: Path, rank: int) -> None:
    configure_logging(settings.log_level if rank == 0 else "warning", "train")
    fit(settings, Meeting(file, rank, settings.gpus))


def fit(settings: FitSettings, meeting: Meeting | None = None) -> Fitted:
    """Train as one rank, to the end, and return how it went. `run` for the whole of a command."""
    _check(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    on_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
    ranks = Ranks.join(meeting, backend="nccl" if on_gpu else "gloo")
    try:
        return _Run(settings, ranks, _device(settings.device, ranks.local)).go()
    finally:
        ranks.close()


def _check(settings: FitSettings) -> None:
    for name in ("data", "out"):
        if not getattr(settings, name):
            raise ConfigError(f"--{name} is missing: the folder of {_WHAT[name]}")
    RunFolder(Path(settings.out)).check(resume=settings.resume)


_WHAT = {"data": "training data, made by `specbridge train data`", "out": "the new drafter"}


class _Run:
    def __init__(self, settings: FitSettings, ranks: Ranks, device: torch.device) -> None:
        self._settings, self._ranks = settings, ranks
        self._shards = Shards([Path(part.strip()) for part in settings.data.split(",")])
        checkpoint = Checkpoint(resolve_target(settings.target))
        _same_target(checkpoint, self._shards)
        facts = TargetFacts.read(checkpoint.config, checkpoint.folder)
        fast = "bfloat16" if device.type == "cuda" else "float32"
        dtype = fast if settings.dtype == "auto" else settings.dtype
        shape = TargetShape.read(checkpoint.config, 0)
        draft = None
        if settings.init:
            draft = Checkpoint(resolve_draft(settings.init, settings.target, flag="--init"))
        wanted = None if draft is None else DrafterShape.of(draft, checkpoint, shape)
        recipe = make_recipe(
            _as_in(settings, wanted), facts, intermediate_size=shape.intermediate_size, dtype=dtype,
            ranks=ranks.size,
        )  # fmt: skip
        self._recipe = recipe
        sides = split(self._shards, recipe)
        self._batches = Batches(self._shards, sides.train, recipe)
        self._held_out = (
            held_out_batches(Batches(self._shards, sides.held_out, recipe)) if len(sides.held_out) else []
        )
        self._target = FrozenTarget(
            checkpoint, row_tokens=recipe.row_tokens, dtype=parse_dtype(dtype), device=device
        )
        if wanted is None:
            mask = settings.mask_token_id
            if mask < 0:
                mask = choose_mask_token(checkpoint.folder, self._shards)
            else:
                check_mask_token(mask, self._shards, warn=ranks.first)
            wanted = DrafterShape(
                shape, recipe.layers, recipe.block_size, recipe.taps, recipe.intermediate_size, mask
            )
        self._network = Network(
            wanted, dtype=parse_dtype(dtype), device=device, max_position=recipe.row_tokens,
            attention=_attention(settings.attention, recipe, device),
        )  # fmt: skip
        self._network.initialise(recipe.seed)
        if draft is not None:
            self._network.load(draft, checkpoint)
        self._out = Path(settings.out)
        self._folder = RunFolder(self._out)
        self._sides = sides

    def go(self) -> Fitted:
        settings, ranks, recipe = self._settings, self._ranks, self._recipe
        if ranks.first:
            self._folder.begin(self._facts(), resume=settings.resume)
        ranks.agree(0.0, self._network.device)  # the folder is there, or this rank fails with the first
        trainer = self._trainer = Trainer(
            self._target, self._network, recipe, self._batches.get(0),
            ranks=ranks, cuda_graphs=settings.cuda_graphs,
        )  # fmt: skip
        step, before = 0, 0.0
        if settings.resume:
            facts = self._folder.load_state(self._state(), self._facts())
            step, before = int(facts["step"]), float(facts["seconds"])
        total = self._planned()
        each = settings.estimate_every or max(1, math.ceil(total / ESTIMATES))
        reporter = Reporter(
            self._folder if ranks.first else None, flops=trainer.flops() * recipe.batches_per_step,
            tokens=recipe.tokens_per_batch * recipe.batches_per_step,
            blocks=recipe.blocks_per_batch * recipe.batches_per_step,
        )  # fmt: skip
        log.info(
            "%s: %.1f M weights, %d layers, blocks of %d; %d responses, %d held out",
            self._out, self._network.count / 1e6, recipe.layers, recipe.block_size,
            len(self._sides.train), len(self._sides.held_out),
        )  # fmt: skip
        log.info("%d steps of %d tokens and %d blocks", total, reporter.tokens, reporter.blocks)
        found: Estimate | None = None
        loss = 0.0
        source = Prefetch(self._step_batches, itertools.count(step))
        begun = time.perf_counter() - before
        reporter.begin(step, total, before)
        try:
            for batches in source:
                if step >= total:
                    break
                rate = learning_rate((step + 0.5) / total, recipe.learning_rate, recipe.warmup)
                trainer.step(batches, rate)
                step += 1
                if settings.minutes and step % REPLAN_STEPS == 0:
                    total = self._replan(step, time.perf_counter() - begun)
                last = step >= total
                if step % settings.log_every == 0 or last:
                    progress = trainer.progress()
                    loss = progress.loss
                    reporter.step(step, total, progress, rate, time.perf_counter() - begun)
                if self._held_out and (step % each == 0 or last):
                    found = estimate(trainer, self._shards, self._held_out)
                    reporter.estimate(step, found)
                if last or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                    self._save(step, time.perf_counter() - begun)
        finally:
            source.close()
            reporter.close()
        return Fitted(step, loss, found, time.perf_counter() - begun)

    def _step_batches(self, step: int) -> list[Batch]:
        """This rank's batches of a step: every rank's, one after the other, make the same step on one."""
        per_rank = self._settings.accumulate
        first = step * self._recipe.batches_per_step + self._ranks.rank * per_rank
        return [self._batches.get(first + i) for i in range(per_rank)]

    def _planned(self) -> int:
        """Steps there will be; with a time limit, before anything is known about their time."""
        if self._settings.steps:
            return self._settings.steps
        if self._settings.minutes:
            return REPLAN_STEPS * 200
        return max(
            1, math.ceil(self._settings.epochs * self._batches.per_epoch / self._recipe.batches_per_step)
        )

    def _replan(self, step: int, seconds: float) -> int:
        """As many steps as fit the time limit at the speed so far; at most those asked for."""
        fitting = int(step * self._settings.minutes * 60 / seconds)
        agreed = max(step, int(self._ranks.agree(fitting, self._network.device)))
        return min(agreed, self._settings.steps) if self._settings.steps else agreed

    def _facts(self) -> dict[str, Any]:
        """What has to be equal for a run to be continued."""
        s = self._settings
        schedule = {"minutes": s.minutes} if s.minutes else {"steps": self._planned()}
        data = {"responses": len(self._shards), "target": self._shards.manifest.fingerprint}
        mask = self._network.shape.mask_token_id
        return {**self._recipe.as_dict(), "mask_token_id": mask, "schedule": schedule, "data": data}

    def _state(self) -> dict[str, torch.Tensor]:
        matrices, norms = self._network.parameters
        return {"matrices": matrices, "norms": norms, **self._trainer.optimizer.state()}

    def _save(self, step: int, seconds: float) -> None:
        if self._ranks.first:
            self._network.save(self._out)
            self._folder.save_state(
                self._state(), {"step": step, "seconds": seconds, "recipe": self._facts()}
            )


def _device(name: str, local: int) -> torch.device:
    """This rank's device, made the current one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not name.startswith("cuda") or not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name!r}: {'no GPU is here' if name.startswith('cuda') else 'cpu or cuda'}"
        )
    device = torch.device(f"cuda:{local}" if name == "cuda" else name)
    torch.cuda.set_device(device)
    return device


def _attention(name: str, recipe: Recipe, device: torch.device) -> str:
    """The fused attention of a GPU wants biases of aligned rows, and has no float64."""
    if name != "auto":
        return name
    fits = device.type == "cuda" and recipe.row_tokens % 16 == 0 and recipe.dtype != "float64"
    return "split" if fits else "dense"


def _as_in(settings: FitSettings, wanted: DrafterShape | None) -> FitSettings:
    """Settings with what --init decides. Raises ConfigError if an option contradicts it."""
    if wanted is None:
        return settings
    decided = {
        "layers": wanted.layers, "block_size": wanted.block_size, "taps": ",".join(map(str, wanted.taps)),
        "intermediate_size": wanted.intermediate_size, "mask_token_id": wanted.mask_token_id,
    }  # fmt: skip
    for name, value in decided.items():
        given, default = getattr(settings, name), FitSettings.model_fields[name].default
        if given not in (default, value):
            raise ConfigError(f"--{name.replace('_', '-')} is {given}, but --init's drafter has {value}")
    return settings.model_copy(update=decided)


def _same_target(checkpoint: Checkpoint, shards: Shards) -> None:
    manifest = shards.manifest
    vocab = TargetFacts.read(checkpoint.config).vocab_size
    if manifest.vocab_size != vocab:
        raise ConfigError(f"the data has a vocabulary of {manifest.vocab_size}, --target one of {vocab}")
    if manifest.fingerprint and manifest.fingerprint != checkpoint.fingerprint():
        raise ConfigError(
            f"the data was answered by {manifest.target} with other weights than {checkpoint.folder}'s; "
            f"a drafter learns one target: make the data with this one"
        )
