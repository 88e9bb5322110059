"""How long one forward of n rows on a cached context takes, against transformers' one-token decode.

    python -m benchmarks.model_step [--model smollm2-135m] [--context 200] [--rows 1,5,9,17,33] [--dtype
    bfloat16]

All row counts and the transformers step take turns, so that a disturbed machine disturbs them alike; medians.
Rows above one are a tree of depth up to 8, as a verify pass has them; each pass commits its anchor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, report
from specbridge.models import resolve_target
from specbridge.rounds import SamplingParams
from target_service.runner import Runner, load_runner
from target_service.sampling import ChoiceRule, RowGroup
from target_service.step import NO_SLOT, Segment, Step

PAGE = 16


def tree_step(rows: int, context: int, pages: tuple[int, ...], sessions: int) -> Step:
    """`sessions` trees of `rows` rows: a chain of up to 8, then nodes spread over its parents."""
    parents = [-1] + [i - 1 if i < 9 else i % 8 for i in range(1, rows)]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    each = len(pages) // sessions
    segments = tuple(
        Segment(s * rows, rows, context, pages[s * each : (s + 1) * each], tuple(parents))
        for s in range(sessions)
    )
    generator = torch.Generator().manual_seed(0)
    count = rows * sessions
    positions = torch.tensor(depths * sessions) + context
    greedy = RowGroup(ChoiceRule(SamplingParams()), 0, (positions + 1).tolist())
    return Step(
        torch.randint(5, 1000, (count,), generator=generator),
        positions,
        segments,
        torch.arange(count),
        groups=(greedy,),
    )


def prefill(runner: Runner, context: int, pages: tuple[int, ...]) -> float:
    """Fill the context in chunks of 128; returns seconds."""
    begin = time.perf_counter()
    for start in range(0, context, 128):
        count = min(128, context - start)
        tokens = torch.arange(start, start + count) % 997 + 5
        at = torch.arange(start, start + count)
        runner.run(
            Step(
                tokens,
                at,
                (Segment(0, count, start, pages),),
                torch.tensor([count - 1]),
                slots=torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE,
            )
        )
    return time.perf_counter() - begin


def transformers_step(folder: Path, context: int, dtype: str) -> tuple[Callable[[], None], Any]:
    """One-token decode with its KV cache, kept at `context` tokens."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    cache = DynamicCache()
    with torch.inference_mode():
        model((torch.arange(context) % 997 + 5)[None], past_key_values=cache, use_cache=True)
    token = torch.tensor([[7]])

    def step() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache, use_cache=True)
            cache.crop(-1)

    return step, model


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rows", default="1,5,9,17,33")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-reference", action="store_true", help="leave transformers out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = resolve_target(args.model)
    counts = [int(n) for n in args.rows.split(",")]
    each = -(-(args.context + 1) // PAGE)
    pages = tuple(range(each * args.sessions))
    runner = load_runner(
        folder,
        device="cpu",
        dtype=args.dtype,
        num_pages=len(pages) + 4,
        page_size=PAGE,
        max_rows=max(128, max(counts) * args.sessions),
    )
    for s in range(args.sessions):
        prefill_s = prefill(runner, args.context, pages[s * each : (s + 1) * each])
    slot = torch.tensor([pages[args.context // PAGE] * PAGE + args.context % PAGE])
    cases: dict[str, Callable[[], None]] = {}

    def ours(rows: int) -> Callable[[], None]:
        step = tree_step(rows, args.context, pages, args.sessions)
        slots = torch.full((len(step.tokens),), NO_SLOT)
        slots[0] = slot
        step = replace(step, slots=slots)

        def once() -> None:
            runner.run(step)

        return once

    for rows in counts:
        cases[f"{rows} rows"] = ours(rows)
    if not args.no_reference:
        cases["transformers, 1 token"] = transformers_step(folder, args.context, args.dtype)[0]
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(args.repeats + 3):
        for name, once in cases.items():
            begin = time.perf_counter()
            once()
            if turn >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = medians[f"{counts[0]} rows"]
    reference = medians.get("transformers, 1 token", float("nan"))
    rows_out = [[n, m, min(times[n]), m / first, m / reference] for n, m in medians.items()]
    header = ["forward", "median ms", "best ms", f"of {counts[0]} rows", "of transformers"]
    report(
        "model_step",
        header,
        rows_out,
        args.out,
        context=args.context,
        sessions=args.sessions,
        dtype=args.dtype,
        threads=torch.get_num_threads(),
        prefill_tokens_per_s=args.context / prefill_s,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
