"""Blocks' attention: both variants against one softmax under one whole mask, values and gradients."""

from __future__ import annotations

import pytest
import torch

from draft_service.training.attention import Visibility, block_attention

ROWS, KV, GROUP, BLOCKS, SIZE, LENGTH, DIM = 2, 2, 3, 5, 4, 11, 8


def inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = [
        draw(ROWS, KV, BLOCKS, GROUP * SIZE, DIM),
        draw(ROWS, KV, LENGTH, DIM),
        draw(ROWS, KV, LENGTH, DIM),
        draw(ROWS, KV, BLOCKS, SIZE, DIM),
        draw(ROWS, KV, BLOCKS, SIZE, DIM),
    ]
    anchors = torch.tensor([[1, 3, 4, 8, 10], [5, 6, 7, 7, 11]])
    starts = torch.tensor([[0, 0, 0, 4, 4], [0, 0, 6, 6, 6]])
    return tensors, starts, anchors


def naive(tensors: list[torch.Tensor], starts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """All keys of a row, context then every block's, one dense mask; one head at a time."""
    q, past_k, past_v, own_k, own_v = tensors
    out = torch.zeros_like(q)
    for r in range(ROWS):
        for h in range(KV):
            keys = torch.cat((past_k[r, h], own_k[r, h].flatten(0, 1)))
            values = torch.cat((past_v[r, h], own_v[r, h].flatten(0, 1)))
            pieces = []
            for b in range(BLOCKS):
                mask = torch.zeros(LENGTH + BLOCKS * SIZE, dtype=torch.bool)
                mask[starts[r, b] : anchors[r, b]] = True
                mask[LENGTH + b * SIZE : LENGTH + (b + 1) * SIZE] = True
                scores = (q[r, h, b] @ keys.T / DIM**0.5).masked_fill(~mask, float("-inf"))
                pieces.append(torch.softmax(scores, -1) @ values)
            out[r, h] = torch.stack(pieces)
    return out


@pytest.mark.parametrize("variant", ["dense", "split"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_is_one_softmax_over_what_is_visible(variant: str, dtype: torch.dtype) -> None:
    tensors, starts, anchors = inputs(dtype)
    visible = Visibility.make(variant, starts, anchors, LENGTH, GROUP * SIZE, dtype)
    found = block_attention(*tensors, visible)  # type: ignore[call-arg]
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad((found * pull).sum(), tensors)
    exact, starts, anchors = inputs(torch.float64)
    wanted = naive(exact, starts, anchors)
    expected = torch.autograd.grad((wanted * pull.double()).sum(), exact)
    # Torch's fused CPU op computes exponentials in float32, whatever the inputs.
    tight = dtype == torch.float64 and variant == "dense"
    close = {"rtol": 1e-9, "atol": 1e-9} if tight else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(found.double(), wanted, **close)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **close)
