"""Judging a drafter: is what it proposes ever what the target then says?

A drafter that was loaded the wrong way (taps off by one, block convention, mask id) gives right output and no
speed, and nothing else shows it. Two look for it: the start-up check, which runs a prompt of its own
(startup_check), and the monitor below, which watches traffic: the tree proposed at an anchor, and, in the
hidden-state chunks that follow, the tokens the target committed.

Owns the evidence, the judgement and the monitor. Does not own who feeds them. Pure Python.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbridge.tree import DraftTree

log = logging.getLogger(__name__)

WINDOW_ROUNDS = 64
"""Rounds of the running mean that can clear an alarm, or raise it later."""
SHIFT_SHARE = 0.25
"""Share of rounds in which the tree fits the text moved by one position, above which the convention is to
blame.
"""
SET_CONVENTION = "set sample_from_anchor {} (--sample-from-anchor / --no-sample-from-anchor)"
SAME_SHARE = 0.75
"""Share of rounds with one and the same first proposal, above which the block rows seem not to see their
input.
"""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """length: tokens one verify of the tree would have committed, bonus included (1 = nothing matched).
    nodes: indexes of the tree's nodes that the text went through."""

    length: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """failed: acceptance is below the threshold. mean: of the rounds judged. cause: a sentence, if failed."""

    failed: bool
    mean: float
    rounds: int
    cause: str = ""


def accepted(tree: DraftTree, text: Sequence[int]) -> Acceptance:
    """Walk `tree` along `text`, the committed tokens after the anchor as far as they are known."""
    at, nodes = -1, []
    for token in text:
        node = tree.child(at, token)
        if node is None:
            break
        nodes.append(node)
        at = node
    return Acceptance(len(nodes) + 1, tuple(nodes))


class Evidence:
    """Greedy rounds, and what in them tells the causes of a low acceptance apart.

    mask_token_id: the drafter's. window: rounds of the running mean.
    """

    def __init__(self, *, mask_token_id: int = -1, window: int = WINDOW_ROUNDS) -> None:
        self._mask_token_id = mask_token_id
        self._lengths: deque[int] = deque(maxlen=window)
        self._first_tokens: Counter[int] = Counter()
        self._texts: Counter[int] = Counter()
        self._late = self._early = self._masks = 0
        self.rounds = 0

    @property
    def mean(self) -> float:
        """Mean acceptance length of the latest rounds; nan before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else math.nan

    @property
    def recent(self) -> int:
        """Rounds that `mean` is over."""
        return len(self._lengths)

    def note(self, tree: DraftTree, text: Sequence[int], length: int) -> None:
        """One round: a tree with nodes, the tokens that followed its anchor, and its acceptance length."""
        self.rounds += 1
        self._lengths.append(length)
        first = tree.tokens[0]
        self._first_tokens[first] += 1
        self._texts[text[0]] += 1
        self._masks += first == self._mask_token_id
        # A match that the unmoved text explains as well (a repeated token) says nothing.
        if len(text) > 1 and first == text[1] != text[0]:
            self._late += 1
        above = tree.parents
        second = next((t for t, p in zip(tree.tokens, above, strict=True) if p >= 0 > above[p]), None)
        if second == text[0] != first:
            self._early += 1

    def clear(self) -> None:
        self._lengths.clear()
        self._first_tokens.clear()
        self._texts.clear()
        self._late = self._early = self._masks = self.rounds = 0

    def cause(self) -> str:
        """The likeliest reason for an acceptance that is too low, as a sentence for the log."""
        if self._late > SHIFT_SHARE * self.rounds:
            return (
                "block convention: proposals fit the text one position later, so the drafter predicts at "
                f"each row the *next* position (n inputs, n drafts): {SET_CONVENTION.format('true')}"
            )
        if self._early > SHIFT_SHARE * self.rounds:
            return (
                "block convention: proposals fit the text one position earlier, so the drafter predicts at "
                f"each row's *own* position (n inputs, n - 1 drafts): {SET_CONVENTION.format('false')}"
            )
        if self._masks > SAME_SHARE * self.rounds:
            return (
                "mask_token_id: the drafter proposes the mask token itself, so it did not learn with this one"
            )
        most, said = (max(c.values(), default=0) for c in (self._first_tokens, self._texts))
        if most > SAME_SHARE * self.rounds >= said:
            return "mask_token_id: every block gets the same proposal, whatever the anchor"
        return (
            'target_layer_ids off by one (they mean "output of layer i", 0-based), another mask_token_id '
            "than the drafter learnt, or a drafter made for another target"
        )


class AcceptanceMonitor:
    """Judges greedy rounds of the traffic; see the module.

    rounds: how many to see before judging (0: never judge). threshold: least mean acceptance length.
    on_verdict: called when the verdict turns, from the thread of `observe`.
    """

    def __init__(
        self,
        *,
        rounds: int = 16,
        threshold: float = 1.2,
        mask_token_id: int = -1,
        on_verdict: Callable[[Verdict], None] | None = None,
    ) -> None:
        self._rounds = rounds
        self._threshold = threshold
        self._on_verdict = on_verdict
        self._evidence = Evidence(mask_token_id=mask_token_id, window=max(WINDOW_ROUNDS, rounds))
        self._failed = False

    @property
    def failed(self) -> bool:
        return self._failed

    @property
    def mean(self) -> float:
        """Mean acceptance length of the latest greedy rounds; nan before the first."""
        return self._evidence.mean

    def observe(self, tree: DraftTree, text: Sequence[int], *, greedy: bool) -> Acceptance:
        """One round: the tree proposed at an anchor and the tokens that followed it (at least one)."""
        result = accepted(tree, text)
        if greedy and tree.tokens and text and self._rounds:
            self._evidence.note(tree, text, result.length)
            if self._evidence.rounds >= self._rounds:
                self._judge()
        return result

    def reset(self) -> None:
        """Forget everything: another target is attached."""
        self._evidence.clear()
        self._failed = False

    def _judge(self) -> None:
        evidence = self._evidence
        failed = evidence.mean < self._threshold
        if failed == self._failed:
            return
        self._failed = failed
        verdict = Verdict(failed, evidence.mean, evidence.recent, evidence.cause() if failed else "")
        if failed:
            log.error(
                "the drafter's acceptance length is %.2f over %d greedy rounds (%.2f at least expected); "
                "output is right but not faster. Likely cause: %s",
                verdict.mean,
                verdict.rounds,
                self._threshold,
                verdict.cause,
            )
        else:
            log.info("the drafter's acceptance length is %.2f again", verdict.mean)
        if self._on_verdict is not None:
            self._on_verdict(verdict)
