"""Trees whose nodes know the token before theirs: the table, the scores, and all ways to grow one list."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.bigrams import FILE, PRIOR, Bigrams, Pairs, read_bigrams, write_bigrams
from draft_service.conditional_tree import WIDTH as CANDIDATES
from draft_service.conditional_tree import Conditioner, Conditioning, _HostTable, grow_levels
from draft_service.host_marginals import best_tokens
from draft_service.training.pairs import count_pairs
from draft_service.training.shards import Manifest, Shards, ShardWriter
from draft_service.tree import build_tree_heap
from kernels.conditional_tree import Steps, pack_conditional_trees
from kernels.conditional_tree import conditional as probabilities
from kernels.philox import gumbel_noise
from kernels.topk import top_entries
from kernels.tree import unpack_trees
from specbridge.errors import ConfigError
from specbridge.tree import DraftTree

VOCAB, DEPTHS, WIDTH = 40, 4, 6
B, C = Conditioning().noise[1], Conditioning().pairs[1]


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
    steps = Conditioner(Bigrams(pairs, "cpu"), DEPTHS, rule).steps(log_probs, beliefs, ids)
    noise, weight = (1.0, 0.7, 0.7, 0.7), (0.0, 0.5, 0.9, 0.9)
    for s, i in itertools.product(range(3), range(WIDTH)):
        torch.testing.assert_close(steps.scores[s, 0, i], log_probs[s, 0].log_softmax(-1))
    for s, d, i in itertools.product(range(3), range(1, DEPTHS), range(WIDTH)):
        q = beliefs[s, d - 1].softmax(-1)
        row = []
        for j in range(WIDTH):
            v = int(ids[s, d, j])
            below = [conditional(pairs, int(u), v) for u in ids[s, d - 1]]
            average = sum(float(a) * b for a, b in zip(q, below, strict=True))
            base = noise[d] * log_probs[s, d, j] + (1 - noise[d]) * beliefs[s, d, j]
            row.append(float(base) + weight[d] * (math.log(below[i]) - math.log(average)))
        torch.testing.assert_close(steps.scores[s, d, i], torch.tensor(row).log_softmax(-1))


def ranked(scores: list[float]) -> list[int]:
    """Places, the highest score first, the lower place of equal ones."""
    return [place for _, place in sorted((-score, place) for place, score in enumerate(scores))]


def brute_force(steps: Steps, session: int, nodes: int, limit: int, most: int) -> DraftTree:
    """All prefixes, sorted as kernels.conditional_tree says."""
    rows = steps.scores[session].numpy()
    turns = [[ranked(row.tolist()) for row in level] for level in rows]
    above: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # of the level above, in order
    found: list[tuple[float, int, int, tuple[int, ...]]] = []
    for d in range(limit):
        here = []
        for parent, (score, path) in enumerate(above):
            up = path[-1] if path else 0
            for turn, place in enumerate(turns[d][up][:most]):
                total = float(np.float32(np.float32(score) + rows[d, up, place]))
                here.append((-total, parent, turn, (*path, place)))
        here.sort()
        above = [(-negative, path) for negative, _, _, path in here]
        found += [(-score, d, i, path) for i, (score, path) in enumerate(above) if score > -math.inf]
    best = sorted(found)[:nodes]
    index = {path: i for i, (_, _, _, path) in enumerate(best)}
    return DraftTree(
        tuple(int(steps.ids[session, len(path) - 1, path[-1]]) for *_, path in best),
        tuple(index.get(path[:-1], -1) for *_, path in best),
        tuple(-negative for negative, *_ in best),
    )


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("nodes", "most"), [(1, None), (5, None), (30, None), (30, 2), (9, 1)])
def test_all_ways_give_the_best_prefixes(coarse: bool, nodes: int, most: int | None) -> None:
    """With many ties, too: then the rule's table is flat and scores are few."""
    rule = Conditioning(noise=(1.0,), pairs=(0.0, 0.0)) if coarse else Conditioning()
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS, rule)
    steps = conditioner.steps(*candidates(2, coarse=coarse))
    limits = torch.tensor([DEPTHS, 2, 0], dtype=torch.int32)
    wanted = [brute_force(steps, s, nodes, n, most or WIDTH) for s, n in enumerate(limits.tolist())]
    assert most != 1 or len(wanted[0]) == DEPTHS
    budgets = torch.tensor([nodes] * 3, dtype=torch.int32)
    for packed in (
        grow_levels(steps, limits, nodes, most),
        pack_conditional_trees(steps, budgets, limits, nodes=nodes, most_children=most),
    ):
        found = [
            DraftTree(tuple(t.tokens), tuple(t.parents), tuple(t.scores))
            for t in unpack_trees(packed, [nodes] * 3)
        ]
        assert found == wanted


