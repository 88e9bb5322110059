"""Sessions over a drafter's context pages on any device, and what different ways of growing trees make of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_drafters import VOCAB, changed

from draft_service.bigrams import Bigrams, Pairs
from draft_service.block_attention import ContextPages
from draft_service.drafter import Drafter
from draft_service.host_trees import Ask
from draft_service.session import Session
from specbridge.paging import PagePool
from specbridge.rounds import SamplingParams, SessionKey
from specbridge.tree import DraftTree

PAGE = 4
PAGES = 160
BASES = (0, 3, 17, 40, 8)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=2**64 - 3, choice=1),
    SamplingParams(temperature=1.3, seed=11),
)


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": (changed("z-lab"), {}),
    "sliding and full": (changed("z-lab", inner={"layer_types": MIXED, "sliding_window": 7}), {}),
    "window smaller than the block": (
        changed("z-lab", inner={"layer_types": ["sliding_attention"] * 3, "sliding_window": 3}),
        {},
    ),
    "causal everywhere": (changed("z-lab", is_causal=True), {}),
    "scales": (
        changed(
            "z-lab",
            own={
                "final_logit_softcapping": 3.0,
                "output_multiplier": 0.5,
                "input_embedding_scale": 1.7,
                "attention_value_scale": 0.6,
            },
        ),
        {},
    ),
    "draft window": (changed("z-lab", inner={"layer_types": MIXED, "sliding_window": 9}), {"window": 5}),
    "anchor row predicts": (changed("z-lab", own={"sample_from_anchor": True}), {}),
    "windows from the anchor": (
        changed("speculators", inner={"layer_types": MIXED, "sliding_window": 5}),
        {"window": 8},
    ),
    "reduced vocabulary, biases": (
        changed("speculators", draft_vocab_size=41, inner={"attention_bias": True}),
        {},
    ),
}
"""Configuration of a tiny drafter, and options of Drafter."""


class Scene:
    """A drafter, its pages, and sessions that hold random context rows."""

    def __init__(self, drafter: Drafter, *, bases: Sequence[int] = BASES, sampled: bool = True) -> None:
        self.drafter = drafter
        self.pages: ContextPages = drafter.new_pages(PAGES, PAGE)
        self.pool = PagePool(PAGES, PAGE)
        self.sessions: list[Session] = []
        for number, base in enumerate(bases):
            sampling = SAMPLINGS[number % 3] if sampled else SamplingParams()
            session = Session(
                SessionKey(b"g" * 16, number), sampling, b"", self.pool.open((), salt=bytes([number]))
            )
            self.sessions.append(session)
            self.append(session, base)

    def append(self, session: Session, count: int) -> None:
        """So many more rows, the same ones for the same session and position on every device."""
        sequence = session.sequence
        first = sequence.length
        sequence.reserve(count)
        rows = features(self.drafter, session.key.number, first, count)
        slots = torch.tensor(sequence.slots(first, count), dtype=torch.int64)
        self.drafter.append(
            self.pages, rows.to(self.drafter.device), torch.arange(first, first + count), slots
        )
        sequence.extend(list(range(first, first + count)))

    def asks(self, *, nodes: Sequence[int] = (16,), depths: Sequence[int] = (9,)) -> list[Ask]:
        """An ask a session; nodes and depths are taken in turn."""
        return [
            Ask(
                session,
                (7 + i) % self.drafter.config.vocab_size,
                nodes[i % len(nodes)],
                depths[i % len(depths)],
            )
            for i, session in enumerate(self.sessions)
        ]


def some_bigrams(device: torch.device | str = "cpu") -> Bigrams:
    """A table in which each token is followed by few others, often."""
    counts = np.random.default_rng(3).integers(0, 6, (VOCAB, VOCAB)) ** 4
    first, second = np.nonzero(counts)
    return Bigrams(Pairs(first, second, counts[first, second], counts.sum(1)), device)


def features(drafter: Drafter, number: int, first: int, count: int) -> torch.Tensor:
    width = drafter.config.feature_size
    rows = [
        torch.randn(width, generator=torch.Generator().manual_seed(1000 * number + position))
        for position in range(first, first + count)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, width)


def assert_same_trees(ours: Sequence[DraftTree], theirs: Sequence[DraftTree], *, atol: float = 1e-4) -> None:
    """Equal as lists; scores up to rounding. Nodes that rounding may order either way are told apart by
    score.
    """
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert one.parents == other.parents
        torch.testing.assert_close(torch.tensor(one.scores), torch.tensor(other.scores), rtol=0, atol=atol)
