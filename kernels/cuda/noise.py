"""The commit rule's noise inside of Triton kernels: kernels.philox's words, and Gumbel noise from them.

Owns the device functions that ops inline, and `gumbel_noise`, which writes whole rows. Does not own the law
(kernels.philox) nor what noise is added to.

Words are bit-equal to kernels.philox's. log1p is made from log (W. Kahan's quotient), so that one source runs
compiled and interpreted: -log1p(-w) is good to 2 ulp, and so g to 2 ulp of the larger of |g| and 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024

UNFUSED = {"enable_fp_fusion": False}
"""Launch option of every kernel that adds noise to scores: a multiplication inside a logarithm must not be
fused with that addition in one kernel and kept apart in another, or their scores differ in the last bit."""


@triton.jit
def philox_words(seed, position, choice, quads):
    """The words of tokens 4 q .. 4 q + 3 for each q of `quads` int32 [..., n]: uint32 [..., 4 n]."""
    zero = tl.zeros_like(quads)
    w0, w1, w2, w3 = tl.philox(seed, quads, zero + position, zero + choice, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_of(words):
    """g of uint32 words, fp32; see kernels.philox."""
    w = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    u = 1.0 - w
    # log(u) is the logarithm of a rounded number; the quotient takes the rounding back out.
    small = u == 1.0
    exponential = tl.where(small, w, -tl.log(u) * tl.div_rn(w, tl.where(small, 1.0, 1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def _gumbel_rows(
    seeds, positions, choices, out, words_out, vocab, first_token, SKIP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1)
    block = tl.program_id(0)
    first = first_token - SKIP  # a multiple of 4
    quads = (first // 4) + block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    words = philox_words(tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), quads)
    place = block * BLOCK + tl.arange(0, BLOCK) - SKIP
    inside = (place >= 0) & (place < vocab)
    at = row.to(tl.int64) * vocab + place
    tl.store(out + at, gumbel_of(words), mask=inside)
    if words_out is not None:
        tl.store(words_out + at, words.to(tl.int32, bitcast=True), mask=inside)


def gumbel_noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    vocab_size: int,
    *,
    first_token: int = 0,
    words_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Noise of tokens [first_token, first_token + vocab_size): seeds int64 [n], positions and choices int32
    [n] -> fp32 [n, vocab_size]. words_out int32 [n, vocab_size]: also gets the words' bits.
    """
    out = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    skip = first_token % 4
    grid = (triton.cdiv(vocab_size + skip, _BLOCK), len(seeds))
    _gumbel_rows[grid](
        seeds, positions, choices, out, words_out, vocab_size, first_token, SKIP=skip, BLOCK=_BLOCK, **UNFUSED
    )
    return out
