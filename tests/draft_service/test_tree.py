"""Trees: heap against brute force, fast path against heap, and the optimality that DDTree claims."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.tree import (
    build_tree_heap,
    build_trees,
    build_trees_from_logits,
    noisy_log_probs,
)
from kernels.philox import gumbel_noise
from specbridge.tree import EMPTY_TREE, DraftTree

GOLDEN = Path(__file__).parent.parent / "golden" / "draft_tree.json"


def marginals(seed: int, *shape: int, ties: bool) -> torch.Tensor:
    """Random log-softmax rows; with ties, coarse bf16 logits and log-probabilities rounded to bf16."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.mul(2).round().div(2).bfloat16().float()
    scores = torch.log_softmax(logits, dim=-1)
    return scores.bfloat16().float() if ties else scores


def brute_force(scores: torch.Tensor, budget: int, max_depth: int, top_k: int) -> DraftTree:
    """Score and sort every prefix there is."""
    horizon, vocab = scores.shape
    width = min(top_k, vocab)
    ranked = [sorted(range(vocab), key=lambda v, row=row: (-row[v], v))[:width] for row in scores.tolist()]
    every: list[tuple[float, int, tuple[int, ...]]] = []
    for depth in range(1, min(horizon, max_depth) + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            total = np.float32(0.0)
            for level, rank in enumerate(ranks):
                total = np.float32(total + np.float32(scores[level, ranked[level][rank]].item()))
            if total > -math.inf:
                every.append((-float(total), depth, ranks))
    best = sorted(every)[:budget]
    place = {ranks: i for i, (_, _, ranks) in enumerate(best)}
    return DraftTree(
        tuple(ranked[depth - 1][ranks[-1]] for _, depth, ranks in best),
        tuple(place[ranks[:-1]] if depth > 1 else -1 for _, depth, ranks in best),
        tuple(-negative for negative, _, _ in best),
    )


def assert_prefix_closed(tree: DraftTree, vocab: int) -> None:
    for cut in range(len(tree) + 1):
        tree.prefix(cut).validate(vocab_size=vocab, max_nodes=cut, max_depth=max(tree.depths(), default=0))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("horizon", "vocab"), [(1, 7), (2, 9), (3, 5), (4, 4), (5, 3), (7, 2)])
def test_heap_equals_brute_force(horizon: int, vocab: int, ties: bool) -> None:
    for seed in range(6):
        scores = marginals(seed, horizon, vocab, ties=ties)
        for budget, depth, top_k in [
            (0, 9, 99),
            (1, 9, 99),
            (7, 9, 99),
            (32, 9, 2),
            (64, 2, 99),
            (64, 9, 99),
        ]:
            tree = build_tree_heap(scores, budget, max_depth=depth, top_k=top_k)
            assert tree == brute_force(scores, budget, depth, min(top_k, max(budget, 1)))
            assert_prefix_closed(tree, vocab)


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**31), ties=st.booleans())
def test_fast_paths_equal_the_heap(data: st.DataObject, seed: int, ties: bool) -> None:
    sessions, horizon = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    vocab = data.draw(st.sampled_from([1, 2, 17, 63, 64, 65, 200, 1000, 4160, 5003]))
    scores = marginals(seed, sessions, horizon, vocab, ties=ties)
    if data.draw(st.booleans()):  # impossible tokens, and a row a broken model left behind
        scores[0, 0, 1:] = -math.inf
        scores[-1, -1] = math.nan
    budgets = data.draw(st.lists(st.sampled_from([0, 1, 7, 32, 64]), min_size=sessions, max_size=sessions))
    depths = data.draw(st.lists(st.integers(0, horizon + 1), min_size=sessions, max_size=sessions))
    top_k = data.draw(st.sampled_from([None, 1, 2, 5, 1000]))
    want = [
        build_tree_heap(s, b, max_depth=d, top_k=top_k)
        for s, b, d in zip(scores, budgets, depths, strict=True)
    ]
    for level_wise in (False, True):
        assert build_trees(scores, budgets, max_depths=depths, top_k=top_k, level_wise=level_wise) == want
    for tree, budget, depth in zip(want, budgets, depths, strict=True):
        assert len(tree) <= budget and max(tree.depths(), default=0) <= depth
        assert_prefix_closed(tree, vocab)


@pytest.mark.parametrize("level_wise", [False, True])
def test_a_flat_marginal_is_all_ties(level_wise: bool) -> None:
    scores = torch.log_softmax(torch.zeros(1, 3, 300), dim=-1)
    (tree,) = build_trees(scores, [64], max_depths=[3], level_wise=level_wise)
    assert tree.tokens == tuple(range(64)) and set(tree.parents) == {
        -1
    }  # same score: shallow first, then by id


def test_real_width_in_bf16() -> None:
    logits = torch.randn(2, 7, 49152, generator=torch.Generator().manual_seed(1)).mul(3).bfloat16().float()
    scores = torch.log_softmax(logits, dim=-1)
    want = [build_tree_heap(s, 64) for s in scores]
    for level_wise in (False, True):
        assert build_trees(scores, [64, 64], max_depths=[7, 7], level_wise=level_wise) == want
    assert build_trees_from_logits(logits, [64, 64], max_depths=[7, 7]) == want


