"""The ops between a pass's matrix products: their torch references against what they are made of, and their
Triton versions against the references, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import cuda
from kernels.activation import silu_mul, silu_mul_reference
from kernels.append import append_context, append_context_reference
from kernels.commit import commit_rows, commit_rows_reference, publish_rows, publish_rows_reference
from kernels.heads import split_heads, split_heads_reference
from kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from kernels.paged import append_rows
from kernels.rotary import RotaryTables, apply_rotary, rotary_tables

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# heads, kv_heads, d: SmolLM2, a small Qwen3, odd counts, head dims that are no power of two.
HEADS = [(9, 3, 64), (4, 1, 128), (3, 3, 80), (5, 1, 96), (1, 1, 16), (12, 9, 64)]


def close(got: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """float32 within a few 1e-6. Half precision: equal, but for rare values near a rounding boundary, where
    each of the op's `roundings` may go the other way."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6 * roundings, atol=1e-6 * roundings)
        return
    unit = torch.finfo(got.dtype).eps * roundings
    torch.testing.assert_close(got, expected, rtol=unit, atol=unit / 16)
    assert int((got != expected).sum()) <= 2 + got.numel() // 100


def tables(d: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> RotaryTables:
    return rotary_tables(head_dim=d, theta=10000.0, max_position=300, dtype=dtype, device=device)


# ---- norms and activation ---------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "shape", [(1, 16), (3, 576), (2, 4096), (1, 5120), (7, 3, 80), (130, 96), (2, 3, 5, 64)]
)
def test_rms_norm(triton_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape, device=triton_device) * 3).to(dtype)
    weight = torch.randn(shape[-1], device=triton_device).to(dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), roundings=2)


@DTYPES
def test_rms_norm_with_a_weight_per_head_of_a_part_of_wider_rows(
    triton_device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 9, 80, device=triton_device).to(dtype).narrow(1, 2, 4)
    weight = torch.randn(4, 80, device=triton_device).to(dtype)
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), roundings=2)


@DTYPES
@pytest.mark.parametrize("magnitude", [1e-4, 300.0])
def test_rms_norm_of_small_and_large_values(
    triton_device: torch.device, dtype: torch.dtype, magnitude: float
) -> None:
    x = (torch.randn(4, 100, device=triton_device) * magnitude).to(dtype)
    weight = torch.ones(100, device=triton_device, dtype=dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), roundings=2)
    assert not rms_norm(torch.zeros_like(x), weight, 1e-5).any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (6, 576), (2, 5120), (3, 2, 48)])
def test_add_rms_norm_norms_the_rounded_sum_that_it_leaves_in_the_residual(
    triton_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = (torch.randn(shape, device=triton_device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=triton_device).to(dtype)
    total = residual + x
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    close(got, rms_norm_reference(total, weight, 1e-5), roundings=2)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 3072), (2, 2 * 1025), (2, 3, 14), (1, 24576)])
def test_silu_mul(triton_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = (torch.randn(shape, device=triton_device) * 4).to(dtype)
    close(silu_mul(gate_up), silu_mul_reference(gate_up), roundings=2)


def test_silu_mul_of_a_part_of_wider_rows_and_of_extremes(triton_device: torch.device) -> None:
    wide = torch.randn(4, 100, device=triton_device)
    wide[0, 10:14] = torch.tensor([-200.0, 200.0, 0.0, -30.0], device=triton_device)
    part = wide[:, 10:50]
    close(silu_mul(part), silu_mul_reference(part))


# ---- split_heads ------------------------------------------------------------------------------------------


def split_case(
    heads: int,
    kv_heads: int,
    d: int,
    *,
    rows: int,
    norm: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Any]:
    """Arguments of split_heads but k_out and v_out."""
    cos, sin = tables(d, dtype, device).rows(torch.randint(0, 300, (rows,), device=device))
    weights = torch.randn(heads + kv_heads, d, device=device).to(dtype) if norm else None
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * d, device=device).to(dtype)
    case = {"qkv": qkv, "cos": cos, "sin": sin, "heads": heads, "kv_heads": kv_heads}
    return {**case, "qk_norm": weights, "eps": 1e-6}


