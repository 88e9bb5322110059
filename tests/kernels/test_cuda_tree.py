"""Trees grown on the device against the host's best-first heap, as ordered lists, with many ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.tree import build_tree_heap
from kernels import cuda
from kernels.marginals import Candidates, top_candidates
from kernels.topk import top_entries
from kernels.tree import (
    TreeLists,
    deepest_tree,
    grow_trees,
    pack_trees,
    pack_trees_reference,
    unpack_trees,
)
from specbridge.tree import DraftTree

KINDS = ["any", "bf16", "coarse", "two values", "zeros", "gaps"]


def log_probs_of(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32, none above 0, with ties; not all are distributions, since the order must hold for any."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2)
    if kind == "bf16":
        return drawn.bfloat16().float().log_softmax(-1).bfloat16().float()
    if kind == "coarse":
        return drawn.round().div(2).log_softmax(-1)
    if kind == "two values":
        return torch.where(drawn > 1.0, -0.5, -1.0)
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "gaps":
        return torch.where(drawn > 0.0, drawn.log_softmax(-1), torch.where(drawn > -1.0, -math.inf, math.nan))
    return drawn.log_softmax(-1)


def ranked(scores: torch.Tensor, width: int) -> Candidates:
    values, ids = top_entries(scores, width, nonpositive=True)
    return Candidates(values, ids.to(torch.int32))


def as_trees(lists: list[TreeLists]) -> list[DraftTree]:
    return [DraftTree(tuple(t.tokens), tuple(t.parents), tuple(t.scores)) for t in lists]


def ints(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(
    scores: torch.Tensor, budgets: list[int], limits: list[int], nodes: int, device: torch.device
) -> None:
    candidates = ranked(scores, min(nodes, scores.shape[-1]))
    moved = Candidates(candidates.log_probs.to(device), candidates.ids.to(device))
    packed = pack_trees(moved, ints(budgets, device), ints(limits, device), nodes=nodes).cpu()
    assert packed.shape == (len(scores), 3, nodes) and packed.dtype == torch.int32
    got = as_trees(unpack_trees(packed, budgets))
    for tree, rows, row_packed, budget, limit in zip(got, scores, packed, budgets, limits, strict=True):
        want = build_tree_heap(rows, min(budget, nodes), max_depth=limit)
        assert tree == want
        empty = torch.tensor([[-1], [-1], [torch.tensor(-math.inf).view(torch.int32).item()]])
        assert torch.equal(row_packed[:, len(want) :].long(), empty.expand(3, nodes - len(want)))


@settings(max_examples=150)
@given(
    kind=st.sampled_from(KINDS),
    levels=st.integers(1, 8),
    vocab=st.integers(1, 40),
    nodes=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_reference_is_the_hosts_heap(
    kind: str, levels: int, vocab: int, nodes: int, seed: int, data: st.DataObject
) -> None:
    budgets = data.draw(st.lists(st.integers(0, nodes), min_size=1, max_size=3))
    limits = data.draw(st.lists(st.integers(0, levels), min_size=len(budgets), max_size=len(budgets)))
    scores = log_probs_of(kind, (len(budgets), levels, vocab), seed)
    check(scores, budgets, limits, nodes, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_heap(triton_device: torch.device, kind: str) -> None:
    if cuda.interpreting():
        check(log_probs_of(kind, (3, 4, 9), 1), [14, 5, 20], [4, 3, 2], 18, triton_device)
        return
    for seed in range(12):
        for levels, vocab, nodes in (
            (15, 300, 64),
            (15, 300, 256),
            (7, 30, 128),
            (1, 500, 100),
            (15, 2, 256),
        ):
            budgets = [nodes, nodes // 2, 0, 1, nodes - 1, 3 * nodes // 4]
            limits = [levels, levels, levels, 1, levels // 2, levels]
            check(log_probs_of(kind, (6, levels, vocab), seed), budgets, limits, nodes, triton_device)


@pytest.mark.parametrize("kind", ["two values", "zeros"])
def test_the_deepest_trees(triton_device: torch.device, kind: str) -> None:
    nodes = 12 if cuda.interpreting() else 256
    levels = deepest_tree(nodes)
    check(log_probs_of(kind, (2, levels, 3), 5), [nodes, nodes], [levels, 5], nodes, triton_device)


@settings(max_examples=40)
@given(kind=st.sampled_from(KINDS), nodes=st.integers(1, 256), seed=st.integers(0, 10**6))
def test_path_codes_fit_and_keep_the_order_of_ranks(kind: str, nodes: int, seed: int) -> None:
    """What kernels.cuda.tree orders by, as strings: of all nodes and of all that were next in line."""
    levels = min(deepest_tree(nodes), 15)
    scores = log_probs_of(kind, (1, levels, nodes), seed)
    tree = unpack_trees(
        pack_trees_reference(ranked(scores, nodes), ints([nodes], "cpu"), ints([levels], "cpu"), nodes=nodes),
        [nodes],
    )[0]
    rank_of = [{t: r for r, t in enumerate(row)} for row in ranked(scores, nodes).ids[0].tolist()]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = () if parent < 0 else paths[parent]
        paths.append((*above, rank_of[len(above)][token]))
    line = paths + [(*p[:-1], p[-1] + 1) for p in paths] + [(*p, 0) for p in paths]
    codes = {path: "".join(code(rank) for rank in path) for path in line}
    # A child of the deepest level is never a candidate.
    assert max((len(c) for p, c in codes.items() if len(p) <= levels), default=0) <= 56
    for depth in range(1, levels + 1):
        same = sorted(path for path in set(line) if len(path) == depth)
        assert [codes[path] for path in same] == sorted(codes[path] for path in same)


def code(rank: int) -> str:
    bits = bin(rank + 1)[3:]
    return "1" * len(bits) + "0" + bits


def test_a_smaller_budget_is_a_prefix() -> None:
    candidates = ranked(log_probs_of("bf16", (1, 6, 50), 3), 40)
    packed = pack_trees(candidates, ints([40], "cpu"), ints([6], "cpu"), nodes=40)
    whole, some, none = (unpack_trees(packed, [n])[0] for n in (40, 11, 0))
    assert (
        some.tokens == whole.tokens[:11]
        and some.scores == whole.scores[:11]
        and none == TreeLists([], [], [])
    )


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_from_logits_to_trees(triton_device: torch.device, heat: float) -> None:
    shape, nodes = ((1, 2, 700), 9) if cuda.interpreting() else ((9, 15, 151936), 256)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(shape, generator=generator).mul(4).bfloat16().to(triton_device)
    sessions, levels, _ = shape
    args = (
        torch.full((sessions,), heat, device=triton_device),
        torch.arange(sessions, device=triton_device),
        *(ints([s + k for s in range(sessions)], triton_device) for k in (0, 50)),
    )
    budgets = [nodes - s for s in range(sessions)]
    limits = [max(1, levels - s) for s in range(sessions)]
    packed = grow_trees(
        logits, *args, ints(budgets, triton_device), ints(limits, triton_device), nodes=nodes
    ).cpu()
    candidates = top_candidates(logits, *args, ints(limits, triton_device), width=nodes)
    for s, tree in enumerate(as_trees(unpack_trees(packed, budgets))):
        scores = torch.full(shape[1:], -math.inf)
        scores.scatter_(1, candidates.ids[s].long().cpu(), candidates.log_probs[s].cpu())
        assert tree == build_tree_heap(scores, budgets[s], max_depth=limits[s])
        tree.validate(vocab_size=shape[2], max_nodes=budgets[s], max_depth=limits[s])
        assert len(tree) == budgets[s]


@pytest.mark.parametrize(("nodes", "levels"), [(0, 3), (257, 3), (256, 39)])
def test_sizes_that_cannot_be(nodes: int, levels: int) -> None:
    candidates = Candidates(torch.zeros(1, levels, 4), torch.zeros(1, levels, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="are not grown here"):
        pack_trees(candidates, ints([1], "cpu"), ints([1], "cpu"), nodes=nodes)


def test_device_tensors_are_read_back_first() -> None:
    with pytest.raises(ValueError, match="read them back"):
        unpack_trees(torch.empty(1, 3, 4, dtype=torch.int32, device="meta"), [4])


@pytest.mark.gpu
@pytest.mark.parametrize(("sessions", "nodes"), [(1, 64), (32, 64), (5, 256)])
def test_captured_in_a_graph(sessions: int, nodes: int) -> None:
    device = torch.device("cuda")
    logits = torch.zeros(sessions, 15, 49152, device=device, dtype=torch.bfloat16)
    args = (
        torch.tensor([float(s % 2) for s in range(sessions)], device=device),
        torch.arange(sessions, device=device),
        ints([0] * sessions, device),
        ints([9] * sessions, device),
        ints([nodes] * sessions, device),
        ints([15] * sessions, device),
    )
    grow_trees(logits, *args, nodes=nodes)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = grow_trees(logits, *args, nodes=nodes)
    for seed in range(4):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).mul(3))
        args[3].add_(3)
        graph.replay()
        assert torch.equal(packed, grow_trees(logits, *args, nodes=nodes))
