"""The ranks of a training run: one process a GPU, gradients summed after each step.

Owns torch.distributed here: joining (under torchrun, or told a meeting point), sums, one rank's word for all.
A single process is a group of one, for which all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
"""For a collective: a rank that is gone is an error of the others, not a wait for ever."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks that were started by us meet: a file, once for a run."""

    file: Path
    rank: int
    size: int


class Ranks:
    """This process among the ranks. local: its number on this machine, which picks its GPU."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @staticmethod
    def join(meeting: Meeting | None, *, backend: str) -> Ranks:
        """backend: "nccl" or "gloo". Without a meeting point: torchrun's, or alone."""
        if meeting is not None:
            store = dist.FileStore(str(meeting.file), meeting.size)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=TIMEOUT
            )
            return Ranks(meeting.rank, meeting.size, meeting.rank)
        if not dist.is_torchelastic_launched():
            return Ranks()
        dist.init_process_group(backend, timeout=TIMEOUT)
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(0))

    @property
    def first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.rank == 0

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each over all ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def agree(self, value: float, device: torch.device) -> float:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        return float(told.item())

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def launched_outside() -> bool:
    """Whether torchrun started this process."""
    return bool(dist.is_torchelastic_launched())


def spawn(work: Callable[[int], None], size: int) -> None:
    """Run `work(rank)` in `size` new processes; an exception in one ends all and is raised here."""
    torch.multiprocessing.spawn(work, nprocs=size, join=True)  # type: ignore[attr-defined]
