"""Step and Commit as one flat int64 tensor, the form in which rank 0 sends them to the other ranks.

[op, ...]
STEP    rows, logit rows, segments, tokens.., positions.., logit rows..,
        then per segment: first_row, rows, context_length, pages, has parents, pages.., parents..
COMMIT  count, rows.., slots..
STOP
"""

from __future__ import annotations

from itertools import chain

import torch

from specbridge.errors import InternalError
from target_service.step import Commit, Segment, Step

STEP, COMMIT, STOP = 1, 2, 3


def encode_step(step: Step) -> torch.Tensor:
    """int64 [n]."""
    tail: list[int] = []
    for s in step.segments:
        tail += (s.first_row, s.rows, s.context_length, len(s.pages), s.parents is not None)
        tail += s.pages
        tail += s.parents or ()
    head = torch.tensor(
        [STEP, step.tokens.numel(), step.logit_rows.numel(), len(step.segments)], dtype=torch.int64
    )
    return torch.cat(
        (head, step.tokens, step.positions, step.logit_rows, torch.tensor(tail, dtype=torch.int64))
    )


def encode_commit(commit: Commit) -> torch.Tensor:
    """int64 [n]."""
    head = torch.tensor([COMMIT, commit.rows.numel()], dtype=torch.int64)
    return torch.cat((head, commit.rows, commit.slots))


def encode_stop() -> torch.Tensor:
    return torch.tensor([STOP], dtype=torch.int64)


def decode(message: torch.Tensor) -> Step | Commit | None:
    """The message's Step or Commit; None for STOP. Raises InternalError for an unknown op."""
    op = int(message[0])
    if op == STOP:
        return None
    if op == COMMIT:
        count = int(message[1])
        return Commit(message[2 : 2 + count], message[2 + count : 2 + 2 * count])
    if op != STEP:
        raise InternalError(f"rank message starts with {op}, not {STEP}, {COMMIT} or {STOP}")
    rows, wanted, segments = (int(x) for x in message[1:4])
    tokens, positions, logit_rows = message[4 : 4 + 2 * rows + wanted].split([rows, rows, wanted])
    words = iter(message[4 + 2 * rows + wanted :].tolist())
    decoded = []
    for _ in range(segments):
        first, count, context, pages, has_parents = (next(words) for _ in range(5))
        ids = tuple(next(words) for _ in range(pages))
        parents = tuple(next(words) for _ in range(count)) if has_parents else None
        decoded.append(Segment(first, count, context, ids, parents))
    assert next(chain(words, (None,))) is None, "rank message is longer than its contents"
    return Step(tokens, positions, tuple(decoded), logit_rows)
