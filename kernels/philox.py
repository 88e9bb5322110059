"""Counter-based noise: Philox4x32-10 and the Gumbel rows that the commit rule adds to logits.

Owns the generator (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and its use:

    key     = seed, 64 bits, low word first (a negative seed is taken mod 2^64)
    counter = (v div 4, position, choice, 0); token v takes word v mod 4
    w       = min((fp32(h) + 0.5) * 2^-32, 1 - 2^-24)          h: the 32-bit word
    g       = -log(-log1p(-w))                                 all fp32; within [-2.82, 22.88], never infinite

The words are equal on every device and for every way of cutting the vocabulary or the batch; the two
logarithms are the device's own fp32 functions. Does not own how tokens are chosen (target_service.sampling).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_SCALE = 2.0**-32
_LARGEST = 1.0 - 2.0**-24

Ints = Sequence[int] | torch.Tensor
"""One integer a row: a list, or an int64 tensor [n] (a 64-bit seed in its two's complement)."""


def signed_seed(seed: int) -> int:
    """A seed of 64 bits, signed or not, as int64 tensors hold it: in two's complement."""
    return (seed + 2**63) % 2**64 - 2**63


def philox4x32_10(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Ten rounds of Philox4x32 in torch, on the device of its arguments.

    counter: four int64 tensors of 32-bit words; key: two. All broadcast to one shape [...].
    Returns int64 [..., 4], the output words, each in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products of two 32-bit words wrap in int64, yet shift-and-mask still yields the right high word.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def gumbel_noise(
    seeds: Ints,
    positions: Ints,
    choices: Ints,
    vocab_size: int,
    *,
    first_token: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Noise of tokens [first_token, first_token + vocab_size), one row per (seed, position, choice).

    positions are absolute, 0-based, prompt included: of the token being chosen. `first_token` and
    `vocab_size` are one rank's share of a vocabulary-parallel head and need not be multiples of 4.
    Returns fp32 [n, vocab_size] on `device`.
    """
    drawn = _rows(seeds, positions, choices)
    target = torch.device(device)
    if target.type == "cpu":
        return _gumbel_cpu(*drawn, vocab_size, first_token)
    return _gumbel_torch(*drawn, vocab_size, first_token, target)


class Columns:
    """Some of a vocabulary's tokens, whose noise is to be computed without the others'.

    ids: int64 [n], each at least 0; columns of the noise are in their order.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        tokens = ids.cpu().numpy()
        blocks, places = np.unique(tokens // 4, return_inverse=True)
        self.products = _products(blocks.astype(np.uint64))
        self.words = tokens % 4 * len(blocks) + places
        """Where a row's [4, blocks] have each token's word."""


def gumbel_noise_of(columns: Columns, seeds: Ints, positions: Ints, choices: Ints) -> torch.Tensor:
    """`gumbel_noise` of these tokens alone, on the CPU: fp32 [n, columns]."""
    drawn = _rows(seeds, positions, choices)
    words = np.empty((len(drawn[0]), len(columns.words)), np.float32)
    for out, found in zip(words, _philox_rows(*drawn, columns.products), strict=True):
        out[:] = found.reshape(-1).take(columns.words)
    return _to_gumbel(torch.from_numpy(words))


def _rows(seeds: Ints, positions: Ints, choices: Ints) -> tuple[list[int], list[int], list[int]]:
    keys, rows, picks = _ints(seeds), _ints(positions), _ints(choices)
    if not len(keys) == len(rows) == len(picks):
        raise ValueError(
            f"{len(keys)} seeds, {len(rows)} positions, {len(picks)} choices: one each a row is needed"
        )
    return keys, rows, picks


def _ints(values: Ints) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [int(v) for v in values]


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    """fp32(h) in, g out; in place."""
    # Of -w, so that it needs no pass of its own.
    words.add_(0.5).mul_(-_SCALE).clamp_(min=-_LARGEST)
    return words.log1p_().neg_().log_().neg_()


def _gumbel_torch(
    seeds: list[int],
    positions: list[int],
    choices: list[int],
    vocab_size: int,
    first_token: int,
    device: torch.device,
) -> torch.Tensor:
    first_block, last_block = first_token // 4, -(-(first_token + vocab_size) // 4)
    # One transfer for all the small arguments.
    packed = torch.tensor(
        [
            [s & _MASK, (s >> 32) & _MASK, p & _MASK, c & _MASK]
            for s, p, c in zip(seeds, positions, choices, strict=True)
        ],
        dtype=torch.int64,
    ).reshape(len(seeds), 4)
    low, high, position, choice = packed.to(device).unsqueeze(-1).unbind(dim=1)
    block = torch.arange(first_block, last_block, dtype=torch.int64, device=device).unsqueeze(0)
    words = philox4x32_10((block, position, choice, torch.zeros_like(block)), (low, high)).flatten(1)
    skip = first_token - 4 * first_block
    return _to_gumbel(words[:, skip : skip + vocab_size].to(torch.float32, copy=True).contiguous())


def _gumbel_cpu(
    seeds: list[int], positions: list[int], choices: list[int], vocab_size: int, first_token: int
) -> torch.Tensor:
    first_block, last_block = first_token // 4, -(-(first_token + vocab_size) // 4)
    words = _words(seeds, positions, choices, np.arange(first_block, last_block, dtype=np.uint64))
    skip = first_token - 4 * first_block
    return _to_gumbel(words[:, skip : skip + vocab_size].contiguous())


def _words(seeds: list[int], positions: list[int], choices: list[int], blocks: np.ndarray) -> torch.Tensor:
    """fp32 [n, 4 * blocks]: the words of each row's blocks."""
    words = np.empty((len(seeds), len(blocks), 4), np.float32)
    for out, found in zip(words, _philox_rows(seeds, positions, choices, _products(blocks)), strict=True):
        for i, word in enumerate(found):
            out[:, i] = word
    return torch.from_numpy(words).flatten(1)


def _products(blocks: np.ndarray) -> np.ndarray:
    """uint64 [2, blocks]: the high and the low words of the first round's products, the same for all rows."""
    product = blocks * np.uint64(_M0)
    return np.stack((product >> np.uint64(32), product & np.uint64(_MASK)))


def _philox_rows(
    seeds: list[int], positions: list[int], choices: list[int], products: np.ndarray
) -> Iterator[np.ndarray]:
    """The words of each row's blocks, int64 [4, blocks], each overwritten by the next.

    numpy, in place, on one row at a time: half the time of torch's int64 arithmetic, and it stays in L2. Only
    one word of the counter is a block's own, so most of the first three rounds is arithmetic of single
    numbers; the calls' number and size is all that counts here.
    """
    high, low = products
    scratch = np.empty((6, len(high)), np.uint64)
    c0, c1, c2, c3, p0, p1 = scratch
    m0, m1, mask, half = np.uint64(_M0), np.uint64(_M1), np.uint64(_MASK), np.uint64(32)
    # Every word is below 2^32, so the signed view is equal and converts to fp32 in one instruction.
    words = scratch[:4].view(np.int64)
    for seed, position, choice in zip(seeds, positions, choices, strict=True):
        keys = [((seed + i * _W0) & _MASK, ((seed >> 32) + i * _W1) & _MASK) for i in range(10)]
        # Round 1: c1 and c2 are the row's, c3 is 0. Afterwards c0 and c1 are the row's.
        k0, k1 = keys[0]
        np.bitwise_xor(high, np.uint64(k1), out=c2)
        product = (choice & _MASK) * _M1
        first, second = (product >> 32) ^ (position & _MASK) ^ k0, product & _MASK
        # Round 2: c3 is `low`. Afterwards c3 is the row's.
        k0, k1 = keys[1]
        product = first * _M0
        np.multiply(c2, m1, out=p1)
        np.right_shift(p1, half, out=c0)
        np.bitwise_xor(c0, np.uint64(second ^ k0), out=c0)
        np.bitwise_xor(low, np.uint64((product >> 32) ^ k1), out=c2)
        np.bitwise_and(p1, mask, out=c1)
        fourth = product & _MASK
        for i, (k0, k1) in enumerate(keys[2:]):
            np.multiply(c0, m0, out=p0)
            np.multiply(c2, m1, out=p1)
            np.right_shift(p1, half, out=c0)
            np.bitwise_xor(c0, c1, out=c0)
            np.bitwise_xor(c0, np.uint64(k0), out=c0)
            np.right_shift(p0, half, out=c2)
            if i:
                np.bitwise_xor(c2, c3, out=c2)
                np.bitwise_xor(c2, np.uint64(k1), out=c2)
            else:
                np.bitwise_xor(c2, np.uint64(fourth ^ k1), out=c2)
            np.bitwise_and(p1, mask, out=c1)
            np.bitwise_and(p0, mask, out=c3)
        yield words
