"""Trees whose nodes know the token before theirs: the table, the scores, and two ways to grow one list."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.bigrams import FILE, PRIOR, Bigrams, Pairs, read_bigrams, write_bigrams
from draft_service.conditional_tree import Conditioner, Conditioning, Transitions, grow_heap, grow_levels
from draft_service.training.pairs import count_pairs
from draft_service.training.shards import Manifest, Shards, ShardWriter
from draft_service.tree import build_tree_heap
from kernels.topk import top_entries
from kernels.tree import unpack_trees
from specbridge.errors import ConfigError
from specbridge.tree import DraftTree

VOCAB, DEPTHS, WIDTH = 40, 4, 6


def table(seed: int = 0) -> Pairs:
    counts = torch.randint(0, 4, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)).numpy() ** 3
    first, second = np.nonzero(counts)
    return Pairs(first, second, counts[first, second], counts.sum(1) + 5)


def conditional(pairs: Pairs, before: int, after: int) -> float:
    [at] = np.nonzero((pairs.first == before) & (pairs.second == after))
    count = float(pairs.counts[at[0]]) if len(at) else 0.0
    share = (pairs.totals[after] + 0.1) / (pairs.totals + 0.1).sum()
    return (count + PRIOR * share) / (float(pairs.totals[before]) + PRIOR)


def candidates(seed: int, *, coarse: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_probs, beliefs, ids of three sessions; coarse: few distinct values, so that many nodes tie."""
    generator = torch.Generator().manual_seed(seed)
    beliefs = torch.randn(3, DEPTHS, VOCAB, generator=generator) * 2
    noise = torch.rand(3, DEPTHS, VOCAB, generator=generator)
    if coarse:
        beliefs, noise = beliefs.round(), noise.round()
    log_probs, ids = top_entries((beliefs + noise).log_softmax(-1), WIDTH, nonpositive=True)
    return log_probs, beliefs.gather(-1, ids), ids


def test_scores_are_those_of_the_formula() -> None:
    pairs, rule = table(), Conditioning(noise=(1.0, 0.7), pairs=(0.0, 0.5, 0.9))
    log_probs, beliefs, ids = candidates(1)
    steps = Conditioner(Bigrams(pairs, "cpu"), DEPTHS, rule).transitions(log_probs, beliefs, ids)
    torch.testing.assert_close(steps.first, log_probs[:, 0].log_softmax(-1))
    noise, weight = (1.0, 0.7, 0.7, 0.7), (0.0, 0.5, 0.9, 0.9)
    for s, d, i in itertools.product(range(3), range(1, DEPTHS), range(WIDTH)):
        q = beliefs[s, d - 1].softmax(-1)
        row = []
        for j in range(WIDTH):
            v = int(ids[s, d, j])
            below = [conditional(pairs, int(u), v) for u in ids[s, d - 1]]
            average = sum(float(a) * b for a, b in zip(q, below, strict=True))
            base = noise[d] * log_probs[s, d, j] + (1 - noise[d]) * beliefs[s, d, j]
            row.append(float(base) + weight[d] * (math.log(below[i]) - math.log(average)))
        torch.testing.assert_close(steps.later[s, d - 1, i], torch.tensor(row).log_softmax(-1))


def brute_force(steps: Transitions, session: int, nodes: int, limit: int) -> DraftTree:
    """All prefixes, sorted as the module says."""
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for depth in range(1, limit + 1):
        for path in itertools.product(range(WIDTH), repeat=depth):
            score = np.float32(steps.first[session, path[0]])
            for d in range(1, depth):
                score = np.float32(score + np.float32(steps.later[session, d - 1, path[d - 1], path[d]]))
            found.append((-float(score), depth, path))
    best = sorted(found)[:nodes]
    place = {path: i for i, (_, _, path) in enumerate(best)}
    return DraftTree(
        tuple(int(steps.ids[session, len(path) - 1, path[-1]]) for _, _, path in best),
        tuple(place.get(path[:-1], -1) for _, _, path in best),
        tuple(-score for score, _, _ in best),
    )


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("nodes", [1, 5, 30])
def test_both_ways_give_the_best_prefixes(coarse: bool, nodes: int) -> None:
    """With many ties, too: then the rule's table is flat and scores are few."""
    rule = Conditioning(pairs=(0.0, 0.0)) if coarse else Conditioning()
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS, rule)
    steps = conditioner.transitions(*candidates(2, coarse=coarse))
    limits = torch.tensor([DEPTHS, 2, 0])
    packed = grow_levels(steps, limits, nodes)
    lists = unpack_trees(packed, [nodes] * 3)
    for session, limit in enumerate(limits.tolist()):
        wanted = brute_force(steps, session, nodes, limit)
        by_levels = lists[session]
        assert (tuple(by_levels.tokens), tuple(by_levels.parents)) == (wanted.tokens, wanted.parents)
        assert tuple(by_levels.scores) == wanted.scores
        assert grow_heap(steps, session, nodes, limit) == wanted


