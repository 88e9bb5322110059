"""Ranks that torchrun started, on one host or several: how they meet, and what ranks above 0 do.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        --no-python specbridge target --target MODEL ...

Every process gets the same options; rank 0 serves, the others follow it. Owns the meeting and the check that
all ranks are of one mind. Does not own collectives (parallel) nor the processes: if one ends, torchrun ends
(or restarts) the rest, and rank 0 also notices by itself.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import torch

from specbridge.errors import ConfigError
from specbridge.settings import Launched, launched_by_torchrun
from target_service.config import TargetSettings
from target_service.model.config import ModelConfig
from target_service.model.shard import ModelShard, ShardSpec
from target_service.parallel import RankGroup, Rendezvous, open_store
from target_service.worker import rank_device

log = logging.getLogger(__name__)


def find_launch(settings: TargetSettings) -> Launched | None:
    """This process's place among ranks that torchrun started; None if it starts its ranks itself.

    Raises ConfigError if torchrun's ranks and the settings contradict each other.
    """
    if settings.launcher == "none":
        return None
    launch = launched_by_torchrun(required=settings.launcher == "torchrun")
    if launch is None:
        return None
    if not 0 <= launch.rank < launch.size:
        raise ConfigError(f"RANK {launch.rank} is not below WORLD_SIZE {launch.size}; start with torchrun")
    if "tp" in settings.model_fields_set and settings.tp != launch.size:
        raise ConfigError(
            f"--tp {settings.tp}, and torchrun started {launch.size} ranks; leave --tp out, or make nnodes x "
            "nproc-per-node the same"
        )
    if launch.size == 1:
        return None
    if settings.deterministic:
        raise ConfigError("deterministic is not available with several ranks; start one, without torchrun")
    if not launch.host:
        raise ConfigError("MASTER_ADDR is empty; start the ranks with torchrun, or give --launcher none")
    return launch


def join(
    launch: Launched, spec: ShardSpec, *, interface: str, timeout_s: float, start_timeout_s: float
) -> RankGroup:
    """Meet the other ranks. Raises Unavailable if they don't come, ConfigError for an interface that is not
    there.
    """
    store = None
    if launch.rank == 0 and not launch.agent_store:
        store = open_store(launch.size, start_timeout_s, host=launch.host, port=launch.port)
    meet = Rendezvous(
        port=launch.port,
        size=launch.size,
        host=launch.host,
        prefix=f"specbridge/{launch.attempt}",
        interface=interface,
    )
    log.info("rank %d of %d meets the others at %s:%d", launch.rank, launch.size, launch.host, launch.port)
    return RankGroup(
        meet,
        launch.rank,
        device=torch.device(spec.device),
        timeout_s=timeout_s,
        join_timeout_s=start_timeout_s,
        store=store,
    )


def local(spec: ShardSpec, launch: Launched) -> ShardSpec:
    """`spec` on this rank's own device."""
    return replace(spec, device=rank_device(spec.device, launch.local_rank))


def load_shard(spec: ShardSpec, config: ModelConfig, fingerprint: str, group: RankGroup) -> ModelShard:
    """This rank's shard, once all have loaded theirs.

    Raises ConfigError if the ranks were given different models or settings, Unavailable if one is lost.
    """
    own = repr((fingerprint, config, replace(spec, device="", model_dir=Path())))
    digest = int.from_bytes(hashlib.blake2b(own.encode(), digest_size=7).digest(), "big")
    found = [row[0] for row in group.exchange([digest])]
    other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} has another model or other settings than rank 0; start all with the same options "
            "and the same files"
        )
    shard = ModelShard(spec, config, group)
    group.exchange([1])
    return shard
