"""ModelShard: one rank's model with its K/V pages and staging; carries out steps and commits.

The same class runs on rank 0 and on the workers. Owns the memory; which page belongs to whom is decided by
the engine on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.linear import activation_dtype
from kernels.rotary import rotary_tables
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError
from target_service.model.batch import BatchSettings, prepare
from target_service.model.config import ModelConfig
from target_service.model.decoder import Decoder, Taps
from target_service.parallel import Group
from target_service.step import Commit, Step, StepOutput
from target_service.weights import Placement, load_weights


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How to build a rank's shard; picklable, sent to the workers once."""

    model_dir: Path
    device: str
    dtype: torch.dtype
    num_pages: int
    page_size: int
    max_rows: int
    deterministic: bool = False


class ModelShard:
    """Loads on construction. Raises ConfigError for a checkpoint or device that can't be used."""

    def __init__(
        self,
        spec: ShardSpec,
        config: ModelConfig,
        group: Group,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._config = config
        self._device = torch.device(spec.device)
        self.activation_dtype = activation_dtype(spec.dtype, self._device)
        placement = Placement(group.rank, group.size, spec.dtype, self._device)
        with torch.inference_mode(), Checkpoint(spec.model_dir) as checkpoint:
            weights = load_weights(checkpoint, config, placement, progress)
            self._decoder = Decoder(config, weights, group, self.activation_dtype)
            heads = weights.heads
            shape = (2 * config.num_layers, spec.num_pages, spec.page_size, heads.key_value, heads.dim)
            try:
                # Zeros, not garbage: masked-out slots must hold finite values.
                pages = torch.zeros(shape, dtype=self.activation_dtype, device=self._device)
            except (RuntimeError, MemoryError) as error:
                size = 2 * config.num_layers * spec.num_pages * spec.page_size * heads.key_value * heads.dim
                raise ConfigError(
                    f"no memory for {spec.num_pages} KV pages of {spec.page_size} tokens "
                    f"({size * self.activation_dtype.itemsize / 2**30:.1f} GiB on {spec.device}); "
                    "lower --kv-tokens"
                ) from error
            self._staging = torch.zeros(
                2 * config.num_layers,
                spec.max_rows,
                heads.key_value,
                heads.dim,
                dtype=self.activation_dtype,
                device=self._device,
            )
            row = heads.key_value * heads.dim
            self._pages = pages.unbind(0)
            self._page_rows = pages.view(2 * config.num_layers, spec.num_pages * spec.page_size, row)
            self._staged_rows = self._staging.view(2 * config.num_layers, spec.max_rows, row)
            # No session can be longer than the whole pool, so rotary rows past it are never read.
            positions = min(config.max_position_embeddings, spec.num_pages * spec.page_size)
            self._settings = BatchSettings(
                page_size=spec.page_size,
                windows=tuple(dict.fromkeys(config.windows)),
                dtype=self.activation_dtype,
                device=self._device,
                one_part=spec.deterministic,
                rotary=rotary_tables(
                    head_dim=config.head_dim,
                    theta=config.rope_theta,
                    max_position=positions + spec.max_rows,
                    scaling=config.rope_scaling,
                    trained_position=config.trained_positions,
                    dtype=self.activation_dtype,
                    device=self._device,
                ),
            )

    @torch.inference_mode()
    def run(self, step: Step, taps: Taps) -> StepOutput:
        """One forward. Logits are filled on rank 0 only (elsewhere [0, vocab]); staging holds the step's K/V
        after it."""
        inputs = prepare(step, self._settings)
        logits, captured = self._decoder.forward(
            inputs, self._staging, self._pages, taps, want_logits=step.logit_rows.numel() > 0
        )
        if logits is None:
            logits = torch.empty(0, self._config.vocab_size, device=self._device)
        return StepOutput(logits, captured)

    @torch.inference_mode()
    def commit(self, commit: Commit) -> None:
        """Copy staged rows into pages, all layers at once."""
        rows, slots = commit.rows.to(self._device), commit.slots.to(self._device)
        self._page_rows.index_copy_(1, slots, self._staged_rows.index_select(1, rows))
