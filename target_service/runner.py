"""Runner: the model as the engine sees it, on one rank or several.

Owns start-up (resolving device and dtype, getting the ranks together) and the rule that rank 0 decides: every
step is broadcast, then carried out here too. Not thread-safe: one thread calls `run`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import kernels.device
from kernels.linear import activation_dtype
from specbridge.channel.base import Projection as Weights
from specbridge.errors import ConfigError, InternalError, InvalidRequest, Unavailable
from specbridge.settings import Launched
from target_service import launched, step_codec
from target_service.config import MemoryRules
from target_service.model.config import ModelConfig, parse_dtype
from target_service.model.decoder import Taps
from target_service.model.projection import Projection
from target_service.model.shard import ModelShard, ShardSpec
from target_service.parallel import SingleRank, check_split
from target_service.ranks import RankLink
from target_service.step import Step, StepOutput
from target_service.weight_sources import LoadFormat, weights_fingerprint
from target_service.worker import Follower, WorkerPool, rank_device, step_limit

COLLECTIVE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0


class Runner:
    """Made by load_runner.

    Tensors it returns were made under torch.inference_mode: use them there, or clone them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        spec: ShardSpec,
        fingerprint: str,
        ranks: RankLink | None,
    ) -> None:
        self.config = config
        self.activation_dtype = shard.activation_dtype
        self.dtype = spec.dtype
        self.device = torch.device(spec.device)
        self.fingerprint = fingerprint
        self.num_pages, self.page_size, self.max_rows = shard.num_pages, spec.page_size, spec.max_rows
        self.plan_of_memory = shard.plan_of_memory
        self.footprint = shard.footprint
        self.tp_size = 1 if ranks is None or ranks.group is None else ranks.group.size
        self.collectives = None if ranks is None or ranks.group is None else ranks.group.clock
        self._shard, self._pool = shard, ranks
        self._taps = Taps()
        self._ring: torch.Tensor | None = None
        self._closed = False

    def set_taps(
        self, layer_ids: tuple[int, ...], *, normed_last_layer: bool, projection: Weights | None = None
    ) -> None:
        """Capture the outputs of these layers (0-based, columns in this order) from the next step on; () for
        none. projection: what to make of them.

        Raises InvalidRequest for a layer the model does not have.
        """
        for layer_id in layer_ids:
            if not 0 <= layer_id < self.config.num_layers:
                raise InvalidRequest(
                    f"target layer id {layer_id} does not exist; "
                    f"this model has layers 0..{self.config.num_layers - 1}",
                    param="target_layer_ids",
                )
        made = None
        if projection is not None:
            with torch.inference_mode():
                made = Projection(projection, self.device)
        self._taps = Taps(tuple(layer_ids), normed_last_layer, made)

    def set_ring(self, ring: torch.Tensor | None) -> None:
        """The ring [slots, width] that segments' RingSpans name, from the next step on; None: capture
        nothing.

        Raises InternalError unless its rows are as wide as what the taps capture.
        """
        width = self._taps.width(self.config.hidden_size)
        if ring is not None and ring.shape[1] != width:
            raise InternalError(f"a ring of rows of {ring.shape[1]} for taps of {width} elements")
        self._ring = ring
        if ring is not None:
            self.warm_up(self._shard.examples())

    def warm_up(self, steps: Sequence[Step]) -> None:
        """Run steps that change nothing until they are captured; nothing to do where nothing is captured."""
        if self._shard.captures:
            for step in steps:
                self.run(step)
                self.run(step)

    def run(self, step: Step) -> StepOutput:
        """Run a step: forward, choice, walk, commit, capture.

        Raises Unavailable when a rank died, InternalError for a step that breaks the rules.
        """
        self._check_open()
        rows = step.tokens.numel()
        if not 0 < rows <= self.max_rows or step.positions.numel() != rows:
            raise InternalError(
                f"a step of {rows} rows and {step.positions.numel()} positions; "
                f"at most {self.max_rows} rows are legal"
            )
        if sum(segment.rows for segment in step.segments) != rows:
            raise InternalError(
                f"the segments of a step cover {[s.rows for s in step.segments]} of {rows} rows"
            )
        if step.slots is not None and step.slots.numel() != rows:
            raise InternalError(f"a step of {rows} rows with {step.slots.numel()} slots")
        step = self._shard.plan(step, self._taps, self._ring)
        if self._pool is None:
            return self._shard.run(step, self._taps, self._ring)
        assert self.collectives is not None
        with self._pool.step(step_codec.encode_step(step)), self.collectives.step():
            return self._shard.run(step, self._taps, self._ring)

    def check(self) -> None:
        """Raises Unavailable once a rank has died; cheap enough for every idle turn."""
        self._check_open()
        if self._pool is not None:
            self._pool.check()

    def close(self) -> None:
        """End the other ranks. Idempotent; nothing works after it."""
        if not self._closed:
            self._shard.close()
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the model runner is closed")


