"""Warm-up: run every kind of pass once, and measure what a verify pass costs at several sizes.

Owns the measuring. The passes read pages and commit nothing, so they leave no trace in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from specbridge.rounds import CostPoint, SamplingParams
from target_service.config import Limits
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import Segment, Step, StepOutput


def measure_verify_cost(
    run: Callable[[Step], StepOutput], limits: Limits, *, repeats: int, budget_s: float = 8.0
) -> tuple[CostPoint, ...]:
    """Median wall time of verify passes over rows x context, choice and its read-back included.

    Row counts double up to two full trees; contexts are short, a quarter of the session length and (if the
    time budget of `budget_s` seconds allows) all of it. Empty with repeats = 0.
    """
    if not repeats:
        return ()
    largest = min(2 * (limits.max_tree_nodes + 1), limits.max_verify_rows)
    rows, sizes = 1, []
    while rows < largest:
        sizes.append(rows)
        rows *= 2
    sizes.append(largest)
    longest = min(limits.max_length, limits.num_pages * limits.page_size) - 2
    contexts = sorted({min(128, longest), min(1024, longest), longest // 4, longest})
    points: list[CostPoint] = []
    begin = time.perf_counter()
    for done, context in enumerate(contexts):
        spent = time.perf_counter() - begin
        # Contexts are measured whole, so that the curve is a grid; the next one costs at least what the last
        # did.
        if done and spent * (done + 1) / done > budget_s:
            break
        for size in sizes:
            times: list[int] = []
            while len(times) <= repeats:
                step = scratch_step(size, context, limits.page_size)
                start = time.perf_counter_ns()
                run(step)
                times.append(time.perf_counter_ns() - start)
                if len(times) > 1 and time.perf_counter() - begin > budget_s:
                    break
            # The first pass of a shape pays for allocations.
            points.append(CostPoint(size, context, int(statistics.median(times[1:]))))
    return tuple(points)


def scratch_step(rows: int, context: int, page_size: int) -> Step:
    """A verify pass of one session: an anchor and rows - 1 children of it, over `context` committed rows."""
    pages = tuple(range(-(-context // page_size)))
    # Siblings only: their one common position can't pass the length limit, and depth costs nothing by itself.
    positions = [context, *[context + 1] * (rows - 1)]
    return Step(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        segments=(Segment(0, rows, context, pages, (-1, *(0,) * (rows - 1))),),
        logit_rows=torch.arange(rows),
        groups=(RowGroup(ChoiceRule(SamplingParams()), 0, [p + 1 for p in positions]),),
        read_logits=False,
    )


def decode_steps(limits: Limits) -> list[Step]:
    """Plain decoding of 1, 2, 4, .. sessions, as far as the limits go; the passes read one page."""
    steps: list[Step] = []
    sessions = 1
    while sessions <= min(limits.max_sessions, limits.max_verify_rows):
        segments = tuple(Segment(i, 1, limits.page_size - 1, (0,), (-1,)) for i in range(sessions))
        positions = torch.full((sessions,), limits.page_size - 1, dtype=torch.int64)
        steps.append(
            Step(
                tokens=torch.zeros(sessions, dtype=torch.int64),
                positions=positions,
                segments=segments,
                logit_rows=torch.arange(sessions),
                groups=(RowGroup(ChoiceRule(SamplingParams()), 0, (positions + 1).tolist()),),
                read_logits=False,
            )
        )
        sessions *= 2
    return steps
