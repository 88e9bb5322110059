"""Conditional trees in Triton: a launch for the steps' scores, and one for the trees.

Owns the launches; the formula, the order of nodes and the packed form are kernels.conditional_tree's. Trees
grow as kernels.cuda.tree grows them: one warp a session, the frontier in registers, a place a node. A node's
next sibling is looked for among the scores of all siblings, so that nothing is sorted. An entry is

    magnitude  bits of |score|, which grow as the score falls
    order      depth, index of the parent + 1, turn: what decides between equal scores
    where      the node's place among its depth's candidates, and its parent's
    above      bits of the parent's |score|
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.choice import GREEDY_BELOW
from kernels.conditional_tree import PairTable, Steps, Weights
from kernels.marginals import Candidates

_INFINITE = tl.constexpr(0x7F800000)
_NOTHING = tl.constexpr(0x7FFFFFFF)
_NEGATIVE = tl.constexpr(-2147483648)
_NEGATIVE_INFINITE = tl.constexpr(-8388608)  # bits of -inf
_DEPTH = tl.constexpr(1 << 20)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


@triton.jit
def _load_depth(log_probs, ids, logits, heat, row, width, vocab, lane):
    """Candidates of one session and depth: log-probabilities, ids, beliefs, all -inf where there is none."""
    inside = lane < width
    log_prob = tl.load(log_probs + row * width + lane, mask=inside, other=-float("inf"))
    token = tl.load(ids + row * width + lane, mask=inside, other=0).to(tl.int64)
    belief = tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=0.0).to(tl.float32) / heat
    there = log_prob > -float("inf")  # false for NaN, too
    return tl.where(there, log_prob, -float("inf")), token, tl.where(there, belief, -float("inf"))


@triton.jit
def _steps(
    log_probs, ids, logits, temperature, keys, counts, totals, shares, noise, pairs, out,
    depths, width, vocab, num_pairs, turns, prior, WIDE: tl.constexpr,
):  # fmt: skip
    session, depth = tl.program_id(0), tl.program_id(1)
    row = session * depths + depth
    lane = tl.arange(0, WIDE)
    heat = tl.load(temperature + session)
    heat = tl.where(heat >= _GREEDY_BELOW, heat, 1.0)
    log_prob, token, belief = _load_depth(log_probs, ids, logits, heat, row, width, vocab, lane)
    b = tl.load(noise + depth)
    base = tl.where(log_prob > -float("inf"), b * log_prob + (1.0 - b) * belief, -float("inf"))
    step = tl.zeros((WIDE, WIDE), tl.float32) + base[None, :]
    if depth > 0:
        _, before, sure = _load_depth(log_probs, ids, logits, heat, row - 1, width, vocab, lane)
        most = tl.max(sure)
        sure = tl.where(sure > -float("inf"), tl.exp(sure - tl.where(most > -float("inf"), most, 0.0)), 0.0)
        total = tl.sum(sure)
        sure = sure / tl.where(total > 0.0, total, 1.0)
        wanted = before[:, None] * vocab + token[None, :]
        low = tl.zeros((WIDE, WIDE), tl.int32)
        high = tl.zeros((WIDE, WIDE), tl.int32) + num_pairs
        for _ in range(turns):
            middle = (low + high) // 2
            open_ = low < high
            less = open_ & (tl.load(keys + middle, mask=open_, other=0) < wanted)
            high = tl.where(open_ & (less == 0), middle, high)
            low = tl.where(less, middle + 1, low)
        at = tl.minimum(low, num_pairs - 1)
        count = tl.where(tl.load(keys + at) == wanted, tl.load(counts + at), 0.0)
        known = (count + tl.load(shares + token)[None, :]) / (tl.load(totals + before)[:, None] + prior)
        average = tl.sum(sure[:, None] * known, axis=0)
        correction = tl.log(known) - tl.log(tl.maximum(average, 1e-30))[None, :]
        step += tl.load(pairs + depth) * correction
    best = tl.max(step, axis=1)
    best = tl.where(best > -float("inf"), best, 0.0)
    log_sum = best + tl.log(tl.sum(tl.exp(step - best[:, None]), axis=1))
    score = tl.where(step > -float("inf"), step - log_sum[:, None], -float("inf"))
    inside = (lane < width)[:, None] & (lane < width)[None, :]
    tl.store(out + (row * width + lane)[:, None] * width + lane[None, :], score, mask=inside)


def step_scores(
    candidates: Candidates,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    table: PairTable,
    weights: Weights,
) -> Steps:
    """kernels.conditional_tree.step_scores on the device, in one launch."""
    sessions, depths, width = candidates.ids.shape
    scores = torch.empty(sessions, depths, width, width, dtype=torch.float32, device=logits.device)
    if sessions:
        _steps[(sessions, depths)](
            candidates.log_probs,
            candidates.ids,
            logits,
            temperature,
            table.keys,
            table.counts,
            table.totals,
            table.shares,
            weights.noise,
            weights.pairs,
            scores,
            depths,
            width,
            logits.shape[2],
            len(table.keys),
            len(table.keys).bit_length(),
            table.prior,
            WIDE=max(16, triton.next_power_of_2(width)),
            num_warps=4,
        )
    return Steps(candidates.ids, scores)


@triton.jit
def _magnitude(score):
    """Bits that grow as a score <= 0 falls; _NOTHING for probability zero."""
    return tl.where(score > -float("inf"), score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NOTHING)


@triton.jit
def _score(magnitude):
    return (magnitude | _NEGATIVE).to(tl.float32, bitcast=True)


@triton.jit
def _below(above, step):
    """Magnitude of the score one step below a path with magnitude `above`; of a step's magnitude."""
    return tl.where(step < _INFINITE, _magnitude(_score(above) + _score(step)), _NOTHING)


