"""Training on a GPU: its attentions against the plain ones, its graphs against the steps they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_target
from training import make_data

from draft_service.drafter_config import TargetFacts
from draft_service.training.attention import Visibility, block_attention
from draft_service.training.batches import Batches
from draft_service.training.estimate import estimate
from draft_service.training.fit import run
from draft_service.training.fit_settings import load_fit, make_recipe
from draft_service.training.frozen_target import FrozenTarget
from draft_service.training.network import DrafterShape, Network
from draft_service.training.parallel import Ranks
from draft_service.training.shards import Shards
from draft_service.training.trainer import Inputs, Trainer
from specbridge.checkpoint import Checkpoint

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Bench:
    folder: Path
    shards: Shards

    def trainer(
        self, device: str, dtype: torch.dtype, *, graphs: bool, loss: str = "ce", **network: str
    ) -> Trainer:
        place = torch.device(device)
        checkpoint = Checkpoint(self.folder)
        settings = load_fit(
            {"layers": 2, "block_size": 4, "rows": 4, "row_tokens": 96, "anchors": 16, "loss": loss,
             "learning_rate": 3e-3}
        )  # fmt: skip
        name = str(dtype).removeprefix("torch.")
        recipe = make_recipe(
            settings, TargetFacts.read(checkpoint.config), intermediate_size=96, dtype=name, ranks=1
        )
        target = FrozenTarget(checkpoint, row_tokens=96, dtype=dtype, device=place)
        shape = DrafterShape(target.shape, 2, 4, recipe.taps, 96, 300)
        attention = network.get("attention", "split" if device == "cuda" else "dense")
        made = Network(shape, dtype=dtype, device=place, max_position=96, attention=attention)
        made.initialise(1)
        batches = Batches(self.shards, torch.arange(len(self.shards)).numpy(), recipe)
        return Trainer(target, made, recipe, batches.get(0), ranks=Ranks(), cuda_graphs=graphs)

    def steps(self, trainer: Trainer, count: int) -> list[torch.Tensor]:
        batches = Batches(self.shards, torch.arange(len(self.shards)).numpy(), trainer.recipe)
        for number in range(count):
            trainer.step([batches.get(number)], 1e-3)
        return [p.detach().clone() for p in trainer.network.parameters]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("cuda")
    folder = make_target(root / "target", dtype=torch.float32, hidden=64, intermediate=128, scale=0.15)
    return Bench(folder, Shards(make_data(root / "data", folder, prompts=24, length=36)))


def test_flash_attention_sees_documents_as_the_mask_does(bench: Bench) -> None:
    trainer = bench.trainer("cuda", torch.bfloat16, graphs=False)
    batch = Batches(bench.shards, torch.arange(len(bench.shards)).numpy(), trainer.recipe).get(0)
    inputs = Inputs(batch, torch.device("cuda"))
    inputs.load(batch)
    blocks = inputs.blocks
    results = [
        trainer.target.forward(blocks.tokens, blocks.positions, documents, (0, 1, 3), want_final=True)
        for documents in (inputs.documents(flash=True), inputs.documents(flash=False))
    ]
    own = torch.from_numpy(batch.documents < 16).cuda()  # padding attends to itself, whatever that gives
    torch.testing.assert_close(results[0].features[own], results[1].features[own], rtol=0.05, atol=0.05)
    exact = FrozenTarget(
        Checkpoint(bench.folder), row_tokens=96, dtype=torch.float32, device=torch.device("cuda")
    ).forward(blocks.tokens, blocks.positions, inputs.documents(flash=False), (0, 1, 3), want_final=True)
    error = (results[0].features[own].float() - exact.features[own]).abs().mean()
    assert error < 0.03 * exact.features[own].abs().mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("blocks", [8, 5])
def test_fused_attention_is_the_plain_one(dtype: torch.dtype, tolerance: float, blocks: int) -> None:
    """blocks 5: query rows that are no multiple of what the fused op's log-sum-exp is padded to."""
    generator = torch.Generator().manual_seed(1)
    rows, kv, group, size, length, dim = 2, 3, 3, 8, 64, 64
    shapes = [
        (rows, kv, blocks, group * size, dim), (rows, kv, length, dim), (rows, kv, length, dim),
        (rows, kv, blocks, size, dim), (rows, kv, blocks, size, dim),
    ]  # fmt: skip
    exact = [torch.randn(s, generator=generator).double().cuda().requires_grad_() for s in shapes]
    pull = torch.randn(shapes[0], generator=generator).double().cuda()
    anchors = torch.randint(1, length + 1, (rows, blocks), generator=generator).cuda()
    starts = (anchors // 3).clamp_max(anchors - 1)

    def result(variant: str, kind: torch.dtype) -> list[torch.Tensor]:
        tensors = [t.detach().to(kind).requires_grad_() for t in exact]
        visible = Visibility.make(variant, starts, anchors, length, group * size, kind)
        out = block_attention(*tensors, visible)  # type: ignore[call-arg]
        return [out, *torch.autograd.grad((out * pull.to(kind)).sum(), tensors)]

    for found, wanted in zip(result("split", dtype), result("dense", torch.float64), strict=True):
        scale = wanted.abs().max()
        assert ((found.double() - wanted).abs().max() / scale) < tolerance


@pytest.mark.parametrize("loss", ["ce", "kl:0.5,l1:0.5"])
def test_graphs_hold_the_steps(bench: Bench, loss: str) -> None:
    eager = bench.steps(bench.trainer("cuda", torch.bfloat16, graphs=False, loss=loss), 6)
    captured = bench.trainer("cuda", torch.bfloat16, graphs=True, loss=loss)
    for ours, theirs in zip(bench.steps(captured, 6), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert captured.optimizer.steps.item() == 6
    assert 0 < captured.progress().loss < 20


def test_a_gpu_trains_what_a_cpu_trains(bench: Bench) -> None:
    there = bench.steps(bench.trainer("cuda", torch.float32, graphs=True), 3)
    here = bench.steps(bench.trainer("cpu", torch.float32, graphs=False), 3)
    for ours, theirs in zip(there, here, strict=True):
        apart = (ours.cpu() - theirs).abs()
        # Adam's first steps have the rate's size, whatever the gradient's: signs of tiny ones may differ.
        assert apart.mean() < 1e-4


def test_coupled_noise_is_fresh_every_step_and_the_same_every_run(bench: Bench) -> None:
    runs = [
        bench.steps(bench.trainer("cuda", torch.bfloat16, graphs=True, loss="coupled"), count)
        for count in (4, 4, 3)
    ]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])
    trainer = bench.trainer("cuda", torch.bfloat16, graphs=True, loss="coupled")
    batch = Batches(bench.shards, torch.arange(len(bench.shards)).numpy(), trainer.recipe).get(0)
    losses = []
    for seed in (batch.seed, batch.seed + 1, batch.seed):
        trainer.step([replace(batch, seed=seed)], 0.0)
        losses.append(trainer.progress().loss)
    assert losses[0] == losses[2] != losses[1]


