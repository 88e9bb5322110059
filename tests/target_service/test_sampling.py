"""The commit rule against transformers' warpers, against its own definition, and independent of the batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.philox import gumbel_noise
from specbridge.rounds import SamplingParams
from target_service.sampling import NO_CHOICE, ChoiceRule, RowGroup, _kept, choose, token_logprobs

FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 5, 40, 10**6), (1.0, 0.95, 0.5, 1e-6), (0.0, 0.05, 0.6)
    )
]


def filter_logits(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """scores [rows, vocab], divided by T already; returned with what the filters remove at -inf."""
    ids, values, keep = _kept(scores, params)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, torch.where(keep, values, -torch.inf))


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' answer, [rows, vocab]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())


@pytest.mark.parametrize("vocab", [7, 300, 2000])
def test_filters_keep_what_transformers_keeps(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(FILTERS), vocab, generator=generator) * 3
    scores = logits / torch.tensor([p.temperature for p in FILTERS]).unsqueeze(1)
    ours = filter_logits(scores, FILTERS)
    for row, params in enumerate(FILTERS):
        theirs = warped(logits[row : row + 1], params)[0]
        assert torch.equal(ours[row].isinf(), theirs.isinf()), params
        kept = ~ours[row].isinf()
        torch.testing.assert_close(ours[row][kept], theirs[kept], rtol=1e-6, atol=1e-6)


def test_a_flat_distribution_needs_more_candidates_than_the_first_try() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5000, generator=generator) * 0.01
    params = SamplingParams(temperature=1.0, top_p=0.9)
    assert torch.equal(filter_logits(logits, [params]).isinf(), warped(logits, params).isinf())


def test_ties_at_a_cut_keep_the_lower_ids() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    kept = ~filter_logits(scores, [SamplingParams(temperature=1.0, top_k=3)]).isinf()
    assert kept.tolist() == [[True, True, False, True, False, False]]
    kept = ~filter_logits(torch.zeros(1, 8), [SamplingParams(temperature=1.0, top_p=0.5)]).isinf()
    assert kept.tolist() == [[True] * 4 + [False] * 4]
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0]])
    kept = ~filter_logits(zeros, [SamplingParams(temperature=1.0, top_k=2)]).isinf()
    assert kept.tolist() == [[True, True, False, False]]


def test_with_ties_as_many_stay_as_transformers_would_keep_of_distinct_scores() -> None:
    """bf16 logits tie often: the values kept are those of a strictly ordered copy."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(FILTERS), 60, generator=generator) * 2).bfloat16().float()
    scores = logits / torch.tensor([p.temperature for p in FILTERS]).unsqueeze(1)
    ours = filter_logits(scores, FILTERS)
    for row, params in enumerate(FILTERS):
        kept = ~ours[row].isinf()
        if params.top_k:
            assert kept.sum() <= params.top_k
        worst = scores[row][kept].min()
        assert kept[scores[row] > worst].all()
        tied = scores[row] == worst
        # Among the tied, a prefix of the ids.
        ids = tied.nonzero().flatten()
        states = kept[ids].tolist()
        assert states == sorted(states, reverse=True), params


def test_greedy_takes_the_lowest_id_of_equal_logits_and_no_noise() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    rule = ChoiceRule(SamplingParams(temperature=9e-6, seed=4, top_p=0.5))
    assert choose(logits, [RowGroup(rule, 0, [7, 8])]).tolist() == [1, 0]


@pytest.mark.parametrize("params", [p for p in FILTERS if p.temperature == 1.0 and p.top_k in (0, 5)])
def test_the_choice_is_the_argmax_of_filtered_scores_plus_noise(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator)
    params = SamplingParams(
        params.temperature, params.top_k, params.top_p, params.min_p, seed=2**63 + 5, choice=3
    )
    positions = [4, 5, 5, 6, 9, 1000]
    chosen = choose(logits, [RowGroup(ChoiceRule(params), 0, positions)])
    noise = gumbel_noise([params.seed] * 6, positions, [3] * 6, 50)
    assert torch.equal(chosen, (warped(logits, params) + noise).argmax(dim=-1))


