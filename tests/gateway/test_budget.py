"""budget.py: pure rules, checked by enumeration and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.budget import Candidate, Plan, SharedRows, depth_limit, fit_tree
from specbridge.errors import InvalidRequest
from specbridge.tree import EMPTY_TREE, DraftTree


def candidate(number: int = 0, max_nodes: int = 100, max_depth: int = 7) -> Candidate:
    return Candidate(number, max_nodes, max_depth, context=10)


@pytest.mark.parametrize(
    ("block_size", "remaining", "max_length", "num_tokens", "expected"),
    [
        (16, 100, 1000, 10, 15),  # the horizon
        (16, 5, 1000, 10, 4),  # four drafts and the bonus are five tokens
        (16, 1, 1000, 10, 0),  # only the bonus fits
        (16, 100, 20, 10, 9),  # nine drafts and the bonus fill the model's length
        (16, 100, 11, 10, 0),
        (16, 100, 10, 10, 0),  # never negative
        (1, 100, 1000, 10, 0),  # no drafter
    ],
)
def test_depth_limit(
    block_size: int, remaining: int, max_length: int, num_tokens: int, expected: int
) -> None:
    got = depth_limit(
        block_size=block_size, remaining=remaining, max_length=max_length, num_tokens=num_tokens
    )
    assert got == expected


def shared(tree_budget: int = 16, max_verify_rows: int = 64, min_tree: int = 4) -> SharedRows:
    return SharedRows(tree_budget=tree_budget, max_verify_rows=max_verify_rows, min_tree=min_tree)


@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        (1, [16]),
        (3, [16] * 3),
        (4, [15] * 4),  # 60 rows left over 4 anchors
        (5, [12, 12, 12, 12, 11]),  # 59 over 5
        (12, [5, 5, 5, 5] + [4] * 8),  # 52 over 12
        (13, [0] * 13),  # 51 over 13 is 3, under min_tree
        (64, [0] * 64),
        (90, [0] * 90),  # more anchors than rows: plain decoding
    ],
)
def test_shares(sessions: int, expected: list[int]) -> None:
    plan = shared().plan([candidate(i) for i in range(sessions)])
    assert list(plan.nodes) == expected
    assert plan.drafts == any(expected)
    assert plan.skipped == ("" if any(expected) else "budget")


def test_sessions_without_speculation_take_only_their_anchor() -> None:
    plan = shared(max_verify_rows=20).plan(
        [candidate(0), candidate(1, max_nodes=0), candidate(2, max_depth=0)]
    )
    assert plan.nodes == (16, 0, 0)


def test_own_caps() -> None:
    assert shared().plan([candidate(0, max_nodes=3), candidate(1, max_nodes=1)]).nodes == (3, 1)


def test_a_budget_below_min_tree_is_meant() -> None:
    assert shared(tree_budget=1, min_tree=4).plan([candidate()]).nodes == (1,)
    assert shared(tree_budget=0).plan([candidate()]) == Plan((0,), "budget")


def test_nobody_able_is_not_a_budget_matter() -> None:
    assert shared().plan([candidate(max_nodes=0)]) == Plan((0,), "")
    assert shared().plan([]) == Plan((), "")


def test_one_row_is_plain_decoding() -> None:
    assert shared(max_verify_rows=1, min_tree=0).plan([candidate()]).nodes == (0,)


@pytest.mark.parametrize("bad", [{"tree_budget": -1}, {"min_tree": -1}, {"max_verify_rows": 0}])
def test_wrong_settings(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        shared(**bad)


candidates = st.lists(
    st.builds(
        candidate, number=st.integers(0, 9), max_nodes=st.integers(0, 40), max_depth=st.integers(0, 15)
    ),
    max_size=40,
)


@given(candidates, st.integers(0, 70), st.integers(1, 300), st.integers(0, 20))
def test_plan_keeps_every_limit(found: list[Candidate], budget: int, rows: int, least: int) -> None:
    plan = shared(budget, rows, least).plan(found)
    assert len(plan.nodes) == len(found)
    for nodes, c in zip(plan.nodes, found, strict=True):
        assert 0 <= nodes <= min(budget, c.max_nodes)
        assert nodes == 0 or c.max_depth > 0
    if plan.drafts:
        assert sum(plan.nodes) + len(found) <= rows


# ---- fit_tree -------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 25))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    tokens = list(range(size))  # distinct: no repeated child
    return DraftTree(tuple(tokens), tuple(parents), tuple(-0.5 * (i + 1) for i in range(size)))


@given(trees(), st.integers(0, 30), st.integers(0, 12))
def test_fit_tree_is_the_best_part_that_fits(tree: DraftTree, max_nodes: int, max_depth: int) -> None:
    got = fit_tree(tree, max_nodes=max_nodes, max_depth=max_depth, vocab_size=100)
    got.validate(vocab_size=100, max_nodes=max_nodes, max_depth=max_depth)
    allowed = [t for t, d in zip(tree.tokens, tree.depths(), strict=True) if d <= max_depth]
    assert list(got.tokens) == allowed[:max_nodes]
    # Same parent token as before, node by node.
    for i, parent in enumerate(got.parents):
        place = tree.tokens.index(got.tokens[i])
        before = tree.parents[place]
        assert (parent < 0) == (before < 0)
        if parent >= 0:
            assert got.tokens[parent] == tree.tokens[before]


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree((500,), (-1,), (-0.1,)),
        DraftTree((1, 2), (-1, 1), (-0.1, -0.2)),
        DraftTree((1, 1), (-1, -1), (-0.1, -0.2)),
        DraftTree((1, 2), (-1, 0), (-0.2, -0.1)),
        DraftTree((1, 2), (-1,), (-0.2, -0.1)),
        DraftTree((1,), (-2,), (-0.1,)),
        DraftTree((1,), (-1,), (float("nan"),)),
        DraftTree((), (-1,), ()),
    ],
)
def test_malformed_trees_are_refused(tree: DraftTree) -> None:
    with pytest.raises(InvalidRequest):
        fit_tree(tree, max_nodes=10, max_depth=10, vocab_size=100)


@given(
    st.lists(st.integers(-1, 12), max_size=5),
    st.lists(st.integers(-3, 5), max_size=5),
    st.lists(st.sampled_from([0.5, 0.0, -0.1, -0.2, -0.3, float("nan"), float("-inf")]), max_size=5),
)
def test_the_quick_check_is_the_tree_s_own(
    tokens: list[int], parents: list[int], scores: list[float]
) -> None:
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(scores))
    try:
        tree._validate_each(vocab_size=10, max_nodes=9, max_depth=9)
        legal = True
    except InvalidRequest:
        legal = False
    if tokens or parents or scores:
        assert tree.well_formed(10) == legal


def test_empty_tree_fits() -> None:
    assert fit_tree(EMPTY_TREE, max_nodes=0, max_depth=0, vocab_size=1) is EMPTY_TREE
