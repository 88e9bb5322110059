"""ragged_attention against one masked softmax per session: kinds, lengths, windows, groups, tiles, parts,
padding, pages; for the torch reference and for the Triton kernels, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.attention import PagedContext, split_attention_reference
from kernels.attention_tiles import Tiling, choose_tiling
from kernels.ragged import (
    BLOCK,
    CHAIN,
    TREE,
    RaggedBatch,
    RaggedSegment,
    ancestor_words,
    ancestor_words_reference,
    pack_ragged,
)
from kernels.ragged_attention import (
    EVERYTHING,
    AttentionWorkspace,
    Window,
    make_workspace,
    ragged_attention,
    ragged_attention_reference,
    workspace_floats,
)

SMALL = Tiling(16, 32, 4, 2, min_blocks=1, merge_rows=4, merge_parts=2)


@dataclass(frozen=True)
class Case:
    """A batch, its tensors in float64 on the CPU, and what each of its rows should give."""

    segments: list[RaggedSegment]
    padding: dict[str, int]
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    scale: float

    def batch(self, device: torch.device | str = "cpu") -> RaggedBatch:
        return pack_ragged(self.segments, **self.padding, device=device)

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(
            x.to(dtype).to(device) for x in (self.q, self.k_new, self.v_new, self.k_pages, self.v_pages)
        )

    def expected(self, window: Window = EVERYTHING, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """By split_attention_reference, from masks made here; of tensors rounded to dtype."""
        q, k_new, v_new, k_pages, v_pages = (x.double() for x in self.tensors(dtype))
        out = torch.zeros_like(q)
        first = 0
        for segment in self.segments:
            n = segment.rows
            rows = slice(first, first + n)
            first += n
            mask, depth = visible(segment)
            position = segment.length + depth
            start = torch.zeros(n, dtype=torch.int64)
            if window.rows is not None:
                mask &= (position[:, None] - position[None, :]).abs() < window.rows
                start = position - window.rows + 1
            if window.context is not None:
                start = start.clamp(min=segment.length - window.context)
            context = PagedContext(
                k_pages, v_pages, torch.tensor([list(segment.pages) or [0]]), torch.tensor([segment.length])
            )
            out[rows] = split_attention_reference(
                q[None, rows],
                k_new[None, rows],
                v_new[None, rows],
                context,
                mask[None],
                scale=self.scale,
                window_start=start[None],
            )[0]
        return out


def visible(segment: RaggedSegment) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of the segment each of its rows sees, and the rows' depths."""
    n = segment.rows
    parents = list(range(-1, n - 1)) if segment.parents is None else list(segment.parents)
    seen = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    depth = seen.sum(1) - 1
    if segment.kind == BLOCK:
        seen = torch.ones(n, n, dtype=torch.bool)
    return seen, depth


def tree(rows: int, generator: torch.Generator) -> list[int]:
    """Parents that make neither a chain nor a star."""
    return [-1] + [int(torch.randint(max(0, i - 6), i, (1,), generator=generator)) for i in range(1, rows)]


