"""The self-check: a misread drafter is flagged with its cause, a right one is not."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_bench import Bench
from oracle_drafter import oracle, tapped
from tiny_drafters import HIDDEN, VOCAB, layout

from draft_service.drafter import BlockBatch, Drafter
from draft_service.drafter_config import TargetFacts
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from draft_service.selfcheck import AcceptanceMonitor, Verdict, accepted
from draft_service.tree import build_trees_from_logits
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError
from specbridge.models import packaged_drafter, resolve_target
from specbridge.rounds import DraftResultKind
from specbridge.tree import DraftTree


def chain(*tokens: int) -> DraftTree:
    return DraftTree(
        tokens, tuple(range(-1, len(tokens) - 1)), tuple(-0.1 * (i + 1) for i in range(len(tokens)))
    )


def test_walk() -> None:
    tree = DraftTree((5, 6, 7, 7), (-1, -1, 0, 1), (-0.1, -0.2, -0.3, -0.4))
    assert accepted(tree, (6, 7, 9)).nodes == (1, 3) and accepted(tree, (6, 7, 9)).length == 3
    assert accepted(tree, (9,)).length == 1 and accepted(tree, ()).nodes == ()


def test_judges_after_so_many_greedy_rounds_and_can_take_it_back() -> None:
    verdicts: list[Verdict] = []
    monitor = AcceptanceMonitor(rounds=4, threshold=1.2, on_verdict=verdicts.append)
    assert math.isnan(monitor.mean)
    for _ in range(3):
        monitor.observe(chain(1, 2), (9, 9), greedy=True)
        monitor.observe(chain(1, 2), (9, 9), greedy=False)
        monitor.observe(DraftTree(), (9, 9), greedy=True)
    assert not verdicts and not monitor.failed
    monitor.observe(chain(1, 2), (9, 9), greedy=True)
    assert monitor.failed and verdicts[0].mean == 1.0 and verdicts[0].rounds == 4
    for _ in range(2):
        monitor.observe(chain(1, 2), (1, 2, 3), greedy=True)
    assert not monitor.failed and [v.failed for v in verdicts] == [True, False]
    monitor.reset()
    assert math.isnan(monitor.mean)


def test_rounds_zero_never_judges() -> None:
    monitor = AcceptanceMonitor(rounds=0)
    for _ in range(100):
        assert monitor.observe(chain(1), (9,), greedy=True).length == 1
    assert not monitor.failed


@pytest.mark.parametrize(
    ("tree_of", "cause"),
    [
        # Row i of the drafter predicts the next position, and is read as predicting its own.
        (lambda i: chain(i + 2, i + 3), "sample_from_anchor true"),
        # The other way round: row 0 has learnt nothing, row 1 comes too late.
        (lambda i: chain(900, i + 1), "sample_from_anchor false"),
        (lambda i: chain(16, 16), "mask_token_id: the drafter proposes the mask token"),
        (lambda i: chain(900, 901), "every block gets the same proposal"),
        (lambda i: chain(900 + i, 901), "target_layer_ids off by one"),
    ],
)
def test_the_likely_cause_is_named(
    tree_of: Callable[[int], DraftTree], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = AcceptanceMonitor(rounds=16, mask_token_id=16)
    with caplog.at_level(logging.ERROR):
        for i in range(100, 116):
            monitor.observe(tree_of(i), (i + 1, i + 2, i + 3), greedy=True)
    assert monitor.failed and len(caplog.records) == 1
    assert cause in caplog.records[0].getMessage()


# ---- an oracle drafter through the whole engine ----------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_an_oracle_drafter_is_fully_accepted_and_a_shifted_tap_is_flagged(
    shift: int, build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    built = build(layout("z-lab"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=generator), dim=-1)
    drafter = Drafter(built.config, oracle(built.config, embedding), dtype=torch.float32, max_position=512)
    verdicts: list[Verdict] = []
    monitor = AcceptanceMonitor(rounds=16, mask_token_id=5, on_verdict=verdicts.append)
    bench = Bench(replace(built, drafter=drafter), monitor=monitor, states=tapped(embedding, shift))
    try:
        with caplog.at_level(logging.ERROR):
            for number, token in enumerate((11, 23, 42)):
                tokens = [token] * 200
                bench.open(number, tokens[:40])
                bench.chunk(number, tokens, 0, 40)
                base = 40
                for _ in range(8):
                    result = bench.propose(number, tokens, base)
                    assert result.kind is DraftResultKind.PROPOSED
                    following = base + accepted(result.tree, tokens[base + 1 : base + 7]).length
                    bench.chunk(number, tokens, base, following)
                    base = following
        bench.settle()
        if shift == 0:
            assert monitor.mean == built.config.horizon + 1
            assert not monitor.failed and not verdicts
        else:
            assert monitor.failed and verdicts[0].rounds == 16 and verdicts[0].mean == 1.0
            assert "target_layer_ids off by one" in caplog.text
    finally:
        bench.engine.close()


# ---- the real drafter ------------------------------------------------------------------------

# The greedy answer of SmolLM2-135M-Instruct to a short question about a baker, chat template included.
PROMPT_LENGTH = 54
ANSWER = (
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
    8182, 2, 198, 1, 4093, 198, 49, 38993, 553, 216, 33, 34, 33190, 351, 216, 40, 20587, 971, 284,
    26064, 216, 36, 32, 20587, 30, 1073, 800, 359, 2049, 47, 2, 198, 1, 520, 9531, 198, 2068, 5482, 451,
    1732, 28, 392, 737, 288, 7529, 260, 1230, 282, 20587, 338, 359, 2049, 284, 3346, 260, 2719, 1230,
    282, 20587, 3459, 30, 198, 198, 504, 38993, 553, 216, 33, 34, 33190, 351, 216, 40, 20587, 971, 28,
    588, 260, 6219, 1230, 282, 20587, 314, 216, 33, 34, 731, 216, 40, 446, 216, 34, 20587, 30, 198, 198,
    504, 2719, 1230, 282, 20587, 3459, 314, 260, 2028, 282, 260, 1230, 282, 20587, 3459, 284, 260, 1230,
    282, 20587,
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Path, tuple[torch.Tensor, ...]]]:
    """The built-in target's folder, and its hidden states over ANSWER as transformers computes them."""
    transformers = pytest.importorskip("transformers")
    try:
        folder = resolve_target("smollm2-135m")
    except ConfigError as error:
        pytest.skip(f"the built-in model is not here: {error}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model(torch.tensor([ANSWER]), output_hidden_states=True)
    greedy = output.logits[0, PROMPT_LENGTH - 1 : -1].argmax(-1).tolist()
    assert greedy == list(ANSWER[PROMPT_LENGTH:])
    yield folder, tuple(states[0] for states in output.hidden_states)


@functools.cache
def packaged(target: Path, sample_from_anchor: bool | None) -> Drafter:
    """The packaged drafter, in bfloat16."""
    folder = packaged_drafter("smollm2-135m")
    assert folder is not None
    draft_files, target_files = Checkpoint(folder), Checkpoint(target)
    config = parse_config(
        draft_files.config,
        TargetFacts.read(target_files.config, target),
        sample_from_anchor=sample_from_anchor,
    )
    weights = load_weights(draft_files, target_files, config, dtype=torch.bfloat16)
    return Drafter(config, weights, dtype=torch.bfloat16, max_position=256)


def rounds_of(
    monitor: AcceptanceMonitor,
    target: Path,
    states: Sequence[torch.Tensor],
    *,
    taps: Sequence[int] | None = None,
    sample_from_anchor: bool | None = None,
) -> None:
    """Draft along ANSWER with the packaged drafter, round after round."""
    drafter = packaged(target, sample_from_anchor)
    pages = drafter.new_pages(16, 16)
    features = torch.cat([states[i + 1] for i in taps or drafter.config.target_layer_ids], -1)
    places = torch.arange(len(ANSWER))
    drafter.append(pages, features, places, places)
    base = PROMPT_LENGTH
    while base < len(ANSWER) - 1:
        logits = drafter.propose(pages, BlockBatch([ANSWER[base]], [base], [list(range(16))]))
        tree = build_trees_from_logits(logits, [16], max_depths=[drafter.config.horizon])[0]
        base += monitor.observe(tree, ANSWER[base + 1 : base + 9], greedy=True).length


@pytest.mark.model
def test_the_packaged_drafter_passes(smollm2: tuple[Path, tuple[torch.Tensor, ...]]) -> None:
    monitor = AcceptanceMonitor(rounds=16)
    rounds_of(monitor, *smollm2)
    assert not monitor.failed and monitor.mean > 2.5


@pytest.mark.model
def test_the_other_block_convention_is_flagged(smollm2: tuple[Path, tuple[torch.Tensor, ...]]) -> None:
    verdicts: list[Verdict] = []
    monitor = AcceptanceMonitor(rounds=16, on_verdict=verdicts.append)
    rounds_of(monitor, *smollm2, sample_from_anchor=True)
    assert monitor.failed and "sample_from_anchor false" in verdicts[0].cause


@pytest.mark.model
def test_shifted_taps_lower_acceptance(smollm2: tuple[Path, tuple[torch.Tensor, ...]]) -> None:
    # Neighbouring layers of a residual stream are much alike, so a shift by one costs a real drafter little;
    # what must hold is that the taps as configured are the best reading.
    means = []
    for shift in (0, 1, 4):
        monitor = AcceptanceMonitor(rounds=16)
        rounds_of(monitor, *smollm2, taps=[(i + shift) % 30 for i in (1, 8, 14, 20, 27)])
        means.append(monitor.mean)
    assert means[0] >= means[1] > means[2]
