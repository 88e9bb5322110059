"""What a drafter is loaded from: two checkpoints, or two configurations and a random generator.

Owns the difference between the two. Does not own what configurations mean (drafter_layouts), tensors of a
checkpoint (drafter_weights) or random ones (dummy_weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import kernels.device
from draft_service.bigrams import Bigrams, read_bigrams
from draft_service.config import DraftSettings
from draft_service.draft_vocabulary import AS_SHIPPED, cut_to, read_vocabulary
from draft_service.drafter_config import DrafterConfig
from draft_service.drafter_weights import DrafterWeights, load_weights
from draft_service.dummy_weights import dummy_weights
from specbridge.checkpoint import Checkpoint, config_files, fingerprint_of_config
from specbridge.errors import ConfigError
from specbridge.models import resolve_config, resolve_draft, resolve_target

BESIDE = "dflash"
"""Folder beside a target's config.json in which its drafter's is looked for."""


class DrafterFiles(Protocol):
    """Configurations, identity and weights of a drafter and of the target it borrows from.

    stored_dtype: of the weights, where they say; None: float32. fc_columns: width of fc.weight; None: as the
    configuration has it.
    """

    draft_config: Mapping[str, Any]
    target_config: Mapping[str, Any]
    fc_columns: int | None

    @property
    def fingerprints(self) -> tuple[str, str]: ...

    def stored_dtype(self) -> torch.dtype: ...

    def weights(self, config: DrafterConfig, *, dtype: torch.dtype, device: str) -> DrafterWeights: ...

    def bigrams(self, vocab_size: int, device: torch.device) -> Bigrams | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Places:
    """Where drafter and target lie: folders, or configuration files of dummy models."""

    draft: Path
    target: Path


def find_places(settings: DraftSettings, *, progress: bool = False) -> Places:
    """Folders of a real drafter and its target, fetched if need be; configurations for load-format dummy.

    Raises ConfigError for what can't be found.
    """
    if settings.load_format != "dummy":
        target = resolve_target(settings.target, progress=progress)
        return Places(resolve_draft(settings.draft, settings.target, progress=progress), target)
    target = resolve_config(settings.config or settings.target, "--config" if settings.config else "--target")
    if settings.drafter_config:
        return Places(resolve_config(settings.drafter_config, "--drafter-config"), target)
    if settings.draft != "auto":
        return Places(resolve_config(settings.draft, "--draft"), target)
    beside = (target.parent if target.is_file() else target) / BESIDE
    if not (beside / "config.json").is_file():
        raise ConfigError(
            f"no drafter configuration: {beside} has no config.json; name one with --drafter-config, or "
            "serve without a drafter with --no-draft"
        )
    return Places(beside, target)


def open_files(settings: DraftSettings, places: Places) -> DrafterFiles:
    """Raises ConfigError for files that are missing or damaged."""
    if settings.load_format == "dummy":
        return ConfigurationsOnly(places)
    return Checkpoints(places, vocabulary=settings.draft_vocabulary)


class Checkpoints:
    """Two safetensors folders. vocabulary: tokens the drafter may propose, as draft_vocabulary has it."""

    def __init__(self, places: Places, *, vocabulary: int = AS_SHIPPED) -> None:
        self._folder = places.draft
        self._vocabulary = vocabulary
        self._draft, self._target = Checkpoint(places.draft), Checkpoint(places.target)
        self.draft_config: Mapping[str, Any] = self._draft.config
        self.target_config: Mapping[str, Any] = self._target.config
        shape = self._draft.shape(self._fc_name())
        self.fc_columns: int | None = shape[1] if len(shape) == 2 else 0

    @property
    def fingerprints(self) -> tuple[str, str]:
        return self._draft.fingerprint(), self._target.fingerprint()

    def stored_dtype(self) -> torch.dtype:
        """Raises ConfigError for quantised weights."""
        own = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        stored = self._draft.entry(self._fc_name()).dtype
        if stored not in own:
            raise ConfigError(
                f"the drafter's weights are {stored}: quantised drafters "
                f"are not supported, use one in {', '.join(sorted(kernels.device.DTYPES))}"
            )
        return own[stored]

    def weights(self, config: DrafterConfig, *, dtype: torch.dtype, device: str) -> DrafterWeights:
        weights = load_weights(self._draft, self._target, config, dtype=dtype)
        kept = read_vocabulary(self._folder, vocab_size=config.vocab_size, size=self._vocabulary)
        return weights if kept is None else cut_to(weights, kept)

    def bigrams(self, vocab_size: int, device: torch.device) -> Bigrams | None:
        """The table in the drafter's folder, if any. Raises ConfigError for one that is damaged."""
        return read_bigrams(self._folder, vocab_size=vocab_size, device=device)

    def close(self) -> None:
        self._draft.close()
        self._target.close()

    def _fc_name(self) -> str:
        """Raises ConfigError for a checkpoint that is no drafter."""
        names = self._draft.names()
        found = next((name for name in names if name.split(".")[-2:] == ["fc", "weight"]), None)
        if found is None:
            raise ConfigError(
                f"--draft {self._folder} is no DFlash drafter: it has no tensor fc.weight; name the drafter "
                "that was made for this target, or serve without one with --no-draft"
            )
        return found


class ConfigurationsOnly:
    """Two configurations; weights are random."""

    fc_columns: int | None = None

    def __init__(self, places: Places) -> None:
        self._draft: dict[str, Any] = config_files(places.draft).model
        self._target: dict[str, Any] = config_files(places.target).model
        self.draft_config: Mapping[str, Any] = self._draft
        self.target_config: Mapping[str, Any] = self._target

    @property
    def fingerprints(self) -> tuple[str, str]:
        return fingerprint_of_config(self._draft), fingerprint_of_config(self._target)

    def stored_dtype(self) -> torch.dtype:
        """Raises ConfigError for a dtype we do not compute in."""
        inner = self._draft.get("transformer_layer_config") or {}
        places = (c.get(key) for c in (self._draft, inner) for key in ("dtype", "torch_dtype"))
        named = next((name for name in places if name), "float32")
        try:
            return kernels.device.parse_dtype(str(named))
        except ValueError as error:
            raise ConfigError(f"the drafter's configuration: {error}") from None

    def weights(self, config: DrafterConfig, *, dtype: torch.dtype, device: str) -> DrafterWeights:
        return dummy_weights(config, self._target, dtype=dtype, device=device)

    def bigrams(self, vocab_size: int, device: torch.device) -> Bigrams | None:
        return None

    def close(self) -> None:
        return None
