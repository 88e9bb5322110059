"""Replayed rounds against the product's own, and the sums made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from product import LiveProduct, request_for
from tiny import VOCAB_SIZE, make_drafter, make_target

from draft_service.bigrams import Pairs, write_bigrams
from draft_service.training.evaluation import CHAIN, HeldOut, Replay, Rounds, accepted_depths
from draft_service.training.evaluation_report import ALL, Tally
from draft_service.training.evaluation_run import compare
from draft_service.training.scoring import BIGRAM, PLAIN, SHARED, ScoringRule, parse_rule
from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams
from target_service.offline import Generator, OfflineRequest, load_generator

TOKENS, LENGTH = 32, 96
SIZES = (CHAIN, 1, 16)


@dataclass(frozen=True)
class Scene:
    product: LiveProduct
    replay: Replay
    generator: Generator
    target: Path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with make_scene(tmp_path_factory.mktemp("evaluation")) as made:
        yield made


@pytest.fixture(scope="module")
def scene_with_bigrams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with make_scene(tmp_path_factory.mktemp("bigrams"), bigrams=True) as made:
        yield made


@contextmanager
def make_scene(root: Path, *, bigrams: bool = False) -> Iterator[Scene]:
    """Logits that are nearly flat: two models then agree on little but the noise they share."""
    target = make_target(root / "target", scale=0.09)
    draft = make_drafter(root / "draft", scale=0.09)
    if bigrams:
        write_bigrams(draft, some_pairs(target), {})
    replay = Replay.load(draft, target, device="cpu", dtype="float64", length=LENGTH)
    generator = load_generator(str(target), device="cpu", dtype="float64", length=LENGTH, slots=4)
    with LiveProduct(target, draft) as product:
        yield Scene(product, replay, generator, target)


def some_pairs(target: Path) -> Pairs:
    """Of the texts that are compared, as if seen often: else the drafter is hardly ever right."""
    generator = load_generator(str(target), device="cpu", dtype="float64", length=LENGTH, slots=4)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.int64)
    for text in generated(generator, 0.8):
        tokens, first = text.tokens, len(text.prompt)
        np.add.at(counts, (tokens[first - 1 : -1], tokens[first:]), 100)
    first, second = np.nonzero(counts)
    return Pairs(first, second, counts[first, second], counts.sum(1))


def held_out(scene: Scene, temperature: float) -> list[HeldOut]:
    return generated(scene.generator, temperature)


def generated(generator: Generator, temperature: float) -> list[HeldOut]:
    prompts = [tuple((7 * i + 3 * j) % 250 for j in range(5 + 9 * i)) for i in range(4)]
    asked = [
        OfflineRequest(i, p, temperature, 2**53 - 1 - i, TOKENS if i else TOKENS // 2)
        for i, p in enumerate(prompts)
    ]
    texts = {text.key: text for text in generator.generate(asked)}
    return [
        HeldOut(prompts[i], texts[i].tokens, temperature, one.seed, one.max_tokens, group=f"file {i % 2}")
        for i, one in enumerate(asked)
    ]


def features(scene: Scene, texts: list[HeldOut]) -> list[torch.Tensor]:
    config = scene.replay.drafter.config
    rows = scene.generator.taps(
        [text.tokens for text in texts], config.target_layer_ids, normed_last_layer=config.normed_last_layer
    )
    return [row.clone() for row in rows]


@pytest.mark.parametrize(("temperature", "sizes"), [(0.0, (CHAIN, 64)), (0.8, SIZES)])
def test_rounds_are_those_of_the_product(scene: Scene, temperature: float, sizes: tuple[int, ...]) -> None:
    """Round by round, the last ones with their shallow trees included."""
    compare_rounds(scene, temperature, sizes, SHARED)


def test_rounds_with_bigrams_are_those_of_the_product(scene_with_bigrams: Scene) -> None:
    compare_rounds(scene_with_bigrams, 0.8, SIZES, BIGRAM)


def compare_rounds(scene: Scene, temperature: float, sizes: tuple[int, ...], rule: ScoringRule) -> None:
    texts = held_out(scene, temperature)
    replayed = [
        scene.replay.rounds(text, rows, [rule], sizes)
        for text, rows in zip(texts, features(scene, texts), strict=True)
    ]
    deep = 0
    for size in sizes:
        scene.product.trees.limit_top_k(1 if size == CHAIN else None)
        requests = [
            request_for(
                text.prompt,
                SamplingParams(temperature=temperature),
                seed=text.seed,
                max_tokens=text.max_tokens,
                ignore_eos=False,
            )
            for text in texts
        ]
        run = scene.product.run(requests, budget=size or scene.product.horizon)
        assert run.tokens == [text.response for text in texts]
        for found, text in zip(replayed, run.texts, strict=True):
            ours, theirs = found[rule.name, size], text.stats
            # A round with one token to go has no tree, and is none of the steps.
            steps = len(theirs.per_step_accepted)
            assert list(ours.accepted[:steps]) == list(theirs.per_step_accepted)
            assert len(ours.accepted) == theirs.num_rounds and not any(ours.accepted[steps:])
            assert ours.committed == len(text.tokens) - 1
            deep += sum(text.stats.per_step_accepted)
    assert deep > 4, "hardly anything was accepted: nothing was compared"


def test_a_tree_walk_by_hand() -> None:
    """Depth 1: token 1 (0.6), 0 (0.3). Depth 2: token 2 (0.9). Trees: 1 | 1 2 | 1 2, 0 | ..."""
    probs = torch.tensor([[[0.3, 0.6, 0.06, 0.04], [0.04, 0.03, 0.9, 0.03]]] * 4)
    truth = torch.tensor([[1, 2], [0, 2], [1, 0], [3, -1]])
    limits = torch.tensor([2, 2, 1, 2], dtype=torch.int32)
    found = accepted_depths(probs.log(), truth, limits, [CHAIN, 1, 2, 3, 4])
    assert {size: depth.tolist() for size, depth in found.items()} == {
        CHAIN: [2, 0, 1, 0],
        1: [1, 0, 1, 0],
        2: [2, 0, 1, 0],
        3: [2, 1, 1, 0],
        4: [2, 2, 1, 0],
    }


def test_sums_and_their_interval() -> None:
    tally = Tally()
    rng = np.random.default_rng(1)
    drawn = [tuple(rng.integers(0, 4, size=30).tolist()) for _ in range(50)]
    for accepted in drawn:
        tally.add(Rounds(accepted, sum(accepted) + len(accepted)))
    flat = np.concatenate(drawn)
    assert tally.mean == pytest.approx(flat.mean() + 1)
    assert tally.histogram() == [int((flat == d).sum()) for d in range(4)]
    assert tally.reached() == [pytest.approx((flat > d).sum() / (flat >= d).sum()) for d in range(3)]
    # Rounds here are independent: the interval is the mean's own, 1.96 standard errors.
    expected = 1.96 * flat.std() / len(flat) ** 0.5
    assert tally.half_width() == pytest.approx(expected, rel=0.25)


def test_two_drafters_over_the_same_texts(scene: Scene, tmp_path: Path) -> None:
    """One of them taps other layers; a text of one token has no round."""
    other = make_drafter(tmp_path / "other", target_layer_ids=(1, 3), scale=0.09, seed=9)
    second = Replay.load(other, scene.target, device="cpu", dtype="float64", length=LENGTH)
    greedy, sampled = held_out(scene, 0.0), held_out(scene, 1.0)
    short = HeldOut((1, 2), (3,), 0.0, 0, 1, group="short")
    seen: list[tuple[int, int]] = []
    report = compare(
        {"one": scene.replay, "two": second},
        [*greedy, short, *sampled],
        scene.generator.taps,
        rules=[PLAIN, SHARED],
        nodes=SIZES,
        report=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (18, 18)
    [rows] = [scene.generator.taps([sampled[2].tokens], (1, 3), normed_last_layer=True)]
    alone = second.rounds(sampled[2], next(iter(rows)), [SHARED], SIZES)
    tally = report.tallies["two", "T=1 shared noise", "file 0", 16]
    assert alone[SHARED.name, 16].committed in tally.tokens and len(tally.rounds) == 2
    both = report.tallies["two", "T=1 shared noise", ALL, 16]
    assert len(both.rounds) == 4 and both.mean > report.tallies["two", "T=1 plain", ALL, 16].mean
    assert {key[1] for key in report.tallies} == {"T=0", "T=1 plain", "T=1 shared noise"}
    assert len(report.rows()) == 2 * 3 * 3 and len(report.as_json()) == 2 * 3 * 3 * len(SIZES)


def test_scoring_rules() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    assert parse_rule("shared") is SHARED and parse_rule("plain") is PLAIN
    same = ScoringRule("spelled out", a=(1.0, 1.0), b=(1.0, 1.0))
    torch.testing.assert_close(same.scores(logits, 0.5, noise), (2 * logits + noise).log_softmax(-1))
    rule = parse_rule("a=0.5:2,b=0.25:1,floor=0.1,name=mine")
    assert rule.name == "mine" and rule.noisy
    q = 0.9 * (logits / 0.5).softmax(-1) + 0.1 / 50
    a, b = torch.tensor([0.5, 2.0, 2.0])[:, None], torch.tensor([0.25, 1.0, 1.0])[:, None]
    torch.testing.assert_close(rule.scores(logits, 0.5, noise), (a * q.log() + b * noise).log_softmax(-1))
    torch.testing.assert_close(rule.scores(logits, 0.0, None), logits.log_softmax(-1))
    for wrong in ("half", "a=x", "floor=1", "a=0", "c=1"):
        with pytest.raises(ConfigError, match="scoring rule"):
            parse_rule(wrong)
