"""A draft tree against the target's choices: the rows of the verify pass, the walk, the commit slots.

Owns the arithmetic of one session's round. With kv_length = base, the anchor sits at position base, a node of
depth d at base + d, and the row of a node chooses the token of the position after its own. Does not own the
forward (target_service.runner), the choice (target_service.sampling) or sessions (target_service.session).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbridge.rounds import FinishReason
from specbridge.tree import DraftTree


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The anchor (row 0) and the nodes (row i + 1 is node i), in order.

    parents: row of each row's parent, -1 for row 0. depth: of the deepest node.
    """

    tokens: list[int]
    positions: list[int]
    parents: tuple[int, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class WalkResult:
    """What one round commits.

    tokens: new tokens in order. accepted: indexes of the nodes among them, root to leaf. When the text goes
    on, tokens has one more entry than accepted: the bonus, the next anchor. When it ends on an accepted node
    there is no bonus.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    finish_reason: FinishReason


def tree_rows(anchor: int, base: int, tree: DraftTree) -> TreeRows:
    """Rows of the verify pass for `tree` below `anchor` at position `base`. `tree` must be valid."""
    depths = tree.depths()
    return TreeRows(
        tokens=[anchor, *tree.tokens],
        positions=[base, *[base + depth for depth in depths]],
        parents=(-1, *[parent + 1 for parent in tree.parents]),
        depth=max(depths, default=0),
    )


def max_depth(*, num_tokens: int, remaining: int, max_length: int) -> int:
    """Deepest tree of which every token could still be used: the last one is left to the bonus."""
    return max(min(remaining - 1, max_length - num_tokens - 1), 0)


def walk(
    tree: DraftTree, choices: Sequence[int], *, stop_ids: frozenset[int], remaining: int, room: int
) -> WalkResult:
    """Descend from the anchor while the committed choice is a child.

    choices[i]: the committed token of row i (row 0 is the anchor's). Ends at the first stop id (kept, nothing
    after it), after `remaining` tokens of the request, or after `room` tokens of the model's length; a stop
    id wins over a limit reached by the same token.
    """
    tokens: list[int] = []
    accepted: list[int] = []
    limit = min(remaining, room)
    node = -1
    while True:
        token = choices[node + 1]
        tokens.append(token)
        child = tree.child(node, token)
        if child is not None:
            accepted.append(child)
        reason = FinishReason.RUNNING
        if token in stop_ids:
            reason = FinishReason.STOP
        elif len(tokens) >= limit:
            reason = FinishReason.LENGTH
        if child is None or reason:
            return WalkResult(tuple(tokens), tuple(accepted), reason)
        node = child


def slots(pages: Sequence[int], page_size: int, first: int, count: int) -> list[int]:
    """Cache slots (page * page_size + offset) of positions [first, first + count)."""
    return [pages[p // page_size] * page_size + p % page_size for p in range(first, first + count)]
