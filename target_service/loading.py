"""From settings to an engine that is ready to start, or to a rank that follows another's.

Owns finding the model's folder, resolving what settings leave open, and the announcement of what is made up
and of where a GPU's memory goes. Does not own the process (server) nor the loading itself (runner).
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.copy_rate import copy_rate
from kernels.device import memory_in_use
from specbridge.errors import SpecBridgeError
from specbridge.models import config_name, resolve_config, resolve_target
from specbridge.rounds import Footprint
from specbridge.settings import Launched
from target_service.config import Limits, TargetSettings, memory_rules, resolve_limits
from target_service.engine import Engine, Identity
from target_service.launched import find_launch
from target_service.metrics import TargetMetrics
from target_service.model.config import ModelConfig
from target_service.runner import Runner, load_launched, load_runner, resolve_device
from target_service.worker import Follower

log = logging.getLogger(__name__)


def load_engine(
    settings: TargetSettings, metrics: TargetMetrics, on_failure: Callable[[SpecBridgeError], None]
) -> Engine:
    """Load the model and build an engine, not yet started. Raises ConfigError."""
    plan = _plan(settings, find_launch(settings))
    runner: Runner | Follower
    if plan.launch is None:
        runner = load_runner(plan.folder, tp=settings.tp, threads=settings.threads or None, **plan.model)
    else:
        runner = _launched(plan, settings.rank_interface)
    assert isinstance(runner, Runner)
    limits = plan.limits.with_pages(runner.num_pages)
    _announce_memory(runner, limits, plan.limits.max_length, metrics)
    metrics.read_gpu_memory = partial(memory_in_use, str(runner.device))
    if runner.collectives is not None:
        metrics.watch_collectives(runner.collectives)
    announce_synthetic(limits, metrics, dummy=plan.dummy)
    identity = Identity(
        model_id=config_name(plan.folder) if plan.dummy else settings.target,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        tp_size=runner.tp_size,
        instance=secrets.token_bytes(16),
        dummy_weights=plan.dummy,
        footprint=_measured(runner, settings),
    )
    return Engine(runner, limits, metrics, identity=identity, on_failure=on_failure)


def load_follower(settings: TargetSettings, launch: Launched) -> Follower:
    """The same model on a rank above 0 that torchrun started. Raises ConfigError, Unavailable."""
    follower = _launched(_plan(settings, launch), settings.rank_interface)
    assert isinstance(follower, Follower)
    return follower


@dataclass(frozen=True, slots=True)
class _Plan:
    """model: what runner.describe takes."""

    folder: Path
    dummy: bool
    limits: Limits
    launch: Launched | None
    model: dict[str, Any]


def _plan(settings: TargetSettings, launch: Launched | None) -> _Plan:
    dummy = settings.load_format == "dummy"
    if dummy:
        folder = resolve_config(
            settings.config or settings.target, "--config" if settings.config else "--target"
        )
    else:
        folder = resolve_target(settings.target, progress=sys.stderr.isatty())
    config = ModelConfig.from_folder(folder)
    device = resolve_device(settings.device, settings.tp if launch is None else launch.local_size)
    dtype: str = settings.dtype
    if dtype == "auto" and config.dtype == torch.float16 and device == "cpu":
        log.info("the checkpoint is float16, which overflows on a CPU: running it in float32")
        dtype = "float32"
    limits = resolve_limits(settings, model_length=config.max_position_embeddings, device=device)
    model = {
        "device": device,
        "dtype": dtype,
        "num_pages": limits.num_pages,
        "page_size": limits.page_size,
        "max_rows": limits.max_rows,
        "deterministic": settings.deterministic,
        "cuda_graphs": settings.cuda_graphs,
        "load_format": settings.load_format,
        "simulated": bool(limits.simulated_acceptance),
        "rules": memory_rules(settings, limits),
    }
    return _Plan(folder, dummy, limits, launch, model)


def _launched(plan: _Plan, interface: str) -> Runner | Follower:
    assert plan.launch is not None
    return load_launched(plan.folder, plan.launch, interface=interface, **plan.model)


def _measured(runner: Runner, settings: TargetSettings) -> Footprint:
    """What a pass reads, and how fast the memory is that it reads, unless nothing is to be measured."""
    rate = copy_rate(runner.device) if settings.warmup_repeats else 0
    return replace(runner.footprint, copy_bytes_per_s=rate)


def _announce_memory(runner: Runner, limits: Limits, wanted_length: int, metrics: TargetMetrics) -> None:
    plan = runner.plan_of_memory
    if plan is None:
        return
    log.info("memory of %s, %s", runner.device, plan)
    for kind, size in plan.parts().items():
        metrics.memory.labels(kind).set(size)
    if limits.max_length < wanted_length:
        log.warning(
            "sessions have at most %d tokens, not the model's %d: the GPU holds no more K/V",
            limits.max_length,
            wanted_length,
        )


def announce_synthetic(limits: Limits, metrics: TargetMetrics, *, dummy: bool) -> None:
    """Say in log and metrics what of this target is not real."""
    metrics.dummy_weights.set(dummy)
    metrics.simulated.set(bool(limits.simulated_acceptance))
    if dummy:
        log.warning("DUMMY WEIGHTS: random numbers; times are real, the text means nothing")
    if limits.simulated_acceptance:
        log.warning("SIMULATED ACCEPTANCE: %s; the text is made up", limits.simulated_acceptance)
