"""Ragged attention on a GPU against its floor: reading K/V once, or the products, whichever takes longer.

    python -m benchmarks.kernels_attention [--shapes qwen3-8b] [--out results.json]
    python -m benchmarks.kernels_attention --sweep --shapes qwen3-8b/tree64/32k

Copy rate and matrix rate are measured in the same run. A shape is timed as a model runs it: a CUDA graph of
several layers, each with its own pages, so that the caches hold nothing of the layer before. The figure is
one layer's time; the plan's (once a pass) stands apart. --sweep tries the neighbours of the table's tiling.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.common import arguments, report
from benchmarks.gpu.clock import captured, copy_rate, device_ms, matmul_rate
from kernels.attention_tiles import Tiling, choose_tiling
from kernels.ragged import BLOCK, CHAIN, TREE, RaggedBatch, RaggedSegment, pack_ragged
from kernels.ragged_attention import AttentionWorkspace, Window, make_workspace, ragged_attention

PAGE = 16
COLD_BYTES = 256 << 20  # a replay touches at least so much K/V: several times the second-level cache
HEADER = ("shape", "us", "floor us", "ratio", "bound by", "plan us", "tiling")


@dataclass(frozen=True, slots=True)
class Model:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`sessions` sessions of `rows` rows over contexts of `lengths` tokens (in turn)."""

    name: str
    model: Model
    kind: int
    sessions: int
    rows: int
    lengths: tuple[int, ...]
    window: Window = Window()

    @property
    def contexts(self) -> list[int]:
        return [self.lengths[s % len(self.lengths)] for s in range(self.sessions)]


QWEN3_8B, SMOLLM2, QWEN3_32B_TP2 = Model(32, 8, 128), Model(9, 3, 64), Model(32, 4, 128)


def shapes() -> Iterator[Shape]:
    """The ones of the published table: single rows, trees, drafter blocks and prefill chunks."""
    for model, family in ((QWEN3_8B, "qwen3-8b"), (SMOLLM2, "smollm2"), (QWEN3_32B_TP2, "qwen3-32b-tp2")):
        long = 32 if family != "smollm2" else 8
        for context in (1, long):
            yield Shape(f"{family}/row/{context}k", model, CHAIN, 1, 1, (context * 1024,))
            for nodes in (16, 32, 64, 128):
                yield Shape(f"{family}/tree{nodes}/{context}k", model, TREE, 1, nodes + 1, (context * 1024,))
        for sessions in (8, 64):
            yield Shape(f"{family}/row/{sessions}x2k", model, CHAIN, sessions, 1, (2048,))
            yield Shape(f"{family}/tree16/{sessions}x2k", model, TREE, sessions, 17, (2048,))
        mixed = (256, 512, 1024, 256, 2048, 512, 256, long * 1024)
        yield Shape(f"{family}/tree16/16x mixed", model, TREE, 16, 17, mixed)
        yield Shape(f"{family}/block16/8x2k", model, BLOCK, 8, 16, (2048,))
        yield Shape(f"{family}/window2k/{long}k", model, TREE, 1, 17, (long * 1024,), Window(rows=2048))
        for context in (0, long):
            yield Shape(f"{family}/chunk2048/{context}k", model, CHAIN, 1, 2048, (context * 1024,))


def tree_parents(rows: int) -> list[int]:
    """A spine of up to 8, then nodes spread over it."""
    return [-1] + [i - 1 if i < 9 else i % 8 for i in range(1, rows)]


