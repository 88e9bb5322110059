"""Which passes recur: the sizes that steps are padded to, and the steps that are run before anybody comes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from target_service.config import Limits
from target_service.model.packing import bucket, cover
from target_service.step import Segment, Step
from target_service.warmup import decode_steps, mixed_steps, prefill_steps, tree_steps

LIMITS = Limits(
    num_pages=256,
    page_size=16,
    max_length=4096,
    max_sessions=256,
    max_tree_nodes=64,
    max_verify_rows=520,
    prefill_chunk=1024,
    channel_slots=128,
)
SMALL = {
    "as chosen": LIMITS,
    "one session": replace(LIMITS, max_sessions=1),
    "small chunks": replace(LIMITS, prefill_chunk=8, max_verify_rows=65),
    "one page": replace(LIMITS, num_pages=1, max_length=16),
    "no trees": replace(LIMITS, max_tree_nodes=0, max_verify_rows=1, prefill_chunk=1),
    "deterministic": replace(LIMITS, deterministic=True),
}


@pytest.mark.parametrize("limits", SMALL.values(), ids=SMALL)
def test_steps_run_beforehand_are_such_as_can_come(limits: Limits) -> None:
    """A larger one would take memory that was planned for nobody, and time at every start."""
    for make in (decode_steps, tree_steps, mixed_steps, prefill_steps):
        for step in make(limits):
            trees = [segment for segment in step.segments if segment.parents is not None]
            chunks = [segment for segment in step.segments if segment.parents is None]
            assert step.slots is None and not step.read_logits
            assert len(step.segments) <= (1 if limits.deterministic else limits.max_sessions)
            assert sum(segment.rows for segment in trees) <= limits.max_verify_rows
            assert sum(segment.rows for segment in chunks) <= limits.prefill_chunk
            assert all(segment.rows <= limits.max_tree_nodes + 1 for segment in trees)
            assert all(page < limits.num_pages for segment in step.segments for page in segment.pages)
            firsts = [segment.first_row for segment in step.segments]
            ends = [segment.first_row + segment.rows for segment in step.segments]
            assert [0, *ends] == [*firsts, step.tokens.numel()] and step.positions.shape == step.tokens.shape
            assert sum(len(group.positions) for group in step.groups) == step.logit_rows.numel()


def step_of(trees: list[int], chunks: list[int]) -> Step:
    """Only what sizes follow from. Each chunk's last row has logits."""
    segments, logits, rows = [], [], 0
    for count, tree in [*((n, True) for n in trees), *((n, False) for n in chunks)]:
        parents = (-1, *(0,) * (count - 1)) if tree else None
        segments.append(Segment(rows, count, 0, (), parents))
        logits += range(rows, rows + count) if tree else [rows + count - 1]
        rows += count
    return Step(torch.zeros(rows), torch.zeros(rows), tuple(segments), torch.tensor(logits))


@pytest.mark.parametrize("most", [65, 300, 520, 2568])
def test_a_bucket_holds_its_step_and_a_row_for_padding_logits(most: int) -> None:
    for trees, chunks in (([17] * n, [m] * bool(m)) for n in range(20) for m in (0, 1, 7, 63, 400, 1024)):
        rows = sum(trees) + sum(chunks)
        if not 0 < rows <= most:
            continue
        step = step_of(trees, chunks)
        shape = bucket(step, 4, most)
        wanted = step.logit_rows.numel()
        if shape is None:
            assert chunks and rows == most  # no row is left for padding logits
            continue
        assert rows <= shape.rows <= most and wanted <= shape.logit_rows
        assert max(segment.rows for segment in step.segments) <= shape.most_rows <= shape.rows
        assert shape.trees == (not chunks)
        if chunks and wanted < shape.logit_rows:
            assert shape.rows - 1 >= rows


def test_the_largest_trees_recur_whatever_the_limit() -> None:
    """A limit between two sizes is one itself: the fullest passes are not those that are never captured."""
    shape = bucket(step_of([60] * 5, []), 4, 316)
    assert shape is not None and shape.rows == 316


def test_any_pass_of_trees_finds_a_graph_once_warm() -> None:
    """Of up to 32 sessions, whatever the sizes of their trees."""
    shapes = {bucket(step, 4, 520) for step in (*decode_steps(LIMITS), *tree_steps(LIMITS))}
    captured = {shape for shape in shapes if shape is not None and shape.trees}
    rng = random.Random(7)
    lent = 0
    for _ in range(2000):
        sessions = rng.choice((1, 2, 3, 5, 8, 12, 20, 32))
        trees = [rng.randint(1, 65) for _ in range(sessions)]
        while sum(trees) > 512:
            trees[trees.index(max(trees))] //= 2
        shape = bucket(step_of(trees, []), 4, 520)
        assert shape is not None
        found = shape if shape in captured else cover(shape, captured)
        assert found is not None, shape
        assert found.rows >= shape.rows and found.sessions >= shape.sessions
        assert found.most_rows >= shape.most_rows and found.rows <= max(1.5 * shape.rows, shape.rows + 128)
        lent += found != shape
    assert lent > 500


def test_prompts_and_wasteful_sizes_are_not_lent() -> None:
    trees, mixed = (bucket(step_of([17, 17], chunk), 4, 520) for chunk in ([], [60]))
    large, other = bucket(step_of([65] * 5, []), 4, 520), bucket(step_of([65] * 2, []), 9, 520)
    assert trees is not None and mixed is not None and large is not None and other is not None
    assert cover(mixed, [large]) is None
    assert cover(trees, [large]) is None  # ten times the rows
    assert cover(trees, [other]) is None  # pages of a longer session
    assert cover(trees, [large, replace(other, pages=4)]) == replace(other, pages=4)
