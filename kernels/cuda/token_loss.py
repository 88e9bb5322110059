"""Triton's token losses: a program reads a row of logits and, where wanted, the teacher's, twice; the second
time from the L2 cache. The gradient is one more pass, in place.

Logits are accumulated in float32. Noise: kernels.cuda.noise. Does not own the formulas (kernels.token_loss).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.noise import UNFUSED, gumbel_of, philox_words
from kernels.token_loss import Logits, LossTerms, RowLosses

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _add_exp(top, total, x):
    """Running maximum and sum of exponentials, per lane. Both scalars of a lane stay finite once x is."""
    new = tl.maximum(top, x)
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp(top - safe) + tl.exp(x - safe)


@triton.jit
def _log_sum_exp(top, total):
    best = tl.max(top)
    return best + tl.log(tl.sum(total * tl.exp(top - best)))


@triton.jit(do_not_specialize=["rows", "first_row"])
def _row_losses(
    student, teacher, labels, seed, losses, certainty, kept, rows, vocab, first_row, heat,
    CE: tl.constexpr, KL: tl.constexpr, L1: tl.constexpr, COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    own = student + row.to(tl.int64) * vocab
    lanes = tl.arange(0, BLOCK)
    low = tl.full((BLOCK,), -float("inf"), tl.float32)
    none = tl.zeros((BLOCK,), tl.float32)
    top_p, sum_p, top_z, sum_z, top_t, sum_t, top_n, sum_n = low, none, low, none, low, none, low, none
    best, best_id, best_z = low, tl.zeros((BLOCK,), tl.int32), none
    DISTIL: tl.constexpr = (KL > 0) or (L1 > 0) or (COUPLED > 0)
    if DISTIL:
        other = teacher + row.to(tl.int64) * vocab
    if COUPLED > 0:
        key = tl.load(seed)
    for start in range(0, vocab, BLOCK):
        column = start + lanes
        inside = column < vocab
        z = tl.load(own + column, mask=inside, other=-float("inf")).to(tl.float32)
        if CE > 0:
            top_p, sum_p = _add_exp(top_p, sum_p, z)
        if DISTIL:
            t = tl.load(other + column, mask=inside, other=-float("inf")).to(tl.float32) / heat
            z = z / heat
            top_z, sum_z = _add_exp(top_z, sum_z, z)
            top_t, sum_t = _add_exp(top_t, sum_t, t)
            if COUPLED > 0:
                quads = start // 4 + tl.arange(0, BLOCK // 4)
                noise = gumbel_of(philox_words(key, first_row + row, 0, quads))
                noisy = z + noise
                top_n, sum_n = _add_exp(top_n, sum_n, noisy)
                take = t + noise > best
                best = tl.where(take, t + noise, best)
                best_id, best_z = tl.where(take, column, best_id), tl.where(take, noisy, best_z)
    loss = 0.0
    if CE > 0:
        lse = _log_sum_exp(top_p, sum_p)
        log_p = tl.load(own + tl.load(labels + row)).to(tl.float32) - lse
        loss -= CE * log_p
        tl.store(certainty + row, tl.exp(log_p))
        tl.store(kept + row, lse)
    if DISTIL:
        lse_z, lse_t = _log_sum_exp(top_z, sum_z), _log_sum_exp(top_t, sum_t)
        tl.store(kept + rows + row, lse_z)
        tl.store(kept + 2 * rows + row, lse_t)
        if COUPLED > 0:
            lse_n = _log_sum_exp(top_n, sum_n)
            most = tl.max(best)
            chosen = tl.min(tl.where(best == most, best_id, vocab))
            at_chosen = tl.sum(tl.where((best == most) & (best_id == chosen), best_z, 0.0))
            loss += COUPLED * heat * (lse_n - at_chosen)
            tl.store(kept + 3 * rows + row, lse_n)
            tl.store(kept + 5 * rows + row, chosen.to(tl.float32))
    if (KL > 0) or (L1 > 0):
        apart, toward, signed = none, none, none
        for start in range(0, vocab, BLOCK):
            column = start + lanes
            inside = column < vocab
            z = tl.load(own + column, mask=inside, other=-float("inf")).to(tl.float32) / heat - lse_z
            t = tl.load(other + column, mask=inside, other=-float("inf")).to(tl.float32) / heat - lse_t
            p, q = tl.exp(z), tl.exp(t)
            toward += tl.where(inside, q * (t - z), 0.0)
            apart += tl.abs(p - q)
            signed += tl.where(p > q, p, tl.where(p < q, -p, 0.0))
        loss += KL * heat * heat * tl.sum(toward) + L1 * tl.sum(apart)
        tl.store(kept + 4 * rows + row, tl.sum(signed))
    tl.store(losses + row, loss)


@triton.jit(do_not_specialize=["rows", "first_row"])
def _write_gradient(
    student, teacher, labels, seed, weights, kept, rows, vocab, first_row, heat,
    CE: tl.constexpr, KL: tl.constexpr, L1: tl.constexpr, COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    at = student + row.to(tl.int64) * vocab + column
    z = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    grad = tl.zeros((BLOCK,), tl.float32)
    if CE > 0:
        hit = (column == tl.load(labels + row)).to(tl.float32)
        grad += CE * (tl.exp(z - tl.load(kept + row)) - hit)
    if (KL > 0) or (L1 > 0) or (COUPLED > 0):
        z = z / heat
        p = tl.exp(z - tl.load(kept + rows + row))
        if (KL > 0) or (L1 > 0):
            t = tl.load(teacher + row.to(tl.int64) * vocab + column, mask=inside, other=-float("inf"))
            q = tl.exp(t.to(tl.float32) / heat - tl.load(kept + 2 * rows + row))
            if KL > 0:
                grad += KL * heat * (p - q)
            if L1 > 0:
                sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
                grad += L1 / heat * p * (sign - tl.load(kept + 4 * rows + row))
        if COUPLED > 0:
            quads = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            noise = gumbel_of(philox_words(tl.load(seed), first_row + row, 0, quads))
            hit = (column == tl.load(kept + 5 * rows + row).to(tl.int32)).to(tl.float32)
            grad += COUPLED * (tl.exp(z + noise - tl.load(kept + 3 * rows + row)) - hit)
    tl.store(at, (grad * tl.load(weights + row)).to(student.dtype.element_ty), mask=inside)


def row_losses(logits: Logits, terms: LossTerms) -> RowLosses:
    """See kernels.token_loss.row_losses."""
    rows, vocab = logits.student.shape
    device = logits.student.device
    kept = torch.zeros(6, rows, dtype=torch.float32, device=device)
    loss, certainty = torch.zeros(2, rows, dtype=torch.float32, device=device).unbind()
    if rows:
        _row_losses[(rows,)](
            logits.student, logits.teacher, logits.labels, logits.seed, loss, certainty, kept, rows, vocab,
            logits.first_row, terms.temperature, **_constants(terms), num_warps=_WARPS, **UNFUSED,
        )  # fmt: skip
    return RowLosses(loss, certainty, kept)


def write_gradient(
    logits: Logits, terms: LossTerms, losses: RowLosses, weights: torch.Tensor
) -> torch.Tensor:
    """See kernels.token_loss.write_gradient."""
    rows, vocab = logits.student.shape
    if rows:
        _write_gradient[(triton.cdiv(vocab, _BLOCK), rows)](
            logits.student, logits.teacher, logits.labels, logits.seed, weights, losses.kept, rows, vocab,
            logits.first_row, terms.temperature, **_constants(terms), num_warps=_WARPS, **UNFUSED,
        )  # fmt: skip
    return logits.student


def _constants(terms: LossTerms) -> dict[str, float]:
    weights = {"CE": terms.ce, "KL": terms.kl, "L1": terms.l1, "COUPLED": terms.coupled}
    return {**{name: float(value) for name, value in weights.items()}, "BLOCK": _BLOCK}