def outputs(case: dict[str, Any], rows: int, kv_heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts of a staging buffer with a row more, filled with what must be overwritten."""
    staging = torch.full((2, rows + 1, kv_heads, d), 77.0, device=case["qkv"].device, dtype=case["qkv"].dtype)
    return staging[0, :rows], staging[1, :rows]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_split_heads_is_norm_rotary_and_two_copies(norm: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, d = 9, 3, 64
    case = split_case(heads, kv_heads, d, rows=5, norm=norm, dtype=dtype, device="cpu")
    k_out, v_out = outputs(case, 5, kv_heads, d)
    q = split_heads(**case, k_out=k_out, v_out=v_out, value_scale=0.5)
    q_in, k_in, v_in = case["qkv"].view(5, -1, d).split((heads, kv_heads, kv_heads), 1)
    if norm:
        q_in = rms_norm(q_in, case["qk_norm"][:heads], 1e-6)
        k_in = rms_norm(k_in, case["qk_norm"][heads:], 1e-6)
    assert torch.equal(q, apply_rotary(q_in, case["cos"], case["sin"]))
    assert torch.equal(k_out, apply_rotary(k_in, case["cos"], case["sin"]))
    assert torch.equal(v_out, v_in * 0.5)


@DTYPES
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
def test_split_heads(
    triton_device: torch.device, dtype: torch.dtype, norm: bool, heads: int, kv_heads: int, d: int
) -> None:
    rows = 3
    case = split_case(heads, kv_heads, d, rows=rows, norm=norm, dtype=dtype, device=triton_device)
    scale = 1.0 if norm else 0.7
    got, expected = outputs(case, rows, kv_heads, d), outputs(case, rows, kv_heads, d)
    q = split_heads(**case, k_out=got[0], v_out=got[1], value_scale=scale)
    q_expected = split_heads_reference(**case, k_out=expected[0], v_out=expected[1], value_scale=scale)
    close(q, q_expected, roundings=3)
    close(got[0], expected[0], roundings=3)
    assert torch.equal(got[1], expected[1])
    assert (got[0]._base[:, rows] == 77.0).all()


def test_split_heads_of_a_part_of_wider_rows(triton_device: torch.device) -> None:
    case = split_case(4, 2, 64, rows=3, norm=True, dtype=torch.float32, device=triton_device)
    wide = torch.randn(3, case["qkv"].shape[1] + 32, device=triton_device)
    case["qkv"] = wide[:, 16:-16]
    got, expected = outputs(case, 3, 2, 64), outputs(case, 3, 2, 64)
    q = split_heads(**case, k_out=got[0], v_out=got[1])
    whole = {**case, "qkv": case["qkv"].contiguous()}
    close(q, split_heads_reference(**whole, k_out=expected[0], v_out=expected[1], value_scale=1.0))
    close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_split_heads_refuses_outputs_with_gaps_in_a_row(triton_device: torch.device) -> None:
    case = split_case(2, 2, 16, rows=3, norm=False, dtype=torch.float32, device=triton_device)
    fine, gaps = torch.empty(3, 2, 16), torch.empty(3, 2, 32)[:, :, :16]
    with pytest.raises(ValueError, match="v_out has strides"):
        split_heads(**case, k_out=fine, v_out=gaps)


# ---- append_context ---------------------------------------------------------------------------------------


def append_case(
    kv_heads: int, d: int, *, layers: int, rows: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[dict[str, Any], Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Arguments of append_context but the pages, every third row a padding row; and fresh pages."""
    slots = torch.randperm(5 * 4)[:rows].to(torch.int32)
    slots[::3] = -1
    positions = torch.where(slots < 0, 10**6, torch.randint(0, 300, (rows,))).to(torch.int32)
    case = {
        "kv": torch.randn(rows, layers * 2 * kv_heads * d, device=device).to(dtype),
        "positions": positions.to(device),
        "slots": slots.to(device),
        "k_norms": torch.randn(layers, d, device=device).to(dtype),
        "rotary": tables(d, dtype, device),
        "eps": 1e-6,
        "value_scale": 0.7,
    }

    def pages() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (layers, 5, 4, kv_heads, d)
        k = torch.full(shape, 77.0, dtype=dtype, device=device)
        return k, k.clone()

    return case, pages


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_append_context_equals_the_parts_layer_by_layer(dtype: torch.dtype, scale: float) -> None:
    """Bit for bit: what was appended may not depend on how."""
    layers, kv_heads, d, rows = 3, 2, 64, 7
    case, fresh = append_case(kv_heads, d, layers=layers, rows=rows, dtype=dtype, device="cpu")
    case["value_scale"] = scale
    (k, v), (k_expected, v_expected) = fresh(), fresh()
    append_context(**case, k_pages=k, v_pages=v)
    live = case["slots"] >= 0
    kv = case["kv"][live].view(-1, layers, 2, kv_heads, d)
    for i in range(layers):
        keys = apply_rotary(
            rms_norm(kv[:, i, 0], case["k_norms"][i], 1e-6), *case["rotary"].rows(case["positions"][live])
        )
        values = kv[:, i, 1] if scale == 1.0 else kv[:, i, 1] * scale
        append_rows(k_expected[i], v_expected[i], case["slots"][live].long(), keys, values)
    assert torch.equal(k, k_expected) and torch.equal(v, v_expected)


@DTYPES
@pytest.mark.parametrize(("kv_heads", "d"), [(3, 64), (1, 128), (2, 80), (10, 96)])
def test_append_context(triton_device: torch.device, dtype: torch.dtype, kv_heads: int, d: int) -> None:
    case, fresh = append_case(kv_heads, d, layers=3, rows=8, dtype=dtype, device=triton_device)
    (k, v), (k_expected, v_expected) = fresh(), fresh()
    append_context(**case, k_pages=k, v_pages=v)
    append_context_reference(**case, k_pages=k_expected, v_pages=v_expected)
    close(k, k_expected, roundings=3)
    assert torch.equal(v, v_expected)
    assert ((v == 77.0).all(-1).sum() == v[..., 0].numel() - 5 * 3 * kv_heads).all()


# ---- which version runs -----------------------------------------------------------------------------------


def test_float64_and_tensors_on_the_cpu_stay_with_torch() -> None:
    assert not cuda.takes(torch.zeros(1))
    if cuda.interpreting():
        with cuda.cpu_tensors_too():
            assert cuda.takes(torch.zeros(1)) and cuda.takes(torch.zeros(1, dtype=torch.bfloat16))
            assert not cuda.takes(torch.zeros(1, dtype=torch.float64))
        assert not cuda.takes(torch.zeros(1))
    else:
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), cuda.cpu_tensors_too():
            pass


