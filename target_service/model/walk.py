"""What a step's rows become once their tokens are chosen: the walk, and the capture of what it accepts.

Owns the packing of a step's trees, chains and ring spans for kernels.walk and kernels.commit. Does not own
the choice (target_service.sampling) nor the walk with stops and limits that the host's books follow
(target_service.verify).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.commit import publish_rows
from kernels.ragged import CHAIN, TREE
from kernels.walk import walk_rows
from target_service.step import Step


@dataclass(frozen=True, slots=True)
class PackedWalk:
    """All int32 on the model's device: tokens, parents [R] (packed row of a row's parent, -1 for a first
    row);
    row_start [S + 1]; kinds, first_slot (-1: not captured), skip [S]. most_rows: of one segment.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    row_start: torch.Tensor
    kinds: torch.Tensor
    first_slot: torch.Tensor
    skip: torch.Tensor
    most_rows: int

    def walk(self, chosen: torch.Tensor) -> torch.Tensor:
        """int32 [R]: place of each row in its segment's accepted path, -1 for the others. chosen int32
        [R]."""
        return walk_rows(
            chosen, self.tokens, self.parents, self.row_start, self.kinds, most_rows=self.most_rows
        )

    def publish(self, taps: torch.Tensor, ring: torch.Tensor, path: torch.Tensor) -> None:
        """Write the accepted rows of `taps` [R, width] to their slots of `ring`."""
        if ring.device == taps.device:
            first_slot, skip, row_start = self.first_slot, self.skip, self.row_start
        else:  # a ring in the host's memory
            first_slot, skip, row_start = (
                x.to(ring.device) for x in (self.first_slot, self.skip, self.row_start)
            )
            taps, path = taps.to(ring.device), path.to(ring.device)
        publish_rows(taps, ring, first_slot=first_slot, skip=skip, row_start=row_start, path=path)


def pack_walk(step: Step, device: torch.device) -> PackedWalk:
    """Everything of `step` that its walk and capture need; padding rows belong to no segment."""
    rows = step.tokens.numel()
    parents = [-1] * rows
    starts, kinds, first_slot, skip = [0], [], [], []
    for segment in step.segments:
        if segment.parents is not None:
            at = segment.first_row
            parents[at : at + segment.rows] = [at + p if p >= 0 else -1 for p in segment.parents]
        starts.append(segment.first_row + segment.rows - segment.padding)
        kinds.append(CHAIN if segment.parents is None else TREE)
        first_slot.append(-1 if segment.ring is None else segment.ring.first_slot)
        skip.append(0 if segment.ring is None else segment.ring.skip)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    return PackedWalk(
        tokens=step.tokens.to(device, torch.int32),
        parents=ints(parents),
        row_start=ints(starts),
        kinds=ints(kinds),
        first_slot=ints(first_slot),
        skip=ints(skip),
        most_rows=max(segment.rows for segment in step.segments),
    )
