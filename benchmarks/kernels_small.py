"""Time and bandwidth of the small kernels on a GPU: norms, activation, split_heads, commit, publish, append.

Each op is captured many times into a CUDA graph, over several sets of tensors (together past the L2 where the
shape allows), and the graph is replayed: what a launch costs inside of a step's graph. Bandwidth is the bytes
that the op must move over that time, its share is of the copy rate measured in the same run. Beside it the
same by torch ops, captured likewise, and what a launch costs that does nothing.
`python -m benchmarks.kernels_small [--out FILE]`
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import arguments, report
from benchmarks.gpu.clock import copy_rate
from kernels.activation import silu_mul, silu_mul_reference
from kernels.append import append_context
from kernels.commit import commit_rows, publish_rows
from kernels.heads import split_heads, split_heads_reference
from kernels.norm import add_rms_norm, rms_norm, torch_rms_norm
from kernels.paged import append_rows
from kernels.rotary import apply_rotary, rotary_tables

EPS = 1e-6
LAUNCHES = 96
"""Launches a graph."""
SPREAD_BYTES = 256 << 20
MAX_SETS = 32
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model the small ops see; drafter_layers, taps: of a drafter beside it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    d: int
    intermediate: int
    layers: int
    qk_norm: bool
    drafter_layers: int = 5
    taps: int = 5


SHAPES = (
    Shape("SmolLM2-135M", 576, 9, 3, 64, 1536, 30, False),
    Shape("Qwen3-8B", 4096, 32, 8, 128, 12288, 36, True),
    Shape("Qwen3-32B", 5120, 64, 8, 128, 25600, 64, True),
)
ROWS = (1, 16, 64, 512)


@dataclass(frozen=True, slots=True)
class Case:
    """An op on one set of tensors; `plain` does the same by torch ops. bytes: read and written at least."""

    op: str
    bytes: int
    run: Callable[[], object]
    plain: Callable[[], object]


def cases(
    shape: Shape, rows: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[Callable[[], Case]]:
    """One function an op; each call of it makes a new set of tensors."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

    def norm() -> Case:
        x, weight = random(rows, shape.hidden), random(shape.hidden)
        size = _bytes(x, x, weight)
        return Case(
            "rms_norm", size, lambda: rms_norm(x, weight, EPS), lambda: torch_rms_norm(x, weight, EPS)
        )

    def add_norm() -> Case:
        x, residual, weight = random(rows, shape.hidden), random(rows, shape.hidden), random(shape.hidden)
        x.zero_()  # the residual is added to again and again
        return Case(
            "add_rms_norm",
            _bytes(x, residual, residual, x, weight),
            lambda: add_rms_norm(x, residual, weight, EPS),
            lambda: torch_rms_norm(residual.add_(x), weight, EPS),
        )

    def silu() -> Case:
        gate_up = random(rows, 2 * shape.intermediate)
        size = _bytes(gate_up) * 3 // 2
        return Case("silu_mul", size, lambda: silu_mul(gate_up), lambda: silu_mul_reference(gate_up))

    tables = rotary_tables(head_dim=shape.d, theta=1e6, max_position=4096, dtype=dtype, device=device)
    positions = torch.randint(0, 4096, (rows,), device=device, dtype=torch.int32)

    def split() -> Case:
        qkv = random(rows, (shape.heads + 2 * shape.kv_heads) * shape.d)
        cos, sin = tables.rows(positions)
        k_out, v_out = (random(rows, shape.kv_heads, shape.d) for _ in range(2))
        weights = random(shape.heads + shape.kv_heads, shape.d) if shape.qk_norm else None

        def through(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
            return lambda: function(
                qkv, cos, sin, heads=shape.heads, kv_heads=shape.kv_heads, k_out=k_out, v_out=v_out,
                qk_norm=weights, eps=EPS, value_scale=1.0,
            )  # fmt: skip

        size = _bytes(qkv, qkv, cos, sin) + (0 if weights is None else _bytes(weights))
        return Case("split_heads", size, through(split_heads), through(split_heads_reference))

    def commit() -> Case:
        width, planes = shape.kv_heads * shape.d, 2 * shape.layers
        pages, staged = random(planes, 2 * rows, width), random(planes, rows, width)
        slots = torch.randperm(2 * rows, device=device)[:rows]
        path = torch.full((rows,), -1, dtype=torch.int32, device=device)
        accepted = torch.arange(0, rows, 4, device=device)  # a quarter of a tree
        path[accepted] = torch.arange(accepted.numel(), dtype=torch.int32, device=device)
        small, kept = slots.to(torch.int32), slots[accepted]
        return Case(
            "commit_rows",
            2 * planes * accepted.numel() * width * dtype.itemsize,
            lambda: commit_rows(pages, staged, small, path),
            lambda: pages.index_copy_(1, kept, staged.index_select(1, accepted)),
        )

    def publish() -> Case:
        taps, ring = (random(size, shape.taps * shape.hidden) for size in (rows, 2 * rows))
        path = torch.arange(rows, dtype=torch.int32, device=device)
        row_start = torch.tensor([0, rows], dtype=torch.int32, device=device)
        first, skip = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        return Case(
            "publish_rows",
            _bytes(taps, taps),
            lambda: publish_rows(taps, ring, first_slot=first, skip=skip, row_start=row_start, path=path),
            lambda: ring[:rows].copy_(taps),
        )

    def append() -> Case:
        layers, kv_heads, d = shape.drafter_layers, shape.kv_heads, shape.d
        kv, norms = random(rows, layers * 2 * kv_heads * d), random(layers, d)
        k_pages, v_pages = (random(layers, -(-2 * rows // 16), 16, kv_heads, d) for _ in range(2))
        slots = torch.randperm(2 * rows, device=device)[:rows]
        small = slots.to(torch.int32)

        def plain() -> None:
            parts = kv.view(rows, layers, 2, kv_heads, d).transpose(0, 1)
            normed = torch_rms_norm(parts[:, :, 0], norms.view(layers, 1, 1, d), EPS)
            keys = apply_rotary(normed, *tables.rows(positions))
            for i in range(layers):
                append_rows(k_pages[i], v_pages[i], slots, keys[i], parts[i, :, 1])

        return Case(
            "append_context",
            _bytes(kv, kv),
            lambda: append_context(
                kv,
                positions=positions,
                slots=small,
                k_norms=norms,
                rotary=tables,
                k_pages=k_pages,
                v_pages=v_pages,
                eps=EPS,
            ),  # fmt: skip
            plain,
        )

    yield from (norm, add_norm, silu, split, commit, publish, append)


def replay_us(calls: Sequence[Callable[[], object]], launches: int = LAUNCHES) -> float:
    """Median microseconds a call, from replays of a graph of `launches` calls that take turns."""
    for call in calls:
        call()  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    times = []
    for _ in range(REPLAYS + 3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / launches)
    return statistics.median(times[3:])


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> int:
    args = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    copied = copy_rate() / 1e9
    one = torch.zeros(1, device="cuda")
    idle = replay_us([lambda: one.add_(1.0)])
    print(f"{torch.cuda.get_device_name()}: copy {copied:.0f} GB/s, a launch that does nothing {idle:.2f} us")
    rows = []
    for shape in SHAPES:
        for count in ROWS:
            for make in cases(shape, count, torch.bfloat16, "cuda"):
                first = make()
                sets = min(MAX_SETS, max(1, SPREAD_BYTES // first.bytes))
                made = [first, *(make() for _ in range(sets - 1))]
                taken = replay_us([case.run for case in made])
                plain = replay_us([case.plain for case in made])
                rate = first.bytes / taken / 1e3
                rows.append(
                    [first.op, shape.name, count, sets, taken, rate, rate / copied, plain, plain / taken]
                )
    header = ["op", "shape", "rows", "sets", "us", "GB/s", "of copy", "torch us", "torch / ours"]
    report(
        "kernels_small", header, rows, args.out,
        gpu=torch.cuda.get_device_name(), copy_gb_per_s=copied, idle_launch_us=idle, dtype="bfloat16",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