@pytest.mark.gpu
def test_float64_on_a_gpu_stays_with_torch() -> None:
    assert cuda.takes(torch.zeros(1, device="cuda"))
    assert not cuda.takes(torch.zeros(1, device="cuda", dtype=torch.float64))


@pytest.mark.parametrize("number", range(7))
def test_what_the_benchmark_compares_is_equal(triton_device: torch.device, number: int) -> None:
    """Also that its cases run: it is for GPUs only."""
    from benchmarks import kernels_small

    shape = kernels_small.Shape("tiny", 32, 4, 2, 16, 48, 2, qk_norm=True, drafter_layers=2, taps=2)
    make = list(kernels_small.cases(shape, 8, torch.float32, triton_device))[number]
    case = make()
    ours, plain = case.run(), case.plain()
    assert case.bytes > 0
    if case.op in ("rms_norm", "add_rms_norm", "silu_mul", "split_heads"):
        assert isinstance(ours, torch.Tensor) and isinstance(plain, torch.Tensor)
        close(ours, plain, roundings=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_of_all_of_them_reads_what_its_buffers_hold_at_replay(dtype: torch.dtype) -> None:
    """Nothing synchronises, and nothing of the captured pass's values is kept."""
    rows, heads, kv_heads, d, layers = 6, 4, 2, 64, 2
    width, dev = kv_heads * d, torch.device("cuda")
    rotary = tables(d, dtype, dev)
    norms = torch.randn(heads + kv_heads, d, device=dev).to(dtype)
    weight = torch.randn(2 * width, device=dev).to(dtype)
    hidden, residual = (torch.empty(rows, 2 * width, device=dev, dtype=dtype) for _ in range(2))
    qkv = torch.empty(rows, (heads + 2 * kv_heads) * d, device=dev, dtype=dtype)
    kv = torch.empty(rows, layers * 2 * width, device=dev, dtype=dtype)
    positions, slots, path = (torch.zeros(rows, dtype=torch.int32, device=dev) for _ in range(3))
    first, skip = (torch.zeros(2, dtype=torch.int32, device=dev) for _ in range(2))
    row_start = torch.tensor([0, 4, 5], dtype=torch.int32, device=dev)
    staging = torch.zeros(2, rows, kv_heads, d, device=dev, dtype=dtype)
    pages, ring = torch.zeros(2, 20, width, device=dev, dtype=dtype), torch.zeros(20, 2 * width, device=dev)
    context = torch.zeros(2, layers, 5, 4, kv_heads, d, device=dev, dtype=dtype)
    buffers = (residual, staging, pages, ring, context)

    def fill(seed: int) -> None:
        torch.manual_seed(seed)
        for buffer in (hidden, residual, qkv, kv):
            buffer.normal_()
        for buffer in buffers[1:]:
            buffer.zero_()
        positions.copy_(torch.randint(0, 300, (rows,)))
        slots.copy_(torch.randperm(20)[:rows])
        slots[seed] = -1
        path.copy_(torch.tensor([0, -1, 1, 2, 0, -1] if seed else [0, 1, -1, -1, -1, -1]))
        first.copy_(torch.tensor([3, 10] if seed else [5, -1]))
        skip.copy_(torch.tensor([seed, 0]))

    def run(ours: bool) -> list[torch.Tensor]:
        normed = add_rms_norm(hidden, residual, weight, 1e-5) if ours else None
        if normed is None:
            residual.add_(hidden)
            normed = rms_norm_reference(residual, weight, 1e-5)
        gated = (silu_mul if ours else silu_mul_reference)(normed)
        q = (split_heads if ours else split_heads_reference)(
            qkv, *rotary.rows(positions), heads=heads, kv_heads=kv_heads, k_out=staging[0], v_out=staging[1],
            qk_norm=norms, eps=1e-6, value_scale=1.0,
        )  # fmt: skip
        (commit_rows if ours else commit_rows_reference)(pages, staging.view(2, rows, width), slots, path)
        (publish_rows if ours else publish_rows_reference)(
            normed, ring, first_slot=first, skip=skip, row_start=row_start, path=path
        )
        (append_context if ours else append_context_reference)(
            kv, positions=positions, slots=slots, k_norms=norms[:layers], rotary=rotary, k_pages=context[0],
            v_pages=context[1], eps=1e-6, value_scale=0.5,
        )  # fmt: skip
        return [normed, gated, q]

    fill(0)
    run(ours=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(ours=True)
    for seed in (1, 0, 2):
        fill(seed)
        graph.replay()
        got = [tensor.clone() for tensor in (*outputs, *buffers)]
        fill(seed)
        expected = [*run(ours=False), *buffers]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.03 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
