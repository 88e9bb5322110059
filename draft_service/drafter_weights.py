"""A drafter's tensors, read from its checkpoint and the target's.

Owns: tensor names of the published layouts, fused q/k/v and gate/up stacking, the embedding (and a missing
head) borrowed from the target, the reduced vocabulary's map. Does not own the configuration (drafter_config)
nor how weights are packed for the device (kernels.linear, through drafter).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from draft_service.drafter_config import DrafterConfig
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError

log = logging.getLogger(__name__)

# Tensors a checkpoint may carry that the forward does not read: the target's are used, or they are tables.
_IGNORED_ENDINGS = (
    "rotary_emb.inv_freq",
    "embed_tokens.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "draft_vocabulary",
    *("bigram_rows", "bigram_after", "bigram_counts", "bigram_totals"),
)
_PREFIXES = ("", "model.", "draft_model.")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. q, k and v are stacked on the output dimension, gate and up as well.

    qkv [(heads + 2 * kv_heads) * head_dim, hidden]; o [hidden, heads * head_dim]; gate_up [2 * intermediate,
    hidden]; down [hidden, intermediate]; input_norm, post_norm [hidden]; q_norm, k_norm [head_dim]; biases or
    None.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """fc [hidden, taps * hidden]; hidden_norm, norm [hidden]; embedding [vocab, hidden] (the target's);
    head [draft_vocab, hidden] (the drafter's own if its checkpoint has one, else the target's);
    target_ids int64 [draft_vocab]: the target's id of each head row, None if they are the same ids."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor
    head: torch.Tensor
    target_ids: torch.Tensor | None


def load_weights(
    draft: Checkpoint, target: Checkpoint, config: DrafterConfig, *, dtype: torch.dtype
) -> DrafterWeights:
    """Read all tensors, in `dtype`. Raises ConfigError for a missing, misshapen or unknown tensor."""
    reader = _Reader(draft, dtype)
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    fc = reader.take("fc.weight", None)
    if fc.shape[0] != hidden or fc.shape[1] < config.feature_size:
        raise ConfigError(
            f"fc.weight has shape {list(fc.shape)}, [{hidden}, {config.feature_size}] is needed"
        )
    if fc.shape[1] > config.feature_size:
        log.warning(
            "fc.weight has %d columns for %d taps; the rest is cut", fc.shape[1], len(config.target_layer_ids)
        )
        fc = fc[:, : config.feature_size].contiguous()
    layers = []
    for i in range(config.num_layers):
        name = f"layers.{i}."
        attention, mlp = name + "self_attn.", name + "mlp."
        layers.append(
            LayerWeights(
                input_norm=reader.take(name + "input_layernorm.weight", (hidden,)),
                qkv=reader.stacked(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), ".weight",
                                   (q_size + 2 * kv_size, hidden)),
                qkv_bias=reader.stacked(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), ".bias",
                                        (q_size + 2 * kv_size,)) if config.attention_bias else None,
                q_norm=reader.take(attention + "q_norm.weight", (dim,)),
                k_norm=reader.take(attention + "k_norm.weight", (dim,)),
                o=reader.take(attention + "o_proj.weight", (hidden, q_size)),
                o_bias=reader.take(attention + "o_proj.bias", (hidden,)) if config.attention_bias else None,
                post_norm=reader.take(name + "post_attention_layernorm.weight", (hidden,)),
                gate_up=reader.stacked(mlp, "gate_up_proj", ("gate_proj", "up_proj"), ".weight",
                                       (2 * config.intermediate_size, hidden)),
                down=reader.take(mlp + "down_proj.weight", (hidden, config.intermediate_size)),
            )
        )  # fmt: skip
    embedding = target_embedding(target, config.vocab_size, config.hidden_size).to(dtype)
    head = _own_head(reader, config)
    target_ids = None
    if head is not None:
        target_ids = _target_ids(reader, config)
    elif config.reduced_vocab:
        raise ConfigError(
            f"draft_vocab_size is {config.draft_vocab_size} but the checkpoint has no lm_head.weight"
        )
    else:
        # A drafter that ships no head was trained against the target's own frozen one.
        untied = target_head(target, config.vocab_size, config.hidden_size)
        head = embedding if untied is None else untied.to(dtype)
        for name in ("d2t", "t2d"):
            reader.raw(name)
    weights = DrafterWeights(
        fc=fc,
        hidden_norm=reader.take("hidden_norm.weight", (hidden,)),
        norm=reader.take("norm.weight", (hidden,)),
        layers=tuple(layers),
        embedding=embedding,
        head=head,
        target_ids=target_ids,
    )
    reader.finish()
    return weights


def target_embedding(target: Checkpoint, vocab_size: int, hidden_size: int) -> torch.Tensor:
    """The target's input embedding, [vocab, hidden]; padding rows are cut off."""
    name = _find(target.names(), "embed_tokens.weight")
    if name is None:
        raise ConfigError(
            f"{target.folder} has no tensor ending in embed_tokens.weight, which the drafter borrows"
        )
    return _rows(target, name, vocab_size, hidden_size)


