"""Time and bandwidth of the choice, the drafter's top-k, the tree build and the walk on a GPU.

    python -m benchmarks.kernels_choice [--vocab 151936] [--dtype bfloat16] [--out FILE]

Each op is captured many times into a CUDA graph, over several sets of tensors (together past the L2 where
that takes no more than 32), and the graph is replayed: what it costs inside of a round's graph. Bandwidth is
the bytes that must be read once over that time, its share is of the copy rate measured in the same run.
Beside it, where torch has one, the nearest op without noise and without an order of ties, captured likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.common import arguments, report
from benchmarks.gpu.clock import copy_rate
from benchmarks.kernels_small import MAX_SETS, SPREAD_BYTES, replay_us
from kernels.choice import choose_rows
from kernels.device import parse_dtype
from kernels.marginals import Candidates, top_candidates
from kernels.ragged import TREE
from kernels.tree import grow_trees, pack_trees
from kernels.walk import walk_rows

HORIZON = 15
ROWS = (1, 17, 65, 512)
SESSIONS = (1, 32)
NODES = (16, 64, 128, 256)
HEADER = ("op", "shape", "sets", "us", "GB/s", "of copy", "torch us")


@dataclass(frozen=True, slots=True)
class Case:
    """One call on its own tensors. bytes: what it must read. plain: what torch would do, or None."""

    op: str
    shape: str
    bytes: int
    run: Callable[[], object]
    plain: Callable[[], object] | None = None


def makers(vocab: int, dtype: torch.dtype, device: str) -> Iterator[Callable[[], Case]]:
    """Functions that make a case on fresh tensors."""
    for heat in (0.0, 1.0):
        for rows in ROWS:
            yield lambda rows=rows, heat=heat: choice(rows, heat, vocab, dtype, device)  # type: ignore[misc]
    for heat in (0.0, 1.0):
        for sessions in SESSIONS:
            for nodes in (16, 64, 256):
                yield lambda s=sessions, n=nodes, t=heat: top_k(s, n, t, vocab, dtype, device)  # type: ignore[misc]
    for sessions in SESSIONS:
        for nodes in NODES:
            yield lambda s=sessions, n=nodes: tree(s, n, device)  # type: ignore[misc]
    for sessions in SESSIONS:
        yield lambda s=sessions: whole(s, 64, vocab, dtype, device)  # type: ignore[misc]
    for sessions in SESSIONS:
        for nodes in (64, 256):
            yield lambda s=sessions, n=nodes: walked(s, n, device)  # type: ignore[misc]


def _ints(count: int, device: str, value: int = 0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=device)


def _name(heat: float) -> str:
    return "sampled" if heat else "greedy"


def choice(rows: int, heat: float, vocab: int, dtype: torch.dtype, device: str) -> Case:
    logits = torch.randn(rows, vocab, device=device).mul_(3).to(dtype)
    seeds = torch.arange(rows, device=device)
    args = (torch.full((rows,), heat, device=device), seeds, _ints(rows, device, 9), _ints(rows, device))
    return Case(
        f"choose_rows {_name(heat)}",
        f"{rows} x {vocab}",
        logits.nbytes,
        lambda: choose_rows(logits, *args),
        lambda: logits.argmax(dim=-1),
    )


def _session_arguments(sessions: int, heat: float, device: str) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((sessions,), heat, device=device),
        torch.arange(sessions, device=device),
        _ints(sessions, device),
        _ints(sessions, device, 1000),
    )


def top_k(sessions: int, width: int, heat: float, vocab: int, dtype: torch.dtype, device: str) -> Case:
    logits = torch.randn(sessions, HORIZON, vocab, device=device).mul_(3).to(dtype)
    args = (*_session_arguments(sessions, heat, device), _ints(sessions, device, HORIZON))
    return Case(
        f"top_candidates {_name(heat)}",
        f"{width} of {sessions} x {HORIZON} x {vocab}",
        logits.nbytes,
        lambda: top_candidates(logits, *args, width=width),
        lambda: logits.float().log_softmax(dim=-1).topk(width, dim=-1),
    )


def tree(sessions: int, nodes: int, device: str) -> Case:
    scores = torch.randn(sessions, HORIZON, 4096, device=device).mul_(4).log_softmax(dim=-1)
    best = scores.topk(nodes, dim=-1)
    candidates = Candidates(best.values, best.indices.to(torch.int32))
    budgets, limits = _ints(sessions, device, nodes), _ints(sessions, device, HORIZON)
    return Case(
        "pack_trees",
        f"{sessions} x {nodes} nodes",
        best.values.nbytes + candidates.ids.nbytes,
        lambda: pack_trees(candidates, budgets, limits, nodes=nodes),
    )


def whole(sessions: int, nodes: int, vocab: int, dtype: torch.dtype, device: str) -> Case:
    logits = torch.randn(sessions, HORIZON, vocab, device=device).mul_(3).to(dtype)
    args = (
        *_session_arguments(sessions, 0.0, device),
        _ints(sessions, device, nodes),
        _ints(sessions, device, HORIZON),
    )
    return Case(
        "grow_trees greedy",
        f"{sessions} x {nodes} nodes, {vocab}",
        logits.nbytes,
        lambda: grow_trees(logits, *args, nodes=nodes),
    )


def walked(sessions: int, nodes: int, device: str) -> Case:
    """Trees of which the longest path, HORIZON deep, is accepted."""
    rows = nodes + 1
    row = torch.arange(sessions * rows, dtype=torch.int32, device=device)
    within = row % rows
    parents = torch.where(within <= HORIZON, row - 1, row - within)  # a chain, the others below the anchor
    parents = torch.where(within == 0, -1, parents)
    args = (row + 1, row, parents, torch.arange(sessions + 1, dtype=torch.int32, device=device) * rows)
    kinds = _ints(sessions, device, TREE)
    return Case(
        "walk_rows",
        f"{sessions} x {nodes} nodes",
        4 * row.nbytes,
        lambda: walk_rows(*args, kinds, most_rows=rows),
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    copied = copy_rate() / 1e9
    print(f"{torch.cuda.get_device_name()}: copy {copied:.0f} GB/s")
    rows = []
    for make in makers(args.vocab, parse_dtype(args.dtype), "cuda"):
        first = make()
        sets = min(MAX_SETS, max(1, SPREAD_BYTES // first.bytes))
        cases = [first, *(make() for _ in range(sets - 1))]
        taken = replay_us([case.run for case in cases])
        plain = replay_us([case.plain for case in cases if case.plain]) if first.plain else None
        rate = first.bytes / taken / 1e3
        rows.append([first.op, first.shape, sets, taken, rate, rate / copied, plain if plain else "-"])
    report(
        "kernels_choice",
        HEADER,
        rows,
        args.out,
        gpu=torch.cuda.get_device_name(),
        copy_gb_per_s=copied,
        dtype=args.dtype,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
