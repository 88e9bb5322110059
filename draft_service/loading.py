"""From two model folders to an engine that is ready to start.

Owns choosing device and dtype, reading the checkpoints, and putting drafter, context, proposer and engine
together. Does not own names of models (specbridge.models) nor the process (server).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import kernels.device
from draft_service.bigrams import FILE as BIGRAMS_FILE
from draft_service.conditional_tree import Conditioner
from draft_service.config import DraftSettings
from draft_service.context_cache import PAGE_SIZE, ContextCache
from draft_service.desk import EngineLimits
from draft_service.drafter import Drafter
from draft_service.drafter_config import DrafterConfig, TargetFacts
from draft_service.drafter_files import DrafterFiles, Places, open_files
from draft_service.drafter_layouts import parse_config
from draft_service.engine import Engine
from draft_service.memory import check_memory
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Proposer
from draft_service.selfcheck import AcceptanceMonitor
from draft_service.simulation import load_simulation
from draft_service.startup_check import CheckText
from kernels.copy_rate import copy_rate
from kernels.tree import MOST_NODES
from specbridge.channel.base import Projection
from specbridge.errors import ConfigError
from specbridge.rounds import Footprint

log = logging.getLogger(__name__)

DEFAULT_KV_TOKENS = 65536
PROPOSE_WAIT_S = {"cpu": 0.02, "cuda": 0.003}


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, not started yet, and what GetInfo tells about it. projection: for the target to apply."""

    engine: Engine
    config: DrafterConfig
    fingerprint: str
    max_nodes: int
    check_text: CheckText | None = None
    device: str = "cpu"
    dummy_weights: bool = False
    simulated_acceptance: str = ""
    projection: Projection | None = None
    footprint: Footprint = Footprint()


def load_engine(settings: DraftSettings, draft: Path, target: Path, metrics: DraftMetrics) -> Loaded:
    """Read the drafter in folder `draft` and what it borrows from folder `target`; of dummy models the
    configurations only.

    Raises ConfigError naming what does not fit and the fix.
    """
    device = resolve_device(settings.device)
    if device != "cpu" and settings.max_tree_nodes > MOST_NODES:
        raise ConfigError(
            f"max_tree_nodes is {settings.max_tree_nodes}; on a GPU trees have at most {MOST_NODES} nodes"
        )
    files = open_files(settings, Places(draft, target))
    facts = TargetFacts.read(files.target_config, target)
    config = parse_config(
        files.draft_config,
        facts,
        fc_columns=files.fc_columns,
        sample_from_anchor=settings.sample_from_anchor,
    )
    dtype = resolve_dtype(settings.dtype, files, device)
    max_length = settings.max_length or facts.max_length or config.max_position_embeddings
    kv_tokens = settings.kv_tokens or max(max_length, min(4 * max_length, DEFAULT_KV_TOKENS))
    drafter = Drafter(
        config,
        files.weights(config, dtype=dtype, device=device),
        dtype=dtype,
        device=device,
        max_position=max_length,
        window=settings.window or None,
        append=settings.append,
        projected=settings.project_on_target,
    )
    # Context rows depend on all of this; pages of one are no use to another.
    identity = (
        *files.fingerprints,
        str(dtype),
        str(drafter.dtype),
        str(config.target_layer_ids),
        str(config.first_row),
    )
    fingerprint = hashlib.blake2b("/".join(identity).encode(), digest_size=16).hexdigest()
    conditioner = _conditioner(settings, files, drafter)
    files.close()
    num_tokens = max(kv_tokens, PAGE_SIZE)
    if drafter.device.type == "cuda":
        check_memory(drafter, num_tokens)
    cache = ContextCache(
        drafter, num_tokens=num_tokens, fingerprint=fingerprint, cuda_graphs=settings.cuda_graphs
    )
    if settings.cuda_graphs and drafter.device.type == "cuda" and not drafter.capturable:
        log.warning("no CUDA graphs: in %s, or without triton, the drafter runs as plain torch", dtype)
    simulation = load_simulation(
        settings.simulate_acceptance, horizon=config.horizon, vocab_size=config.vocab_size, device=device
    )
    proposer = Proposer(
        drafter,
        cache,
        top_k=settings.top_k or None,
        simulation=simulation,
        cuda_graphs=settings.cuda_graphs,
        shared_noise=settings.shared_noise,
        conditioner=conditioner,
        trim_block=settings.trim_block,
    )
    wait = settings.propose_wait if settings.propose_wait >= 0 else PROPOSE_WAIT_S[device.split(":")[0]]
    limits = EngineLimits(
        max_sessions=settings.max_sessions,
        max_nodes=settings.max_tree_nodes,
        max_length=max_length,
        propose_wait_s=wait,
        session_lease_s=settings.session_lease,
        idle_lease_s=settings.idle_lease,
        eager=settings.eager,
    )
    engine = Engine(
        proposer, cache, limits=limits, metrics=metrics, monitor=_monitor(settings, config, metrics)
    )
    log.info(
        "drafter %s (%s layout): block %d, taps %s, mask id %d, %s on %s, context %d tokens of %.1f KiB",
        draft,
        config.layout,
        config.block_size,
        list(config.target_layer_ids),
        config.mask_token_id,
        str(dtype).removeprefix("torch."),
        device,
        cache.pool.num_pages * cache.pool.page_size,
        drafter.bytes_per_token / 1024,
    )
    dummy = settings.load_format == "dummy"
    metrics.dummy_weights.set(dummy)
    metrics.read_gpu_memory = partial(kernels.device.memory_in_use, device)
    metrics.simulated.set(simulation is not None)
    if dummy:
        log.warning("DUMMY WEIGHTS: random numbers; times are real, proposals mean nothing")
    check_text = None
    if settings.selfcheck and not settings.synthetic:
        check_text = CheckText.read(target, config.vocab_size)
    return Loaded(
        engine,
        config,
        fingerprint,
        settings.max_tree_nodes,
        check_text,
        device=device,
        dummy_weights=dummy,
        simulated_acceptance=simulation.label if simulation is not None else "",
        projection=drafter.projection,
        footprint=replace(
            drafter.footprint, copy_bytes_per_s=copy_rate(drafter.device) if settings.warmup_repeats else 0
        ),
    )


