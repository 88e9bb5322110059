"""Rows, walk and slots of one round."""

from __future__ import annotations

import random

import pytest
from toy_target import chain_tree, random_tree

from specbridge.rounds import FinishReason
from specbridge.tree import EMPTY_TREE, DraftTree
from target_service.verify import max_depth, slots, tree_rows, walk

#      root -> 5 -> 7 -> 9
#           -> 6 -> 7
TREE = DraftTree((5, 6, 7, 7, 9), (-1, -1, 0, 1, 2), (-0.1, -0.2, -0.3, -0.4, -0.5))


def go(
    choices: list[int],
    tree: DraftTree = TREE,
    *,
    stop: tuple[int, ...] = (),
    remaining: int = 99,
    room: int = 99,
):  # type: ignore[no-untyped-def]
    return walk(tree, choices, stop_ids=frozenset(stop), remaining=remaining, room=room)


def test_rows_sit_at_base_plus_depth_and_point_at_parent_rows() -> None:
    rows = tree_rows(3, 10, TREE)
    assert rows.tokens == [3, 5, 6, 7, 7, 9]
    assert rows.positions == [10, 11, 11, 12, 12, 13]
    assert rows.parents == (-1, 0, 0, 1, 2, 3)
    assert rows.depth == 3


def test_an_empty_tree_is_the_anchor_alone() -> None:
    rows = tree_rows(3, 10, EMPTY_TREE)
    assert (rows.tokens, rows.positions, rows.parents, rows.depth) == ([3], [10], (-1,), 0)


@pytest.mark.parametrize(
    ("choices", "tokens", "accepted"),
    [
        ([4, 0, 0, 0, 0, 0], (4,), ()),  # no child carries 4
        ([5, 8, 0, 0, 0, 0], (5, 8), (0,)),
        ([6, 0, 7, 0, 1, 0], (6, 7, 1), (1, 3)),  # the other branch's 7
        ([5, 7, 0, 9, 0, 2], (5, 7, 9, 2), (0, 2, 4)),  # to the leaf, and the bonus
    ],
)
def test_the_walk_descends_while_the_choice_is_a_child(
    choices: list[int], tokens: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    result = go(choices)
    assert (result.tokens, result.accepted, result.finish_reason) == (tokens, accepted, FinishReason.RUNNING)


def test_a_likely_sibling_that_was_not_chosen_is_never_accepted() -> None:
    """cases.md 26: one target choice per node decides."""
    result = go([6, 7, 4, 9, 0, 0])
    assert result.tokens == (6, 4) and result.accepted == (1,)


def test_a_stop_id_on_an_accepted_node_ends_the_text_without_bonus() -> None:
    result = go([5, 7, 0, 9, 0, 2], stop=(7,))
    assert result.tokens == (5, 7)
    assert result.accepted == (0, 2)
    assert result.finish_reason is FinishReason.STOP


def test_a_stop_id_as_bonus_is_kept() -> None:
    result = go([5, 8, 0, 0, 0, 0], stop=(8,))
    assert (result.tokens, result.accepted, result.finish_reason) == ((5, 8), (0,), FinishReason.STOP)


@pytest.mark.parametrize(
    ("remaining", "room", "tokens", "reason"),
    [
        (1, 99, (5,), FinishReason.LENGTH),
        (2, 99, (5, 7), FinishReason.LENGTH),
        (99, 3, (5, 7, 9), FinishReason.LENGTH),
        (4, 99, (5, 7, 9, 2), FinishReason.LENGTH),
        (5, 99, (5, 7, 9, 2), FinishReason.RUNNING),
    ],
)
def test_limits_end_the_walk(
    remaining: int, room: int, tokens: tuple[int, ...], reason: FinishReason
) -> None:
    result = go([5, 7, 0, 9, 0, 2], remaining=remaining, room=room)
    assert (result.tokens, result.finish_reason) == (tokens, reason)


def test_the_earliest_event_wins_and_a_stop_beats_the_limit_of_the_same_token() -> None:
    """cases.md 2: [10, 11, STOP, 20, 21, 22], max 5 -> 3 tokens, "stop"."""
    tree = chain_tree([10, 11, 13, 20, 21])
    choices = [10, 11, 13, 20, 21, 22]
    result = go(choices, tree, stop=(13,), remaining=5)
    assert (result.tokens, result.finish_reason) == ((10, 11, 13), FinishReason.STOP)
    assert go(choices, tree, stop=(13,), remaining=3).finish_reason is FinishReason.STOP
    shorter = go(choices, tree, stop=(13,), remaining=2)
    assert (shorter.tokens, shorter.finish_reason) == ((10, 11), FinishReason.LENGTH)


def test_the_walk_equals_a_naive_replay_on_random_trees() -> None:
    rng = random.Random(1)
    for _ in range(300):
        tree = random_tree(rng, nodes=rng.randrange(20), depth=6, vocab=4)
        choices = [rng.randrange(4) for _ in range(len(tree) + 1)]
        stop, remaining = rng.randrange(8), rng.randrange(1, 9)
        result = go(choices, tree, stop=(stop,), remaining=remaining)
        # Replay: every prefix of the accepted path is a node of the tree, found by searching all of them.
        paths = {(): -1}
        for i, parent in enumerate(tree.parents):
            above = next(path for path, node in paths.items() if node == parent)
            paths[(*above, tree.tokens[i])] = i
        expected: list[int] = []
        while True:
            expected.append(choices[paths[tuple(expected)] + 1])
            if expected[-1] == stop or len(expected) == remaining or tuple(expected) not in paths:
                break
        assert list(result.tokens) == expected
        assert [tree.tokens[i] for i in result.accepted] == expected[: len(result.accepted)]
        assert len(expected) - len(result.accepted) == (tuple(expected) not in paths)


def test_depth_leaves_room_for_the_bonus() -> None:
    assert max_depth(num_tokens=10, remaining=5, max_length=100) == 4
    assert max_depth(num_tokens=97, remaining=50, max_length=100) == 2
    assert max_depth(num_tokens=100, remaining=50, max_length=100) == 0


def test_slots_follow_the_page_table() -> None:
    assert slots([7, 3], 4, 2, 4) == [30, 31, 12, 13]
