"""split_attention against one masked softmax, over shapes, windows, page layouts and all three ways to
compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import attention
from kernels.attention import (
    PagedContext,
    merge_states,
    plan_attention,
    split_attention,
    split_attention_reference,
)
from kernels.attention_plan import plan_joint

PAGE = 4


def ancestor_mask(rows: int, generator: torch.Generator) -> torch.Tensor:
    mask = torch.eye(rows, dtype=torch.bool)
    for i in range(1, rows):
        parent = int(torch.randint(0, i, (1,), generator=generator))
        mask[i] |= mask[parent]
    return mask


def case(
    lengths: list[int],
    rows: int,
    *,
    heads: int = 4,
    kv: int = 2,
    d: int = 8,
    dtype: torch.dtype = torch.float64,
    scattered: bool = True,
    seed: int = 0,
) -> dict:
    g = torch.Generator().manual_seed(seed)
    pages_needed = [-(-n // PAGE) for n in lengths]
    total = sum(pages_needed) + 5
    order = torch.randperm(total, generator=g) if scattered else torch.arange(2, total)
    table = torch.zeros(len(lengths), max([*pages_needed, 1]), dtype=torch.int64)
    used = 0
    for s, count in enumerate(pages_needed):
        table[s, :count] = order[used : used + count]
        used += count

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype)

    return {
        "q": draw(len(lengths), rows, heads, d),
        "k_new": draw(len(lengths), rows, kv, d),
        "v_new": draw(len(lengths), rows, kv, d),
        "context": PagedContext(
            draw(total, PAGE, kv, d), draw(total, PAGE, kv, d), table, torch.tensor(lengths)
        ),
        "mask": torch.stack([ancestor_mask(rows, g) for _ in lengths]),
        "scale": d**-0.5,
    }


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbouring", "scattered"])
@pytest.mark.parametrize("heads,kv", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("rows", [1, 2, 9, 33, 140])
@pytest.mark.parametrize("lengths", [[0], [1], [37], [0, 5, 64, 3], [17, 17]])
def test_equals_one_masked_softmax_in_float64(
    lengths: list[int], rows: int, heads: int, kv: int, scattered: bool
) -> None:
    inputs = case(lengths, rows, heads=heads, kv=kv, scattered=scattered)
    torch.testing.assert_close(
        split_attention(**inputs), split_attention_reference(**inputs), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 100])
@pytest.mark.parametrize("lengths", [[0], [23], [9, 40]])
def test_mask_none_is_a_causal_chain(lengths: list[int], rows: int) -> None:
    inputs = case(lengths, rows)
    inputs["mask"] = attention.causal_mask(rows).expand(len(lengths), rows, rows)
    expected = split_attention_reference(**inputs)
    inputs["mask"] = None
    torch.testing.assert_close(split_attention(**inputs), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rows", [3, 40])
def test_bidirectional_block(rows: int) -> None:
    inputs = case([11, 0], rows)
    inputs["mask"] = torch.ones(2, rows, rows, dtype=torch.bool)
    torch.testing.assert_close(
        split_attention(**inputs), split_attention_reference(**inputs), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("mode_rows", [6, 150], ids=["small", "flash"])
@pytest.mark.parametrize("scattered", [False, True], ids=["neighbouring", "scattered"])
@pytest.mark.parametrize("window", [1, 8])
def test_window_bounds_per_row(window: int, scattered: bool, mode_rows: int) -> None:
    """Bases around the window's length; a row at position p sees context positions > p - window."""
    bases = [0, max(window - 1, 0), window, window + 3, 6 * window + 1]
    inputs = case(bases, mode_rows, scattered=scattered)
    depths = torch.arange(mode_rows) // 3
    positions = torch.tensor(bases)[:, None] + depths[None]
    inputs["window_start"] = positions - window + 1
    torch.testing.assert_close(
        split_attention(**inputs), split_attention_reference(**inputs), atol=1e-10, rtol=1e-10
    )


def test_half_precision_takes_the_flash_path_and_stays_close() -> None:
    inputs = case([0, 21], 7, dtype=torch.bfloat16)
    got = split_attention(**inputs)
    assert got.dtype == torch.bfloat16
    wide = {
        **inputs,
        **{k: inputs[k].double() for k in ("q", "k_new", "v_new")},
        "context": PagedContext(
            inputs["context"].k_pages.double(),
            inputs["context"].v_pages.double(),
            inputs["context"].page_table,
            inputs["context"].lengths,
        ),
    }
    torch.testing.assert_close(got.double(), split_attention_reference(**wide), atol=0.03, rtol=0.03)


def test_float32_is_close() -> None:
    inputs = case([70, 12, 0], 9, dtype=torch.float32)
    torch.testing.assert_close(
        split_attention(**inputs), split_attention_reference(**inputs), atol=1e-5, rtol=1e-5
    )


