"""Drafters that know the text: scripts for `product.ScriptedTrees`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draft_service.proposer import Ask

SURE = 1e4
"""A logit that no noise and no other logit reaches."""


class Known:
    """Finds where in which of the known texts (prompt and continuation) a session stands."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [tuple(text) for text in texts]

    def place(self, ask: Ask) -> tuple[int, int]:
        """(index of the text, position of the anchor in it)."""
        so_far = (*ask.session.sequence.tokens, ask.anchor)
        for i, text in enumerate(self.texts):
            if text[: len(so_far)] == so_far:
                return i, len(so_far) - 1
        raise AssertionError(f"a session has left all known texts at position {len(so_far) - 1}")

    def ahead(self, ask: Ask, depth: int) -> Sequence[int]:
        """The true tokens at depths 1 .. depth, fewer at the end of the text."""
        i, anchor = self.place(ask)
        return self.texts[i][anchor + 1 : anchor + 1 + depth]


def oracle(texts: Sequence[Sequence[int]]) -> Callable[[Sequence[Ask], torch.Tensor], torch.Tensor]:
    """Certain of the true token at every depth, with the real drafter's opinion of the rest."""
    known = Known(texts)

    def script(asks: Sequence[Ask], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for row, ask in zip(logits, asks, strict=True):
            for depth, token in enumerate(known.ahead(ask, len(row))):
                row[depth, token] = SURE
        return logits

    return script


def target_itself(
    texts: Sequence[Sequence[int]], logits_of: Sequence[torch.Tensor]
) -> Callable[[Sequence[Ask], torch.Tensor], torch.Tensor]:
    """The target's own logits along the true path: what a perfect drafter would put out.

    logits_of: [len(text), vocab] for each text. At T > 0 it meets the committed token only through the noise.
    """
    known = Known(texts)

    def script(asks: Sequence[Ask], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for row, ask in zip(logits, asks, strict=True):
            i, anchor = known.place(ask)
            true = logits_of[i][anchor : anchor + len(row)]
            row[: len(true)] = true
        return logits

    return script


def adversary(
    texts: Sequence[Sequence[int]], logits_of: Sequence[torch.Tensor]
) -> Callable[[Sequence[Ask], torch.Tensor], torch.Tensor]:
    """Plausible and wrong, in a way that changes from round to round.

    Tokens that the target itself likes second best stand before the true one, the tree is the true text moved
    by one position, or the true token leads at every other depth and a likely sibling in between.
    """
    known = Known(texts)

    def script(asks: Sequence[Ask], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for row, ask in zip(logits, asks, strict=True):
            i, anchor = known.place(ask)
            ahead = known.ahead(ask, len(row) + 1)
            for depth in range(min(len(row), len(ahead))):
                true = ahead[depth]
                likely = [t for t in logits_of[i][anchor + depth].topk(4).indices.tolist() if t != true]
                if anchor % 3 == 0:
                    order = [*likely, true]
                elif anchor % 3 == 1:
                    order = [*ahead[depth + 1 : depth + 2], *likely[:1], true]
                else:
                    order = [true, *likely] if depth % 2 == 0 else [likely[0], true, *likely[1:]]
                for rank, token in enumerate(dict.fromkeys(order)):
                    # Close together, so that branches cross in the best-first order.
                    row[depth, token] = 30.0 - 0.5 * rank
        return logits

    return script


def swapped(asks: Sequence[Ask], logits: torch.Tensor) -> torch.Tensor:
    """In every other round a session's best and third-best token change places at every depth.

    Needs no known text, and is wrong where the drafter is sure.
    """
    best = logits.topk(3, dim=-1)
    wrong = logits.scatter(-1, best.indices.flip(-1), best.values)
    odd = torch.tensor([ask.session.sequence.length % 2 == 1 for ask in asks])
    return torch.where(odd[:, None, None], wrong, logits)
