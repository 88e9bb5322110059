"""Token losses: the reference against autograd over definitions, the Triton version against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.philox import gumbel_noise
from kernels.token_loss import (
    Logits,
    LossTerms,
    row_losses,
    row_losses_reference,
    write_gradient,
    write_gradient_reference,
)

TERMS = [
    LossTerms(),
    LossTerms(ce=0.3),
    LossTerms(ce=0, kl=1.0),
    LossTerms(ce=0, l1=2.0, temperature=0.7),
    LossTerms(ce=0, coupled=1.0, temperature=1.3),
    LossTerms(ce=0.1, kl=0.5, l1=0.9, coupled=0.4, temperature=0.8),
]


def scene(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Logits, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    student, teacher = (
        torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 4 for _ in range(2)
    )
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    weights[0] = 0
    logits = Logits(
        student.to(device, dtype), teacher.to(device, dtype), labels.to(device),
        torch.tensor([77], device=device), first_row=5,
    )  # fmt: skip
    return logits, weights.to(device, torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("terms", TERMS)
def test_losses_and_gradients_are_their_definitions(terms: LossTerms) -> None:
    """In float64, with autograd's gradients."""
    logits, weights = scene(6, 37, torch.float64)
    assert logits.teacher is not None
    d = terms.temperature
    raw = logits.student.clone().requires_grad_()
    z, t = raw / d, logits.teacher / d
    p, q = F.softmax(z, -1), F.softmax(t, -1)
    noise = gumbel_noise([77] * 6, list(range(5, 11)), [0] * 6, 37)
    wanted = (
        terms.ce * F.cross_entropy(raw, logits.labels, reduction="none")
        + terms.kl * d * d * F.kl_div(p.log(), q, reduction="none").sum(-1)
        + terms.l1 * (p - q).abs().sum(-1)
        + terms.coupled * d * F.cross_entropy(z + noise, (t + noise).argmax(-1), reduction="none")
    )
    (gradient,) = torch.autograd.grad((wanted * weights).sum(), raw)
    found = row_losses(logits, terms)
    torch.testing.assert_close(found.loss, wanted.detach())
    if terms.ce:
        torch.testing.assert_close(
            found.certainty, F.softmax(logits.student, -1).gather(1, logits.labels[:, None])[:, 0]
        )
    written = write_gradient(logits, terms, found, weights)
    assert written.data_ptr() == logits.student.data_ptr()
    torch.testing.assert_close(written, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [37, 4096, 9001])
@pytest.mark.parametrize("terms", TERMS)
def test_the_triton_version(
    terms: LossTerms, vocab: int, dtype: torch.dtype, triton_device: torch.device
) -> None:
    """Losses and gradients of one block, a full one and several with a rest."""
    logits, weights = scene(3, vocab, dtype, triton_device)
    assert logits.teacher is not None
    exact = replace(logits, student=logits.student.double(), teacher=logits.teacher.double())
    wanted = row_losses_reference(exact, terms)
    gradient = write_gradient_reference(exact, terms, wanted, weights.double())
    found = row_losses(logits, terms)
    torch.testing.assert_close(found.loss.double(), wanted.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.certainty.double(), wanted.certainty, rtol=1e-4, atol=1e-6)
    written = write_gradient(logits, terms, found, weights)
    assert written.data_ptr() == logits.student.data_ptr()
    close = {"rtol": 8e-3, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(written.double(), gradient, **close)
    assert not written[0].any() and written[1].any()
