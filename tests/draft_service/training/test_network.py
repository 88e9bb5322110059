"""The pass that is trained is the pass that is served, and what it writes is what the draft service reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import make_target
from training import make_data

from draft_service.drafter import BlockBatch, Drafter
from draft_service.drafter_config import DrafterConfig, TargetFacts
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from draft_service.training.batches import Batch, Batches
from draft_service.training.fit_settings import FitSettings, Recipe, make_recipe
from draft_service.training.frozen_target import Documents, FrozenTarget
from draft_service.training.network import DrafterShape, Network
from draft_service.training.parallel import Ranks
from draft_service.training.shards import Shards
from draft_service.training.trainer import Trainer
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

CPU = torch.device("cpu")
TAPS, PAGE = (0, 2, 3), 4


@dataclass(frozen=True)
class Scene:
    """A float64 target, its data, and a drafter in training whose weights are no initial ones."""

    folder: Path
    shards: Shards
    recipe: Recipe
    target: FrozenTarget
    network: Network

    def trainer(self, batch: Batch, **changes: object) -> Trainer:
        recipe = replace(self.recipe, **changes)  # type: ignore[arg-type]
        return Trainer(self.target, self.network, recipe, batch, ranks=Ranks(), cuda_graphs=False)

    def served(self) -> tuple[Drafter, DrafterConfig]:
        """The drafter's checkpoint, in the draft service."""
        folder = self.folder.parent / "drafter"
        self.network.save(folder, torch.float64)
        draft, target = Checkpoint(folder), Checkpoint(self.folder)
        config = parse_config(draft.config, TargetFacts.read(target.config))
        weights = load_weights(draft, target, config, dtype=torch.float64)
        return Drafter(config, weights, dtype=torch.float64, max_position=64), config


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp(request.param)
    folder = make_target(root / "target", family=request.param)
    shards = Shards(make_data(root / "data", folder, prompts=6, length=24))
    checkpoint = Checkpoint(folder)
    settings = FitSettings(
        layers=2, block_size=5, taps="0,2,3", rows=2, row_tokens=60, anchors=9, holdout=0, gamma=3.0
    )
    recipe = make_recipe(
        settings, TargetFacts.read(checkpoint.config), intermediate_size=40, dtype="float64", ranks=1
    )
    target = FrozenTarget(checkpoint, row_tokens=60, dtype=torch.float64, device=CPU)
    shape = DrafterShape(target.shape, 2, 5, TAPS, 40, 300)
    network = Network(shape, dtype=torch.float64, device=CPU, max_position=60, attention="dense")
    network.initialise(1)
    with torch.no_grad():
        network.norms += 0.2 * torch.randn(network.norms.shape, generator=torch.Generator().manual_seed(2))
        network.matrices *= 8
    yield Scene(folder, shards, recipe, target, network)


def served_logits(scene: Scene, drafter: Drafter, tokens: torch.Tensor, anchor: int) -> torch.Tensor:
    """What the draft service proposes from after tokens[:anchor + 1]: its context is tokens[:anchor]."""
    features = scene.target.forward(
        tokens[None], torch.arange(len(tokens))[None],
        Documents.masked(torch.zeros(1, len(tokens), dtype=torch.int64)), TAPS, want_final=False,
    ).features[0]  # fmt: skip
    pages = drafter.new_pages(math.ceil(64 / PAGE), PAGE)
    places = torch.arange(anchor)
    drafter.append(pages, features[:anchor], places, places)
    return drafter.propose(pages, BlockBatch([int(tokens[anchor])], [anchor], [range(16)]))[0]