def make_batch(shape: Shape) -> tuple[RaggedBatch, int]:
    """The batch, and how many pages it reads, scattered."""
    needed = [-(-length // PAGE) for length in shape.contexts]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    segments = []
    for length, count in zip(shape.contexts, needed, strict=True):
        parents = tree_parents(shape.rows) if shape.kind == TREE else None
        segments.append(RaggedSegment(shape.rows, length, order[:count], shape.kind, parents))
        order = order[count:]
    return pack_ragged(segments, device="cuda"), max(sum(needed), 1)


def floors(shape: Shape, itemsize: int = 2) -> tuple[float, float]:
    """Bytes that have to be moved and FLOP that have to be done for one layer."""
    model, rows = shape.model, shape.rows
    moved = pairs = 0
    for length in shape.contexts:
        seen = length if shape.window.rows is None else min(length, shape.window.rows - 1)
        own = rows * rows if shape.kind == BLOCK else rows * (rows + 1) // 2
        moved += 2 * seen * model.kv_heads + rows * (2 * model.heads + 2 * model.kv_heads)
        pairs += rows * seen + own
    return float(moved * model.head_dim * itemsize), float(4 * pairs * model.heads * model.head_dim)


class Prepared:
    """A shape's tensors on the GPU, for any tiling. layers: how many to run in turn (None: by COLD_BYTES)."""

    def __init__(self, shape: Shape, layers: int | None = None) -> None:
        self.shape = shape
        model = shape.model
        self.batch, pages = make_batch(shape)
        size = 2 * pages * PAGE * model.kv_heads * model.head_dim
        self.layers = layers or min(max(4, -(-COLD_BYTES // (2 * size))), 64)
        self.pages = torch.randn(
            self.layers, 2, pages, PAGE, model.kv_heads, model.head_dim, device="cuda", dtype=torch.bfloat16
        )
        rows = self.batch.rows
        self.q, self.k, self.v = (
            torch.randn(self.layers, rows, heads, model.head_dim, device="cuda", dtype=torch.bfloat16)
            for heads in (model.heads, model.kv_heads, model.kv_heads)
        )
        self.out = torch.empty_like(self.q)

    def workspace(self, tiling: Tiling) -> AttentionWorkspace:
        """Planned for the shape's batch."""
        model, batch = self.shape.model, self.batch
        workspace = make_workspace(
            rows=batch.rows,
            sessions=batch.sessions,
            most_rows=batch.most_rows,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cuda",
            windows=(self.shape.window,),
            tiling=tiling,
        )
        workspace.plan(batch)
        return workspace

    def run(self, workspace: AttentionWorkspace) -> None:
        """All layers once."""
        for i in range(self.layers):
            ragged_attention(
                self.q[i],
                self.k[i],
                self.v[i],
                self.pages[i, 0],
                self.pages[i, 1],
                self.batch,
                scale=self.shape.model.head_dim**-0.5,
                window=self.shape.window,
                workspace=workspace,
                out=self.out[i],
            )

    def time(self, tiling: Tiling) -> tuple[float, float]:
        """Seconds of a layer's attention and of a plan."""
        workspace = self.workspace(tiling)

        def plans() -> None:
            for _ in range(16):
                workspace.plan(self.batch)

        whole, planning = captured(lambda: self.run(workspace)), captured(plans)
        return device_ms(whole) / 1e3 / self.layers, device_ms(planning) / 1e3 / 16


def tabled(shape: Shape) -> Tiling:
    model = shape.model
    return choose_tiling(
        packed_rows=shape.rows * model.heads // model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
    )


def blockings(tiling: Tiling) -> list[Tiling]:
    """The tiling, and those with other blocks, warps and stages."""
    sizes = sorted({max(tiling.block_m // 2, 16), tiling.block_m, min(2 * tiling.block_m, 256)})
    found = [tiling]
    for block_m, block_n, warps, stages in itertools.product(sizes, (32, 64, 128), (4, 8), (2, 3, 4)):
        other = replace(tiling, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)
        # Large blocks do not fit the registers of 4 warps, nor small tiles feed 8.
        large = block_m * block_n > 128 * 32 and block_m >= 128
        if other not in found and not (large and warps == 4) and not (block_m <= 32 and warps == 8):
            found.append(other)
    return found


def spreads(tiling: Tiling) -> list[Tiling]:
    """The tiling with other numbers of parts: the same machine code."""
    return [
        replace(tiling, resident=resident, min_blocks=min_blocks)
        for resident, min_blocks in itertools.product((1, 2, 3, 4), (1, 2, 4, 8))
    ]


def short(tiling: Tiling) -> str:
    return (
        f"{tiling.block_m}x{tiling.block_n} warps {tiling.num_warps} stages {tiling.num_stages} "
        f"resident {tiling.resident} least {tiling.min_blocks}"
    )


def sweep(shape: Shape, workers: int) -> list[tuple[float, Tiling]]:
    """Tilings that the device can run, the fastest first: all blockings, then the best ones' spreads."""
    from kernels.cuda.ragged_attention import OutOfResources

    tilings = blockings(tabled(shape))
    compile_ahead(shape, tilings, workers)
    prepared = Prepared(shape)
    found: dict[Tiling, float] = {}

    def measure(tiling: Tiling) -> None:
        if tiling in found:
            return
        try:
            found[tiling] = prepared.time(tiling)[0]
        except OutOfResources:
            pass  # more shared memory than there is
        except RuntimeError as error:
            print(f"{short(tiling)}: {str(error).splitlines()[0]}", flush=True)

    for tiling in tilings:
        measure(tiling)
    for tiling in sorted(found, key=found.__getitem__)[:4]:
        for other in spreads(tiling):
            measure(other)
    return sorted(((seconds, tiling) for tiling, seconds in found.items()), key=lambda entry: entry[0])


def compile_ahead(shape: Shape, tilings: list[Tiling], workers: int) -> None:
    """Fill Triton's cache on disk from several processes: one alone compiles for minutes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _prepare_worker, (shape,)) as pool:
        for _ in pool.imap_unordered(_compile, tilings):
            pass


_worker: list[Prepared] = []


def _prepare_worker(shape: Shape) -> None:
    _worker.append(Prepared(shape, layers=1))


def _compile(tiling: Tiling) -> None:
    # What cannot be compiled or launched says so again where it is timed.
    with contextlib.suppress(Exception):
        prepared = _worker[0]
        prepared.run(prepared.workspace(tiling))
        torch.cuda.synchronize()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", default="", help="only shapes whose names contain one of these, by comma")
    parser.add_argument(
        "--sweep", action="store_true", help="try other tilings, print the best of each shape"
    )
    parser.add_argument("--workers", type=int, default=8, help="processes that compile for --sweep")
    parser.add_argument("--best", type=int, default=6, help="tilings that --sweep prints for a shape")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; torch sees none")
    wanted = [name for name in args.shapes.split(",") if name]
    chosen = [s for s in shapes() if not wanted or any(name in s.name for name in wanted)]
    copied, multiplied = copy_rate(), matmul_rate()
    print(
        f"{torch.cuda.get_device_name()}: copy {copied / 1e12:.2f} TB/s, "
        f"bf16 products {multiplied / 1e12:.0f} TFLOP/s\n",
        flush=True,
    )
    rows: list[tuple[object, ...]] = []
    for shape in chosen:
        moved, flop = floors(shape)
        floor = max(moved / copied, flop / multiplied)
        bound = "bytes" if moved / copied >= flop / multiplied else "FLOP"
        if args.sweep:
            entries = [(seconds, 0.0, tiling) for seconds, tiling in sweep(shape, args.workers)[: args.best]]
        else:
            entries = [(*Prepared(shape).time(tabled(shape)), tabled(shape))]
        for seconds, plan, tiling in entries:
            rows.append(
                (shape.name, seconds * 1e6, floor * 1e6, seconds / floor, bound, plan * 1e6, short(tiling))
            )
            print(
                f"{shape.name}: {seconds * 1e6:.1f} us, {seconds / floor:.2f}x, {short(tiling)}", flush=True
            )
        torch.cuda.empty_cache()
    print()
    report(
        "kernels_attention",
        HEADER,
        rows,
        args.out,
        device=torch.cuda.get_device_name(),
        copy_bytes_per_s=copied,
        matmul_flop_per_s=multiplied,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
