"""The drafter's pass on a GPU: block pass and tree build by graph replay, against the bytes it has to read.

    python -m benchmarks.draft_pass --config benchmarks/configs/qwen3-8b [--sessions 1,8,32] [--nodes 16,64]

Weights are random (--load-format dummy). `pass` is a replay of the whole captured sequence, from the copy of
its inputs to the copy of its trees; `marginals` the vocabulary's best tokens and `tree` the build upon them,
each captured alone; `propose` what the service's thread waits for, packing and unpacking included. The floor
of a pass: its weights, head and context read once, at the copy rate measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import arguments, report
from benchmarks.gpu.clock import captured, copy_rate, device_ms
from draft_service.config import DraftSettings
from draft_service.device_appends import DeviceAppends
from draft_service.device_trees import DeviceTrees
from draft_service.drafter import ContextPages, Drafter
from draft_service.drafter_config import TargetFacts
from draft_service.drafter_files import find_places, open_files
from draft_service.drafter_layouts import parse_config
from draft_service.host_trees import Ask
from draft_service.session import Session
from kernels.device import parse_dtype
from kernels.marginals import Candidates, top_candidates
from kernels.tree import pack_trees
from specbridge.paging import PagePool
from specbridge.rounds import SamplingParams, SessionKey

PAGE = 16
REPEATS = 30
MOST_APPENDED = 1024


@dataclass(frozen=True, slots=True)
class Bench:
    """A drafter with random weights and sessions of the same length over random context."""

    drafter: Drafter
    pages: ContextPages
    trees: DeviceTrees
    appends: DeviceAppends
    sessions: tuple[Session, ...]
    context: int

    def asks(self, count: int, nodes: int) -> list[Ask]:
        depth = self.drafter.config.horizon
        return [Ask(session, 7, nodes, depth) for session in self.sessions[:count]]

    def floor_bytes(self, sessions: int) -> int:
        """Weights of the layers, the head, and the sessions' context."""
        drafter = self.drafter
        return drafter.pass_bytes + sessions * self.context * drafter.bytes_per_token


def load(settings: DraftSettings, *, device: str, context: int, sessions: int, graphs: bool) -> Bench:
    """Raises ConfigError for configurations that do not fit each other."""
    places = find_places(settings)
    files = open_files(settings, places)
    config = parse_config(files.draft_config, TargetFacts.read(files.target_config, places.target))
    dtype = parse_dtype(settings.dtype) if settings.dtype != "auto" else files.stored_dtype()
    drafter = Drafter(
        config,
        files.weights(config, dtype=dtype, device=device),
        dtype=dtype,
        device=device,
        max_position=max(context + config.block_size, config.max_position_embeddings),
    )
    each = -(-context // PAGE)
    pool = PagePool(max(1, each * sessions, MOST_APPENDED // PAGE), PAGE)
    pages = drafter.new_pages(pool.num_pages, PAGE)
    pages.k.normal_()
    pages.v.normal_()
    table = []
    for number in range(sessions):
        sequence = pool.open((), salt=number.to_bytes(4, "little"))
        sequence.extend([0] * context)
        table.append(Session(SessionKey(bytes(16), number), SamplingParams(), b"", sequence))
    trees = DeviceTrees(drafter, pages, top_k=None, simulation=None, graphs=graphs)
    appends = DeviceAppends(drafter, pages, graphs=graphs)
    return Bench(drafter, pages, trees, appends, tuple(table), context)


def stages_ms(bench: Bench, sessions: int, nodes: int) -> tuple[float, float]:
    """Milliseconds of the marginals and of the tree build alone."""
    config, device = bench.drafter.config, bench.drafter.device
    depth = min(config.horizon, nodes)
    logits = torch.randn(sessions, depth, config.vocab_size, device=device).mul_(3).to(bench.drafter.dtype)

    def column(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((sessions,), value, dtype=dtype, device=device)

    temperature, seeds, choices = column(0, torch.float32), column(1, torch.int64), column(0)
    bases, limits, budgets = column(bench.context), column(depth), column(nodes)
    width = min(nodes, config.vocab_size)

    def marginals() -> Candidates:
        return top_candidates(logits, temperature, seeds, choices, bases, limits, width=width)

    candidates = marginals()
    grow = captured(lambda: pack_trees(candidates, budgets, limits, nodes=nodes))
    return device_ms(captured(marginals)), device_ms(grow)


def propose_ms(bench: Bench, asks: list[Ask], repeats: int = REPEATS) -> float:
    """Median milliseconds until the trees are there, by the host's clock."""
    times = []
    for _ in range(repeats + 3):
        begun = time.perf_counter()
        bench.trees.grow(asks)
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[3:])


def append_row(bench: Bench, rows: int) -> list[float]:
    """[rows, device ms, host ms] of appending that many rows that lie on the device already."""
    drafter, device = bench.drafter, bench.drafter.device
    features = torch.randn(rows, drafter.config.feature_size, device=device).to(drafter.dtype)
    positions, slots = torch.arange(rows), torch.arange(rows)

    def run() -> None:
        bench.appends.append(features, positions, slots)

    on_device = device_ms(run)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1e3)
    return [rows, on_device, statistics.median(times)]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--config", required=True, help="the target's config.json, or its folder")
    parser.add_argument("--drafter-config", default="", help="default: dflash beside the target's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sessions", default="1,8,32")
    parser.add_argument("--nodes", default="16,64")
    parser.add_argument("--append-rows", default="1,8,64,512")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch sees none")
    settings = DraftSettings(
        load_format="dummy", config=args.config, drafter_config=args.drafter_config, dtype=args.dtype
    )
    counts = [int(n) for n in args.sessions.split(",")]
    sizes = [int(n) for n in args.nodes.split(",")]
    bench = load(
        settings,
        device="cuda",
        context=args.context,
        sessions=max(counts),
        graphs=not args.no_cuda_graphs,
    )
    rate = copy_rate()
    rows: list[list[object]] = []
    for count in counts:
        if count > bench.trees.most_sessions:
            print(f"{count} sessions are more than one pass takes, {bench.trees.most_sessions}: left out")
            continue
        floor = bench.floor_bytes(count) / rate * 1e3
        for nodes in sizes:
            asks = bench.asks(count, nodes)
            bench.trees.grow(asks)
            whole = device_ms(bench.trees.prepare(asks).launch)
            marginals, tree = stages_ms(bench, count, nodes)
            block = whole - marginals - tree
            rows.append(
                [count, nodes, whole, block, marginals, tree, propose_ms(bench, asks), floor, whole / floor,
                 block / floor]
            )  # fmt: skip
    header = ["sessions", "nodes", "pass ms", "block ms", "marginals ms", "tree ms", "propose ms", "floor ms",
              "pass / floor", "block / floor"]  # fmt: skip
    appends = [append_row(bench, int(n)) for n in args.append_rows.split(",")]
    report(
        "draft_pass",
        header,
        rows,
        args.out,
        config=Path(args.config).name,
        context=args.context,
        dtype=str(bench.drafter.dtype).removeprefix("torch."),
        graphs=not args.no_cuda_graphs,
        gpu=torch.cuda.get_device_name(),
        copy_gb_per_s=rate / 1e9,
        pass_bytes=bench.drafter.pass_bytes,
        appends={"header": ["rows", "device ms", "host ms"], "rows": appends},
    )
    for append in appends:
        print("append of {} rows: {:.3f} ms on the device, {:.3f} ms of the host".format(*append))
    return 0


if __name__ == "__main__":
    sys.exit(main())