class Reference:
    """The rule as docs/training.md describes it, re-stated on Python's numbers for one session."""

    def __init__(
        self, pairs: Pairs, logits: torch.Tensor, temperature: float, noise: torch.Tensor | None
    ) -> None:
        self.known = [[conditional(pairs, u, v) for v in range(VOCAB)] for u in range(VOCAB)]
        beliefs = logits.double() / (temperature if temperature > 0 else 1.0)
        served = (beliefs + noise if noise is not None else beliefs).log_softmax(-1)
        self.depths: list[dict[int, tuple[float, float]]] = []
        for noisy, belief in zip(served.tolist(), beliefs.tolist(), strict=True):
            best = ranked(noisy)[:CANDIDATES]
            self.depths.append({v: (noisy[v], belief[v]) for v in best if noisy[v] > -math.inf})

    def steps(self, d: int, above: int | None) -> dict[int, float]:
        row = {v: noisy for v, (noisy, _) in self.depths[d].items()}
        if above is not None:
            weights = {u: math.exp(belief) for u, (_, belief) in self.depths[d - 1].items()}
            total = sum(weights.values())
            for v, (noisy, belief) in self.depths[d].items():
                average = sum(w / total * self.known[u][v] for u, w in weights.items())
                row[v] = B * noisy + (1 - B) * belief + C * math.log(self.known[above][v] / average)
        scale = math.log(sum(map(math.exp, row.values())))
        return {v: score - scale for v, score in row.items()}

    def best(self, nodes: int) -> list[tuple[tuple[int, ...], float]]:
        found: list[tuple[float, tuple[int, ...]]] = []
        level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for d in range(len(self.depths)):
            rows = {path[-1] if path else None for _, path in level}
            steps = {above: self.steps(d, above) for above in rows}
            # What lies beyond a level's best has no child among the best of all.
            level = sorted(
                (negative - score, (*path, v))
                for negative, path in level
                for v, score in steps[path[-1] if path else None].items()
            )[:nodes]
            found += level
        return [(path, -negative) for negative, path in sorted(found)[:nodes]]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_served_on_the_host_are_those_of_the_rule(reduced: bool, temperature: float) -> None:
    pairs = table()
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(DEPTHS, VOCAB, generator=generator) * 2
    kept = torch.randperm(VOCAB, generator=generator)[: VOCAB - 7].sort().values
    noise = -torch.log(-torch.log(torch.rand(DEPTHS, VOCAB, generator=generator))) if temperature else None
    columns = kept if reduced else torch.arange(VOCAB)
    own = None if noise is None else noise[:, columns]
    tree = Conditioner(Bigrams(pairs, "cpu"), DEPTHS).host_tree(
        logits[:, columns],
        temperature,
        None if own is None else list(own),
        budget=20,
        head_ids=kept if reduced else None,
    )
    if reduced:
        gone = torch.ones(VOCAB, dtype=torch.bool)
        gone[kept] = False
        logits[:, gone] = -math.inf
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    wanted = Reference(pairs, logits, temperature, noise).best(20)
    assert paths == [path for path, _ in wanted]
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor([score for _, score in wanted]))
    assert max(map(len, paths)) > 2, "no step below a step was tested"


def test_without_conditioning_it_is_the_tree_of_marginals() -> None:
    """b = 1 and c = 0 over all tokens there are: the heap of draft_service.tree."""
    generator = torch.Generator().manual_seed(4)
    scores = (torch.randn(DEPTHS, CANDIDATES, generator=generator) * 3).log_softmax(-1)
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS, Conditioning((1.0,), (0.0,)))
    tree = conditioner.host_tree(scores, 0.0, budget=25)
    wanted = build_tree_heap(scores, 25)
    assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(wanted.scores))


def test_impossible_tokens_are_never_nodes() -> None:
    """Depth 2 has two candidates, depth 3 none."""
    log_probs, beliefs, ids = (x[:1].clone() for x in candidates(5))
    log_probs[0, 1, 2:] = -math.inf
    log_probs[0, 2] = -math.inf
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS)
    steps = conditioner.steps(log_probs, beliefs, ids)
    limits = torch.tensor([DEPTHS], dtype=torch.int32)
    [tree] = unpack_trees(pack_conditional_trees(steps, limits * 0 + 100, limits, nodes=100), [100])
    assert len(tree.tokens) == WIDTH + 2 * WIDTH
    [levels] = unpack_trees(grow_levels(steps, limits, 100), [100])
    assert levels == tree
    scores = torch.full((DEPTHS, VOCAB), -math.inf)
    scores[0].scatter_(0, ids[0, 0], log_probs[0, 0])
    scores[1].scatter_(0, ids[0, 1], log_probs[0, 1])
    scores[3].scatter_(0, ids[0, 3], log_probs[0, 3])
    host = conditioner.host_tree(scores, 0.0, budget=100)
    assert sorted(host.tokens) == sorted(tree.tokens)


