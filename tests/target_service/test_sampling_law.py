"""The law of what comes out, trees and shared noise on: chi-square against enumeration.

One draw per seed, 20,000 consecutive seeds, through the service's own sampling and verify functions. The
trees are grown from a drafter's marginals plus the very noise that decides the commit, which is as dependent
as a tree can be; a rule that let the tree decide anything would show here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels import philox
from specbridge.rounds import SamplingParams
from specbridge.tree import DraftTree
from target_service import sampling
from target_service.sampling import ChoiceRule, RowGroup, choose
from target_service.verify import walk

VOCAB, PROMPT, SEEDS, LENGTH = 4, 3, 20_000, 3
P_VALUE = 1e-4


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    """[seeds, positions, vocab] of positions PROMPT .. PROMPT + LENGTH."""
    count = LENGTH + 1
    seeds = [s for s in range(SEEDS) for _ in range(count)]
    positions = [PROMPT + p for _ in range(SEEDS) for p in range(count)]
    table = philox._gumbel_torch(seeds, positions, [0] * len(seeds), VOCAB, 0, torch.device("cpu"))
    return table.view(SEEDS, count, VOCAB)


@pytest.fixture(autouse=True)
def _fast_noise(noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise, made in one go: one numpy pass a row would be most of this file's time."""

    def lookup(
        seeds: Sequence[int],
        positions: Sequence[int],
        choices: Sequence[int],
        vocab_size: int,
        *,
        device: object,
    ) -> torch.Tensor:
        assert vocab_size == VOCAB and not any(choices)
        return noise[torch.tensor(seeds), torch.tensor(positions) - PROMPT]

    monkeypatch.setattr(sampling, "gumbel_noise", lookup)


def test_the_shortcut_of_this_file_is_the_real_noise(noise: torch.Tensor) -> None:
    seeds, positions = [0, 1, 77, SEEDS - 1], [PROMPT, PROMPT + 3, PROMPT + 1, PROMPT + 2]
    real = philox.gumbel_noise(seeds, positions, [0] * 4, VOCAB)
    torch.testing.assert_close(noise[seeds, [p - PROMPT for p in positions]], real)


def model_tables() -> list[torch.Tensor]:
    """Logits of the next token after 0, 1, 2, 3 tokens: [vocab] * depth + [vocab]."""
    generator = torch.Generator().manual_seed(42)
    return [torch.randn(*([VOCAB] * (depth + 1)), generator=generator) for depth in range(LENGTH + 1)]


TABLES = model_tables()
DRAFT = [
    torch.randn(VOCAB, generator=torch.Generator().manual_seed(9 + depth)) for depth in range(LENGTH + 1)
]


def law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Joint law of the first three tokens by enumeration, with transformers' filters."""
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    probability: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(VOCAB), repeat=LENGTH):
        p = 1.0
        for depth in range(LENGTH):
            scores = (TABLES[depth][path[:depth]] / params.temperature).unsqueeze(0)
            p *= float(
                warpers(torch.zeros(1, 1, dtype=torch.int64), scores)[0].double().softmax(-1)[path[depth]]
            )
        probability[path] = p
    return probability


FLAT = torch.cat([table.reshape(-1, VOCAB) for table in TABLES])


def row_of(path: Sequence[int]) -> int:
    """Row of FLAT with the logits after `path`."""
    row = 0
    for token in path:
        row = row * VOCAB + token
    return row + sum(VOCAB**depth for depth in range(len(path)))


