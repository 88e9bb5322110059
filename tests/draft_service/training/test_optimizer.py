"""AdamW over flat tensors against torch's own, and the schedule."""

from __future__ import annotations

import pytest
import torch

from draft_service.training.optimizer import AdamW, learning_rate


def test_updates_are_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    ours = [draw(50).requires_grad_(), draw(7).requires_grad_()]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    mine = AdamW(ours, (0.1, 0.0), betas=(0.9, 0.95), clip=1.0)
    reference = torch.optim.AdamW(
        [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step in range(12):
        scale = 0.05 if step % 2 else 3.0  # below the clip, and above
        gradients = [draw(50) * scale, draw(7) * scale]
        rate = 1e-2 * (step + 1)
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        mine.rate.fill_(rate)
        mine.update(gradients)
        assert mine.norm.item() == pytest.approx(norm.item())
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate(i / 1000, 6e-4, 0.04) for i in range(1001)]
    assert max(rates) == pytest.approx(6e-4) and rates.index(max(rates)) == 40
    assert rates[:41] == sorted(rates[:41]) and rates[40:] == sorted(rates[40:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12) and rates[20] == pytest.approx(3e-4)
    assert rates[520] == pytest.approx(3e-4)
    assert learning_rate(0.0, 1.0, 0.0) == 1.0