def resolve_device(device: str) -> str:
    """The device to use, checked. Raises ConfigError naming what is there."""
    try:
        return kernels.device.resolve_device(device)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolve_dtype(name: str, files: DrafterFiles, device: str) -> torch.dtype:
    """The weights' dtype: as asked, or as stored. Raises ConfigError for what a device can't do."""
    if name != "auto":
        if name == "float16" and device == "cpu":
            raise ConfigError("float16 on a CPU overflows in common models; use bfloat16, float32 or auto")
        return kernels.device.parse_dtype(name)
    dtype = files.stored_dtype()
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype


def _conditioner(settings: DraftSettings, files: DrafterFiles, drafter: Drafter) -> Conditioner | None:
    """For trees that are scored by bigrams; None: by marginals. Raises ConfigError for a table that is
    damaged, or missing though asked for.
    """
    bigrams = None
    # On a GPU this has not been measured yet: there it waits to be asked for.
    wanted = settings.tree_scores == "bigrams" or (
        settings.tree_scores == "auto" and drafter.device.type == "cpu"
    )
    if wanted and not settings.synthetic:
        bigrams = files.bigrams(drafter.config.vocab_size, drafter.device)
    if bigrams is not None:
        log.info("trees are scored by marginals and %d bigrams", len(bigrams))
        return Conditioner(bigrams, drafter.config.horizon)
    if settings.tree_scores == "bigrams":
        raise ConfigError(
            f"tree_scores is bigrams, but the drafter has no {BIGRAMS_FILE}; make it with "
            "`specbridge train bigrams`, or use auto or marginals"
        )
    log.info("trees are scored by marginals")
    return None


def _monitor(settings: DraftSettings, config: DrafterConfig, metrics: DraftMetrics) -> AcceptanceMonitor:
    monitor = AcceptanceMonitor(
        rounds=0 if settings.synthetic else settings.selfcheck_rounds,
        threshold=settings.selfcheck_acceptance,
        mask_token_id=config.mask_token_id,
    )
    metrics.acceptance_low.set_function(lambda: int(monitor.failed))
    metrics.recent_acceptance.set_function(lambda: monitor.mean)
    return monitor
