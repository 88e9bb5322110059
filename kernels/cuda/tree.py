"""pack_trees in Triton: best-first, one warp a session, the frontier in registers.

The frontier has one place a node. When its best entry becomes a node, the entry's next sibling takes its
place and the node's first child takes a fresh one, so n nodes never need more than n places. An entry is

    magnitude  bits of |score|, which grow as the score falls (scores are <= 0)
    path       depth, then the ranks from the root on in a code whose order is that of the ranks (below):
               62 bits, kept as two words
    detail     the last rank, the parent's index + 1, and how many code bits lead up to the parent
    above      bits of the parent's |score|

Order is (magnitude, path): score, then depth, then ranks. All reductions are of one warp over 32-bit
integers, an instruction each on the device. A rank r is coded as n = r + 1: k = floor(log2 n) ones, a zero,
then the k lower bits of n. No code begins another, and a greater rank has the greater code, so codes in a row
compare as the ranks do. kernels.tree.deepest_tree says why 56 bits hold all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.marginals import Candidates

_INFINITE = tl.constexpr(0x7F800000)
_NOTHING = tl.constexpr(0x7FFFFFFF)
_NEGATIVE = tl.constexpr(-2147483648)
_NEGATIVE_INFINITE = tl.constexpr(-8388608)  # bits of -inf
_CODE_BITS = tl.constexpr(56)
_LEVEL = tl.constexpr(1 << 56)
_WORD = tl.constexpr(31)


@triton.jit
def _log2(n):
    """floor(log2(n)) of 1 <= n < 2^24."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _magnitude_below(above, log_prob):
    """Magnitude of the score one step below a path with magnitude `above`; _NOTHING for probability zero."""
    score = (above | _NEGATIVE).to(tl.float32, bitcast=True) + log_prob
    return tl.where(score > -float("inf"), score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NOTHING)


@triton.jit
def _pack(log_probs, ids, budgets, depth_limits, packed, depths, width, nodes, PLACES: tl.constexpr):
    session = tl.program_id(0)
    log_probs += session * depths * width
    ids += session * depths * width
    packed += session * 3 * nodes
    budget = tl.minimum(tl.load(budgets + session), nodes)
    limit = tl.minimum(tl.load(depth_limits + session), depths)

    place = tl.arange(0, PLACES)
    magnitude = tl.full((PLACES,), _NOTHING, tl.int32)
    high = tl.zeros((PLACES,), tl.int32)  # of the path
    low = tl.zeros((PLACES,), tl.int32)
    detail = tl.zeros((PLACES,), tl.int32)
    above = tl.zeros((PLACES,), tl.int32)
    if limit > 0:
        root = _magnitude_below(tl.zeros((), tl.int32), tl.load(log_probs))
        magnitude = tl.where(place == 0, root, magnitude)
    high = tl.where(place == 0, _LEVEL >> _WORD, high)

    count = tl.zeros((), tl.int32)
    going = budget > 0
    while going:
        best = tl.min(magnitude)
        going = best < _INFINITE
        if going:
            taken = magnitude == best
            first = tl.min(tl.where(taken, high, _NOTHING))
            taken &= high == first
            second = tl.min(tl.where(taken, low, _NOTHING))
            taken &= low == second
            what = tl.max(tl.where(taken, detail, 0))
            up = tl.max(tl.where(taken, above, 0))
            path = (first.to(tl.int64) << _WORD) | second
            depth = (path >> _CODE_BITS).to(tl.int32)
            rank, parent, used = what & 0xFFF, ((what >> 12) & 0xFFF) - 1, what >> 24
            tl.store(packed + count, tl.load(ids + (depth - 1) * width + rank))
            tl.store(packed + nodes + count, parent)
            tl.store(packed + 2 * nodes + count, tl.where(best == 0, 0, best | _NEGATIVE))

            # The next sibling: the same path up to the parent, then the code of rank + 1.
            step = tl.load(
                log_probs + (depth - 1) * width + rank + 1, mask=rank + 1 < width, other=-float("inf")
            )
            free = _CODE_BITS - used
            log2 = _log2(rank + 2)
            code = ((1 << (2 * log2 + 1)) - (2 << log2) + rank + 2 - (1 << log2)).to(tl.int64)
            sibling = ((path >> free) << free) | (code << (free - 2 * log2 - 1))
            magnitude = tl.where(taken, _magnitude_below(up, step), magnitude)
            high = tl.where(taken, (sibling >> _WORD).to(tl.int32), high)
            low = tl.where(taken, (sibling & _NOTHING).to(tl.int32), low)
            detail = tl.where(taken, what + 1, detail)

            # The first child: the same path, one level deeper; the code of rank 0 is a zero, which is there.
            step = tl.load(log_probs + depth * width, mask=depth < limit, other=-float("inf"))
            count += 1
            fresh = place == count
            magnitude = tl.where(fresh, _magnitude_below(best, step), magnitude)
            child = path + _LEVEL
            high = tl.where(fresh, (child >> _WORD).to(tl.int32), high)
            low = tl.where(fresh, (child & _NOTHING).to(tl.int32), low)
            inner = used + 2 * _log2(rank + 1) + 1
            detail = tl.where(fresh, (inner << 24) | (count << 12), detail)
            above = tl.where(fresh, best, above)
            going = count < budget

    unused = (place >= count) & (place < nodes)
    empty = tl.full((PLACES,), -1, tl.int32)
    tl.store(packed + place, empty, mask=unused)
    tl.store(packed + nodes + place, empty, mask=unused)
    tl.store(packed + 2 * nodes + place, tl.full((PLACES,), _NEGATIVE_INFINITE, tl.int32), mask=unused)


def pack_trees(
    candidates: Candidates, budgets: torch.Tensor, depth_limits: torch.Tensor, *, nodes: int
) -> torch.Tensor:
    """kernels.tree.pack_trees on the device, in one launch."""
    sessions, depths, width = candidates.log_probs.shape
    packed = torch.empty(sessions, 3, nodes, dtype=torch.int32, device=candidates.log_probs.device)
    if sessions:
        _pack[(sessions,)](
            candidates.log_probs,
            candidates.ids,
            budgets,
            depth_limits,
            packed,
            depths,
            width,
            nodes,
            PLACES=max(32, triton.next_power_of_2(nodes)),
            num_warps=1,
        )
    return packed