def test_without_conditioning_it_is_the_served_tree() -> None:
    """b = 1 and c = 0 over the whole vocabulary: the heap of draft_service.tree."""
    generator = torch.Generator().manual_seed(4)
    scores = (torch.randn(1, DEPTHS, VOCAB, generator=generator) * 3).log_softmax(-1)
    log_probs, ids = top_entries(scores, VOCAB, nonpositive=True)
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS, Conditioning((1.0,), (0.0,)))
    tree = grow_heap(conditioner.transitions(log_probs, log_probs, ids), 0, 25, DEPTHS)
    wanted = build_tree_heap(scores[0], 25)
    assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(wanted.scores))


def test_impossible_tokens_are_never_nodes() -> None:
    """Depth 2 has two candidates, depth 3 none."""
    log_probs, beliefs, ids = (x[:1].clone() for x in candidates(5))
    log_probs[0, 1, 2:] = -math.inf
    log_probs[0, 2] = -math.inf
    steps = Conditioner(Bigrams(table(), "cpu"), DEPTHS).transitions(log_probs, beliefs, ids)
    tree = grow_heap(steps, 0, 100, DEPTHS)
    assert len(tree.tokens) == WIDTH + 2 * WIDTH
    [levels] = unpack_trees(grow_levels(steps, torch.tensor([DEPTHS]), 100), [100])
    assert tuple(levels.tokens) == tree.tokens


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    """Counts keep within 3%: 12 steps to a factor of two."""
    pairs = table()
    write_bigrams(tmp_path, pairs, {"data": "none"})
    found = read_bigrams(tmp_path, vocab_size=VOCAB, device="cpu")
    assert found is not None
    every = torch.arange(VOCAB)
    exact = Bigrams(pairs, "cpu").conditional(every, every)
    torch.testing.assert_close(found.conditional(every, every), exact, rtol=0.06, atol=0)
    assert float(exact[3, 7]) == pytest.approx(conditional(pairs, 3, 7), rel=1e-5)
    for vocab, damage, message in ((50, None, "is for 40 tokens"), (VOCAB, b"{}", "can't be read")):
        if damage:
            (tmp_path / FILE).write_bytes(damage)
        with pytest.raises(ConfigError, match=message):
            read_bigrams(tmp_path, vocab_size=vocab, device="cpu")
    assert read_bigrams(tmp_path / "elsewhere", vocab_size=VOCAB, device="cpu") is None


def test_pairs_are_counted_inside_of_responses(tmp_path: Path) -> None:
    """The first token of a response has the prompt's last before it; no pair crosses from one to the next."""
    with ShardWriter(tmp_path, Manifest("t", "f", VOCAB)) as writer:
        for key in range(3):
            writer.add([1, 2, 3, 4, 3, 4, 5 + key], 2, 0.0, 0, key)
    pairs = count_pairs(Shards(tmp_path), 10)
    kept = dict(zip(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True), pairs.counts, strict=True))
    assert kept == {(2, 3): 3, (3, 4): 6, (4, 3): 3}
    assert pairs.totals[[1, 2, 3, 4]].tolist() == [0, 3, 6, 6]
    fewer = count_pairs(Shards(tmp_path), 1)
    assert (fewer.first.tolist(), fewer.second.tolist()) == ([3], [4])
