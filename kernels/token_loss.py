"""Losses of next-token logits and their gradients, in two passes: all that training reads of a vocabulary.

Of a row, with logits z and the teacher's logits t, both over the temperature D (in the cross-entropy D = 1),
p = softmax(z), q = softmax(t), and the text's token y:

    ce        -log p[y]                        dz = p - [y]
    kl        D^2 sum q (log q - log p)        dz = D (p - q)          forward KL, to the teacher
    l1        sum |p - q|                      dz = p (s - sum p s) / D,  s = sign(p - q)
    coupled   -D log p_g[y_g]                  dz = p_g - [y_g]: p_g = softmax(z + g), y_g = argmax(t + g),
                                               the teacher's choice under the fresh Gumbel noise g

`row_losses` gives each row's loss and what the gradient needs of it; `write_gradient` then replaces logits by
their gradient, times the row's weight, which may depend on the losses. Owns both, in torch; the Triton
version is kernels/cuda/token_loss.py. Does not own the products with the head before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import cuda
from kernels.philox import gumbel_noise


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Weights of the terms; 0 leaves one out. temperature: D of kl, l1 and coupled."""

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    coupled: float = 0.0
    temperature: float = 1.0

    @property
    def distils(self) -> bool:
        """Whether the teacher's logits are read."""
        return self.kl > 0 or self.l1 > 0 or self.coupled > 0


@dataclass(frozen=True, slots=True)
class Logits:
    """One call's rows. student, teacher: [n, vocab], contiguous, of one float dtype; teacher None where no
    term reads it. labels int64 [n]: y. seed int64 [1]: of the coupled noise, whose rows are first_row ..
    first_row + n - 1; None where there is none."""

    student: torch.Tensor
    teacher: torch.Tensor | None
    labels: torch.Tensor
    seed: torch.Tensor | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class RowLosses:
    """loss [n]: of all terms, weighted. certainty [n]: p[y] at D = 1 (0 without the term ce). Float32, or
    float64 for float64 logits. kept: [6, n], for write_gradient: the log-sum-exps of z at D = 1, z, t and z +
    g; sum p s; and y_g."""

    loss: torch.Tensor
    certainty: torch.Tensor
    kept: torch.Tensor


def row_losses(logits: Logits, terms: LossTerms) -> RowLosses:
    """Each row's loss. Reads the logits, changes nothing."""
    if cuda.takes(logits.student):
        from kernels.cuda import token_loss as triton_op

        return triton_op.row_losses(logits, terms)
    return row_losses_reference(logits, terms)


def write_gradient(
    logits: Logits, terms: LossTerms, losses: RowLosses, weights: torch.Tensor
) -> torch.Tensor:
    """d sum(weights * loss) / d student, written over logits.student, which is returned. weights [n]."""
    if cuda.takes(logits.student):
        from kernels.cuda import token_loss as triton_op

        return triton_op.write_gradient(logits, terms, losses, weights)
    return write_gradient_reference(logits, terms, losses, weights)


def row_losses_reference(logits: Logits, terms: LossTerms) -> RowLosses:
    """row_losses in torch."""
    raw = _wide(logits.student)
    loss, zero = raw.new_zeros(len(raw)), raw.new_zeros(len(raw))
    plain_lse, z_lse, t_lse, noisy_lse, dot, chosen, certainty = (zero.clone() for _ in range(7))
    heat = terms.temperature
    if terms.ce:
        plain_lse = raw.logsumexp(-1)
        log_p = raw.gather(1, logits.labels.unsqueeze(1)).squeeze(1) - plain_lse
        loss -= terms.ce * log_p
        certainty = log_p.exp()
    if terms.distils:
        assert logits.teacher is not None
        z, t = raw / heat, _wide(logits.teacher) / heat
        z_lse, t_lse = z.logsumexp(-1), t.logsumexp(-1)
        log_p, log_q = z - z_lse.unsqueeze(1), t - t_lse.unsqueeze(1)
        p, q = log_p.exp(), log_q.exp()
        loss += terms.kl * heat * heat * (q * (log_q - log_p)).sum(-1)
        loss += terms.l1 * (p - q).abs().sum(-1)
        dot = (p * (p - q).sign()).sum(-1)
        if terms.coupled:
            noise = _noise(logits)
            noisy_lse, best = (z + noise).logsumexp(-1), (t + noise).argmax(-1, keepdim=True)
            loss += terms.coupled * heat * (noisy_lse - (z + noise).gather(1, best).squeeze(1))
            chosen = best.squeeze(1).to(loss.dtype)
    kept = torch.stack((plain_lse, z_lse, t_lse, noisy_lse, dot, chosen))
    return RowLosses(loss, certainty, kept)


def write_gradient_reference(
    logits: Logits, terms: LossTerms, losses: RowLosses, weights: torch.Tensor
) -> torch.Tensor:
    """write_gradient in torch."""
    raw, heat = _wide(logits.student), terms.temperature
    plain_lse, z_lse, t_lse, noisy_lse, dot, chosen = (row.unsqueeze(1) for row in losses.kept)
    grad = torch.zeros_like(raw)
    if terms.ce:
        grad += terms.ce * _minus_one_at((raw - plain_lse).exp(), logits.labels.unsqueeze(1))
    if terms.distils:
        assert logits.teacher is not None
        z, t = raw / heat, _wide(logits.teacher) / heat
        p, q = (z - z_lse).exp(), (t - t_lse).exp()
        grad += terms.kl * heat * (p - q)
        grad += terms.l1 / heat * p * ((p - q).sign() - dot)
        if terms.coupled:
            noisy = (z + _noise(logits) - noisy_lse).exp()
            grad += terms.coupled * _minus_one_at(noisy, chosen.long())
    return logits.student.copy_(grad * weights.unsqueeze(1))


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _minus_one_at(p: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return p.scatter_add(1, index, torch.full_like(index, -1, dtype=p.dtype))


def _noise(logits: Logits) -> torch.Tensor:
    """Gumbel rows [n, vocab], fp32, a function of (seed, row) alone."""
    assert logits.seed is not None
    count, vocab = logits.student.shape
    rows = range(logits.first_row, logits.first_row + count)
    seeds = [int(logits.seed)] * count
    return gumbel_noise(seeds, list(rows), [0] * count, vocab, device=logits.student.device)
