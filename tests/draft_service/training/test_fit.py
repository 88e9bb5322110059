"""Training runs, whole, on the CPU: they learn, stop and go on, and don't depend on the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_target
from training import make_data

from draft_service.training import fit as module
from draft_service.training.batches import Batches
from draft_service.training.estimate import Estimate, estimate, held_out_batches
from draft_service.training.fit import fit, run
from draft_service.training.fit_settings import FitSettings, load_fit, make_recipe
from draft_service.training.frozen_target import FrozenTarget
from draft_service.training.mask_token import check_mask_token
from draft_service.training.network import DrafterShape, Network
from draft_service.training.parallel import Ranks
from draft_service.training.shards import Shards
from draft_service.training.trainer import Trainer
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    target: Path
    data: Path

    def settings(self, out: Path, **changes: Any) -> FitSettings:
        small: dict[str, Any] = {
            "target": str(self.target), "data": str(self.data), "out": str(out), "layers": 1, "block_size": 4,
            "rows": 4, "row_tokens": 80, "anchors": 24, "holdout": 4, "log_every": 5, "steps": 12,
            "learning_rate": 3e-3, "intermediate_size": 64,
        }  # fmt: skip
        return load_fit({**small, **changes})

    def acceptance(self, folder: Path | None) -> Estimate:
        """Of a drafter's checkpoint (None: random weights), on all of the data."""
        shards, checkpoint = Shards(self.data), Checkpoint(self.target)
        settings = self.settings(Path("unused"))
        target = FrozenTarget(checkpoint, row_tokens=80, dtype=torch.float32, device=CPU)
        facts = module.TargetFacts.read(checkpoint.config)
        recipe = make_recipe(settings, facts, intermediate_size=64, dtype="float32", ranks=1)
        shape = DrafterShape(target.shape, 1, 4, recipe.taps, 64, 300)
        if folder is not None:
            shape = DrafterShape.of(Checkpoint(folder), checkpoint, target.shape)
        network = Network(shape, dtype=torch.float32, device=CPU, max_position=80, attention="dense")
        network.initialise(5)
        if folder is not None:
            network.load(Checkpoint(folder), checkpoint)
        batches = Batches(shards, torch.arange(len(shards)).numpy(), recipe)
        trainer = Trainer(target, network, recipe, batches.get(0), ranks=Ranks(), cuda_graphs=False)
        return estimate(trainer, shards, held_out_batches(batches))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A target whose text a small drafter can learn: weights that leave it few habits."""
    root = tmp_path_factory.mktemp("fit")
    target = make_target(root / "target", dtype=torch.float32, scale=0.12, seed=3)
    return Place(target, make_data(root / "data", target, prompts=32, length=40))


def log_of(out: Path) -> list[dict[str, Any]]:
    """Log lines without what depends on the clock."""
    lines = [json.loads(text) for text in (out / "run" / "log.jsonl").read_text().splitlines()]
    timed = ("seconds", "step_ms", "tokens_per_s", "blocks_per_s", "tflops")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def test_it_learns(place: Place, tmp_path: Path) -> None:
    """Loss falls, and acceptance rises above a random drafter's: in greedy text, and in sampled text with
    the noise it was drawn with."""
    ended = fit(place.settings(tmp_path / "out", steps=150))
    losses = [line["loss"] for line in log_of(tmp_path / "out") if "loss" in line]
    assert ended.steps == 150 and ended.loss == pytest.approx(losses[-1], abs=1e-5)
    assert losses[-1] < 0.75 * losses[0]
    random, trained = place.acceptance(None), place.acceptance(tmp_path / "out")
    assert random.greedy and trained.greedy and random.shared_noise and trained.shared_noise
    assert random.greedy.length < 1.1 and trained.greedy.length > random.greedy.length + 0.5
    assert trained.shared_noise.length > random.shared_noise.length + 0.1
    assert ended.estimate is not None and ended.estimate.greedy is not None
    estimates = [
        line["acceptance/greedy"] for line in log_of(tmp_path / "out") if "acceptance/greedy" in line
    ]
    assert estimates[-1] == pytest.approx(ended.estimate.greedy.length, abs=1e-3) and len(estimates) == 10
    recipe = json.loads((tmp_path / "out" / "run" / "recipe.json").read_text())
    assert (recipe["gamma"], recipe["layers"], recipe["schedule"]) == (2.5, 1, {"steps": 150})


class _Interrupted(BaseException):
    pass


def _interrupt_at(step: int) -> Callable[..., None]:
    real = Trainer.step

    def stepping(self: Trainer, batches: Any, rate: float) -> None:
        if self.optimizer.steps == step:
            raise _Interrupted
        real(self, batches, rate)

    return stepping


@pytest.mark.parametrize("loss", ["ce", "ce:0.1,kl:0.5,coupled:0.5"])
def test_a_resumed_run_is_the_uninterrupted_one(
    loss: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: weights, optimiser, log. Interrupted two steps after a checkpoint, twice."""
    changes = {"checkpoint_every": 4, "log_every": 2, "loss": loss, "accumulate": 2}
    fit(place.settings(tmp_path / "whole", **changes))
    for interruption, step in enumerate((6, 10)):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", _interrupt_at(step))
            with pytest.raises(_Interrupted):
                fit(place.settings(tmp_path / "cut", resume=interruption > 0, **changes))
    with pytest.raises(ConfigError, match="learning_rate 0.003 -> 0.1"):
        fit(place.settings(tmp_path / "cut", resume=True, **{**changes, "learning_rate": 0.1}))
    with pytest.raises(ConfigError, match=r"mask_token_id \d+ -> 7;"):
        fit(place.settings(tmp_path / "cut", resume=True, **{**changes, "mask_token_id": 7}))
    with pytest.raises(ConfigError, match="--resume continues it"):
        fit(place.settings(tmp_path / "cut", **changes))
    ended = fit(place.settings(tmp_path / "cut", resume=True, **changes))
    assert ended.steps == 12
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    whole, cut = (load_file(tmp_path / n / "run" / "state.safetensors") for n in ("whole", "cut"))
    assert set(whole) == set(cut) and all(torch.equal(whole[n], cut[n]) for n in whole)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_two_ranks_are_one_with_twice_the_batches(place: Place, tmp_path: Path) -> None:
    fit(place.settings(tmp_path / "one", steps=3, accumulate=2, log_every=1, estimate_every=3))
    assert (
        run(place.settings(tmp_path / "two", steps=3, gpus=2, device="cpu", log_every=1, estimate_every=3))
        == 0
    )
    one, two = (load_file(tmp_path / n / "run" / "state.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    assert [line.get("loss") for line in log_of(tmp_path / "two")] == pytest.approx(
        [line.get("loss") for line in log_of(tmp_path / "one")], abs=1e-4
    )


def test_a_run_starts_from_a_drafter(place: Place, tmp_path: Path) -> None:
    """With --init the shape is that drafter's; a learning rate of next to nothing gives it back."""
    fit(place.settings(tmp_path / "first", steps=2))
    settings = place.settings(
        tmp_path / "second", steps=1, layers=0, block_size=0, intermediate_size=0, learning_rate=1e-12,
        init=str(tmp_path / "first"), estimate_every=5,
    )  # fmt: skip
    fit(settings)
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert (tmp_path / "second" / "config.json").read_bytes() == (
        tmp_path / "first" / "config.json"
    ).read_bytes()
    with pytest.raises(ConfigError, match="--block-size is 8, but --init's drafter has 4"):
        fit(settings.model_copy(update={"block_size": 8, "out": str(tmp_path / "third")}))


def test_a_time_limit_ends_the_run_with_its_schedule(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of 2 s a step and 4 minutes: 120 steps, found out after 50, and a rate that has come down."""
    steps = [0]

    def count(self: Trainer, batches: Any, rate: float) -> None:
        steps.append(steps[-1] + 1)

    monkeypatch.setattr(Trainer, "step", count)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 2.0 * steps[-1])
    ended = fit(place.settings(tmp_path, steps=0, minutes=4.0, log_every=5, holdout=0))
    assert (ended.steps, ended.seconds) == (120, 240.0)
    rates = [line["rate"] for line in log_of(tmp_path)]
    assert rates[-1] < 1e-5 < max(rates)


def test_what_does_not_belong_together_is_refused(place: Place, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", dtype=torch.float32, seed=9)
    with pytest.raises(ConfigError, match="with other weights than"):
        fit(replace(place, target=other).settings(tmp_path / "out"))
    with pytest.raises(ConfigError, match="--data is missing"):
        fit(place.settings(tmp_path / "out", data=""))
    with pytest.raises(ConfigError, match="--resume: .* does not exist"):
        fit(place.settings(tmp_path / "out", resume=True))
    with pytest.raises(ConfigError, match="no GPU is here"):
        fit(place.settings(tmp_path / "out", device="cuda:99" if torch.cuda.is_available() else "cuda"))
    with pytest.raises(ConfigError, match="--init 'nowhere' is not a folder here"):
        fit(place.settings(tmp_path / "out", init="nowhere"))
    with pytest.raises(ConfigError, match=f"'{tmp_path}' holds no training data"):
        fit(place.settings(tmp_path / "out", data=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out: nothing can be written to the folder '.*file/run'"):
        fit(place.settings(tmp_path / "file"))


def test_a_mask_token_that_texts_use_is_told(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = Shards(place.data)
    vocab, used = shards.manifest.vocab_size, int(shards.tokens[0])
    unused = next(i for i in range(vocab) if i not in shards.tokens)
    check_mask_token(unused, shards)
    assert not caplog.records
    check_mask_token(used, shards)
    times = shards.tokens.tolist().count(used)
    assert f"--mask-token-id {used} is in the data, {times} times" in caplog.text
    with pytest.raises(ConfigError, match=f"--mask-token-id is {vocab}: .* 0..{vocab - 1}"):
        fit(place.settings(tmp_path / "out", mask_token_id=vocab))
