"""Steps' scores and conditional trees on the device against the references, as ordered lists, many ties."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import cuda
from kernels.conditional_tree import (
    PairTable,
    Steps,
    Weights,
    pack_conditional_trees,
    pack_conditional_trees_reference,
    step_scores,
    step_scores_reference,
)
from kernels.marginals import Candidates
from kernels.topk import top_entries

KINDS = ["any", "coarse", "zeros", "gaps"]


def to(device: torch.device, item: object) -> object:
    """A dataclass of tensors on a device."""
    names = item.__dataclass_fields__  # type: ignore[attr-defined]
    values = {name: getattr(item, name) for name in names}
    return type(item)(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()})


def steps_of(kind: str, sessions: int, depths: int, width: int, seed: int) -> Steps:
    """None above 0; not all rows are distributions, since the order must hold for any."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(sessions, depths, width, width, generator=generator).mul(2)
    drawn[:, 0] = drawn[:, 0, :1]
    ids = torch.randint(0, 1000, (sessions, depths, width), generator=generator, dtype=torch.int32)
    scores = drawn.log_softmax(-1)
    if kind == "coarse":
        scores = drawn.round().div(2).abs().neg()
    if kind == "zeros":
        scores = torch.zeros_like(drawn)
    if kind == "gaps":
        scores = torch.where(drawn > 0.0, scores, -math.inf)
    return Steps(ids, scores)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_heaps(triton_device: torch.device, kind: str) -> None:
    cases = [(3, 4, 5, 18, 18), (2, 3, 20, 7, 2)]
    if not cuda.interpreting():
        cases = [(6, 7, 32, n, m) for n in (1, 8, 32, 64, 256) for m in (1, 3, 32)] + [(6, 15, 32, 256, 32)]
    for sessions, depths, width, nodes, most in cases:
        steps = steps_of(kind, sessions, depths, width, nodes)
        budgets = torch.tensor([nodes, nodes // 2, 0, 1, nodes - 1, nodes][:sessions], dtype=torch.int32)
        limits = torch.tensor([depths, 2, depths, 1, depths, 0][:sessions], dtype=torch.int32)
        most = min(most, width)
        wanted = pack_conditional_trees_reference(steps, budgets, limits, nodes=nodes, most=most)
        there = to(triton_device, steps)
        got = pack_conditional_trees(
            there, budgets.to(triton_device), limits.to(triton_device), nodes=nodes, most_children=most
        )
        assert torch.equal(got.cpu(), wanted)
        assert kind == "gaps" or int((wanted[0, 0] >= 0).sum()) == nodes or most == 1


@pytest.mark.parametrize("vocab", [11, 300])
def test_scores_are_the_references(triton_device: torch.device, vocab: int) -> None:
    """Sampled and greedy sessions, fewer candidates than lanes, rows without candidates, NaN."""
    generator = torch.Generator().manual_seed(vocab)
    sessions, depths, width = 3, 4, min(32, vocab)
    logits = torch.randn(sessions, depths, vocab, generator=generator).mul(3).bfloat16()
    temperature = torch.tensor([0.0, 0.6, 1.5])
    log_probs, ids = top_entries(
        (logits.float() + torch.rand(logits.shape, generator=generator)).log_softmax(-1),
        width,
        nonpositive=True,
    )
    log_probs[1, 2:] = -math.inf  # past its depth limit
    ids[1, 2:] = 0
    log_probs[2, 1, 3:] = -math.inf
    log_probs[2, 3] = math.nan
    keys = torch.randperm(vocab * vocab, generator=generator)[: vocab * 4].sort().values
    totals = torch.randint(0, 50, (vocab,), generator=generator).float()
    table = PairTable(
        keys,
        torch.randint(2, 90, (len(keys),), generator=generator).float(),
        totals,
        60.0 * (totals + 0.1) / (totals + 0.1).sum(),
        60.0,
    )
    weights = Weights(torch.tensor([1.0, 0.8, 0.7, 0.7]), torch.tensor([0.0, 0.6, 0.5, 0.5]))
    candidates = Candidates(log_probs, ids.to(torch.int32))
    wanted = step_scores_reference(candidates, logits, temperature, table, weights)
    got = step_scores(
        to(triton_device, candidates),
        logits.to(triton_device),
        temperature.to(triton_device),
        to(triton_device, table),
        to(triton_device, weights),
    )
    assert torch.equal(got.ids.cpu().long(), wanted.ids)
    # Below a place that is no candidate nothing is ever asked for.
    above = (log_probs > -math.inf).unsqueeze(-1).expand(-1, -1, -1, width).roll(1, dims=1)
    above[:, 0] = True
    assert (wanted.scores > -math.inf).sum() > 4 * width * width
    torch.testing.assert_close(
        got.scores.cpu().where(above, torch.tensor(0.0)),
        wanted.scores.where(above, torch.tensor(0.0)),
        rtol=1e-4,
        atol=1e-4,
    )