def test_very_unequal_sessions_are_tiled_and_still_equal() -> None:
    inputs = case([4000, 1, 900, 0, 30], 3)
    context = inputs["context"]
    plan = plan_attention(
        context.page_table,
        context.lengths,
        inputs["mask"],
        rows=3,
        page_size=PAGE,
        dtype=torch.float64,
        device="cpu",
    )
    assert len(plan.tiles) > 1
    torch.testing.assert_close(
        split_attention(**inputs, plan=plan), split_attention_reference(**inputs), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("rows", [4, 200])
def test_a_plan_serves_many_layers(rows: int) -> None:
    """Work spaces kept between layers must not leak one layer's values into the next."""
    first, second = case([9, 26], rows, seed=1), case([9, 26], rows, seed=2)
    for key in ("mask",):
        second[key] = first[key]
    second["context"] = PagedContext(
        second["context"].k_pages,
        second["context"].v_pages,
        first["context"].page_table,
        first["context"].lengths,
    )
    plan = plan_attention(
        first["context"].page_table,
        first["context"].lengths,
        first["mask"],
        rows=rows,
        page_size=PAGE,
        dtype=torch.float64,
        device="cpu",
    )
    for inputs in (first, second, first):
        torch.testing.assert_close(
            split_attention(**inputs, plan=plan), split_attention_reference(**inputs), atol=1e-10, rtol=1e-10
        )


def test_garbage_in_unused_pages_and_slots_is_never_read() -> None:
    inputs = case([6, 3], 3, scattered=True)
    context = inputs["context"]
    expected = split_attention(**inputs)
    used = torch.zeros(context.k_pages.shape[0] * PAGE, dtype=torch.bool)
    for s, n in enumerate([6, 3]):
        for p in range(n):
            used[int(context.page_table[s, p // PAGE]) * PAGE + p % PAGE] = True
    for pages in (context.k_pages, context.v_pages):
        pages.view(-1, *pages.shape[2:])[~used] = float("nan")
    torch.testing.assert_close(split_attention(**inputs), expected, atol=0, rtol=0)


def test_merge_ignores_an_empty_part() -> None:
    out = torch.randn(3, 5, dtype=torch.float64)
    lse = torch.randn(3, dtype=torch.float64)
    nothing = torch.full((3,), float("-inf"), dtype=torch.float64)
    merged, merged_lse = merge_states(
        torch.full((3, 5), float("nan"), dtype=torch.float64), nothing, out, lse
    )
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


def test_merge_is_the_softmax_over_both_parts() -> None:
    scores, values = torch.randn(2, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    parts = [
        (scores[:, a:b].softmax(-1) @ values[a:b], scores[:, a:b].logsumexp(-1)) for a, b in ((0, 4), (4, 9))
    ]
    merged, lse = merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(merged, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("rows", [1, 5])
def test_the_way_of_other_devices_equals_too(rows: int) -> None:
    """The joint path, run on the CPU."""
    inputs = case([0, 13, 30], rows)
    context = inputs["context"]
    for window in (None, torch.tensor([0, 13, 30])[:, None] + torch.arange(rows)[None] - 6):
        plan = plan_joint(
            context.page_table,
            context.lengths,
            inputs["mask"],
            rows,
            PAGE,
            torch.device("cpu"),
            window,
            False,
        )
        torch.testing.assert_close(
            split_attention(**inputs, plan=plan),
            split_attention_reference(**inputs, window_start=window),
            atol=1e-10,
            rtol=1e-10,
        )


def test_mask_is_row_major_over_the_pass_alone() -> None:
    """Prefix of 3, tree of 2 below the anchor: mask[s, i, j] is row i looking at row j; the prefix has no
    columns in it and is seen by every row."""
    keys = torch.eye(6, dtype=torch.float64) * 0.0  # equal scores: every row weighs what it sees equally
    values = torch.eye(6, dtype=torch.float64)  # value n is unit vector n, so the output tells what was seen
    pages = torch.zeros(2, PAGE, 1, 6, dtype=torch.float64)
    pages_v = pages.clone()
    pages_v[1, :3, 0] = values[:3]
    context = PagedContext(pages, pages_v, torch.tensor([[1]]), torch.tensor([3]))
    # Anchor 0; nodes 1 and 2 are siblings below it: neither sees the other.
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    out = split_attention(
        torch.ones(1, 3, 1, 6, dtype=torch.float64),
        keys[None, 3:, None],
        values[None, 3:, None],
        context,
        mask,
        scale=1.0,
    )
    seen = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]
    for row, columns in enumerate(seen):
        want = torch.zeros(6, dtype=torch.float64)
        want[columns] = 1 / len(columns)
        torch.testing.assert_close(out[0, row, 0], want)


class Allocations(TorchDispatchMode):
    """The bytes of the largest tensor that an operation made, and of the largest mask among them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.largest_mask = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                size = tensor.untyped_storage().nbytes()
                self.largest = max(self.largest, size)
                if tensor.dtype == torch.bool:
                    self.largest_mask = max(self.largest_mask, size)
        return made


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
def test_a_long_prefix_needs_no_mask_and_no_copy(windowed: bool) -> None:
    """cases.md 40: a tree of 64 over a prefix of 32 k. Only scores may have rows x context elements."""
    prefix, rows, heads, kv, d, page = 32768, 65, 4, 2, 8, 16
    g = torch.Generator().manual_seed(0)
    pages = torch.randn(2, prefix // page, page, kv, d, generator=g)
    context = PagedContext(
        pages[0], pages[1], torch.arange(prefix // page)[None], torch.tensor([prefix], dtype=torch.int64)
    )
    q, k, v = (torch.randn(1, rows, n, d, generator=g) for n in (heads, kv, kv))
    mask = ancestor_mask(rows, g)[None]
    start = torch.full((1, rows), prefix - 4096) + torch.arange(rows)[None] // 9 if windowed else None
    with Allocations() as seen:
        plan = plan_attention(
            context.page_table,
            context.lengths,
            mask,
            rows=rows,
            page_size=page,
            dtype=torch.float32,
            device="cpu",
            window_start=start,
        )
        got = split_attention(q, k, v, context, mask, scale=0.3, window_start=start, plan=plan)
    width = 4096 if windowed else prefix
    assert seen.largest_mask <= rows * 4096, "no mask over the context beyond a window's"
    assert seen.largest <= 4 * rows * heads * (width + rows) + 4096
    want = split_attention_reference(q, k, v, context, mask, scale=0.3, window_start=start)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
