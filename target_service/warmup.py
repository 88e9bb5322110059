"""Warm-up: run every kind of pass once, and measure what a verify pass costs at several sizes.

Owns the measuring. The passes read pages and commit nothing, so they leave no trace in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specbridge.rounds import CostPoint, SamplingParams
from target_service.config import Limits
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import Segment, Step, StepOutput

WIDE_NS = 50_000_000
"""Passes of more rows than two trees are measured until one takes longer than this."""
COVERING_ROWS = (136, 264, 384, 512, 768, 1152, 1664)
"""Rows of passes whose graphs run others': each holds all sizes from two thirds of it, or 128 rows less."""
WARM_ROWS = 320
"""Passes of many sessions' trees are run beforehand up to so many rows; larger ones when they first occur."""


def measure_verify_cost(
    run: Callable[[Step], StepOutput], limits: Limits, *, repeats: int, budget_s: float = 8.0
) -> tuple[CostPoint, ...]:
    """Median wall time of verify passes over rows x context, choice and its read-back included.

    Row counts go up to two full trees; contexts are short, a quarter of the session length and (if the time
    budget of `budget_s` seconds allows) all of it. What many sessions need, up to all rows of a step, is
    measured over the short context, as long as it is quick. Empty with repeats = 0.
    """
    if not repeats:
        return ()
    largest = min(2 * (limits.max_tree_nodes + 1), limits.max_verify_rows)
    sizes = pass_sizes(largest)
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
        wider = [size for size in pass_sizes(limits.max_verify_rows) if size > largest and not done]
        for size in (*sizes, *wider):
            if size > largest and points[-1].time_ns > WIDE_NS:
                break
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


def pass_sizes(largest: int) -> list[int]:
    """Rows to measure: 1, 2, 3, 4, 6, 8, 12, .., `largest`, at most half as many again each time.

    Costs have stairs (blocks of a product, captured sizes), which doublings alone would step over.
    """
    sizes = sorted({*(1 << bit for bit in range(16)), *(3 << bit for bit in range(15))})
    below = [size for size in sizes if size < 0.95 * largest]
    return [*below, largest]


def measure_prefill_cost(
    run: Callable[[Step], StepOutput], limits: Limits, *, budget_s: float = 2.0
) -> tuple[CostPoint, ...]:
    """Wall time of prompt chunks that choose one token: a sixteenth, a quarter and all of the largest chunk
    over a short context, and (if the time budget allows) the largest over a long one.

    Once each, after a first pass that pays for allocations (where passes are captured, after prefill_steps):
    passes under way correct what this gets wrong.
    """
    points: list[CostPoint] = []
    begin = time.perf_counter()
    for step in prefill_steps(limits):
        if points and time.perf_counter() - begin > budget_s:
            break
        run(step)
        start = time.perf_counter_ns()
        run(step)
        taken = time.perf_counter_ns() - start
        points.append(CostPoint(step.tokens.numel(), step.segments[0].context_length, taken))
    return tuple(points)


def prefill_steps(limits: Limits) -> list[Step]:
    """The chunks that measure_prefill_cost times."""
    room = min(limits.max_length, limits.num_pages * limits.page_size) - 2
    most = max(1, min(limits.prefill_chunk, room))
    longest = max(room - most, 0)
    short, long = min(128, longest), min(4096, longest)
    sizes = sorted({max(1, most // 16), max(1, most // 4), most})
    wanted = [(rows, short) for rows in sizes] + ([(most, long)] if long > 2 * short else [])
    return [chunk_step(rows, context, limits.page_size) for rows, context in wanted]


def chunk_step(rows: int, context: int, page_size: int) -> Step:
    """A prompt chunk of `rows` rows behind `context` committed ones, whose last row chooses a token."""
    positions = list(range(context, context + rows))
    return Step(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        segments=(Segment(0, rows, context, tuple(range(-(-context // page_size)))),),
        logit_rows=torch.tensor([rows - 1]),
        groups=(RowGroup(ChoiceRule(SamplingParams()), 0, [context + rows]),),
        read_logits=False,
        warms=True,
    )


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
        warms=True,
    )


def decode_steps(limits: Limits) -> list[Step]:
    """Plain decoding of 1, 2, 4, .. sessions, as far as the limits go; the passes read one page."""
    steps: list[Step] = []
    sessions = 1
    while sessions <= min(_together(limits), limits.max_verify_rows):
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
                warms=True,
            )
        )
        sessions *= 2
    return steps


def tree_steps(limits: Limits) -> list[Step]:
    """Small trees of several sessions, as rounds under load have them: sessions 2, 4, .. 32 with 2, 4, 8 and
    17 rows each, at most WARM_ROWS in all; the passes read one page."""
    steps: list[Step] = []
    for sessions in (2, 4, 8, 16, 32):
        for rows in (2, 4, 8, 17):
            total = sessions * rows
            if sessions > _together(limits) or total > min(limits.max_verify_rows, WARM_ROWS):
                break
            if rows <= limits.max_tree_nodes + 1:
                steps.append(_join([scratch_step(rows, limits.page_size - 2, limits.page_size)] * sessions))
    return steps + covering_steps(limits)


def covering_steps(limits: Limits) -> list[Step]:
    """Passes that hold a tree of up to 64 nodes beside others, a few sizes of them: others that have no graph
    of their own yet are run by theirs (model.packing.cover)."""
    steps: list[Step] = []
    largest = min(65, limits.max_tree_nodes + 1)
    for sessions in (8, 32):
        for total in COVERING_ROWS:
            each = (total - largest) // (sessions - 1)
            if sessions > _together(limits) or total > limits.max_verify_rows or each < 1:
                continue
            rows = [largest, *[min(each, largest)] * (sessions - 1)]
            steps.append(_join([scratch_step(n, limits.page_size - 2, limits.page_size) for n in rows]))
            if each >= largest:
                break  # no more fit into so few sessions
    return steps


def mixed_steps(limits: Limits) -> list[Step]:
    """Prompt chunks of several sizes, alone and beside one or some streams' rounds: what a newcomer must not
    wait for."""
    context, page = limits.page_size - 2, limits.page_size
    sizes = [
        n for n in (8, 16, 64, 128, 256, 1024) if n <= limits.prefill_chunk and n + 16 <= limits.max_length
    ]
    rounds = [scratch_step(rows, context, page) for rows in (1, min(17, limits.max_tree_nodes + 1))]
    steps = []
    for rows in sizes:
        chunk = chunk_step(rows, 0, page)
        steps.append(chunk)
        for round_ in rounds:
            for count in (1, 4, 32):
                fits = count * round_.tokens.numel() <= limits.max_verify_rows
                if fits and count < _together(limits):
                    steps.append(_join([round_] * count + [chunk]))
    return steps


def _together(limits: Limits) -> int:
    """Sessions of a pass, at most."""
    return 1 if limits.deterministic else limits.max_sessions


def _join(steps: Sequence[Step]) -> Step:
    """One step of the segments of several."""
    segments, logit_rows, groups = [], [], []
    rows = choices = 0
    for step in steps:
        segments += [replace(segment, first_row=segment.first_row + rows) for segment in step.segments]
        groups += [replace(group, first_row=group.first_row + choices) for group in step.groups]
        logit_rows.append(step.logit_rows + rows)
        rows += step.tokens.numel()
        choices += step.logit_rows.numel()
    return Step(
        tokens=torch.cat([step.tokens for step in steps]),
        positions=torch.cat([step.positions for step in steps]),
        segments=tuple(segments),
        logit_rows=torch.cat(logit_rows),
        groups=tuple(groups),
        read_logits=False,
        warms=True,
    )
