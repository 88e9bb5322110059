"""Part draft: the block pass with its trees, by graph replay and without, against its floor; appends.

`pass ms` is the device's, from the copy of the inputs to that of the trees; of it `marginals` are the
vocabulary's best tokens and `tree` the build upon them, each captured alone, and `block` is what is left.
`host ms` is what the service's thread waits for, packing and unpacking included. The floor: layers, head and
context read once. Does not own how a drafter is put together for a benchmark (benchmarks.draft_pass).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.draft_pass import Bench, load
from benchmarks.gpu.clock import captured, device_ms, host_ms, release
from benchmarks.gpu.floor import append_bytes, products_ms
from benchmarks.gpu.setup import Part, Setup, Stage
from draft_service.device_trees import DeviceTrees
from draft_service.host_trees import Ask
from kernels.marginals import Candidates, top_candidates
from kernels.tree import pack_trees

APPEND_ROWS = (1, 2, 4, 8, 16)
HEADER = (
    "graphs", "sessions", "context", "nodes", "pass ms", "block ms", "marginals ms", "tree ms", "host ms",
    "floor ms", "pass / floor", "block / floor",
)  # fmt: skip


def stages_of(bench: Bench, asks: list[Ask], repeats: int) -> tuple[float, float]:
    """ms of the marginals and of the tree build alone."""
    config, device = bench.drafter.config, bench.drafter.device
    sessions, nodes = len(asks), asks[0].max_nodes
    depth = min(config.horizon, nodes)
    logits = torch.randn(sessions, depth, config.vocab_size, device=device).mul_(3).to(bench.drafter.dtype)

    def column(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((sessions,), value, dtype=dtype, device=device)

    rules = (column(0, torch.float32), column(1, torch.int64), column(0))
    bases, limits, budgets = column(bench.context), column(depth), column(nodes)

    def marginals() -> Candidates:
        return top_candidates(logits, *rules, bases, limits, width=min(nodes, config.vocab_size))

    candidates = marginals()

    def timed(run: Callable[[], object]) -> float:
        return device_ms(captured(run, device), device, repeats=repeats)

    return timed(marginals), timed(lambda: pack_trees(candidates, budgets, limits, nodes=nodes))


def products_of(bench: Bench, sessions: int, setup: Setup) -> float:
    """ms of the block pass's products alone: all rows through the layers, the predicted ones through the
    head."""
    drafter = bench.drafter
    layers = [x for layer in drafter._layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    options: dict[str, Any] = {"dtype": drafter.dtype, "device": drafter.device, "repeats": setup.repeats}
    inner = products_ms(layers, sessions * drafter.config.block_size, **options)
    return inner + products_ms([drafter._head], sessions * drafter.config.horizon, **options)


def append_row(bench: Bench, rows: int, repeats: int) -> list[Any]:
    """[rows, device ms, host ms] of appending rows that lie on the device already."""
    drafter = bench.drafter
    features = torch.randn(rows, drafter.config.feature_size, device=drafter.device).to(drafter.dtype)
    positions, slots = torch.arange(rows), torch.arange(rows)

    def run() -> None:
        bench.appends.append(features, positions, slots)

    on_device = device_ms(run, drafter.device, repeats=repeats)
    return [rows, on_device, host_ms(run, drafter.device, repeats=repeats)]


def measure(setup: Setup) -> Part:
    """Tables `draft passes` and `appends`, and the stages of one stream."""
    part, told = Part(), setup.told
    if setup.drafter is None:
        part.notes.append("there is no drafter")
        return part
    rows: list[list[Any]] = []
    part.tables["draft passes"] = (HEADER, rows)
    for context in setup.contexts:
        counts = [n for n in setup.concurrency if n * context <= setup.kv_tokens]
        if not counts or not setup.budget.fits(2.0):
            part.notes.append(
                f"draft passes over {context} tokens: left out, of K/V or of time is too little"
            )
            continue
        bench = load(
            setup.draft_settings,
            device=str(setup.device),
            context=context,
            sessions=max(counts),
            graphs=True,
        )
        modes = [("on", bench)]
        if setup.eager and setup.on_gpu:
            trees = DeviceTrees(bench.drafter, bench.pages, top_k=None, simulation=None, graphs=False)
            modes.append(("off", replace(bench, trees=trees)))
        for graphs, of in modes:
            for count in counts:
                if count > of.trees.most_sessions:
                    part.notes.append(f"{count} sessions are more than one pass takes: left out")
                    continue
                for nodes in setup.nodes:
                    if not setup.budget.fits(1.0):
                        part.notes.append(f"draft {count} x {nodes} nodes, graphs {graphs}: no time left")
                        continue
                    rows.append(_row(setup, of, graphs, count, nodes))
                    if (graphs, count, context, nodes) == ("on", told.sessions, told.context, told.nodes):
                        part.stages = _stages(setup, bench, rows[-1])
        if context == told.context:
            appends = [append_row(bench, n, setup.repeats) for n in APPEND_ROWS]
            part.tables["appends"] = (("rows", "device ms", "host ms"), appends)
            eight = next(row for row in appends if row[0] == 8)
            read = setup.rates.read_ms(append_bytes(setup.drafter, setup.act))
            part.stages.append(Stage("draft: append of 8 rows", read, eight[1]))
            part.stages.append(Stage("draft: append, host", 0.0, max(eight[2] - eight[1], 0.0)))
        del bench, modes, of
        release(setup.device)
    return part


def _row(setup: Setup, bench: Bench, graphs: str, sessions: int, nodes: int) -> list[Any]:
    asks, device = bench.asks(sessions, nodes), setup.device
    bench.trees.grow(asks)  # compiled, captured
    launch = bench.trees.prepare(asks).launch
    whole = device_ms(launch, device, repeats=setup.repeats, launching_ms=8.0 if graphs == "off" else 0.5)
    marginals, tree = stages_of(bench, asks, setup.repeats)
    waited = host_ms(lambda: bench.trees.grow(asks), device, repeats=setup.repeats)
    floor = setup.rates.read_ms(bench.floor_bytes(sessions))
    block = whole - marginals - tree
    times = [whole, block, marginals, tree, waited]
    return [graphs, sessions, bench.context, nodes, *times, floor, whole / floor, block / floor]


def _stages(setup: Setup, bench: Bench, row: list[Any]) -> list[Stage]:
    sessions, drafter, rates = int(row[1]), bench.drafter, setup.rates
    whole, block, marginals, tree, waited = row[4:9]
    products = products_of(bench, sessions, setup)
    context = rates.read_ms(sessions * bench.context * drafter.bytes_per_token)
    return [
        Stage("draft: products", rates.read_ms(drafter.pass_bytes), products),
        Stage("draft: attention, small ops, between launches", context, block - products),
        Stage("draft: best tokens of the vocabulary", 0.0, marginals),
        Stage("draft: tree", 0.0, tree),
        Stage("draft: host", 0.0, waited - whole),
    ]
