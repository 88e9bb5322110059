"""HostPass: a step run operation by operation, its shapes those of the step.

For devices without the ragged kernels: a CPU, fp64, a GPU without Triton. It is also the oracle of
target_service.model.device_pass. Owns the order choice, walk, commit, capture; the forward is the decoder's.
"""

from __future__ import annotations

from collections import Counter

import torch

from kernels.commit import commit_rows
from target_service.model.batch import BatchSettings, GroupedAttention, StepInputs, prepare
from target_service.model.config import ModelConfig
from target_service.model.decoder import Decoder, Taps
from target_service.model.memory import Memory
from target_service.model.walk import pack_walk
from target_service.parallel import Group
from target_service.sampling import choose
from target_service.simulation import simulated_choices
from target_service.step import Step, StepOutput, visible_context


class HostPass:
    """simulated: choices are those of a made-up text (target_service.simulation). one_part: rounding does not
    depend on where pages lie."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        memory: Memory,
        group: Group,
        *,
        device: torch.device,
        dtype: torch.dtype,
        simulated: bool,
        one_part: bool,
    ) -> None:
        self._config, self._decoder, self._memory, self._group = config, decoder, memory, group
        self._device = device
        self._simulated = simulated
        self._layers = Counter(config.windows)
        self._settings = BatchSettings(
            page_size=memory.page_size,
            windows=tuple(dict.fromkeys(config.windows)),
            dtype=dtype,
            device=device,
            one_part=one_part,
            rotary=memory.rotary,
        )

    def plan(self, step: Step, taps: Taps, ring: torch.Tensor | None) -> Step:
        return step

    def examples(self) -> list[Step]:
        return []

    def run(self, step: Step, taps: Taps, ring: torch.Tensor | None) -> StepOutput:
        """Logits and choices are filled on rank 0 only (elsewhere [0, vocab], none)."""
        memory = self._memory
        inputs = prepare(step, self._settings)
        local, captured = self._decoder.forward(
            inputs,
            memory.staging,
            memory.pages,
            taps,
            want_logits=step.logit_rows.numel() > 0,
        )
        logits = None if local is None else self._group.gather_columns(local.float())
        if logits is None:
            logits = torch.empty(0, self._config.vocab_size, device=self._device)
        logits = logits.narrow(1, 0, self._config.vocab_size)
        chosen = self._choose(step, logits)
        if step.slots is not None or ring is not None:
            packed = pack_walk(step, self._device)
            path = packed.walk(self._agree(step, chosen))
            if step.slots is not None:
                commit_rows(memory.page_rows, memory.staged_rows, step.slots.to(self._device), path)
            if ring is not None and captured is not None:
                packed.publish(captured, ring, path)
        return StepOutput(logits, captured, tuple(chosen.tolist()), *self._context(step, inputs))

    def close(self) -> None:
        return None

    def _context(self, step: Step, inputs: StepInputs) -> tuple[float, float, float]:
        """StepOutput.context_rows, context_rows_read, context_rows_copied."""
        attention, layers = inputs.attention, self._config.num_layers
        assert isinstance(attention, GroupedAttention)
        held = sum(
            visible_context(segment.context_length, self._layers)
            for segment in step.segments
            if segment.parents is not None
        )
        read = copied = 0
        for window, count in self._layers.items():
            rows = attention.context_rows(window)
            read, copied = read + count * rows[0], copied + count * rows[1]
        return held, read / layers, copied / layers

    def _choose(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the committed tokens of the groups' rows; n = 0 on ranks other than 0."""
        if not step.groups or self._group.rank:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        chosen = choose(logits[: sum(len(group.positions) for group in step.groups)], step.groups)
        if self._simulated:
            chosen = simulated_choices(chosen, step.groups, self._config.vocab_size)
        return chosen

    def _agree(self, step: Step, chosen: torch.Tensor) -> torch.Tensor:
        """int32 [rows]: rank 0's choice after each row, -1 where there is none; the same on all ranks."""
        after = torch.full((step.tokens.numel(),), -1, dtype=torch.int32, device=self._device)
        if any(segment.parents is not None for segment in step.segments):
            after[step.logit_rows[: chosen.numel()].to(self._device)] = chosen.to(torch.int32)
            self._group.broadcast(after)
        return after
