"""The chunked loss and its gradient through the head against autograd over whole logits, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from draft_service.training import losses
from draft_service.training.losses import Objective, Rows, decay, head_loss
from kernels.token_loss import LossTerms

BLOCKS, HORIZON, HIDDEN, VOCAB = 6, 4, 8, 31


def rows(dtype: torch.dtype = torch.float64) -> tuple[Rows, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = BLOCKS * HORIZON

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = draw(count, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (count,), generator=generator)
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    weights[::5] = 0
    made = Rows(hidden, labels, weights.to(dtype), draw(count, HIDDEN).to(dtype), torch.tensor([5]))
    return made, draw(VOCAB, HIDDEN).to(dtype)


@pytest.mark.parametrize("chunk", [1, 9, 1000])
@pytest.mark.parametrize("reach", [0.0, 1.0, 0.5])
def test_total_and_gradient(reach: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropy and a distillation, the weights of deep rows scaled by how surely they are reached."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk * VOCAB)
    made, head = rows()
    found = head_loss(made, head, Objective(LossTerms(ce=0.3, kl=0.7), HORIZON, reach))
    (2.5 * found.total).backward()
    again, _ = rows()
    assert again.teacher is not None
    z, t = again.hidden @ head.T, again.teacher @ head.T
    each = 0.3 * F.cross_entropy(z, again.labels, reduction="none") + 0.7 * F.kl_div(
        z.log_softmax(-1), t.softmax(-1), reduction="none"
    ).sum(-1)
    right = z.softmax(-1).gather(1, again.labels[:, None]).view(BLOCKS, HORIZON).detach()
    weights = again.weights.view(BLOCKS, HORIZON).clone()
    for k in range(1, HORIZON):
        weights[:, k] *= right[:, :k].prod(1) ** reach
    (2.5 * (each * weights.flatten()).sum()).backward()
    torch.testing.assert_close(found.rows, each.detach())
    torch.testing.assert_close(found.weights, weights.flatten())
    torch.testing.assert_close(made.hidden.grad, again.hidden.grad)
    assert made.hidden.grad is not None and not made.hidden.grad[::5].any() and made.hidden.grad[1].any()


def test_noise_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1, 13, 1000):
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk * VOCAB)
        made, head = rows()
        found = head_loss(made, head, Objective(LossTerms(ce=0, coupled=1.0), HORIZON))
        found.total.backward()
        results.append((found.rows, made.hidden.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_bfloat16_loses_little() -> None:
    """The gradient of a row points where float64's does; losses are within bfloat16's rounding of logits."""
    exact, head = rows()
    rounded, _ = rows(torch.bfloat16)
    made = Rows(rounded.hidden, rounded.labels, exact.weights.float())
    objective = Objective(LossTerms(), HORIZON)
    found = head_loss(made, head.bfloat16(), objective)
    found.total.backward()
    wanted = head_loss(exact, head, objective)
    wanted.total.backward()
    assert found.rows.dtype == torch.float32
    torch.testing.assert_close(found.rows.double(), wanted.rows, rtol=0.03, atol=0.1)
    assert made.hidden.grad is not None and exact.hidden.grad is not None
    cosine = F.cosine_similarity(made.hidden.grad.double(), exact.hidden.grad, dim=-1)
    assert cosine[exact.weights > 0].min() > 0.99


def test_depths_decay() -> None:
    weights = decay(7, 4.0, dtype=torch.float64, device=torch.device("cpu"))
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / 4) for k in range(1, 8)])
