"""Step as one flat int64 tensor, the form in which rank 0 sends it to the other ranks.

[op, ...]
STEP    rows, logit rows, segments, has slots, choices (-1: rank 0 chooses by itself), read logits, mode,
        lender (3), tokens.., positions.., logit rows.., slots.., four rows of choices..,
        then per segment: first_row, rows, context_length, padding, pages, has parents, pages.., parents..
STOP
PING: nothing to do; whether a rank can still be reached shows in the sending

Where hidden states go is rank 0's own matter and stays there, and so do choices that need filters or masks.
"""

from __future__ import annotations

from itertools import chain

import torch

from specbridge.errors import InternalError
from target_service.step import ChoiceRows, Segment, Step

STEP, STOP, PING = 1, 2, 3
_HEAD = 11


def encode_step(step: Step) -> torch.Tensor:
    """int64 [n]."""
    tail: list[int] = []
    for s in step.segments:
        tail += (s.first_row, s.rows, s.context_length, s.padding, len(s.pages), s.parents is not None)
        tail += s.pages
        tail += s.parents or ()
    choice = step.rows_choice
    head = (
        STEP,
        step.tokens.numel(),
        step.logit_rows.numel(),
        len(step.segments),
        step.slots is not None,
        -1 if choice is None else choice.seeds.numel(),
        step.read_logits,
        step.mode,
        *step.lender,
    )
    parts = [torch.tensor(head, dtype=torch.int64), step.tokens, step.positions, step.logit_rows]
    if step.slots is not None:
        parts.append(step.slots)
    if choice is not None:
        parts += (choice.temperature, choice.seeds, choice.positions, choice.choices)
    return torch.cat((*parts, torch.tensor(tail, dtype=torch.int64)))


def encode_stop() -> torch.Tensor:
    return torch.tensor([STOP], dtype=torch.int64)


def encode_ping() -> torch.Tensor:
    return torch.tensor([PING], dtype=torch.int64)


def is_ping(message: torch.Tensor) -> bool:
    return int(message[0]) == PING


def decode(message: torch.Tensor) -> Step | None:
    """The message's Step; None for STOP. Raises InternalError for an unknown op."""
    op = int(message[0])
    if op == STOP:
        return None
    if op != STEP:
        raise InternalError(f"rank message starts with {op}, not {STEP} or {STOP}")
    rows, wanted, segments, has_slots, choices, read_logits, mode, *lender = message[1:_HEAD].tolist()
    sizes = [rows, rows, wanted, rows * has_slots, *[max(choices, 0)] * 4]
    tokens, positions, logit_rows, slots, *choice = message[_HEAD : _HEAD + sum(sizes)].split(sizes)
    words = iter(message[_HEAD + sum(sizes) :].tolist())
    decoded = []
    for _ in range(segments):
        first, count, context, padding, pages, has_parents = (next(words) for _ in range(6))
        ids = tuple(next(words) for _ in range(pages))
        parents = tuple(next(words) for _ in range(count)) if has_parents else None
        decoded.append(Segment(first, count, context, ids, parents, padding=padding))
    assert next(chain(words, (None,))) is None, "rank message is longer than its contents"
    return Step(
        tokens,
        positions,
        tuple(decoded),
        logit_rows,
        slots if has_slots else None,
        read_logits=bool(read_logits),
        mode=mode,
        lender=(lender[0], lender[1], lender[2]),
        rows_choice=ChoiceRows(*choice) if choices >= 0 else None,
    )
