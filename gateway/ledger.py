"""Ledger: which rounds a request's output tokens came from.

Owns the statistics of delivered tokens, exact for any cut. Pure.
"""

from __future__ import annotations

from gateway.generation import RoundShare, SpecStats


class Ledger:
    """Which rounds the output tokens came from; turns a cut at any output token into exact statistics."""

    __slots__ = ("_accepted", "_drafted", "_settled_rounds", "_starts", "_tokens", "output", "settled")

    def __init__(self) -> None:
        self.output = 0
        self.settled = 0
        self._starts: list[int] = []
        self._tokens: list[int] = []
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._settled_rounds = 0

    def add_plain(self, tokens: int) -> None:
        """Tokens a prefill chose."""
        self.output += tokens

    def add_round(self, *, tokens: int, drafted: int, accepted: int) -> None:
        self._starts.append(self.output)
        self._tokens.append(tokens)
        self._drafted.append(drafted)
        self._accepted.append(accepted)
        self.output += tokens

    def _share(self, i: int, limit: int) -> RoundShare:
        tokens = min(self._tokens[i], limit - self._starts[i])
        return RoundShare(tokens, self._drafted[i], min(self._accepted[i], tokens))

    def settle(self, limit: int, *, final: bool) -> tuple[RoundShare, ...]:
        """Declare output tokens [settled, limit) delivered; returns the rounds that end among them.

        At the `final` settlement a round that the cut falls into counts too, with what is left of it.
        """
        first = self._settled_rounds
        last = first
        while last < len(self._starts) and (
            self._starts[last] + self._tokens[last] <= limit or (final and self._starts[last] < limit)
        ):
            last += 1
        self._settled_rounds = last
        self.settled = max(self.settled, limit)
        return tuple(self._share(i, limit) for i in range(first, last))

    def stats(self, limit: int, num_spec_tokens: int) -> SpecStats:
        """Statistics over the first `limit` output tokens."""
        shares = [self._share(i, limit) for i in range(len(self._starts)) if self._starts[i] < limit]
        steps = [s for s in shares if s.drafted]
        depth = max([num_spec_tokens, *(s.accepted for s in steps)])
        histogram = [0] * (depth + 1)
        for share in steps:
            histogram[share.accepted] += 1
        return SpecStats(
            acceptance_histogram=tuple(histogram),
            num_spec_tokens=depth,
            num_spec_steps=len(steps),
            num_accepted_draft_tokens=sum(s.accepted for s in steps),
            num_draft_tokens=sum(s.drafted for s in steps),
            num_rounds=len(shares),
            num_output_tokens=limit,
            per_step_accepted=tuple(s.accepted for s in steps),
            per_step_drafted=tuple(s.drafted for s in steps),
        )
