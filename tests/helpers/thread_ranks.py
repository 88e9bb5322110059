"""Tensor-parallel ranks as threads of this process: what tests patch holds on all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from target_service.model.shard import ModelShard
from target_service.parallel import RankGroup, Rendezvous, open_store
from target_service.ranks import RankLink
from target_service.runner import Runner, describe
from target_service.worker import Follower

TIMEOUT_S = 60.0


@contextlib.contextmanager
def thread_ranks(folder: Path, size: int, *, timeout_s: float = TIMEOUT_S, **model: Any) -> Iterator[Runner]:
    """Rank 0's runner of a model on `size` CPU ranks, which end with the block."""
    made = describe(folder, tp=size, device="cpu", **model)
    store = open_store(size, TIMEOUT_S)
    meet = Rendezvous(int(store.port), size)
    ended: list[bool] = []

    def join(rank: int) -> tuple[RankGroup, ModelShard]:
        group = RankGroup(
            meet, rank, device=torch.device("cpu"), timeout_s=timeout_s, store=None if rank else store
        )
        return group, ModelShard(made.spec, made.config, group)

    def follow(rank: int) -> None:
        group, shard = join(rank)
        ended.append(Follower(group, shard).run())

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    group, shard = join(0)
    link = RankLink(step_timeout_s=None)
    link.start(group)
    with Runner(made.config, shard, made.spec, made.fingerprint, link) as runner:
        yield runner
    for thread in threads:
        thread.join(timeout_s + 5)
    assert ended == [True] * (size - 1), "a rank did not end in good order"
