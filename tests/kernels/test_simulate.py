"""Simulated acceptance: draws, marginals and trees keep what the acceptance file says."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from kernels import simulate
from kernels.philox import philox4x32_10

VOCAB = 97
# Two classes of different confidence; after a miss worse, and the draft over-confident.
WEIGHTS = [0.3, 0.7]
TRUE = [
    [[0.8, 0.1, 0.05], [0.7, 0.1, 0.1], [0.6, 0.2, 0.1]],
    [[0.3, 0.2, 0.1], [0.4, 0.3, 0.1], [0.2, 0.2, 0.2]],
]
MISSED = [
    [[0.0, 0.0, 0.0], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]],
    [[0.0, 0.0, 0.0], [0.2, 0.1, 0.1], [0.1, 0.1, 0.1]],
]
DRAFT = [
    [[0.9, 0.05, 0.02], [0.8, 0.1, 0.05], [0.7, 0.2, 0.05]],
    [[0.4, 0.2, 0.1], [0.5, 0.3, 0.1], [0.3, 0.2, 0.2]],
]


def tables(device: str = "cpu", vocab_size: int = VOCAB) -> simulate.MarginalTables:
    return simulate.marginal_tables(WEIGHTS, TRUE, MISSED, DRAFT, vocab_size=vocab_size, device=device)


def rows(count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return simulate.pack_rows([(2**64 - 1 - 7 * i, 11 * i, i % 3) for i in range(count)], device)


def test_the_token_is_the_philox_word_of_its_position() -> None:
    """Pins the counter: both services, and a later version, must agree on it."""
    seeds, positions, choices = simulate.pack_rows([(5, 9, 2), (2**64 - 1, 0, 0)], "cpu")
    got = simulate.true_tokens(seeds, positions, choices, 1000).tolist()
    for token, (low, high, position, choice) in zip(
        got, [(5, 0, 9, 2), (2**32 - 1, 2**32 - 1, 0, 0)], strict=True
    ):
        words = philox4x32_10(
            tuple(torch.tensor([w]) for w in (0, position, choice, 1)),  # type: ignore[arg-type]
            (torch.tensor([low]), torch.tensor([high])),
        )
        assert token == int(words[0, 0]) * 1000 >> 32


def test_tokens_are_spread_over_the_vocabulary() -> None:
    seeds, positions, choices = rows(4000)
    tokens = simulate.true_tokens(seeds, positions, choices, VOCAB)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    chi = float(((counts - 4000 / VOCAB) ** 2 / (4000 / VOCAB)).sum())
    assert chi < VOCAB - 1 + 5 * math.sqrt(2 * (VOCAB - 1))


@pytest.mark.parametrize("vocab_size", [VOCAB, 96, 151936])
def test_marginals_have_the_recorded_probabilities_and_the_true_token_at_its_rank(vocab_size: int) -> None:
    t = tables(vocab_size=vocab_size)
    seeds, bases, choices = rows(40)
    logits = torch.randn(40, 3, vocab_size)
    out = simulate.simulated_marginals(logits, t, seeds, bases, choices)
    assert out.data_ptr() == logits.data_ptr()
    kind, ranks = simulate.draw_rounds(t, seeds, bases, choices, 3)
    scores = out.log_softmax(-1)
    best = scores.topk(3, dim=-1)
    expected = torch.tensor(DRAFT, dtype=torch.float64)[kind.cpu()].log()
    assert torch.allclose(best.values.cpu().double(), expected, atol=1e-3)
    assert bool((best.values[..., :-1] > best.values[..., 1:]).all()), "ranks must stay in order in fp32"
    for depth in range(3):
        true = simulate.true_tokens(seeds, bases + depth + 1, choices, vocab_size)
        found = (best.indices[:, depth] == true.unsqueeze(1)).cpu()
        rank = ranks[:, depth].cpu()
        assert found.any(1).tolist() == (rank < 3).tolist()
        assert found.int().argmax(1)[rank < 3].tolist() == rank[rank < 3].tolist()


def test_fewer_depths_are_the_first_ones() -> None:
    seeds, bases, choices = rows(8)
    whole = simulate.simulated_marginals(torch.zeros(8, 3, VOCAB), tables(), seeds, bases, choices)
    part = simulate.simulated_marginals(torch.zeros(8, 2, VOCAB), tables(), seeds, bases, choices)
    assert torch.equal(whole[:, :2], part)


def test_draws_do_not_depend_on_the_batch() -> None:
    seeds, bases, choices = rows(9)
    whole = simulate.simulated_marginals(torch.zeros(9, 3, VOCAB), tables(), seeds, bases, choices)
    for i in (0, 4, 8):
        one = simulate.simulated_marginals(
            torch.zeros(1, 3, VOCAB), tables(), seeds[i : i + 1], bases[i : i + 1], choices[i : i + 1]
        )
        assert torch.equal(one[0], whole[i])


def test_a_small_vocabulary_never_outranks_a_candidate() -> None:
    t = simulate.marginal_tables([1.0], [[[0.3, 0.2]]], [[[0.3, 0.2]]], [[[0.3, 0.2]]], vocab_size=4)
    assert t.folded == pytest.approx(0.5 - 2 * 0.2 * 0.99)
    out = simulate.simulated_marginals(torch.zeros(5, 1, 4), t, *rows(5))
    assert bool((out.sort(-1, descending=True).values[..., 1] > t.tail[0, 0]).all())


def frequency_of_paths(count: int) -> dict[tuple[int, ...], float]:
    _, ranks = simulate.draw_rounds(tables(), *rows(count), 3)
    paths, counts = np.unique(ranks.numpy(), axis=0, return_counts=True)
    return {tuple(map(int, p)): c / count for p, c in zip(paths, counts, strict=True)}


def test_ranks_follow_the_joint_law_of_the_file() -> None:
    """Every path of ranks, against enumeration: classes, the greedy path, and what follows a miss."""
    count = 20000
    seen = frequency_of_paths(count)
    for path in product(range(4), repeat=3):
        chance = 0.0
        for weight, true, missed in zip(WEIGHTS, TRUE, MISSED, strict=True):
            term, on_path = weight, True
            for depth, rank in enumerate(path):
                row = (true if on_path else missed)[depth]
                term *= row[rank] if rank < 3 else 1 - sum(row)
                on_path = on_path and rank == 0
            chance += term
        error = math.sqrt(chance * (1 - chance) / count)
        assert abs(seen.get(path, 0.0) - chance) <= 5 * error + 1e-9, path


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [VOCAB, 4096, 5003])
def test_triton_equals_the_reference(triton_device: torch.device, vocab_size: int, depth: int) -> None:
    t, (seeds, bases, choices) = tables(str(triton_device), vocab_size), rows(7, str(triton_device))
    logits = torch.randn(7, depth, vocab_size, device=triton_device)
    fast = simulate.simulated_marginals(logits, t, seeds, bases.int(), choices.int())
    reference = simulate.simulated_marginals_reference(
        torch.zeros(7, depth, vocab_size), tables(vocab_size=vocab_size), *rows(7)
    )
    assert torch.equal(fast.cpu(), reference)


@pytest.mark.parametrize("count", [1, 128, 130])
def test_triton_tokens_equal_the_reference(triton_device: torch.device, count: int) -> None:
    for vocab_size in (VOCAB, 151936):
        tokens = simulate.true_tokens(*rows(count, str(triton_device)), vocab_size)
        assert torch.equal(tokens.cpu(), simulate.true_tokens_reference(*rows(count), vocab_size))


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_positions() -> None:
    t, (seeds, bases, choices) = tables("cuda"), rows(6, "cuda")
    logits = torch.zeros(6, 3, VOCAB, device="cuda")
    simulate.simulated_marginals(logits, t, seeds, bases, choices)
    simulate.true_tokens(seeds, bases, choices, VOCAB)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = simulate.true_tokens(seeds, bases, choices, VOCAB)
        simulate.simulated_marginals(logits, t, seeds, bases, choices)
    bases.add_(17)
    graph.replay()
    torch.cuda.synchronize()
    own = rows(6)
    fresh = simulate.simulated_marginals_reference(
        torch.zeros(6, 3, VOCAB), tables(), own[0], own[1] + 17, own[2]
    )
    assert torch.equal(logits.cpu(), fresh)
    assert torch.equal(tokens.cpu(), simulate.true_tokens_reference(own[0], own[1] + 17, own[2], VOCAB))
