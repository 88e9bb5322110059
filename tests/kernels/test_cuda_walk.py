"""walk_rows against the host's walk, over packed batches of trees, chains and padding."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.ragged import BLOCK, CHAIN, TREE
from kernels.walk import walk_rows, walk_rows_reference
from specbridge.tree import DraftTree
from target_service.verify import walk


@dataclass
class Packed:
    """Arguments of walk_rows on the CPU, and the path that the host's walk gives."""

    chosen: list[int]
    tokens: list[int]
    parents: list[int]
    row_start: list[int]
    kinds: list[int]
    path: list[int]

    def arguments(self, device: torch.device) -> list[torch.Tensor]:
        lists = (self.chosen, self.tokens, self.parents, self.row_start, self.kinds)
        return [torch.tensor(values, dtype=torch.int32, device=device) for values in lists]


def random_tree(rng: random.Random, nodes: int, vocab: int) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    children: set[tuple[int, int]] = set()
    while len(tokens) < nodes:
        # Often below the newest node, so that some trees are deep.
        parent = len(tokens) - 1 if rng.random() < 0.5 else rng.randrange(-1, len(tokens))
        token = rng.randrange(vocab)
        if (parent, token) not in children:
            children.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * nodes)


def packed(seed: int, sizes: list[int], *, padding_rows: int, padding_sessions: int, vocab: int) -> Packed:
    """sizes: nodes of each session's tree; a negative size: a chain (or block) of so many rows."""
    rng = random.Random(seed)
    out = Packed([], [], [], [0], [], [])
    for size in sizes:
        first = out.row_start[-1]
        rows = -size if size < 0 else size + 1
        out.row_start.append(first + rows)
        choices = [rng.randrange(vocab) for _ in range(rows)]
        if size < 0:
            out.kinds.append(rng.choice([CHAIN, BLOCK]))
            out.tokens += [rng.randrange(vocab) for _ in range(rows)]
            out.parents += [-1, *range(first, first + rows - 1)]
            out.path += range(rows)
        else:
            out.kinds.append(TREE)
            tree = random_tree(rng, size, vocab)
            for row in range(rows):
                # Mostly a child of the row, if there is one; now and then a row that was no number.
                below = [t for p, t in zip(tree.parents, tree.tokens, strict=True) if p == row - 1]
                if below and rng.random() < 0.85:
                    choices[row] = rng.choice(below)
                elif rng.random() < 0.2:
                    choices[row] = -1
            out.tokens += [rng.randrange(vocab), *tree.tokens]
            out.parents += [-1, *(first + parent + 1 for parent in tree.parents)]
            accepted = walk(tree, choices, stop_ids=frozenset(), remaining=10**6, room=10**6).accepted
            path = [-1] * rows
            for depth, row in enumerate([0, *(node + 1 for node in accepted)]):
                path[row] = depth
            out.path += path
        out.chosen += choices
    out.row_start += out.row_start[-1:] * padding_sessions
    out.kinds += [CHAIN] * padding_sessions
    out.chosen += [rng.randrange(vocab) for _ in range(padding_rows)]
    out.tokens += [0] * padding_rows
    out.parents += [-1] * padding_rows
    out.path += [-1] * padding_rows
    return out


BATCHES = [
    ([0], 0, 0),
    ([7], 3, 0),
    ([0, 16, -1, 5, -40, 1], 9, 2),
    ([30, 30, 30], 40, 1),
    ([-130, 63, -1, 3], 150, 3),
]


@pytest.mark.parametrize(("sizes", "padding_rows", "padding_sessions"), BATCHES)
@pytest.mark.parametrize("seed", [0, 1])
def test_path_is_the_hosts_walk(
    triton_device: torch.device, sizes: list[int], padding_rows: int, padding_sessions: int, seed: int
) -> None:
    batch = packed(seed, sizes, padding_rows=padding_rows, padding_sessions=padding_sessions, vocab=6)
    most = max([size + 1 for size in sizes if size >= 0], default=1)
    path = walk_rows(*batch.arguments(triton_device), most_rows=most)
    assert path.dtype == torch.int32 and path.tolist() == batch.path


@pytest.mark.parametrize("seed", range(20))
def test_reference_is_the_hosts_walk(seed: int) -> None:
    batch = packed(seed, [12, 0, 200, -9, 3, 64], padding_rows=5, padding_sessions=2, vocab=4)
    assert walk_rows_reference(*batch.arguments(torch.device("cpu"))).tolist() == batch.path


def test_a_whole_chain_of_512_nodes_is_walked(triton_device: torch.device) -> None:
    nodes = 512 if triton_device.type == "cuda" else 40
    rows = torch.arange(nodes + 1, dtype=torch.int32, device=triton_device)
    path = walk_rows(
        rows + 1,
        rows,
        rows - 1,
        torch.tensor([0, nodes + 1], dtype=torch.int32, device=triton_device),
        torch.tensor([TREE], dtype=torch.int32, device=triton_device),
        most_rows=nodes + 1,
    )
    assert torch.equal(path, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_large_batches(seed: int) -> None:
    device = torch.device("cuda")
    sizes = [random.Random(seed).choice([0, 1, 16, 64, 256, 512, -1, -512]) for _ in range(32)]
    batch = packed(seed, sizes, padding_rows=seed * 7, padding_sessions=seed % 4, vocab=600)
    assert walk_rows(*batch.arguments(device), most_rows=513).tolist() == batch.path
