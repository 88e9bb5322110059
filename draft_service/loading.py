"""From two model folders to an engine that is ready to start.

Owns choosing device and dtype, reading the checkpoints, and putting drafter, context, proposer and engine
together. Does not own names of models (specbridge.models) nor the process (server).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels.device
from draft_service.config import DraftSettings
from draft_service.context_cache import PAGE_SIZE, ContextCache
from draft_service.desk import EngineLimits
from draft_service.drafter import Drafter
from draft_service.drafter_config import DrafterConfig, TargetFacts
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import load_weights
from draft_service.engine import Engine
from draft_service.metrics import DraftMetrics
from draft_service.proposer import Proposer
from draft_service.selfcheck import AcceptanceMonitor
from draft_service.startup_check import CheckText
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_KV_TOKENS = 65536
PROPOSE_WAIT_S = {"cpu": 0.02, "cuda": 0.003}


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, not started yet, and what GetInfo tells about it."""

    engine: Engine
    config: DrafterConfig
    fingerprint: str
    max_nodes: int
    check_text: CheckText | None = None


def load_engine(settings: DraftSettings, draft: Path, target: Path, metrics: DraftMetrics) -> Loaded:
    """Read the drafter in folder `draft` and what it borrows from folder `target`.

    Raises ConfigError naming what does not fit and the fix.
    """
    device = resolve_device(settings.device)
    draft_files, target_files = Checkpoint(draft), Checkpoint(target)
    facts = TargetFacts.read(target_files.config, target)
    config = parse_config(
        draft_files.config,
        facts,
        fc_columns=_fc_columns(draft_files),
        sample_from_anchor=settings.sample_from_anchor,
    )
    dtype = resolve_dtype(settings.dtype, draft_files, device)
    max_length = settings.max_length or facts.max_length or config.max_position_embeddings
    kv_tokens = settings.kv_tokens or max(max_length, min(4 * max_length, DEFAULT_KV_TOKENS))
    drafter = Drafter(
        config,
        load_weights(draft_files, target_files, config, dtype=dtype),
        dtype=dtype,
        device=device,
        max_position=max_length,
        window=settings.window or None,
        append=settings.append,
    )
    # Context rows depend on all of this; pages of one are no use to another.
    identity = (
        draft_files.fingerprint(),
        target_files.fingerprint(),
        str(dtype),
        str(drafter.dtype),
        str(config.target_layer_ids),
        str(config.first_row),
    )
    fingerprint = hashlib.blake2b("/".join(identity).encode(), digest_size=16).hexdigest()
    draft_files.close()
    target_files.close()
    cache = ContextCache(drafter, num_tokens=max(kv_tokens, PAGE_SIZE), fingerprint=fingerprint)
    proposer = Proposer(drafter, cache, top_k=settings.top_k or None)
    wait = settings.propose_wait if settings.propose_wait >= 0 else PROPOSE_WAIT_S[device.split(":")[0]]
    limits = EngineLimits(
        max_sessions=settings.max_sessions,
        max_nodes=settings.max_tree_nodes,
        max_length=max_length,
        propose_wait_s=wait,
        session_lease_s=settings.session_lease,
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
    check_text = CheckText.read(target, config.vocab_size) if settings.selfcheck else None
    return Loaded(engine, config, fingerprint, settings.max_tree_nodes, check_text)


def resolve_device(device: str) -> str:
    """The device to use, checked. Raises ConfigError naming what is there."""
    try:
        return kernels.device.resolve_device(device)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolve_dtype(name: str, checkpoint: Checkpoint, device: str) -> torch.dtype:
    """The weights' dtype: as asked, or the checkpoint's. Raises ConfigError for what a device can't do."""
    if name != "auto":
        if name == "float16" and device == "cpu":
            raise ConfigError("float16 on a CPU overflows in common models; use bfloat16, float32 or auto")
        return kernels.device.parse_dtype(name)
    own = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    dtype = own.get(checkpoint.entry(_fc_name(checkpoint)).dtype)
    if dtype is None:
        raise ConfigError(
            f"the drafter's weights are {checkpoint.entry(_fc_name(checkpoint)).dtype}: quantised drafters "
            f"are not supported, use one in {', '.join(sorted(kernels.device.DTYPES))}"
        )
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype


def _fc_name(checkpoint: Checkpoint) -> str:
    return next(
        (name for name in checkpoint.names() if name.split(".")[-2:] == ["fc", "weight"]), "fc.weight"
    )


def _fc_columns(checkpoint: Checkpoint) -> int:
    shape = checkpoint.shape(_fc_name(checkpoint))
    return shape[1] if len(shape) == 2 else 0


def _monitor(settings: DraftSettings, config: DrafterConfig, metrics: DraftMetrics) -> AcceptanceMonitor:
    monitor = AcceptanceMonitor(
        rounds=settings.selfcheck_rounds,
        threshold=settings.selfcheck_acceptance,
        mask_token_id=config.mask_token_id,
    )
    metrics.acceptance_low.set_function(lambda: int(monitor.failed))
    metrics.recent_acceptance.set_function(lambda: monitor.mean)
    return monitor