def test_the_estimate_is_the_cpu_s(bench: Bench) -> None:
    there, here = (bench.trainer(d, torch.float32, graphs=False) for d in ("cuda", "cpu"))
    batches = Batches(bench.shards, torch.arange(len(bench.shards)).numpy(), here.recipe)
    looked_at = [batches.get(i) for i in range(2)]
    ours, theirs = (estimate(t, bench.shards, looked_at) for t in (there, here))
    for name in ("greedy", "sampled", "shared_noise"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.blocks == b.blocks and a.length == pytest.approx(b.length, abs=0.02)


@pytest.mark.multi_gpu
def test_two_gpus_are_one_with_twice_the_batches(bench: Bench, tmp_path: Path) -> None:
    common = {
        "target": str(bench.folder), "data": str(bench.shards.folders[0]), "rows": 4, "row_tokens": 96,
        "anchors": 16, "layers": 2, "block_size": 4, "steps": 8, "dtype": "float32", "log_every": 4,
    }  # fmt: skip
    run(load_fit({**common, "out": str(tmp_path / "one"), "accumulate": 2}))
    run(load_fit({**common, "out": str(tmp_path / "two"), "gpus": 2}))
    one, two = (load_file(tmp_path / n / "run" / "state.safetensors") for n in ("one", "two"))
    for name in ("matrices", "norms"):
        assert (one[name] - two[name]).abs().mean() < 1e-4
