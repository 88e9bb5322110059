"""What the engine needs of the model, and nothing more: the seam at which tests put their own.

Owns no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from specbridge.channel.base import Projection
from target_service.step import Step, StepOutput


class ModelConfig(Protocol):
    """What the engine reads of the model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...


class Runner(Protocol):
    """What the engine needs of target_service.runner; rank 0 of the model."""

    @property
    def config(self) -> Any: ...

    @property
    def activation_dtype(self) -> torch.dtype: ...

    @property
    def fingerprint(self) -> str: ...

    def set_taps(
        self, layer_ids: tuple[int, ...], *, normed_last_layer: bool, projection: Projection | None = None
    ) -> None: ...

    def set_ring(self, ring: torch.Tensor | None) -> None: ...

    def warm_up(self, steps: Sequence[Step]) -> None: ...

    def run(self, step: Step) -> StepOutput: ...

    def check(self) -> None: ...

    def close(self) -> None: ...
