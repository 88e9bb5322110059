"""ModelShard: one rank's model with its K/V pages and staging; carries out steps.

The same class runs on rank 0 and on the workers. Owns loading, and the choice between the two ways to run a
step: device_pass for GPUs, host_pass for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.linear import activation_dtype
from specbridge.rounds import Footprint
from target_service.config import MemoryRules
from target_service.memory_plan import Gpu, MemoryPlan, needs_of, plan_memory
from target_service.model.config import ModelConfig
from target_service.model.decoder import Decoder, Taps
from target_service.model.device_pass import DevicePass, uses_kernels
from target_service.model.host_pass import HostPass
from target_service.model.memory import allocate
from target_service.parallel import Group
from target_service.step import Step, StepOutput
from target_service.weight_sources import LoadFormat, open_weights
from target_service.weights import Placement, load_weights


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How to build a rank's shard; picklable, sent to the workers once.

    num_pages: 0, on a GPU: as many as its memory has room for. rules: how a GPU's memory may be used; None:
    without a plan.
    """

    model_dir: Path
    device: str
    dtype: torch.dtype
    num_pages: int
    page_size: int
    max_rows: int
    deterministic: bool = False
    load_format: LoadFormat = "auto"
    simulated: bool = False
    cuda_graphs: bool = True
    rules: MemoryRules | None = None


class ModelShard:
    """Loads on construction. Raises ConfigError for a checkpoint or device that can't be used.

    plan_of_memory: None on a CPU. num_pages: as given, or as planned. footprint: what a pass of this rank
    reads.
    """

    def __init__(
        self,
        spec: ShardSpec,
        config: ModelConfig,
        group: Group,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        # With its number, as torch.cuda.set_device wants it.
        self._device = torch.device("cuda:0" if spec.device == "cuda" else spec.device)
        self.activation_dtype = activation_dtype(spec.dtype, self._device)
        self.plan_of_memory = self._plan_memory(spec, config, group)
        self.num_pages = self.plan_of_memory.num_pages if self.plan_of_memory else spec.num_pages
        placement = Placement(group.rank, group.size, spec.dtype, self._device)
        source = open_weights(spec.model_dir, spec.load_format, dtype=spec.dtype, device=self._device)
        with torch.inference_mode(), source:
            weights = load_weights(source, config, placement, progress)
            heads = weights.heads
            self.footprint = Footprint(
                weight_bytes=weights.pass_bytes,
                products_per_row=weights.products,
                kv_bytes_per_token=2
                * config.num_layers
                * heads.key_value
                * heads.dim
                * self.activation_dtype.itemsize,
                num_kv_heads=config.num_kv_heads,
            )
            decoder = Decoder(config, weights, group, self.activation_dtype)
            memory = allocate(
                config,
                weights.heads,
                num_pages=self.num_pages,
                page_size=spec.page_size,
                max_rows=spec.max_rows,
                dtype=self.activation_dtype,
                device=self._device,
            )
            if uses_kernels(self._device, self.activation_dtype):
                self._pass: HostPass | DevicePass = DevicePass(
                    config,
                    decoder,
                    memory,
                    group,
                    heads=weights.heads,
                    first_token=weights.first_token,
                    vocab_rows=weights.embedding.shape[0],
                    device=self._device,
                    dtype=self.activation_dtype,
                    simulated=spec.simulated,
                    graphs=spec.cuda_graphs,
                    lends=not spec.deterministic,
                )
            else:
                self._pass = HostPass(
                    config,
                    decoder,
                    memory,
                    group,
                    device=self._device,
                    dtype=self.activation_dtype,
                    simulated=spec.simulated,
                    one_part=spec.deterministic,
                )

    def _plan_memory(self, spec: ShardSpec, config: ModelConfig, group: Group) -> MemoryPlan | None:
        """The same on every rank, from what all of them found. Before anything is allocated."""
        if spec.rules is None or self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        found = [Gpu(total=row[0], free=row[1]) for row in group.exchange((total, free))]
        needs = needs_of(
            config, spec.rules, ranks=group.size, dtype=self.activation_dtype, max_rows=spec.max_rows
        )
        return plan_memory(needs, found, spec.rules, page_size=spec.page_size)

    def plan(self, step: Step, taps: Taps, ring: torch.Tensor | None) -> Step:
        """On rank 0, before the others are told: `step` with what all ranks must do alike."""
        return self._pass.plan(step, taps, ring)

    def examples(self) -> list[Step]:
        """Steps to run twice after a change of taps or ring, so that no request waits for a capture."""
        return self._pass.examples()

    @property
    def captures(self) -> bool:
        """Whether a pass's first two runs cost more than the further ones."""
        return isinstance(self._pass, DevicePass)

    @torch.inference_mode()
    def run(self, step: Step, taps: Taps, ring: torch.Tensor | None = None) -> StepOutput:
        """One step, from the forward to the commit. Logits and choices are filled on rank 0 only (elsewhere
        [0, vocab], none)."""
        return self._pass.run(step, taps, ring)

    def close(self) -> None:
        """Drop what holds on to the group's collectives; before the group itself ends."""
        self._pass.close()
