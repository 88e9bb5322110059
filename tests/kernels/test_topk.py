"""The k best entries in a fixed order, against a stable sort."""

from __future__ import annotations

import pytest
import torch

from kernels.topk import places_of, sort_keys, top_entries

SHAPES = [(1, 1), (64, 64), (130, 1), (4160, 7), (4161, 64), (49152, 64), (49152, 512)]


def scores_of(kind: str, n: int) -> torch.Tensor:
    """[2, 3, n] with many ties; "any": of both signs, "nonpositive": log-probabilities."""
    logits = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n)).mul(4).round().div(2)
    return logits if kind == "any" else logits.log_softmax(-1).bfloat16().float()


@pytest.mark.parametrize("kind", ["any", "nonpositive"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equal_to_a_stable_sort(kind: str, n: int, k: int) -> None:
    scores = scores_of(kind, n)
    values, places = top_entries(scores, k, nonpositive=kind == "nonpositive")
    want = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(places, want.indices[..., :k]) and torch.equal(values, want.values[..., :k])


def test_all_equal_are_in_order_of_place() -> None:
    _, places = top_entries(torch.full((1, 1000), 2.5), 5)
    assert places.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extremes_zeros_and_what_is_no_number(sign: float) -> None:
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[-0.0, nan * sign, 1e-40, -inf, 0.0, inf, -1e-40, 3.0, -3.0]])
    _, places = top_entries(scores, 9)
    assert places.tolist() == [[5, 7, 2, 0, 4, 6, 8, 3, 1]]


def test_keys_sort_as_the_entries_do_and_know_their_places() -> None:
    scores = scores_of("any", 500)
    keys = sort_keys(scores)
    want = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    assert torch.equal(places_of(keys.sort(dim=-1).values), want)
    assert torch.equal(places_of(keys), torch.arange(500).expand(2, 3, 500))
