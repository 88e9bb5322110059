"""What a DFlash drafter is: one DrafterConfig, whichever layout its checkpoint has.

Owns the configuration's meaning, what it has to agree with its target on, and the default choice of taps.
Does not own reading config.json (drafter_layouts), the weights (drafter_weights) nor the forward (drafter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must agree with its target on.

    max_length: positions the target was made for, 0 if its config does not say. folder: where tokenizer.json
    lies.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_length: int = 0
    folder: Path | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], folder: Path | None = None) -> TargetFacts:
        """From the target's config.json. Raises ConfigError if a field is missing."""
        text = config.get("text_config") or config
        where = f"the target's config.json{f' in {folder}' if folder else ''}"
        return cls(
            hidden_size=positive_integer(text, "hidden_size", where),
            num_layers=positive_integer(text, "num_hidden_layers", where),
            vocab_size=positive_integer(text, "vocab_size", where),
            max_length=int(text.get("max_position_embeddings") or 0),
            folder=folder,
        )


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What a block row sees in one layer. causal: inside the block only itself and rows before it.
    window: positions > own - window of the context (None: all of it)."""

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One DFlash drafter.

    block_size: rows of a block pass, the anchor's included.
    first_row: block row of the first proposal: 1 (row i predicts its own position) or 0 (row i predicts the
    next).
    target_layer_ids: 0-based; "output of target layer i", in the order `fc` wants them.
    normed_last_layer: a tap on the target's last layer means the state after the final norm.
    window_from_anchor: windows count from the anchor for all rows (speculators), not from each row (z-lab).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    block_size: int
    first_row: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    normed_last_layer: bool
    layers: tuple[LayerRule, ...]
    window_from_anchor: bool
    output_multiplier: float
    logit_softcap: float | None
    embedding_scale: float
    value_scale: float
    draft_vocab_size: int
    vocab_size: int
    layout: str

    @property
    def horizon(self) -> int:
        """Positions predicted by one block pass: the largest depth of a tree."""
        return self.block_size - self.first_row

    @property
    def feature_size(self) -> int:
        """Width of one context feature: taps * hidden_size."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The taps of a checkpoint that names none: evenly spaced from layer 1 to the third last, both included.

    >>> build_target_layer_ids(36, 5)
    (1, 9, 17, 25, 33)
    >>> build_target_layer_ids(36, 1)
    (18,)
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def check_config(config: DrafterConfig, target: TargetFacts, fc_columns: int | None) -> None:
    """Raises ConfigError naming the first thing in which drafter and target disagree."""
    if config.block_size < 2 and config.horizon < 1:
        raise ConfigError(
            f"block_size is {config.block_size}: a block needs the anchor and at least one proposal"
        )
    if config.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the drafter's hidden_size is {config.hidden_size}, the target's {target.hidden_size}: "
            f"this drafter was made for another target"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter's vocab_size is {config.vocab_size}, the target's {target.vocab_size}: "
            f"this drafter was made for another target"
        )
    wrong = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers]
    if (
        wrong
        or not config.target_layer_ids
        or len(set(config.target_layer_ids)) != len(config.target_layer_ids)
    ):
        raise ConfigError(
            f"target_layer_ids {list(config.target_layer_ids)} must be different layers of the target's "
            f"0..{target.num_layers - 1}"
        )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"mask_token_id {config.mask_token_id} is outside the target's {target.vocab_size} embeddings"
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of {config.vocab_size}"
        )
    if fc_columns is not None and fc_columns < config.feature_size:
        raise ConfigError(
            f"fc.weight has {fc_columns} columns, {len(config.target_layer_ids)} taps of "
            f"{config.hidden_size} need {config.feature_size}: taps and weights do not belong together"
        )


def positive_integer(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive integer")
    return value


def integers(values: Any, key: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or any(not isinstance(v, int) or isinstance(v, bool) for v in values):
        raise ConfigError(f"{key} is {values!r}; it must be a list of integers")
    return tuple(values)
