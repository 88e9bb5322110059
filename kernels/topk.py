"""The k best of each row with ties in a fixed order: score descending, then place ascending.

torch.topk leaves ties open, so it runs on 64-bit keys that hold score and place, and, for wide rows, only on
the blocks that can hold a winner. Every order of scores that ends in tokens (trees, filters, log-probability
lists) is this one.
"""

from __future__ import annotations

import torch

_BLOCK = 64
_MAGNITUDE = 0x7FFFFFFF
_INFINITE = 0x7F800000
_LOW_WORD = 0xFFFFFFFF


def top_entries(
    scores: torch.Tensor, k: int, *, nonpositive: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of each row of fp32 [..., n]: scores fp32 and places int64, both [..., k]. k <= n.

    -inf, then NaN, come last; the two zeros are equal. nonpositive: promises scores <= 0 (log-probabilities),
    whose keys are cheaper.
    """
    lead, n = scores.shape[:-1], scores.shape[-1]
    rows = scores.reshape(-1, n)
    blocks = n // _BLOCK
    if blocks <= k:
        keys = sort_keys(rows, nonpositive=nonpositive).topk(k, dim=-1, largest=False).values
        places = places_of(keys)
    else:
        # Whatever lies outside the k blocks of neighbours with the best maxima (ties: the lower block) has k
        # entries before it.
        whole = rows[:, : blocks * _BLOCK].view(len(rows), blocks, _BLOCK)
        best = sort_keys(whole.amax(dim=-1), nonpositive=nonpositive).topk(k, dim=-1, largest=False).values
        chosen = places_of(best).sort(dim=-1).values
        picked = whole.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
        if blocks * _BLOCK < n:
            # Entries after the last whole block are always candidates; their places are the highest.
            picked = torch.cat((picked, rows[:, blocks * _BLOCK :]), dim=-1)
        keys = sort_keys(picked, nonpositive=nonpositive).topk(k, dim=-1, largest=False).values
        place = places_of(keys)
        block = chosen.gather(1, (place // _BLOCK).clamp_(max=k - 1))
        inside = block * _BLOCK + place % _BLOCK
        places = torch.where(place < k * _BLOCK, inside, place + (blocks - k) * _BLOCK)
    return rows.gather(1, places).view(*lead, k), places.view(*lead, k)


def sort_keys(values: torch.Tensor, *, nonpositive: bool = False) -> torch.Tensor:
    """int64 keys of fp32 [..., n]: ascending = value descending (-inf, NaN last), then place ascending.

    The high word is the value's magnitude, less than zero for positive values; see `places_of`.
    """
    # The bits of a float, sign aside, grow with its magnitude.
    bits = values.contiguous().view(torch.int32)
    high = bits & _MAGNITUDE
    if not nonpositive:
        high = torch.where((bits > 0) & (bits <= _INFINITE), -bits, high)
    return (
        high.to(torch.int64)
        .bitwise_left_shift_(32)
        .bitwise_or_(torch.arange(values.shape[-1], device=values.device))
    )


def places_of(keys: torch.Tensor) -> torch.Tensor:
    """int64 places in their rows of the entries whose keys these are."""
    return keys & _LOW_WORD