def test_every_block_in_training_is_the_served_one(scene: Scene) -> None:
    """Logits of each block of a batch, rows with several responses among them, against the draft service's
    drafter on that response alone."""
    drafter, config = scene.served()
    assert (config.target_layer_ids, config.horizon, config.mask_token_id) == (TAPS, 4, 300)
    batch = Batches(scene.shards, torch.arange(len(scene.shards)).numpy(), scene.recipe).get(0)
    assert len({int(s) for s in batch.starts[0]}) > 1
    trainer = scene.trainer(batch)
    trainer.inputs.load(batch)
    found = trainer.predict(trainer.inputs, want_final=False)
    logits = found.hidden @ scene.target.head.T
    for r in range(scene.recipe.rows):
        for b in range(scene.recipe.anchors):
            start, end = int(batch.starts[r, b]), int(batch.ends[r, b])
            response = torch.from_numpy(batch.tokens[r, start:end])
            wanted = served_logits(scene, drafter, response, int(batch.anchors[r, b]) - start)
            torch.testing.assert_close(logits[r, b].float(), wanted, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_formula_over_served_logits(scene: Scene) -> None:
    """Loss and gradient of a step, restated without rows, packing or chunks: for each anchor, the weighted
    cross-entropy of the served logits against the tokens that follow in its response."""
    drafter, _ = scene.served()
    batch = Batches(scene.shards, torch.arange(len(scene.shards)).numpy(), scene.recipe).get(1)
    total = weight_sum = 0.0
    depths: dict[int, list[float]] = {}
    for anchor, start, owner, end in zip(
        *(x.ravel().tolist() for x in (batch.anchors, batch.starts, batch.responses, batch.ends)), strict=True
    ):
        if owner < 0:
            continue
        tokens = torch.from_numpy(scene.shards.get(owner).tokens)
        logits = served_logits(scene, drafter, tokens, anchor - start).double()
        for k in range(1, 5):
            place = anchor - start + k
            if place < len(tokens):
                assert place < end - start
                loss = F.cross_entropy(logits[k - 1], tokens[place]).item()
                total += math.exp(-(k - 1) / 3.0) * loss
                weight_sum += math.exp(-(k - 1) / 3.0)
                depths.setdefault(k, []).append(loss)
    trainer = scene.trainer(batch)
    trainer.inputs.load(batch)
    trainer._run_batch()
    found = trainer.progress()
    assert found.loss == pytest.approx(total / weight_sum, rel=1e-6)
    assert found.depths == pytest.approx([sum(v) / len(v) for _, v in sorted(depths.items())], rel=1e-6)


def test_gradients_are_finite_differences(scene: Scene) -> None:
    """Through the whole step, for some weights of every kind of tensor."""
    batch = Batches(scene.shards, torch.arange(len(scene.shards)).numpy(), scene.recipe).get(0)

    def loss() -> Trainer:
        trainer = scene.trainer(batch, losses={"ce": 0.5, "kl": 0.5})
        trainer.inputs.load(batch)
        trainer._run_batch()
        return trainer

    gradients = loss()._gradients
    generator = torch.Generator().manual_seed(5)
    for parameter, gradient in zip(scene.network.parameters, gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-5 * direction
            values.append(float(loss()._sums[0, 0]))
            with torch.no_grad():
                parameter -= sign * 1e-5 * direction
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(float((gradient * direction).sum()), rel=1e-4)


def test_split_attention_trains_the_same(scene: Scene) -> None:
    batch = Batches(scene.shards, torch.arange(len(scene.shards)).numpy(), scene.recipe).get(0)
    gradients = []
    for variant in ("dense", "split"):
        scene.network.attention = variant
        try:
            trainer = scene.trainer(batch)
            trainer.inputs.load(batch)
            trainer._run_batch()
        finally:
            scene.network.attention = "dense"
        gradients.append(trainer._gradients)
    for dense, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, dense, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_read_back_bit_for_bit(scene: Scene, tmp_path: Path) -> None:
    """By training (--init) and by the draft service; in bfloat16, as it is shipped."""
    scene.network.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    draft, target = Checkpoint(tmp_path), Checkpoint(scene.folder)
    shape = DrafterShape.of(draft, target, scene.target.shape)
    assert shape == scene.network.shape
    again = Network(shape, dtype=torch.float64, device=CPU, max_position=60, attention="dense")
    again.load(draft, target)
    for ours, theirs in zip(again.parameters, scene.network.parameters, strict=True):
        assert torch.equal(ours, theirs.bfloat16().double())
    again.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_drafters_that_training_does_not_make_are_refused(scene: Scene, tmp_path: Path) -> None:
    scene.network.save(tmp_path)
    draft, target = Checkpoint(tmp_path), Checkpoint(scene.folder)
    draft.config["final_logit_softcapping"] = 30.0
    with pytest.raises(ConfigError, match="logit_softcap is 30.0"):
        DrafterShape.of(draft, target, scene.target.shape)