def case(
    shapes: list[tuple[int, int, int]],
    *,
    heads: int = 4,
    kv: int = 2,
    d: int = 16,
    page: int = 16,
    seed: int = 0,
    **padding: int,
) -> Case:
    """shapes: (kind, rows, length) of each session. Pages are scattered; slots nobody may read hold NaN."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-length // page) for _, _, length in shapes]
    order = torch.randperm(sum(needed) + 3, generator=g).tolist()
    total_rows = padding.get("rows", sum(rows for _, rows, _ in shapes))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    k_pages, v_pages = draw(len(order), page, kv, d), draw(len(order), page, kv, d)
    segments = []
    for (kind, rows, length), count in zip(shapes, needed, strict=True):
        pages, order = order[:count], order[count:]
        if length % page:
            k_pages[pages[-1], length % page :] = v_pages[pages[-1], length % page :] = float("nan")
        parents = tree(rows, g) if kind == TREE else None
        segments.append(RaggedSegment(rows, length, pages, kind, parents))
    k_pages[order] = v_pages[order] = float("nan")
    return Case(
        segments=segments,
        padding=padding,
        q=draw(total_rows, heads, d),
        k_new=draw(total_rows, kv, d),
        v_new=draw(total_rows, kv, d),
        k_pages=k_pages,
        v_pages=v_pages,
        scale=d**-0.5,
    )


def planned(
    made: Case,
    batch: RaggedBatch,
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: Window = EVERYTHING,
    tiling: Tiling | None = SMALL,
    processors: int | None = 6,
) -> AttentionWorkspace:
    workspace = make_workspace(
        rows=batch.rows,
        sessions=batch.sessions,
        most_rows=batch.most_rows,
        heads=made.q.shape[1],
        kv_heads=made.k_new.shape[1],
        head_dim=made.q.shape[2],
        page_size=made.k_pages.shape[1],
        dtype=dtype,
        device=device,
        windows=(window,),
        tiling=tiling,
        processors=processors,
    )
    workspace.plan(batch)
    return workspace


def check(
    made: Case,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    window: Window = EVERYTHING,
    tiling: Tiling | None = SMALL,
    processors: int | None = 6,
) -> AttentionWorkspace:
    batch = made.batch(device)
    workspace = planned(made, batch, device, dtype, window=window, tiling=tiling, processors=processors)
    out = torch.full(made.q.shape, float("nan"), dtype=dtype, device=device)
    got = ragged_attention(
        *made.tensors(dtype, device),
        batch,
        scale=made.scale,
        window=window,
        workspace=workspace,
        out=out,
    )
    assert got is out
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        got.cpu().double(), made.expected(window, dtype), atol=tolerance, rtol=tolerance
    )
    return workspace


MIXES = {
    "one row": [(CHAIN, 1, 40)],
    "no context": [(TREE, 9, 0)],
    "a tree": [(TREE, 17, 75)],
    "a wide tree": [(TREE, 70, 33)],
    "a chain": [(CHAIN, 45, 50)],
    "a block": [(BLOCK, 16, 64)],
    "mixed": [(TREE, 5, 17), (CHAIN, 1, 0), (BLOCK, 8, 130), (CHAIN, 40, 31), (TREE, 33, 48)],
    "unequal": [(CHAIN, 1, 3), (TREE, 3, 290), (CHAIN, 1, 0), (TREE, 2, 1)],
}


@pytest.mark.parametrize("shapes", MIXES.values(), ids=MIXES.keys())
def test_reference(shapes: list[tuple[int, int, int]]) -> None:
    made = case(shapes)
    for window in (EVERYTHING, Window(rows=20), Window(context=9)):
        got = ragged_attention(*made.tensors(torch.float64), made.batch(), scale=made.scale, window=window)
        torch.testing.assert_close(got, made.expected(window), atol=1e-12, rtol=1e-12)


def test_reference_in_half_precision_rounds_only_its_result() -> None:
    made = case(MIXES["mixed"])
    got = ragged_attention_reference(*made.tensors(torch.bfloat16), made.batch(), scale=made.scale)
    torch.testing.assert_close(got, made.expected(dtype=torch.bfloat16).bfloat16(), atol=1e-6, rtol=8e-3)


@pytest.mark.parametrize("shapes", MIXES.values(), ids=MIXES.keys())
def test_kinds_and_lengths(shapes: list[tuple[int, int, int]], triton_device: torch.device) -> None:
    check(case(shapes), triton_device)


@pytest.mark.parametrize("base", [31, 32, 35, 0, 100])
def test_windows_around_their_own_length(base: int, triton_device: torch.device) -> None:
    made = case([(TREE, 9, base), (CHAIN, 20, base), (BLOCK, 4, base)])
    check(made, triton_device, window=Window(rows=32))


@pytest.mark.parametrize(
    "window", [Window(rows=1), Window(rows=5), Window(context=0), Window(24, 10)], ids=str
)
def test_narrow_windows(window: Window, triton_device: torch.device) -> None:
    """Ones that end inside the pass's own rows, and ones that hide the context."""
    check(case([(TREE, 20, 37), (CHAIN, 45, 70), (BLOCK, 12, 20)]), triton_device, window=window)


