"""DraftTree: prefixes, depth limits and what a receiver refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbridge.errors import InvalidRequest
from specbridge.tree import EMPTY_TREE, DraftTree

VOCAB = 50


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 20) -> DraftTree:
    """Any valid tree: no token twice under a parent, scores falling from 0."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, i - 1))
        used = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(draw(st.integers(0, VOCAB - 1).filter(lambda t, used=used: t not in used)))
        parents.append(parent)
    steps = draw(
        st.lists(st.floats(-50, 0, width=32), min_size=len(tokens), max_size=len(tokens)).map(
            lambda s: sorted(s, reverse=True)
        )
    )
    return DraftTree(tuple(tokens), tuple(parents), tuple(steps))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Each node as the tokens that lead to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def check(tree: DraftTree, *, max_nodes: int = 64, max_depth: int = 64) -> None:
    tree.validate(vocab_size=VOCAB, max_nodes=max_nodes, max_depth=max_depth)


@given(trees(), st.integers(0, 25))
def test_every_prefix_is_a_tree(tree: DraftTree, cut: int) -> None:
    head = tree.prefix(cut)
    assert len(head) == min(cut, len(tree))
    assert head.tokens == tree.tokens[:cut] and head.scores == tree.scores[:cut]
    check(head, max_nodes=cut)
    if len(tree) > cut:
        with pytest.raises(InvalidRequest, match=f"at most {cut}"):
            check(tree, max_nodes=cut)


@given(trees(), st.integers(-1, 20), st.integers(0, VOCAB))
def test_a_child_is_found_by_its_token(tree: DraftTree, node: int, token: int) -> None:
    table = {pair: i for i, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    assert all(tree.child(*pair) == i for pair, i in table.items())
    assert tree.child(node, token) == table.get((node, token))


@given(trees(), st.integers(0, 21))
def test_a_depth_limit_keeps_exactly_the_shallow_paths(tree: DraftTree, depth: int) -> None:
    shallow = tree.limit_depth(depth)
    check(shallow, max_depth=depth)
    assert paths(shallow) == {path for path in paths(tree) if len(path) <= depth}
    assert list(shallow.scores) == [s for s, d in zip(tree.scores, tree.depths(), strict=True) if d <= depth]
    if max(tree.depths(), default=0) > depth:
        with pytest.raises(InvalidRequest, match=f"at most {depth} is legal"):
            check(tree, max_depth=depth)


@given(trees())
def test_depths_are_path_lengths(tree: DraftTree) -> None:
    assert sorted(tree.depths()) == sorted(len(path) for path in paths(tree))
    assert len(paths(tree)) == len(tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree((1, 2), (-1,), (0.0, 0.0)), "2 tokens, 1 parents, 2 scores"),
        (DraftTree((1,), (-1,), ()), "1 tokens, 1 parents, 0 scores"),
        (DraftTree((VOCAB,), (-1,), (0.0,)), "token 50 at node 0"),
        (DraftTree((-1,), (-1,), (0.0,)), "token -1 at node 0"),
        (DraftTree((1,), (0,), (0.0,)), "parent 0 at node 0"),
        (DraftTree((1,), (-2,), (0.0,)), "parent -2 at node 0"),
        (DraftTree((1, 2), (-1, 1), (0.0, 0.0)), "parent 1 at node 1"),
        (DraftTree((1, 1), (-1, -1), (0.0, 0.0)), "node 1 repeats token 1 under parent -1"),
        (DraftTree((1,), (-1,), (0.5,)), "score 0.5 at node 0"),
        (DraftTree((1, 2), (-1, -1), (-2.0, -1.0)), "score -1.0 at node 1"),
        (DraftTree((1,), (-1,), (math.nan,)), "score nan at node 0"),
    ],
)
def test_a_broken_tree_is_refused_with_its_fault(tree: DraftTree, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(tree)


def test_the_empty_tree_is_plain_decoding() -> None:
    EMPTY_TREE.validate(vocab_size=1, max_nodes=0, max_depth=0)
    assert len(EMPTY_TREE) == 0 and EMPTY_TREE.depths() == ()
    assert EMPTY_TREE.prefix(3) is EMPTY_TREE and EMPTY_TREE.limit_depth(0) is EMPTY_TREE