@dataclass(frozen=True, slots=True)
class Described:
    """A model to be loaded: known, checked, nothing of it in memory. fingerprint: of weights and dtypes."""

    spec: ShardSpec
    config: ModelConfig
    fingerprint: str


def describe(
    model_dir: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tp: int = 1,
    local_ranks: int | None = None,
    num_pages: int,
    page_size: int = 16,
    max_rows: int,
    deterministic: bool = False,
    load_format: LoadFormat = "auto",
    simulated: bool = False,
    cuda_graphs: bool = True,
    rules: MemoryRules | None = None,
) -> Described:
    """Look at a model folder that `tp` ranks are to run, `local_ranks` of them (None: all) on this host.

    device: auto, cpu, cuda or cuda:N (ranks take N, N+1, ..). dtype: auto (the checkpoint's), float64,
    float32, bfloat16, float16. num_pages x page_size tokens of K/V (0, on a GPU with `rules`: what fits);
    max_rows bounds the rows of a step. deterministic: rounding does not depend on where pages lie.
    load_format "dummy": random weights, only the configuration is read (model_dir may be the file itself).
    simulated: the text is made up (target_service.simulation). cuda_graphs: a GPU captures passes that recur.
    rules: how a GPU's memory may be used; None: no plan is made.
    Raises ConfigError for settings or a checkpoint that can't work.
    """
    resolved = resolve_device(device, local_ranks or tp)
    planned = rules is not None and resolved != "cpu"
    for name, value, least in (
        ("tp", tp, 1),
        ("num_pages", num_pages, 0 if planned else 1),
        ("page_size", page_size, 1),
        ("max_rows", max_rows, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    config = ModelConfig.from_folder(model_dir)
    check_split(config.num_heads, config.num_kv_heads, config.vocab_size, tp)
    chosen = config.dtype if dtype == "auto" else parse_dtype(dtype)
    spec = ShardSpec(
        model_dir,
        resolved,
        chosen,
        num_pages,
        page_size,
        max_rows,
        deterministic,
        load_format,
        simulated,
        cuda_graphs,
        rules,
    )
    weights = weights_fingerprint(model_dir, load_format)
    fingerprint = hashlib.blake2b(
        f"{weights}/{chosen}/{activation_dtype(chosen, spec.device)}".encode(), digest_size=16
    ).hexdigest()
    return Described(spec, config, fingerprint)


def load_runner(
    model_dir: Path,
    *,
    tp: int = 1,
    threads: int | None = None,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    progress: Callable[[int, int], None] | None = None,
    **model: Any,
) -> Runner:
    """Load a model folder, on `tp` ranks of this host. model: what `describe` takes.

    threads: CPU threads that the ranks share (None: torch's number); it sets those of the ranks above 0.
    progress(layers done, layers) while loading.
    Raises ConfigError for settings or a checkpoint that can't work, Unavailable if a rank fails to start.
    """
    made = describe(model_dir, tp=tp, **model)
    spec, config = made.spec, made.config
    if tp == 1:
        return Runner(config, ModelShard(spec, config, SingleRank(), progress), spec, made.fingerprint, None)
    pool = WorkerPool(
        spec,
        config,
        size=tp,
        threads=max(1, (threads or torch.get_num_threads()) // tp),
        timeout_s=collective_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    try:
        assert pool.group is not None
        spec = replace(spec, device=rank_device(spec.device, 0))
        shard = ModelShard(spec, config, pool.group, progress)
        pool.wait_ready()
    except BaseException:
        pool.close()
        raise
    return Runner(config, shard, spec, made.fingerprint, pool)


def load_launched(
    model_dir: Path,
    launch: Launched,
    *,
    interface: str = "",
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    **model: Any,
) -> Runner | Follower:
    """This process's part of a model on ranks that torchrun started: rank 0's Runner, or what another rank
    does. model: what `describe` takes, but tp and local_ranks.

    Raises ConfigError like load_runner, and if the ranks differ; Unavailable if they don't find together.
    """
    made = describe(model_dir, tp=launch.size, local_ranks=launch.local_size, **model)
    spec = launched.local(made.spec, launch)
    group = launched.join(
        launch,
        spec,
        interface=interface,
        timeout_s=collective_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    try:
        shard = launched.load_shard(spec, made.config, made.fingerprint, group)
    except BaseException:
        group.abort()
        raise
    if launch.rank:
        return Follower(group, shard)
    link = RankLink(step_timeout_s=step_limit(spec.device, collective_timeout_s))
    link.start(group)
    return Runner(made.config, shard, spec, made.fingerprint, link)


def resolve_device(device: str, tp: int = 1) -> str:
    """The device to use, checked. Raises ConfigError naming what is there."""
    try:
        return kernels.device.resolve_device(device, count=tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