def target_head(target: Checkpoint, vocab_size: int, hidden_size: int) -> torch.Tensor | None:
    """The target's LM head, [vocab, hidden], or None if it is tied to the embedding."""
    name = _find(target.names(), "lm_head.weight")
    text = target.config.get("text_config") or {}
    tied = target.config.get("tie_word_embeddings", text.get("tie_word_embeddings", name is None))
    if tied:
        return None
    if name is None:
        raise ConfigError(f"{target.folder} says tie_word_embeddings: false, but has no lm_head.weight")
    return _rows(target, name, vocab_size, hidden_size)


def _rows(target: Checkpoint, name: str, vocab_size: int, hidden_size: int) -> torch.Tensor:
    shape = target.shape(name)
    if len(shape) != 2 or shape[0] < vocab_size or shape[1] != hidden_size:
        raise ConfigError(
            f"the target's {name} has shape {list(shape)}, [{vocab_size}, {hidden_size}] is needed"
        )
    return target.get_slice(name, 0, 0, vocab_size)


def _find(names: Iterable[str], ending: str) -> str | None:
    return next((n for n in sorted(names, key=len) if n == ending or n.endswith("." + ending)), None)


def _own_head(reader: _Reader, config: DrafterConfig) -> torch.Tensor | None:
    """The head the drafter brings along, if any; padding rows of a full vocabulary are cut off."""
    head = reader.optional("lm_head.weight")
    if head is None:
        return None
    rows, hidden = config.draft_vocab_size, config.hidden_size
    enough = head.ndim == 2 and (head.shape[0] == rows or (head.shape[0] > rows and not config.reduced_vocab))
    if not enough or head.shape[1] != hidden:
        raise ConfigError(f"lm_head.weight has shape {list(head.shape)}, [{rows}, {hidden}] is needed")
    return head[:rows].contiguous()


def _target_ids(reader: _Reader, config: DrafterConfig) -> torch.Tensor | None:
    """The target id of each row of the drafter's own head: row + d2t[row]. t2d marks the same ids and is
    checked. None: they are the same ids.
    """
    offsets, mask = reader.raw("d2t"), reader.raw("t2d")
    if offsets is None and mask is None:
        if not config.reduced_vocab:
            return None
        raise ConfigError("a reduced vocabulary needs d2t or t2d in the checkpoint")
    ids = None
    if offsets is not None:
        if offsets.shape != (config.draft_vocab_size,):
            raise ConfigError(f"d2t has shape {list(offsets.shape)}, [{config.draft_vocab_size}] is needed")
        ids = offsets.to(torch.int64) + torch.arange(config.draft_vocab_size)
    if mask is not None:
        marked = mask.to(torch.bool).nonzero().flatten()
        if mask.shape != (config.vocab_size,) or marked.numel() != config.draft_vocab_size:
            raise ConfigError(
                f"t2d marks {marked.numel()} of {list(mask.shape)} ids, {config.draft_vocab_size} wanted"
            )
        if ids is not None and not torch.equal(marked, ids.sort().values):
            raise ConfigError("d2t and t2d name different ids: the checkpoint contradicts itself")
        ids = marked if ids is None else ids
    assert ids is not None
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or ids.unique().numel() != ids.numel():
        raise ConfigError(f"d2t names ids outside [0, {config.vocab_size}) or one twice")
    return None if torch.equal(ids, torch.arange(config.vocab_size)) else ids


class _Reader:
    """Takes tensors by name and remembers which, so that what is left over can be refused."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        names = checkpoint.names()
        self._prefix = next((p for p in _PREFIXES if p + "fc.weight" in names), "")
        self._left = set(names)

    def raw(self, name: str) -> torch.Tensor | None:
        for full in (self._prefix + name, name):
            if full in self._checkpoint:
                self._left.discard(full)
                return self._checkpoint.get(full)
        return None

    def optional(self, name: str) -> torch.Tensor | None:
        tensor = self.raw(name)
        return None if tensor is None else tensor.to(self._dtype)

    def take(self, name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
        tensor = self.optional(name)
        if tensor is None:
            raise ConfigError(
                f"{self._checkpoint.folder} has no tensor {name!r}: not a DFlash drafter of this layout"
            )
        if shape is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"tensor {name!r} has shape {list(tensor.shape)}, {list(shape)} is needed by its config"
            )
        return tensor

    def stacked(
        self, where: str, fused: str, parts: tuple[str, ...], ending: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """The fused tensor if the checkpoint has it, else its parts stacked."""
        if self._prefix + where + fused + ending in self._left:
            return self.take(where + fused + ending, shape)
        take: Callable[[str], torch.Tensor] = lambda part: self.take(where + part + ending, None)  # noqa: E731
        tensor = torch.cat([take(part) for part in parts])
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{where}{{{','.join(parts)}}}{ending} stack to {list(tensor.shape)}, not {list(shape)}"
            )
        return tensor

    def finish(self) -> None:
        left = sorted(n for n in self._left if not n.endswith(_IGNORED_ENDINGS))
        if left:
            raise ConfigError(
                f"{self._checkpoint.folder} holds tensors this build does not use (of another kind?): "
                f"{', '.join(left[:5])}{' ...' if len(left) > 5 else ''}"
            )
