"""Prefixes found again by both services, by one, or by none: the same text and the same acceptance, on tiny
models in fp64, and never a row more than must run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from product import LiveProduct, Run, request_for
from tiny import make_drafter, make_target

from draft_service.host_trees import Ask
from specbridge.rounds import SamplingParams

PAGE = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("prefixes")
    return make_target(root / "target", max_length=256), make_drafter(root / "draft", block_size=8)


@pytest.fixture(scope="module")
def roomy(folders: tuple[Path, Path]) -> Iterator[LiveProduct]:
    with LiveProduct(*folders) as product:
        yield product


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((37 * seed + 11 * j + j * j) % 250 for j in range(length))


@dataclass
class Turn:
    """One request: its text, what of its prompt was found, what the drafter thought at each base."""

    tokens: tuple[int, ...]
    cached: int
    prefilled: float
    marginals: dict[int, torch.Tensor]
    run: Run

    def same_as(self, other: Turn) -> bool:
        """The same text out of the same rounds, at each the drafter's very opinion, of the same context."""
        assert self.run.texts[0].stats == other.run.texts[0].stats
        both = self.marginals.keys() & other.marginals.keys()
        assert len(both) > 10
        # Behind the last round an eager draft may have begun one more, which nobody asked for.
        assert all(base > max(both) for base in self.marginals.keys() ^ other.marginals.keys())
        for base in both:
            torch.testing.assert_close(self.marginals[base], other.marginals[base], rtol=0, atol=1e-9)
        return self.tokens == other.tokens


def ask(product: LiveProduct, text: Sequence[int], *, tokens: int = 24, speculate: bool = True) -> Turn:
    marginals: dict[int, torch.Tensor] = {}

    def listen(asks: Sequence[Ask], logits: torch.Tensor) -> torch.Tensor:
        for one, row in zip(asks, logits, strict=True):
            marginals[one.session.sequence.length] = row.clone()
        return logits

    before = _prefilled(product)
    request = request_for(
        text, SamplingParams(temperature=0.7), seed=5, max_tokens=tokens, speculate=speculate
    )
    run = product.run([request], budget=12, script=listen)
    product.assert_idle()
    assert not run.recorder.fallbacks and not run.recorder.reopens
    cached = run.texts[0].events[0].cached_tokens
    return Turn(run.tokens[0], cached, _prefilled(product) - before, marginals, run)


def _prefilled(product: LiveProduct) -> float:
    return product.target_metrics.registry.get_sample_value("specbridge_target_prefill_rows_total") or 0.0


@pytest.mark.parametrize("length", [16, 33, 48, 50])
def test_the_same_prompt_again_runs_only_its_last_rows(roomy: LiveProduct, length: int) -> None:
    """Nothing new to say to it, and still the last token must run: it chooses what follows."""
    first = ask(roomy, prompt(length, length))
    again = ask(roomy, prompt(length, length))
    whole = (length - 1) // PAGE * PAGE
    assert first.cached == 0 and again.cached == whole
    assert again.prefilled == length - whole
    assert again.same_as(first)


def test_every_turn_of_a_chat_runs_only_what_is_new(roomy: LiveProduct, folders: tuple[Path, Path]) -> None:
    text = prompt(2, 40)
    known, found = 0, []
    for number in range(3):
        turn = ask(roomy, text)
        # Whole pages of what both services have committed. The hidden states of the last round may reach the
        # draft after the release, so that the page which they would have filled is missing.
        assert known // PAGE * PAGE - PAGE <= turn.cached <= known // PAGE * PAGE
        assert turn.prefilled == len(text) - turn.cached
        found.append(turn.cached)
        if number == 2:
            break
        known = len(text) + len(turn.tokens) - 1
        text = (*text, *turn.tokens, *prompt(10 + number, 9))
    assert found[2] > found[1] > 0
    with LiveProduct(*folders) as fresh:
        cold = ask(fresh, text)
    assert cold.cached == 0 and turn.same_as(cold)


@pytest.mark.parametrize("small", ["draft", "target"])
def test_a_prefix_that_one_side_has_evicted_is_run_again(folders: tuple[Path, Path], small: str) -> None:
    """No position is reused which the draft has no context for; nor of course one that the target lacks."""
    with LiveProduct(*folders, **{small: {"kv_tokens": 256}}) as product:
        start = prompt(3, 70)
        first = ask(product, start)
        for n in range(4):
            ask(product, prompt(20 + n, 120), tokens=8)
        again = ask(product, start)
        assert again.cached == 0 and again.same_as(first)
        assert ask(product, start).cached == 64  # it is there again


def test_the_draft_has_forgotten_and_the_target_has_not(roomy: LiveProduct) -> None:
    start = prompt(4, 50)
    first = ask(roomy, start)
    roomy.forget_context()
    again = ask(roomy, start)
    assert again.cached == 0 and again.same_as(first)
    roomy.forget_context()
    # Who does not speculate needs no context at the draft.
    assert ask(roomy, start, speculate=False).cached == 48