def test_layers_of_one_plan_may_differ_in_kind(triton_device: torch.device) -> None:
    """A drafter's layers are bidirectional or causal over the same rows; the plan is made once."""
    block = case([(BLOCK, 12, 70), (BLOCK, 9, 0), (BLOCK, 16, 33)])
    chain = replace(block, segments=[replace(segment, kind=CHAIN) for segment in block.segments])
    batch = block.batch(triton_device)
    workspace = planned(block, batch, triton_device, torch.float32)
    for made in (block, chain):
        layer = replace(batch, kinds=made.batch(triton_device).kinds, chains=made is chain)
        got = ragged_attention(
            *block.tensors(torch.float32, triton_device), layer, scale=block.scale, workspace=workspace
        )
        torch.testing.assert_close(got.cpu().double(), made.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads,kv", [(2, 2), (9, 3), (4, 1), (8, 1)])
def test_query_heads_of_a_group_share_a_tile(heads: int, kv: int, triton_device: torch.device) -> None:
    check(case([(TREE, 13, 45), (CHAIN, 21, 70), (CHAIN, 1, 9)], heads=heads, kv=kv), triton_device)


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_head_sizes(d: int, triton_device: torch.device) -> None:
    check(case([(TREE, 5, 20)], heads=2, kv=1, d=d), triton_device)


@pytest.mark.parametrize("page", [8, 16, 64])
def test_page_sizes(page: int, triton_device: torch.device) -> None:
    check(case([(TREE, 5, 70), (CHAIN, 1, 64)], page=page), triton_device)
    check(case([(TREE, 5, 70), (CHAIN, 1, 64)], page=page), triton_device, window=Window(rows=30))


@pytest.mark.parametrize("page, processors", [(16, 6), (64, 1), (8, 6)])
def test_parts_of_no_one_and_many_context_blocks(
    page: int, processors: int, triton_device: torch.device
) -> None:
    """A block's page ids are loaded with the block before it, within the part."""
    made = case(
        [(TREE, 13, 290), (CHAIN, 1, 64), (CHAIN, 40, 31), (BLOCK, 9, 32), (TREE, 4, 0), (CHAIN, 20, 90)],
        page=page,
    )
    for window in (EVERYTHING, Window(rows=30), Window(context=70)):
        check(made, triton_device, processors=processors, window=window)


def test_padding_gives_zeros_and_is_not_seen(triton_device: torch.device) -> None:
    made = case([(TREE, 5, 20), (CHAIN, 1, 33)], rows=23, sessions=7, most_rows=8, pages=5)
    made.k_new[6:] = made.v_new[6:] = float("nan")
    check(made, triton_device)
    nobody = case([], rows=3, sessions=2)
    check(nobody, triton_device)


@pytest.mark.parametrize("processors", [1, 3, 64])
def test_any_number_of_parts(processors: int, triton_device: torch.device) -> None:
    """From one part a tile to one a block: the same result, and as many items as there is room for."""
    made = case([(TREE, 9, 200), (CHAIN, 1, 17), (TREE, 3, 90)])
    workspace = check(made, triton_device, processors=processors)
    items = workspace.items[0].cpu()
    items = items[items[:, 0] >= 0]
    if processors == 64:
        assert items[:, 5].max() > 3
    firsts = items[:, 4] == 0
    assert firsts.sum() <= workspace.tiles and firsts[: int(firsts.sum())].all()  # the merge's programs
    for tile in items[items[:, 4] == 0].tolist():
        same = items[(items[:, 0] == tile[0]) & (items[:, 1] == tile[1])]
        assert sorted(same[:, 4].tolist()) == list(range(tile[5]))


def test_one_long_chain_is_not_split(triton_device: torch.device) -> None:
    workspace = check(case([(CHAIN, 130, 40)]), triton_device, processors=2)
    assert not workspace.splits and workspace.partial.numel() == 0


def test_inputs_may_be_views(triton_device: torch.device) -> None:
    """As they come out of one projection: q, k and v in one row."""
    made = case([(TREE, 7, 30)])
    batch = made.batch(triton_device)
    q, k_new, v_new, k_pages, v_pages = made.tensors(torch.float32, triton_device)
    joint = torch.cat((q, k_new, v_new), 1)
    pages = torch.stack((k_pages, v_pages), 1)
    got = ragged_attention(
        joint[:, :4], joint[:, 4:6], joint[:, 6:], pages[:, 0], pages[:, 1], batch, scale=made.scale
    )
    torch.testing.assert_close(got.cpu().double(), made.expected(dtype=torch.float32), atol=2e-5, rtol=2e-5)


def test_half_precision(triton_device: torch.device) -> None:
    # The interpreter multiplies the bits of bfloat16 numbers.
    dtype = torch.bfloat16 if triton_device.type == "cuda" else torch.float16
    check(case([(TREE, 9, 70), (CHAIN, 20, 33)]), triton_device, dtype)


def test_a_workspace_serves_pass_after_pass(triton_device: torch.device) -> None:
    """Nothing of an earlier plan is left over, in buffers of one bucket that share their scratch."""
    sizes = {"rows": 24, "sessions": 3, "most_rows": 12, "pages": 20}
    first = case([(TREE, 12, 300), (CHAIN, 1, 150), (TREE, 9, 5)], **sizes)
    second = case([(CHAIN, 1, 2), (TREE, 4, 66)], **sizes)
    workspace = planned(first, first.batch(triton_device), triton_device, torch.float32)
    for made in (first, second, first):
        batch = made.batch(triton_device)
        workspace.plan(batch)
        got = ragged_attention(
            *made.tensors(torch.float32, triton_device), batch, scale=made.scale, workspace=workspace
        )
        torch.testing.assert_close(
            got.cpu().double(), made.expected(dtype=torch.float32), atol=2e-5, rtol=2e-5
        )


def test_several_windows_in_one_plan(triton_device: torch.device) -> None:
    made = case([(TREE, 9, 100), (CHAIN, 18, 50)])
    batch = made.batch(triton_device)
    windows = (EVERYTHING, Window(rows=16), Window(context=20))
    q, *others = made.tensors(torch.float32, triton_device)
    workspace = make_workspace(
        rows=27,
        sessions=2,
        most_rows=18,
        heads=4,
        kv_heads=2,
        head_dim=16,
        page_size=16,
        dtype=torch.float32,
        device=triton_device,
        windows=windows,
        tiling=SMALL,
        processors=4,
    )
    workspace.plan(batch)
    for window in windows:
        got = ragged_attention(q, *others, batch, scale=made.scale, window=window, workspace=workspace)
        torch.testing.assert_close(
            got.cpu().double(), made.expected(window, torch.float32), atol=2e-5, rtol=2e-5
        )


def test_ancestor_words(triton_device: torch.device) -> None:
    g = torch.Generator().manual_seed(3)
    parents: list[int] = []
    starts = [0]
    kinds = [TREE, CHAIN, TREE, TREE, TREE]
    for rows in (1, 40, 70, 0, 33):
        first = starts[-1]
        parents += [first + p if p >= 0 else -1 for p in (tree(rows, g) if rows else [])]
        starts.append(first + rows)
    parents += [-1] * 9  # padding
    above = torch.tensor(parents, dtype=torch.int32)
    row_start = torch.tensor(starts, dtype=torch.int32)
    for rules in (torch.tensor(kinds, dtype=torch.int32), None):
        expected = ancestor_words_reference(above, row_start, rules, words=3)
        got = ancestor_words(
            above.to(triton_device),
            row_start.to(triton_device),
            None if rules is None else rules.to(triton_device),
            words=3,
        )
        assert torch.equal(got.cpu(), expected)
    bits = [[(int(word) >> j) & 1 for word in row for j in range(32)] for row in expected.tolist()]
    segment = RaggedSegment(70, 0, [], TREE, [p - 41 if p >= 0 else -1 for p in parents[41:111]])
    assert torch.equal(torch.tensor(bits)[41:111, :70].bool(), visible(segment)[0])
    assert not any(map(any, bits[144:]))


def test_a_batch_of_another_bucket_is_refused() -> None:
    made = case([(TREE, 9, 10)])
    workspace = planned(made, made.batch(), torch.device("cpu"), torch.float32)
    other = case([(TREE, 8, 10)])
    with pytest.raises(ValueError, match="8 rows"):
        workspace.plan(other.batch())
    with pytest.raises(ValueError, match="do not fit"):
        pack_ragged([RaggedSegment(4, 20, [1, 2])], rows=3)
    with pytest.raises(ValueError, match="scratch"):
        make_workspace(
            rows=9, sessions=1, most_rows=9, heads=2, kv_heads=1, head_dim=16, page_size=16,
            dtype=torch.float32, device="cpu", scratch=torch.empty(3),
        )  # fmt: skip


@pytest.mark.parametrize("page", [0, 12, 24, 48, 80])
def test_pages_that_do_not_fit_the_blocks_are_refused(page: int) -> None:
    """24 rows: the second block of 32 would begin within a page, where the kernels take it to begin one."""
    sizes = {"rows": 9, "sessions": 1, "most_rows": 9, "heads": 2, "kv_heads": 1, "head_dim": 16}
    with pytest.raises(ValueError, match=f"pages of {page} rows do not fit blocks of 32 keys"):
        make_workspace(**sizes, page_size=page, dtype=torch.float32, device="cpu")
    for fits in (1, 16, 32, 64, 96 * 32):
        SMALL.check_pages(fits)


def test_tilings() -> None:
    """Every head size and row count has one; what a bucket needs can be asked for."""
    for d in (16, 64, 80, 96, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            for packed in (1, 4, 17, 68, 260, 8192):
                assert choose_tiling(packed_rows=packed, head_dim=d, dtype=dtype).block_m >= 16
    with pytest.raises(ValueError, match="512"):
        choose_tiling(packed_rows=1, head_dim=512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="power of two"):
        Tiling(48, 64, 4, 2)
    rows = {
        packed: choose_tiling(packed_rows=packed, head_dim=128, dtype=torch.bfloat16).block_m
        for packed in (64, 68, 128, 132, 200, 260, 516, 8192)
    }
    assert rows == {64: 64, 68: 128, 128: 128, 132: 64, 200: 128, 260: 64, 516: 64, 8192: 128}
    sizes = {"rows": 17, "sessions": 1, "most_rows": 17, "heads": 32, "kv_heads": 8, "head_dim": 128}
    floats = workspace_floats(**sizes, dtype=torch.bfloat16, device="cpu")
    made = make_workspace(
        **sizes, page_size=16, dtype=torch.bfloat16, device="cpu", scratch=torch.empty(floats)
    )
    assert made.partial.numel() + made.lse.numel() == floats


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads,kv,d", [(32, 8, 128), (9, 3, 64), (16, 2, 80), (8, 4, 256)])
@pytest.mark.parametrize(
    "shapes",
    [
        [(CHAIN, 1, 3000)],
        [(TREE, 17, 4101)],
        [(TREE, 65, 2500)],
        [(CHAIN, 700, 900)],
        [(CHAIN, 1, 50 * i) for i in range(24)],
        [(TREE, 17, 333 * i) for i in range(6)],
        [(BLOCK, 16, 100 * i) for i in range(8)],
        [(CHAIN, 300, 1000), (TREE, 33, 2000), (CHAIN, 1, 5000), (BLOCK, 16, 0)],
    ],
    ids=["row", "tree17", "tree65", "chunk", "rows", "trees", "blocks", "mixed"],
)
def test_with_the_tables_tiling_on_the_gpu(
    shapes: list[tuple[int, int, int]], heads: int, kv: int, d: int, dtype: torch.dtype
) -> None:
    made = case(shapes, heads=heads, kv=kv, d=d)
    for window in (EVERYTHING, Window(rows=512)):
        check(made, torch.device("cuda"), dtype, window=window, tiling=None, processors=None)


@pytest.mark.gpu
def test_one_captured_graph_serves_other_batches_of_its_bucket() -> None:
    sizes = {"rows": 40, "sessions": 4, "most_rows": 33, "pages": 70}
    first = case([(TREE, 33, 1000), (CHAIN, 1, 500)], d=64, **sizes)
    second = case([(CHAIN, 1, 2), (TREE, 20, 66), (TREE, 5, 900)], d=64, **sizes)
    device = torch.device("cuda")
    batch = first.batch(device)
    tensors = list(first.tensors(torch.bfloat16, device))
    room = max(first.k_pages.shape[0], second.k_pages.shape[0])
    tensors[3:] = [torch.zeros(room, *x.shape[1:], dtype=x.dtype, device=device) for x in tensors[3:]]
    workspace = planned(first, batch, device, torch.bfloat16, tiling=None, processors=None)
    out = torch.empty_like(tensors[0])

    def run() -> None:
        workspace.plan(batch)
        ragged_attention(*tensors, batch, scale=first.scale, workspace=workspace, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for made in (first, second):
        other = made.batch(device)
        for name in ("row_start", "lengths", "page_table", "positions", "kinds"):
            getattr(batch, name).copy_(getattr(other, name))
        batch.ancestors.zero_()
        batch.ancestors[:, : other.ancestors.shape[1]].copy_(other.ancestors)
        for mine, theirs in zip(tensors, made.tensors(torch.bfloat16, device), strict=True):
            mine[: theirs.shape[0]].copy_(theirs)
        graph.replay()
        torch.testing.assert_close(
            out.cpu().double(), made.expected(dtype=torch.bfloat16), atol=2e-2, rtol=2e-2
        )