@triton.jit
def _row(scores, depth, place, width, lane, wanted):
    """Magnitudes of the steps to `depth` below candidate `place` of the depth before; if wanted."""
    row = scores + ((depth - 1) * width + place) * width
    return _magnitude(tl.load(row + lane, mask=(lane < width) & wanted, other=-float("inf")))


@triton.jit
def _pack(
    scores, ids, budgets, depth_limits, packed, depths, width, nodes, most,
    PLACES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    session = tl.program_id(0)
    scores += session * depths * width * width
    ids += session * depths * width
    packed += session * 3 * nodes
    budget = tl.minimum(tl.load(budgets + session), nodes)
    limit = tl.minimum(tl.load(depth_limits + session), depths)

    lane = tl.arange(0, WIDE)
    place = tl.arange(0, PLACES)
    above = tl.zeros((PLACES,), tl.int32)
    order = tl.where(place == 0, _DEPTH, 0)
    row = _row(scores, 1, 0, width, lane, limit > 0)
    step = tl.min(row)
    magnitude = tl.where(place == 0, step, _NOTHING)
    where = tl.where(place == 0, tl.min(tl.where(row == step, lane, WIDE)), 0)

    count = tl.zeros((), tl.int32)
    going = budget > 0
    while going:
        best = tl.min(magnitude)
        going = best < _INFINITE
        if going:
            taken = magnitude == best
            first = tl.min(tl.where(taken, order, _NOTHING))
            taken &= order == first
            what = tl.max(tl.where(taken, where, 0))
            up = tl.max(tl.where(taken, above, 0))
            depth, parent, turn = first >> 20, ((first >> 8) & 0xFFF) - 1, first & 0xFF
            own, before = what & 0xFF, what >> 8
            tl.store(packed + count, tl.load(ids + (depth - 1) * width + own).to(tl.int32))
            tl.store(packed + nodes + count, parent)
            tl.store(packed + 2 * nodes + count, tl.where(best == 0, 0, best | _NEGATIVE))

            # The next sibling: the best of those that come after this one.
            row = _row(scores, depth, before, width, lane, turn + 1 < most)
            mine = tl.max(tl.where(lane == own, row, 0))
            row = tl.where((row > mine) | ((row == mine) & (lane > own)), row, _NOTHING)
            step = tl.min(row)
            magnitude = tl.where(taken, _below(up, step), magnitude)
            where = tl.where(taken, (before << 8) | tl.min(tl.where(row == step, lane, WIDE)), where)
            order = tl.where(taken, first + 1, order)

            # The first child, at a fresh place.
            row = _row(scores, depth + 1, own, width, lane, depth < limit)
            step = tl.min(row)
            count += 1
            fresh = place == count
            magnitude = tl.where(fresh, _below(best, step), magnitude)
            where = tl.where(fresh, (own << 8) | tl.min(tl.where(row == step, lane, WIDE)), where)
            order = tl.where(fresh, (depth + 1) * _DEPTH + (count << 8), order)
            above = tl.where(fresh, best, above)
            going = count < budget

    unused = (place >= count) & (place < nodes)
    empty = tl.full((PLACES,), -1, tl.int32)
    tl.store(packed + place, empty, mask=unused)
    tl.store(packed + nodes + place, empty, mask=unused)
    tl.store(packed + 2 * nodes + place, tl.full((PLACES,), _NEGATIVE_INFINITE, tl.int32), mask=unused)


def pack_conditional_trees(
    steps: Steps, budgets: torch.Tensor, depth_limits: torch.Tensor, *, nodes: int, most: int
) -> torch.Tensor:
    """kernels.conditional_tree.pack_conditional_trees on the device, in one launch."""
    sessions, depths, width = steps.ids.shape
    packed = torch.empty(sessions, 3, nodes, dtype=torch.int32, device=steps.scores.device)
    if sessions:
        _pack[(sessions,)](
            steps.scores,
            steps.ids,
            budgets,
            depth_limits,
            packed,
            depths,
            width,
            nodes,
            most,
            PLACES=max(32, triton.next_power_of_2(nodes)),
            WIDE=max(16, triton.next_power_of_2(width)),
            num_warps=1,
        )
    return packed