def test_rows_of_a_mixed_batch_choose_as_they_would_alone() -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    groups, row = [], 0
    for i in range(40):
        params = rng.choice([SamplingParams(), *FILTERS])
        params = SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=i)
        count = rng.randrange(1, 5)
        positions = [10 + rng.randrange(3) for _ in range(count)]
        groups.append(RowGroup(ChoiceRule(params, (1, 2), rng.choice([0, 11, 99])), row, positions))
        row += count
    logits = torch.randn(row, 80, generator=generator) * 2
    together = choose(logits, groups).tolist()
    alone = [
        int(choose(logits[g.first_row + i : g.first_row + i + 1], [RowGroup(g.rule, 0, [position])])[0])
        for g in groups
        for i, position in enumerate(g.positions)
    ]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_stop_ids_per_position_and_leaves_the_logits_alone(temperature: float) -> None:
    logits = torch.zeros(3, 6)
    logits[:, 4] = 50.0
    before = logits.clone()
    rule = ChoiceRule(SamplingParams(temperature=temperature, seed=1), masked_ids=(4,), masked_below=12)
    chosen = choose(logits, [RowGroup(rule, 0, [10, 11, 12])]).tolist()
    assert chosen[0] != 4 and chosen[1] != 4 and chosen[2] == 4
    assert torch.equal(logits, before)


def test_the_seed_and_the_choice_index_change_the_sample_and_repeat_it() -> None:
    """cases.md 24."""
    logits = torch.zeros(64, 100)

    def sample(seed: int, choice: int = 0) -> list[int]:
        rule = ChoiceRule(SamplingParams(temperature=1.0, seed=seed, choice=choice))
        return choose(logits, [RowGroup(rule, 0, range(64))]).tolist()

    assert sample(7) == sample(7)
    assert len({tuple(sample(seed)) for seed in (0, 1, 7, 2**32 + 7, 2**64 - 1)}) == 5
    assert sample(7) != sample(7, choice=1)
    assert sample(-1) == sample(2**64 - 1)


def test_wire_floats_and_python_floats_choose_alike() -> None:
    """The wire carries fp32: 0.9 and its fp32 neighbour must cut at the same place."""
    scores = torch.log(torch.tensor([[0.5, 0.4, 0.1]]))
    wire = torch.tensor(0.9, dtype=torch.float32).item()
    assert wire != 0.9
    for top_p in (0.9, wire):
        first = filter_logits(scores, [SamplingParams(temperature=1.0, top_p=top_p)])
        assert torch.equal(first, filter_logits(scores, [SamplingParams(temperature=1.0, top_p=0.9)]))


def test_logprobs_are_those_of_the_plain_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    (only,) = token_logprobs(logits, [0], 1)
    assert only.top_ids == () and only.chosen == pytest.approx(float(logits.log_softmax(-1)[0, 0]))
    (three,) = token_logprobs(logits, [3], 3)
    assert three.top_ids == (1, 2)
    assert three.top == pytest.approx(logits.log_softmax(-1)[0, [1, 2]].tolist())


@pytest.mark.parametrize("number", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), FILTERS[7], FILTERS[-1]]
)
def test_a_row_that_is_no_number_gets_no_choice_and_disturbs_no_other(
    params: SamplingParams, number: float
) -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(4))
    groups = [RowGroup(ChoiceRule(params), 0, [5, 6, 7])]
    want = choose(logits, groups).tolist()
    logits[1, 37] = number
    assert choose(logits, groups).tolist() == [want[0], NO_CHOICE, want[2]]
    logits[1] = -torch.inf
    assert choose(logits, groups).tolist() == [want[0], NO_CHOICE, want[2]]
