"""Runner: the model as the engine sees it, on one rank or several.

Owns start-up (resolving device and dtype, spawning ranks) and the rule that rank 0 decides: every step and
commit is broadcast, then carried out here too. Not thread-safe: one thread calls forward and commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kernels.device
from kernels.linear import activation_dtype
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError, InternalError, InvalidRequest, Unavailable
from target_service import step_codec
from target_service.model.config import ModelConfig, parse_dtype
from target_service.model.decoder import Taps
from target_service.model.shard import ModelShard, ShardSpec
from target_service.parallel import SingleRank, check_split
from target_service.step import Commit, Step, StepOutput
from target_service.worker import WorkerPool, rank_device

log = logging.getLogger(__name__)


class Runner:
    """Made by load_runner. `forward` fills staging; `commit` copies chosen rows of the latest forward into
    pages.

    Tensors it returns were made under torch.inference_mode: use them there, or clone them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        spec: ShardSpec,
        fingerprint: str,
        pool: WorkerPool | None,
    ) -> None:
        self.config = config
        self.activation_dtype = shard.activation_dtype
        self.dtype = spec.dtype
        self.device = torch.device(spec.device)
        self.fingerprint = fingerprint
        self.num_pages, self.page_size, self.max_rows = spec.num_pages, spec.page_size, spec.max_rows
        self.tp_size = 1 if pool is None or pool.group is None else pool.group.size
        self._shard, self._pool = shard, pool
        self._taps = Taps()
        self._staged_rows = 0
        self._closed = False

    def set_taps(self, layer_ids: tuple[int, ...], *, normed_last_layer: bool) -> None:
        """Capture the outputs of these layers (0-based, columns in this order) from the next forward on; ()
        for none.

        Raises InvalidRequest for a layer the model does not have.
        """
        for layer_id in layer_ids:
            if not 0 <= layer_id < self.config.num_layers:
                raise InvalidRequest(
                    f"target layer id {layer_id} does not exist; "
                    f"this model has layers 0..{self.config.num_layers - 1}",
                    param="target_layer_ids",
                )
        self._taps = Taps(tuple(layer_ids), normed_last_layer)

    def forward(self, step: Step) -> StepOutput:
        """Run a step. Raises Unavailable when a rank died, InternalError for a step that breaks the rules."""
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
        self._staged_rows = 0
        with self._ranks(step_codec.encode_step, step):
            output = self._shard.run(step, self._taps)
        self._staged_rows = rows
        return output

    def commit(self, commit: Commit) -> None:
        """Write staged rows of the latest forward to their slots. Raises like forward."""
        self._check_open()
        if commit.rows.numel() == 0:
            return
        if int(commit.rows.max()) >= self._staged_rows or commit.rows.numel() != commit.slots.numel():
            raise InternalError(
                f"commit of row {int(commit.rows.max())} to {commit.slots.numel()} slots; "
                f"the latest step staged {self._staged_rows} rows"
            )
        with self._ranks(step_codec.encode_commit, commit):
            self._shard.commit(commit)

    def check(self) -> None:
        """Raises Unavailable once a rank has died; cheap enough for every idle turn."""
        self._check_open()
        if self._pool is not None:
            self._pool.check()

    def close(self) -> None:
        """End the other ranks. Idempotent; nothing works after it."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _ranks(self, encode: Callable[[Any], torch.Tensor], order: Step | Commit):  # type: ignore[no-untyped-def]
        """Tell the other ranks first, and explain a collective's failure inside."""
        if self._pool is None:
            yield
            return
        self._pool.send(encode(order))
        with self._pool.explained():
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the model runner is closed")


def load_runner(
    model_dir: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tp: int = 1,
    num_pages: int,
    page_size: int = 16,
    max_rows: int,
    threads: int | None = None,
    deterministic: bool = False,
    collective_timeout_s: float = 60.0,
    start_timeout_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
) -> Runner:
    """Load a model folder, on `tp` ranks of this host.

    device: auto, cpu, cuda or cuda:N (ranks take N, N+1, ..). dtype: auto (the checkpoint's), float64,
    float32, bfloat16, float16. num_pages x page_size tokens of K/V; max_rows bounds the rows of a step.
    threads: CPU threads that the ranks share (None: torch's number); it sets those of the ranks above 0.
    deterministic: rounding does not depend on where pages lie. progress(layers done, layers) while loading.
    Raises ConfigError for settings or a checkpoint that can't work, Unavailable if a rank fails to start.
    """
    for name, value in (
        ("tp", tp),
        ("num_pages", num_pages),
        ("page_size", page_size),
        ("max_rows", max_rows),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    config = ModelConfig.from_folder(model_dir)
    check_split(config.num_heads, config.num_kv_heads, tp)
    chosen = config.dtype if dtype == "auto" else parse_dtype(dtype)
    spec = ShardSpec(
        model_dir, resolve_device(device, tp), chosen, num_pages, page_size, max_rows, deterministic
    )
    with Checkpoint(model_dir) as checkpoint:
        fingerprint = hashlib.blake2b(
            f"{checkpoint.fingerprint()}/{chosen}/{activation_dtype(chosen, spec.device)}".encode(),
            digest_size=16,
        ).hexdigest()
    if tp == 1:
        shard = ModelShard(spec, config, SingleRank(), progress)
        return Runner(config, shard, spec, fingerprint, None)
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
    return Runner(config, shard, spec, fingerprint, pool)


def resolve_device(device: str, tp: int = 1) -> str:
    """The device to use, checked. Raises ConfigError naming what is there."""
    try:
        return kernels.device.resolve_device(device, count=tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