BROAD = 5000


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 20.0])
@pytest.mark.parametrize("kind", ["sharp", "flat", "all equal", "few possible", "impossible"])
@pytest.mark.parametrize(("nodes", "most"), [(1, None), (5, None), (60, None), (60, 2)])
def test_rows_on_demand_give_the_trees_of_all_rows(
    temperature: float, kind: str, nodes: int, most: int | None
) -> None:
    """Of thousands of tokens, against the batch's way, which normalises and sorts them all."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(DEPTHS, BROAD, generator=generator) * {"sharp": 6.0, "flat": 0.5}.get(kind, 2.0)
    if kind == "all equal":
        logits.zero_()
    elif kind == "few possible":
        logits[:, torch.arange(BROAD) % 500 > 0] = -math.inf
    elif kind == "impossible":
        logits[2] = -math.inf
    keys = torch.randint(0, BROAD**2, (2_000_000,), generator=generator).unique().numpy()
    counts = 1 + keys % 50
    totals = np.bincount(keys // BROAD, counts, BROAD).astype(np.int64) + 5
    conditioner = Conditioner(Bigrams(Pairs(keys // BROAD, keys % BROAD, counts, totals), "cpu"), DEPTHS)
    packed = conditioner.grow(
        logits.unsqueeze(0),
        torch.tensor([temperature]),
        torch.tensor([77]),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([100], dtype=torch.int32),
        torch.tensor([nodes], dtype=torch.int32),
        torch.tensor([DEPTHS], dtype=torch.int32),
        nodes=nodes,
        top_k=most,
    )
    [wanted] = unpack_trees(packed, [nodes])
    noise = gumbel_noise([77] * DEPTHS, list(range(101, 101 + DEPTHS)), [2] * DEPTHS, BROAD)
    tree = conditioner.host_tree(logits, temperature, list(noise), budget=nodes, top_k=most)
    assert tree.tokens
    if kind != "all equal" or temperature > 0:  # of equals, each way's rounding has another before the other
        assert (list(tree.tokens), list(tree.parents)) == (list(wanted.tokens), list(wanted.parents))
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(wanted.scores), atol=1e-4, rtol=1e-4)


def test_only_rows_that_get_nodes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's children are looked at when it has its place, and not of the last one."""
    read: list[float] = []

    def best(logits: np.ndarray, k: int, **options: Any) -> Any:
        read.append(float(logits[0]))
        return best_tokens(logits, k, **options)

    monkeypatch.setattr("draft_service.conditional_tree.best_tokens", best)
    logits = torch.randn(DEPTHS, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.1
    logits[:, 0] = torch.arange(DEPTHS) - 9.0
    conditioner = Conditioner(Bigrams(table(), "cpu"), DEPTHS)
    deepest = []
    for nodes in (1, 2, 3, 30):
        read.clear()
        tree = conditioner.host_tree(logits, 0.0, budget=nodes)
        depths = [0]
        for parent in tree.parents:
            depths.append(depths[parent + 1] + 1)
        deepest.append(min(max(depths[:-1]) + 1, DEPTHS))
        assert read == [d - 9.0 for d in range(deepest[-1])]
    assert deepest[:3] == [1, 2, 2]  # the second is a sibling


@pytest.mark.parametrize("vocab", [VOCAB, 1 << 16, (1 << 16) + 1])
def test_counts_of_the_host_are_the_tables(vocab: int) -> None:
    """Keys of 32 bits where they suffice, and of 64; the last pair there is, pairs after it, repeated ids."""
    generator = np.random.default_rng(vocab)
    keys = np.unique(np.append(generator.integers(0, vocab**2, 3000), [0, vocab * (vocab - 1) - 2]))
    counts = generator.integers(1, 1000, len(keys))
    host = _HostTable(
        Bigrams(Pairs(keys // vocab, keys % vocab, counts, np.full(vocab, 10**6, np.int64)), "cpu")
    )
    known = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    some = generator.integers(0, len(keys), 12)
    before = np.append(keys[some] // vocab, [vocab - 1, 0, vocab - 1, vocab - 2])
    after = np.append(keys[some] % vocab, [0, vocab - 1, vocab - 2])
    found = host.counts(before, after)
    assert np.count_nonzero(found) >= 12
    for i, u in enumerate(before.tolist()):
        assert found[i].tolist() == [known.get(u * vocab + v, 0) for v in after.tolist()]


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    """Counts keep within 3%: 12 steps to a factor of two."""
    pairs = table()
    write_bigrams(tmp_path, pairs, {"data": "none"})
    found = read_bigrams(tmp_path, vocab_size=VOCAB, device="cpu")
    assert found is not None
    every = torch.arange(VOCAB)
    exact = probabilities(Bigrams(pairs, "cpu").table, every, every)
    torch.testing.assert_close(probabilities(found.table, every, every), exact, rtol=0.06, atol=0)
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