@pytest.mark.gpu
def test_cuda_equals_the_heap() -> None:
    scores = torch.stack([marginals(s, 7, 49152, ties=s > 1) for s in range(4)])
    budgets, depths = [64, 7, 32, 0], [7, 7, 3, 7]
    want = [build_tree_heap(s, b, max_depth=d) for s, b, d in zip(scores, budgets, depths, strict=True)]
    for level_wise in (None, False, True):
        assert build_trees(scores.cuda(), budgets, max_depths=depths, level_wise=level_wise) == want


def test_a_smaller_budget_is_a_prefix() -> None:
    scores = marginals(5, 7, 500, ties=True)
    big = build_tree_heap(scores, 64)
    for budget in (0, 1, 7, 32):
        assert build_tree_heap(scores, budget) == big.prefix(budget)


def test_no_tree_of_that_size_expects_more_accepted_nodes() -> None:
    """E[accepted] under the product law, by enumerating outcomes: the built tree beats every other tree."""
    scores = marginals(11, 3, 3, ties=False)
    q = scores.double().exp()
    prefixes = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]

    def expected(nodes: frozenset[tuple[int, ...]]) -> float:
        total = 0.0
        for outcome in itertools.product(range(3), repeat=3):
            probability = math.prod(q[i, v].item() for i, v in enumerate(outcome))
            accepted = 0
            while accepted < 3 and outcome[: accepted + 1] in nodes:
                accepted += 1
            total += probability * accepted
        return total

    for budget in (1, 2, 3, 4):
        tree = build_tree_heap(scores, budget)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        ours = expected(frozenset(paths))
        assert ours == pytest.approx(sum(math.exp(s) for s in tree.scores), abs=1e-6)
        closed = (
            frozenset(c)
            for c in itertools.combinations(prefixes, budget)
            if all(len(p) == 1 or p[:-1] in c for p in c)
        )
        assert ours >= max(map(expected, closed)) - 1e-9


def test_noise_shifts_the_tree_to_what_the_target_will_draw() -> None:
    """With the target's own logits and noise, the first node of each depth is the token it commits."""
    vocab, temperature = 300, 0.8
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)) * 2
    noise = gumbel_noise([9] * 4, [20, 21, 22, 23], [0] * 4, vocab)
    (tree,) = build_trees_from_logits(
        logits.unsqueeze(0), [60], max_depths=[4], temperatures=[temperature], noise=[noise]
    )
    committed = (logits / temperature + noise).argmax(dim=-1).tolist()
    node = -1
    for token in committed:
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        assert tree.tokens[children[0]] == token
        node = children[0]
    scores = noisy_log_probs(logits, temperature, noise)
    assert torch.allclose(scores.exp().sum(-1), torch.ones(4), atol=1e-5) and scores.max() <= 0
    torch.testing.assert_close(scores, torch.log_softmax(logits / temperature + noise, dim=-1))


def test_sessions_mix_greedy_and_sampled() -> None:
    logits = torch.randn(3, 5, 200, generator=torch.Generator().manual_seed(4)) * 2
    noise = gumbel_noise([1] * 5, list(range(5)), [0] * 5, 200)
    mixed = build_trees_from_logits(
        logits, [9, 9, 9], max_depths=[5, 2, 5], temperatures=[0.0, 1.0, 0.7], noise=[noise, noise, None]
    )
    assert mixed[0] == build_tree_heap(torch.log_softmax(logits[0], -1), 9)
    assert mixed[1] == build_tree_heap(noisy_log_probs(logits[1], 1.0, noise), 9, max_depth=2)
    assert mixed[2] == build_tree_heap(noisy_log_probs(logits[2], 0.7), 9)


def test_nothing_to_build() -> None:
    scores = marginals(0, 2, 3, 10, ties=False)
    assert build_trees(scores, [0, 5], max_depths=[3, 0]) == [EMPTY_TREE, EMPTY_TREE]
    assert build_trees(scores[:0], [], max_depths=[]) == []
    assert build_trees_from_logits(scores, [0, 0], max_depths=[3, 3]) == [EMPTY_TREE, EMPTY_TREE]


def test_lists_must_match_the_sessions() -> None:
    with pytest.raises(ValueError, match="1 budgets, 2 depths for 2 sessions"):
        build_trees(marginals(0, 2, 3, 10, ties=False), [1], max_depths=[1, 1])


def test_golden_tree() -> None:
    golden = json.loads(GOLDEN.read_text())
    scores = torch.tensor(golden["scores"], dtype=torch.float32)
    tree = build_tree_heap(scores, golden["budget"])
    assert list(tree.tokens) == golden["tokens"]
    assert list(tree.parents) == golden["parents"]
    assert list(tree.scores) == golden["tree_scores"]
    for level_wise in (False, True):
        assert build_trees(
            scores.unsqueeze(0), [golden["budget"]], max_depths=[3], level_wise=level_wise
        ) == [tree]