def grow(best: list[list[int]]) -> DraftTree:
    """All combinations of best[depth], the candidates of each depth."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [-1]
    for candidates in best:
        below = []
        for parent in level:
            for token in candidates:
                below.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
        level = below
    return DraftTree(tuple(tokens), tuple(parents), tuple(-float(i) for i in range(len(tokens))))


Rule = Callable[[torch.Tensor, list[RowGroup]], torch.Tensor]


def draw(
    params: SamplingParams,
    noise: torch.Tensor,
    *,
    seeds: int = SEEDS,
    rule: Rule = choose,
    pick: Callable[[DraftTree, list[int]], list[int]] = lambda tree, choices: choices,
) -> torch.Tensor:
    """First three tokens of every seed, [seeds, 3]: a first token, then one round with a tree, then the rest
    plainly.
    """
    rules = [
        ChoiceRule(SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=seed))
        for seed in range(seeds)
    ]
    first = rule(
        TABLES[0].expand(seeds, VOCAB), [RowGroup(r, i, [PROMPT]) for i, r in enumerate(rules)]
    ).tolist()
    texts = [[token] for token in first]
    # Two candidates a depth, by the drafter's marginals with the noise that will decide the commit.
    best = (torch.stack(DRAFT) + noise).topk(2).indices.tolist()
    while any(len(text) < LENGTH for text in texts):
        groups: list[RowGroup] = []
        logit_rows: list[int] = []
        rounds: list[tuple[int, DraftTree, int]] = []
        row = 0
        for seed, text in enumerate(texts):
            if len(text) >= LENGTH:
                continue
            tree = grow(best[seed][len(text) : LENGTH])
            paths = [text]
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                paths.append([*paths[parent + 1], token])
            groups.append(RowGroup(rules[seed], row, [PROMPT + len(path) for path in paths]))
            logit_rows += [row_of(path) for path in paths]
            rounds.append((seed, tree, row))
            row += len(paths)
        choices = rule(FLAT[logit_rows], groups).tolist()
        for seed, tree, at in rounds:
            own = pick(tree, choices[at : at + len(tree) + 1])
            result = walk(tree, own, stop_ids=frozenset(), remaining=99, room=99)
            texts[seed] += result.tokens
    return torch.tensor([text[:LENGTH] for text in texts])


def chi_square(samples: torch.Tensor, probability: dict[tuple[int, ...], float]) -> float:
    """p-value of the observed paths; 0 if an impossible one was seen. Rare cells are pooled."""
    counts = dict.fromkeys(probability, 0)
    for path in map(tuple, samples.tolist()):
        counts[path] += 1
    if any(counts[path] for path, p in probability.items() if p == 0.0):
        return 0.0
    total = len(samples)
    often = [path for path, p in probability.items() if p * total >= 5]
    observed = [float(counts[path]) for path in often]
    expected = [probability[path] * total for path in often]
    if total - sum(expected) > 1:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=3, min_p=0.1),
    ],
)
def test_three_tokens_have_their_joint_law(params: SamplingParams, noise: torch.Tensor) -> None:
    """cases.md 22, 23. And the tokens of neighbouring seeds are independent of each other."""
    samples = draw(params, noise)
    assert chi_square(samples, law(params)) > P_VALUE
    first = samples[:, 0].unique(return_inverse=True)[1]
    table = torch.zeros(int(first.max()) + 1, int(first.max()) + 1, dtype=torch.int64)
    # Every other pair, so that no draw is in two of them.
    table.index_put_((first[0::2], first[1::2]), torch.ones(SEEDS // 2, dtype=torch.int64), accumulate=True)
    assert stats.chi2_contingency(table.numpy()).pvalue > P_VALUE


def test_a_rule_that_reuses_one_position_s_noise_for_all_depths_fails(noise: torch.Tensor) -> None:
    def wrong(logits: torch.Tensor, groups: list[RowGroup]) -> torch.Tensor:
        return choose(logits, [RowGroup(g.rule, g.first_row, [PROMPT] * len(g.positions)) for g in groups])

    params = SamplingParams(temperature=1.0)
    assert chi_square(draw(params, noise, seeds=4000, rule=wrong), law(params)) < P_VALUE


def test_a_walk_that_prefers_tree_branches_fails(noise: torch.Tensor) -> None:
    """cases.md 26: "some acceptable child" instead of the one sample. Every fourth such choice is enough to
    show.
    """
    count = itertools.count()

    def wrong(tree: DraftTree, choices: list[int]) -> list[int]:
        children = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == -1]
        if children and choices[0] not in children and next(count) % 4 == 0:
            choices = [children[0], *choices[1:]]
        return choices

    params = SamplingParams(temperature=1.0)
    assert chi_square(draw(params, noise, seeds=4000, pick=wrong), law(params)) < P_VALUE


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_of_neighbours_is_uncorrelated(noise: torch.Tensor, axis: str) -> None:
    x = noise.double()
    pairs = {
        "seed": (x[:-1], x[1:]),
        "position": (x[:, :-1], x[:, 1:]),
        "token": (x[..., :-1], x[..., 1:]),
    }[axis]
    assert stats.pearsonr(pairs[0].flatten().numpy(), pairs[1].flatten().numpy()).pvalue > P_VALUE
